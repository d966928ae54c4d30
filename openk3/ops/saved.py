"""How tensors wait for the backward pass: as they are, to be made again, or rounded to FP8; by the name of their group.

Operations and layers name tensors, and say where one can be made again from others; `saving` sets the policy of a
forward pass. All of it goes through torch's own hooks for saved tensors and its non-reentrant checkpoint. Without a
policy, or without a gradient, naming costs next to nothing and changes nothing. Nothing here waits for a GPU.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from openk3.ops.mxfp import BLOCK
from openk3.ops.mxfp8 import dequantize_mxfp8, quantize_mxfp8

KEEP, RECOMPUTE, FP8 = "keep", "recompute", "fp8"
REST = "rest"  # what has no name
_local = threading.local()  # the pass of each thread: micro-batches may be computed side by side


@contextmanager
def saving(policy: Mapping[str, str], *, beside: Iterable[Tensor] | None = None) -> Generator[SavingPass]:
    """While entered, what this thread's forward passes save is held as `policy` says; groups it lacks are kept.

    Gradients are the same bits for "keep" and "recompute". With `beside`, the pass counts the bytes it holds, without
    those of the tensors given (a model's weights and buffers).
    """
    found = SavingPass(policy, beside)
    if beside is None and all(held == KEEP for held in policy.values()):
        yield found
        return
    before, _local.current = getattr(_local, "current", None), found
    try:
        with saved_tensors_hooks(found.pack, _unpack):
            yield found
    finally:
        _local.current = before
        found.close()


def name(group: str, *tensors: Tensor | None) -> None:
    """Say which group tensors belong to, and with them all that lies in the same allocation."""
    current = _current()
    if current is not None:
        for tensor in tensors:
            if tensor is not None:
                current.add(group, tensor)


def remake(group: str, made: Sequence[Tensor], make: Callable[..., Any], *inputs: Tensor) -> None:
    """Name tensors, and say that make(*inputs) gives the same bits again: one tensor, or all of them in order.

    `make` must depend on nothing that changes before the backward pass; weights may be part of it.
    """
    current = _current()
    if current is None:
        return
    recipe = None
    if current.policy.get(group) == RECOMPUTE:
        recipe = _Recipe(make, [current.held(x) for x in inputs], len(made))
    for index, tensor in enumerate(made):
        current.add(group, tensor, recipe, index)


def remake_linear(group: str, y: Tensor, x: Tensor, weight: Tensor) -> None:
    """`remake` of y = x W^T."""
    remake(group, [y], partial(F.linear, weight=weight), x)


def again(group: str, run: Callable[[Tensor], Any], x: Tensor) -> Any:
    """run(x); if the group's policy is "recompute", nothing inside is held and the backward pass runs it once more.

    `run` must give the same bits for the same x. x waits by the policy of its own group. Inside of another such run
    it is just run(x).
    """
    current = _current()
    if current is None or not recomputes(group):
        return run(x)
    waiting, live, needs = current.held(x), [x], x.requires_grad

    def body(_: Tensor) -> Any:
        value = live.pop() if live else waiting.take().detach().requires_grad_(needs)
        before, _local.current = getattr(_local, "current", None), None
        try:
            return run(value)
        finally:
            _local.current = before

    # No layer draws random numbers, and reading a generator's state is a wait for the GPU.
    return checkpoint(body, x.new_empty(0), use_reentrant=False, preserve_rng_state=False)


def recomputes(group: str) -> bool:
    """Whether `again` would run something of this group twice."""
    current = _current()
    return current is not None and current.policy.get(group) == RECOMPUTE and torch.is_grad_enabled()


def _current() -> SavingPass | None:
    return getattr(_local, "current", None)


class _Layout(NamedTuple):
    """Where a tensor without gaps lies in its memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor of the same memory is part of it."""
        start = int(tensor.storage_offset()) - self.offset
        last = start + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
        return tensor.dtype == self.dtype and tensor.numel() > 0 and start >= 0 and last < self.shape.numel()


class _Name(NamedTuple):
    """What is known of one piece of memory."""

    group: str
    alive: StorageWeakRef
    layout: _Layout | None  # of all that can be given back; None if that has gaps
    recipe: _Recipe | None
    index: int  # among the recipe's results
    rounded: list[weakref.ref[_Rounded]]  # of it, once there is one


class SavingPass:
    """The tensors of one forward pass: what is known of them, and the books of what is held."""

    def __init__(self, policy: Mapping[str, str], beside: Iterable[Tensor] | None) -> None:
        self.policy = dict(policy)
        self._names: dict[int, _Name] = {}
        self._limit = 256
        self._beside = None if beside is None else {_key(x) for x in beside}
        self._books: dict[int, tuple[StorageWeakRef, int]] = {}
        self._rounded: list[weakref.ref[_Rounded]] = []

    def add(self, group: str, tensor: Tensor, recipe: _Recipe | None = None, index: int = 0) -> None:
        """Name the memory of a tensor. Memory that has a name keeps it."""
        key = _key(tensor)
        old = self._names.get(key)
        if old is not None and not old.alive.expired():
            return
        if len(self._names) > self._limit:  # forget what is gone, now and then
            self._names = {key: known for key, known in self._names.items() if not known.alive.expired()}
            self._limit = 2 * len(self._names) + 256
        layout, storage = None, tensor.untyped_storage()
        if recipe is None:  # several tensors of one allocation are rounded together
            values = storage.nbytes() // tensor.element_size()
            layout = _Layout(torch.Size([values]), (1,), 0, tensor.dtype)
        elif tensor.is_contiguous():
            layout = _Layout(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        self._names[key] = _Name(group, StorageWeakRef(storage), layout, recipe, index, [])

    def pack(self, tensor: Tensor) -> Any:
        """What autograd holds in place of a tensor."""
        key = _key(tensor)
        known = self._names.get(key)
        if known is not None and known.layout is not None and known.layout.holds(tensor):
            holder = None if known.alive.expired() else self._holder(known, known.layout, tensor)
            if holder is not None:
                holder.uses += 1
                offset = int(tensor.storage_offset()) - known.layout.offset
                return _View(holder, known.index, tensor.shape, tensor.stride(), offset)
        if self._beside is not None and key not in self._beside:
            storage = tensor.untyped_storage()
            self._books[key] = StorageWeakRef(storage), storage.nbytes()
        return tensor

    def held(self, tensor: Tensor) -> _View | _Kept:
        """What a detached tensor can be taken from in the backward pass."""
        found = self.pack(tensor)
        return found if isinstance(found, _View) else _Kept(tensor.detach())

    def bytes(self) -> dict[str, int]:
        """Bytes by group that are held at this moment, for passes that count, before they are closed."""
        totals: dict[str, int] = {}
        for key, (alive, count) in self._books.items():
            if count and not alive.expired():
                known = self._names.get(key)
                group = REST if known is None or known.alive.expired() else known.group
                totals[group] = totals.get(group, 0) + count
        for reference in self._rounded:
            holder = reference()
            if holder is not None:
                totals[holder.group] = totals.get(holder.group, 0) + holder.nbytes
        return totals

    def close(self) -> None:
        """Forget all names, which would hold memory that the backward pass is to free step by step."""
        self._names.clear()

    def _holder(self, known: _Name, layout: _Layout, tensor: Tensor) -> _Holder | None:
        """What holds a named tensor; None if that is the tensor itself."""
        how = self.policy.get(known.group, KEEP)
        if how == RECOMPUTE:
            return known.recipe
        if how != FP8:
            return None
        holder = known.rounded[0]() if known.rounded else None
        if holder is None:
            holder = _Rounded(known.group, tensor.detach().as_strided(layout.shape, layout.stride, layout.offset))
            known.rounded[:] = [weakref.ref(holder)]
            if self._beside is not None:
                self._rounded.append(known.rounded[0])
        return holder


class _Holder(ABC):
    """Gives tensors back that are not kept, and keeps them while others still wait for the same."""

    def __init__(self) -> None:
        self.uses = 0
        self._made: tuple[int, list[Tensor]] | None = None

    def take(self, index: int) -> Tensor:
        """Tensor `index`, whole. What another stream has made is made again: nothing orders the two."""
        self.uses -= 1
        stream = _stream()
        found = self._made
        if found is None or found[0] != stream:
            found = stream, self.make()
        self._made = found if self.uses > 0 else None
        return found[1][index]

    @abstractmethod
    def make(self) -> list[Tensor]:
        """All tensors."""


class _Recipe(_Holder):
    """Tensors that are made again."""

    def __init__(self, run: Callable[..., Any], inputs: Sequence[_View | _Kept], count: int) -> None:
        super().__init__()
        self._run, self._inputs, self._count = run, list(inputs), count

    def make(self) -> list[Tensor]:
        """Run it on its inputs."""
        with torch.no_grad():
            found = self._run(*(x.take() for x in self._inputs))
            return [x.contiguous() for x in ([found] if self._count == 1 else found)]


class _Rounded(_Holder):
    """One tensor in E4M3, blocks of 32 values in memory order with one scale each."""

    def __init__(self, group: str, whole: Tensor) -> None:
        super().__init__()
        self.group, self._shape, self._dtype = group, whole.shape, whole.dtype
        flat = whole.flatten()
        flat = F.pad(flat, (0, -len(flat) % BLOCK))
        with torch.no_grad():
            self._values, self._scale = quantize_mxfp8(flat)
        self._stream = _stream()

    @property
    def nbytes(self) -> int:
        """That it holds."""
        return self._values.nbytes + self._scale.nbytes

    def make(self) -> list[Tensor]:
        """The rounded values."""
        stream = _stream()
        if stream != self._stream:  # the allocator must not hand the memory on before that stream has read it
            for x in (self._values, self._scale):
                x.record_stream(torch.cuda.current_stream(x.device))
        with torch.no_grad():
            flat = dequantize_mxfp8(self._values, self._scale, self._dtype)
        return [flat[: self._shape.numel()].view(self._shape)]


class _View(NamedTuple):
    """A tensor in the memory of a held one."""

    holder: _Holder
    index: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # from the start of the held tensor

    def take(self) -> Tensor:
        """It, once."""
        whole = self.holder.take(self.index)
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


class _Kept(NamedTuple):
    """A tensor that is just kept."""

    tensor: Tensor

    def take(self) -> Tensor:
        """It."""
        return self.tensor


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _unpack(held: Any) -> Tensor:
    """Of a function of its own: autograd holds it until the backward pass, and with a method all of the pass."""
    return held.take() if isinstance(held, _View) else held


def _stream() -> int:
    """Number of the stream that work goes to; without a GPU there is one."""
    return torch.cuda.current_stream().stream_id if torch.cuda.is_initialized() else 0
