"""Median times of calls on a GPU by CUDA events, eager or as one replayed graph, and the card's copy rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Calls = Sequence[Callable[[], Any]]


@dataclass(frozen=True)
class Protocol:
    """How often a call is repeated: the median of `repeats` after `warmups`."""

    repeats: int = 20
    warmups: int = 5


def median_ms(calls: Calls, device: torch.device, protocol: Protocol) -> float:
    """Milliseconds of one call; the calls take turns, so that no call finds its inputs in the cache."""
    for n in range(protocol.warmups):
        calls[n % len(calls)]()
    order = [calls[n % len(calls)] for n in range(protocol.repeats)]
    if device.type != "cuda":
        return statistics.median(seconds(call) for call in order) * 1e3
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in order]
    for call, (start, end) in zip(order, events):
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def seconds(call: Callable[[], Any]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def all_of(calls: Calls) -> Callable[[], None]:
    """One call that makes them all."""

    def together() -> None:
        for call in calls:
            call()

    return together


def replayed(calls: Calls) -> Callable[[], None]:
    """The calls captured as one CUDA graph; each has run before, so nothing is compiled or tuned inside."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        all_of(calls)()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of(calls)()
    return graph.replay


def peak_growth(call: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes that tensors held at most in one call beyond those before it; None without a GPU."""
    if device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def copy_rate(device: torch.device, protocol: Protocol) -> float:
    """Bytes a second, read plus written, of a large copy on the device."""
    size = 2**30 if device.type == "cuda" else 2**22
    source, target = torch.empty(2, size, dtype=torch.int32, device=device).random_()
    return 2 * source.nbytes / (median_ms([lambda: target.copy_(source)], device, protocol) / 1e3)
