"""Rows of `gpu.py`: whole training steps of the recipes at the batches of their goals, beside the roofline.

A step of one micro-batch comes first, twice, which compiles and allocates; then whole steps are timed, and kernels of
one micro-batch are told apart by operation. Goals: the recipe's MFU, and 70 % of the speed that the roofline allows.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from openk3.commands import bench
from openk3.commands.bench_flags import BenchTrain
from openk3.config.train import PretrainConfig
from openk3.model.accounting import account
from openk3.model.roofline import roofline
from openk3.train.breakdown import breakdown, mark
from openk3.train.flops import model_flops, utilisation
from openk3.train.state import TrainState
from openk3.train.step import next_token_loss, train_step

# Recipe, tokens of a micro-batch, micro-batches of a step, goal of MFU, timed steps.
TRAINING = (("small", 65536, 8, 0.25, 2), ("medium", 32768, 16, 0.40, 1))
TRIAL = (("tiny", 64, 2, None, 1),)
OF_ROOFLINE = 0.70


def rows(options: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """A row for each recipe; `keep` is called with those that are there, after each."""
    found: list[dict[str, Any]] = []
    for recipe, tokens, count, goal, steps in TRIAL if options.small else TRAINING:
        name = f"train {recipe} {count}x{tokens}"
        if options.rows and not any(part in name for part in options.rows):
            continue
        flags = BenchTrain(recipe, min(8192, tokens), tokens, count, activations=options.activations)
        row = {"work": name} | measure(flags, options.device, 1 if options.quick else steps)
        row["goal_ms"] = row["ours_ms"] * row["mfu"] / goal if goal and "mfu" in row else None
        if row["floor_ms"] is not None:
            row["goal_of_roofline_ms"] = row["floor_ms"] / OF_ROOFLINE
        found.append(row)
        share = "" if row["floor_ms"] is None else f", MFU {row['mfu']:.2%}, {row['of_floor']:.1%} of the roofline"
        print(f"{name}: {row['ours_ms']:.1f} ms, {row['tokens_per_s']:,.0f} tokens/s{share}", flush=True)
        keep(found)
    return found


def measure(flags: BenchTrain, device_name: str, steps: int) -> dict[str, Any]:
    """Median milliseconds of whole steps, and seconds of one micro-batch's kernels by operation."""
    whole = bench.complete(dataclasses.replace(flags, device=device_name))
    one = bench.complete(dataclasses.replace(flags, device=device_name, micro_batches=1))
    began = time.perf_counter()
    state = TrainState.around(bench.random_model(whole), whole)
    try:
        return timed(state, whole, one, steps, time.perf_counter() - began)
    finally:
        dismiss(state.optimizer)


def dismiss(optimizer: Any) -> None:
    """Let go of everything that an optimizer holds: hooks of its parameters keep it alive, and gc finds no circle."""
    vars(optimizer).clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def timed(state: TrainState, whole: PretrainConfig, one: PretrainConfig, steps: int, built: float) -> dict[str, Any]:
    """As `measure`, of what has been built."""
    device, recipe = state.device, f"a model of {account(whole.model).in_memory / 1e9:.2f} G"
    print(f"{recipe}: built in {built:.1f} s", flush=True)
    first = [stepped(state, one) for _ in range(2)]
    print(f"{recipe}: steps of one micro-batch {', '.join(f'{each:.2f}' for each in first)} s", flush=True)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = [stepped(state, whole) for _ in range(steps)]
    seconds = median(times)
    batches = bench.random_batches(whole)
    tokens = sum(packed.num_tokens for packed in batches)
    found: dict[str, Any] = {"ours_ms": 1e3 * seconds, "floor_ms": None, "goal_ms": None}
    found |= {"steps_ms": [1e3 * each for each in times], "one_micro_batch_ms": 1e3 * first[-1]}
    found |= {"tokens_per_s": tokens / seconds, "activations": str(state.activations)}
    found |= utilisation(model_flops(account(whole.model), batches), seconds, device)
    if device.type == "cuda":
        found["floor_ms"] = 1e3 * tokens * bound(whole).seconds()
        found["of_floor"] = found["floor_ms"] / found["ours_ms"]
    return found | by_operation(state, one)


def bound(config: PretrainConfig) -> Any:
    """The roofline of a token in a step of these sizes."""
    data = config.data
    sizes = {"micro_batch": data.micro_batch_tokens, "batch": data.batch_tokens}
    return roofline(config.model, length=data.stages[0][1], **sizes)


def stepped(state: TrainState, config: PretrainConfig) -> float:
    """Seconds of a step with the batches of a configuration."""
    state.config = config
    batches = bench.random_batches(config)
    _wait(state.device)
    began = time.perf_counter()
    train_step(state, batches, next_token_loss(config.mtp_loss_weight))
    _wait(state.device)
    return time.perf_counter() - began


def by_operation(state: TrainState, config: PretrainConfig) -> dict[str, Any]:
    """Measured and least seconds of one step by operation, and what was busy in all."""
    optimizer_step = state.optimizer.step

    def optimize(lr: float) -> float:
        with mark("optimizer"):
            return optimizer_step(lr)

    def whole() -> None:
        with mark("head and loss"):  # what no module is marked for
            stepped(state, config)

    vars(state.optimizer)["step"] = optimize
    try:
        times = breakdown(state.model, whole, state.device)
    finally:
        del vars(state.optimizer)["step"]
    tokens = config.data.batch_tokens
    least = bound(config) if state.device.type == "cuda" else None
    return {"operations": bench.operations(times, least, tokens), "busy_ms": 1e3 * sum(times.values())}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
