"""Decoder: one token at a time for many sequences, on a GPU as one CUDA graph for each number of sequences.

The whole step is on the device: embedding, layers, head, the most likely token, and the counting of lengths. A graph is
captured when a number of sequences is met first; other numbers use the next larger graph, with places that stand empty.
Without a GPU, or with `graphs=False`, the same function runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from openk3.model.cache import Cache, DenseCache, KdaCache, MlaCache
from openk3.model.k3 import K3
from openk3.model.step_cache import Step, StepCache, StepLatents, StepStates
from openk3.ops.few.head import head


class _Places(NamedTuple):
    """Fixed memory of steps of N sequences, and what runs one: results are overwritten by the next step."""

    id_N: Tensor  # read by a step, then overwritten with the most likely next ones
    slot_N: Tensor
    logits_NV: Tensor
    run: Callable[[], None]


class Decoder:
    """Decoding steps of up to `slots` sequences with up to `max_tokens` tokens each, prompts included.

    The model's weights are read where they lie: they may change in place between steps, and must not move.
    """

    def __init__(self, model: K3, *, slots: int, max_tokens: int, graphs: bool | None = None) -> None:
        """`graphs`: capture CUDA graphs; by default on a GPU. Raises ValueError for sizes that are not positive."""
        if slots < 1 or max_tokens < 1:
            raise ValueError(f"Decoder: slots and max_tokens must be positive, got {slots} and {max_tokens}")
        weight = model.embed.weight
        self.model, self.device = model, weight.device
        self.cache = StepCache(model.config, slots, max_tokens, weight.dtype, weight.device)
        self.lengths = [0] * slots
        self._graphs = weight.device.type == "cuda" if graphs is None else graphs
        self._places: dict[int, _Places] = {}
        self._pool: Any = None
        self._last: list[int] | None = None  # slots whose next ids lie on the device

    @torch.no_grad()
    def load(self, slot: int, cache: DenseCache, sequence: int = 0) -> None:
        """Begin or replace a slot's sequence: copy what a prefill left in `cache`. Raises ValueError if it is longer
        than `max_tokens`.
        """
        length = cache.lengths[sequence]
        if length > self.cache.max_tokens:
            raise ValueError(f"Decoder: a sequence of {length} tokens, room for {self.cache.max_tokens}")
        for ours, theirs in zip(self.cache.layers, cache.layers, strict=True):
            if isinstance(ours, StepStates) and isinstance(theirs, KdaCache):
                given = theirs.state_NHKV, *theirs.windows
                for pool, values in zip(ours.pool.tensors(), given, strict=True):
                    pool[slot].copy_(values[sequence])
            elif isinstance(ours, StepLatents) and isinstance(theirs, MlaCache):
                ours.memory_PTC[slot, :length].copy_(theirs.latents()[sequence])
        self.cache.length_R[slot] = length
        self.lengths[slot] = length
        self._last = None

    @torch.no_grad()
    def store(self, slot: int, cache: DenseCache, sequence: int = 0) -> None:
        """The reverse of `load`: whoever continues `cache` goes on where the slot's sequence has come to."""
        length = self.lengths[slot]
        for ours, theirs in zip(self.cache.layers, cache.layers, strict=True):
            if isinstance(ours, StepStates) and isinstance(theirs, KdaCache):
                for pool, values in zip(ours.pool.tensors(), (theirs.state_NHKV, *theirs.windows), strict=True):
                    values[sequence].copy_(pool[slot])
            elif isinstance(ours, StepLatents) and isinstance(theirs, MlaCache):
                theirs.replace(sequence, ours.memory_PTC[slot, :length])
        cache.lengths[sequence] = length

    @torch.no_grad()
    def resized(self, max_tokens: int) -> Decoder:
        """Another one with the same sequences and more room. Raises ValueError if they do not fit."""
        if max_tokens < max(self.lengths):
            raise ValueError(f"Decoder: a sequence of {max(self.lengths)} tokens, room for {max_tokens}")
        other = Decoder(self.model, slots=self.cache.slots, max_tokens=max_tokens, graphs=self._graphs)
        for ours, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            if isinstance(ours, StepStates) and isinstance(theirs, StepStates):
                for mine, copy in zip(ours.pool.tensors(), theirs.pool.tensors(), strict=True):
                    copy.copy_(mine)
            elif isinstance(ours, StepLatents) and isinstance(theirs, StepLatents):
                longest = max(self.lengths)
                theirs.memory_PTC[:, :longest].copy_(ours.memory_PTC[:, :longest])
        other.cache.length_R.copy_(self.cache.length_R)
        other.lengths = list(self.lengths)
        return other

    @torch.no_grad()
    def step(self, slots: Sequence[int], ids: Sequence[int] | None = None) -> Tensor:
        """Continue these slots' sequences by one token each -> logits [N, V] of what follows, in memory of this step.

        The next call overwrites them. Without `ids` the same slots as in the call before continue with their most
        likely tokens, which nothing waits for.

        Raises ValueError for slots that are not distinct, not there or full, and for ids that do not fit.
        """
        slots = list(slots)
        self._check(slots, ids)
        places = self._places_for(len(slots))
        if ids is not None:
            self._write(places.id_N, list(ids), 0)
        if slots != self._last:
            self._write(places.slot_N, slots, -1)
        self._last = slots
        places.run()
        for slot in slots:
            self.lengths[slot] += 1
        return places.logits_NV[: len(slots)]

    @torch.no_grad()
    def greedy(self, slots: Sequence[int], ids: Sequence[int], count: int) -> Tensor:
        """The `count` most likely tokens [count, N] that follow each slot's given one; int64, on the model's device."""
        found = torch.empty(count, len(slots), dtype=torch.int64, device=self.device)
        for n in range(count):
            self.step(slots, ids if n == 0 else None)
            found[n] = self._places_for(len(slots)).id_N[: len(slots)]
        return found

    def _check(self, slots: list[int], ids: Sequence[int] | None) -> None:
        if not slots or len(set(slots)) < len(slots) or not all(0 <= slot < self.cache.slots for slot in slots):
            raise ValueError(f"slots: distinct ones of 0..{self.cache.slots - 1} needed, got {slots}")
        full = [slot for slot in slots if self.lengths[slot] >= self.cache.max_tokens]
        if full:
            raise ValueError(f"slots: {full} hold {self.cache.max_tokens} tokens, which is all they have room for")
        if ids is None and slots != self._last:
            raise ValueError("ids: needed where other slots than in the step before are continued")
        vocab = self.model.config.text.vocab_size
        if ids is not None and (len(ids) != len(slots) or not all(0 <= token < vocab for token in ids)):
            raise ValueError(f"ids: {len(slots)} of 0..{vocab - 1} needed, got {list(ids)[:8]}")

    def _write(self, into_N: Tensor, values: list[int], rest: int) -> None:
        """Put values into fixed memory, `rest` behind them, without waiting for the device."""
        host = torch.tensor(values + [rest] * (len(into_N) - len(values)), dtype=into_N.dtype)
        into_N.copy_(host.pin_memory() if into_N.is_cuda else host, non_blocking=True)

    def _places_for(self, count: int) -> _Places:
        """Places of the smallest power of two that suffices, or of all slots."""
        size = min(1 << (count - 1).bit_length(), self.cache.slots)
        if size not in self._places:
            self._places[size] = self._make(size)
        return self._places[size]

    def _make(self, size: int) -> _Places:
        """Fixed memory; with graphs, also a step captured over it, after one without sequences to compile kernels."""
        device, weight = self.device, self.model.lm_head.weight
        id_N = torch.zeros(size, dtype=torch.int64, device=device)
        slot_N = torch.full((size,), -1, dtype=torch.int32, device=device)
        logits_NV = torch.empty(size, len(weight), dtype=weight.dtype, device=device)

        def run() -> None:
            _forward(self.model, self.cache, id_N, slot_N, logits_NV)

        if not self._graphs:
            return _Places(id_N, slot_N, logits_NV, run)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._pool = self._pool or graph.pool()
        return _Places(id_N, slot_N, logits_NV, graph.replay)


def _forward(model: K3, cache: StepCache, id_N: Tensor, slot_N: Tensor, logits_NV: Tensor) -> None:
    """One step; reads and writes fixed memory only."""
    step = cache.step = Step(slot_N, cache.length_R)
    h_ND = model.backbone(model.embed(id_N), step.bounds, cast(Cache, cache))
    head(h_ND, (model.norm.weight, model.norm.eps), model.lm_head.weight, logits_NV, id_N)
    step.count(cache.length_R)
