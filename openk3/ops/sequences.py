"""Where packed sequences begin and end, read from a GPU at most once for each tensor of bounds."""

import weakref
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import index
from typing import Any

import torch
from torch import Tensor

_REMEMBERED = 16
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def sequence_bounds(cu_seqlens: Tensor | None, num_tokens: int) -> tuple[int, ...]:
    """Bounds of N packed sequences as N + 1 integers: sequence n is tokens [bounds[n], bounds[n + 1]).

    cu_seqlens [N + 1] integers from 0 up to num_tokens; equal neighbours are an empty sequence; None is one sequence.
    Raises ValueError if it is no such tensor or does not cover the tokens in order. Reading a tensor on a GPU waits
    for all its work, so what was read is remembered for as long as the tensor lives and is not written to.
    """
    if cu_seqlens is None:
        return 0, num_tokens
    bounds = bounds_in("cu_seqlens", cu_seqlens)
    if bounds[0] != 0 or bounds[-1] != num_tokens or any(a > b for a, b in zip(bounds, bounds[1:])):
        rule = f"integers that must rise from 0 to the number of tokens, {num_tokens}"
        raise ValueError(f"cu_seqlens: {rule}; got {shown(bounds)}")
    return bounds


def bounds_in(name: str, x: Tensor) -> tuple[int, ...]:
    """The values of a tensor [N + 1] of bounds. Raises ValueError that names it if it is no such tensor of integers."""
    if isinstance(x, Tensor) and x.ndim == 1 and len(x) and x.dtype in _INTEGERS:
        return integers(x)
    got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
    raise ValueError(f"{name}: expected integers in a tensor [sequences + 1], got {got}")


def shown(values: Sequence[Any]) -> str:
    """A list as a message has it: of more than eight values the first four and the last four."""
    if len(values) <= 8:
        return str(list(values))
    first, last = (", ".join(map(str, part)) for part in (values[:4], values[-4:]))
    return f"[{first}, ..., {last}] ({len(values)} values)"


def check_tensors(*named: tuple[str, Any]) -> None:
    """Raise ValueError that names the first of these (name, value) that is no tensor."""
    for name, x in named:
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(x).__name__}")


def whole_numbers(name: str, values: Iterable[Any]) -> tuple[int, ...]:
    """The values as Python integers. Raises ValueError that names them if one is no whole number."""
    try:
        return tuple(index(x) for x in values)
    except TypeError:
        raise ValueError(f"{name}: expected whole numbers, got {values}") from None


@lru_cache(maxsize=_REMEMBERED)
def bounds_on(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    """The bounds as int32 [N + 1] on `device`: one tensor for all who ask, not to be written to."""
    return torch.tensor(bounds, dtype=torch.int32, device=device)


class Memory:
    """The integers of the tensors that were asked for last."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Tensor], int, tuple[int, ...]]] = []

    def __len__(self) -> int:
        return len(self._known)

    def integers(self, x: Tensor) -> tuple[int, ...]:
        """x.tolist() of a 1-d tensor, read again only if x was written to in between."""
        if x.is_inference():  # keeps no count of writes
            return tuple(x.tolist())
        for reference, version, values in self._known:
            if reference() is x and version == x._version:
                return values
        values = tuple(x.tolist())
        self.remember(x, values)
        return values

    def remember(self, x: Tensor, values: tuple[int, ...]) -> None:
        """Answer `integers` of x with these, its values, until it is written to."""
        others = [known for known in self._known if known[0]() is not None and known[0]() is not x]
        self._known = [(weakref.ref(x), x._version, values), *others][:_REMEMBERED]


_MEMORY = Memory()


def remember_integers(x: Tensor, values: Iterable[int]) -> None:
    """Take the values of a 1-d integer tensor on a GPU from here, so that it need not be waited for."""
    if x.device.type != "cpu" and not x.is_inference():
        _MEMORY.remember(x, tuple(values))


def integers(x: Tensor) -> tuple[int, ...]:
    """The values of a 1-d integer tensor; one on a GPU is read once for as long as it is not written to."""
    # A CPU tensor is quick to read, and may share its memory with an array that counts no writes.
    return tuple(x.tolist()) if x.device.type == "cpu" else _MEMORY.integers(x)
