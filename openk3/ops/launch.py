"""Starting Triton kernels without looking at every argument's type anew, which takes the host longer than the GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from openk3.ops.kda.gluon_launch import Compiled

_compiled: dict[tuple[Any, ...], Compiled] = {}
_signatures: dict[Any, _Signature] = {}
_NUMBERS = frozenset((int, float, bool, type(None)))
_INT32 = range(-(2**31), 2**31)


class _Signature(NamedTuple):
    """A kernel's arguments in order, which of them are compile-time constants, and what stands for missing ones."""

    names: tuple[str, ...]
    constant: tuple[bool, ...]
    defaults: tuple[Any, ...]


def start(kernel: Any, *grid: int) -> Callable[..., None]:
    """As `kernel[grid]`: call it with the kernel's arguments and options. Tensors, numbers, None and constants only.

    What is compiled is what Triton would compile: kernels are told apart by what it specialises on. The first call of
    each kind goes through Triton; later ones are launched from what it made. Hooks of Triton's around launches are not
    called. In Triton's interpreter it is `kernel[grid]`.
    """
    if not isinstance(kernel, triton.JITFunction) or kernel.pre_run_hooks:
        return kernel[grid]
    return partial(_run, kernel, grid)


def _run(kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
    signature = _signatures.get(kernel.fn) or _signature(kernel)
    final = list(given)
    if len(given) < len(signature.names):
        pairs = zip(signature.names[len(given) :], signature.defaults[len(given) :])
        final += [named.pop(name, default) for name, default in pairs]
    values, device = tuple(final), torch.cuda.current_device()
    key: list[Any] = [kernel.fn, device, *named.items()]
    add = key.append
    for n, constant in enumerate(signature.constant):
        x = final[n]
        if constant:
            add((type(x), x))
        elif isinstance(x, Tensor):
            # As a number: the launcher asks the driver about every tensor.
            final[n] = address = x.data_ptr()
            add((x.dtype, address % 16 == 0))
        elif type(x) is int:
            add((x == 1, x % 16 == 0, x in _INT32))
        elif type(x) in _NUMBERS:
            add(type(x))
        else:
            raise TypeError(f"a kernel's argument must be a tensor, a number or None, got {type(x).__name__}")
    kind = tuple(key)
    found = _compiled.get(kind)
    if found is None:
        found = Compiled.of(kernel.run(*values, grid=grid, warmup=True, **named))
        _compiled[kind] = found
    if found.raw is None:
        kernel[grid](*values, **named)
    else:
        found.start((*grid, 1, 1)[:3], device, final)


def cdiv(value: int, unit: int) -> int:
    """How many units cover a value; `triton.cdiv` takes the host 5 us."""
    return -(-value // unit)


def power_of_2(value: int) -> int:
    """The first power of two that is not below a positive value; `triton.next_power_of_2` takes the host 5 us."""
    return 1 << (value - 1).bit_length()


def _signature(kernel: Any) -> _Signature:
    parameters = kernel.params
    names = tuple(each.name for each in parameters)
    defaults = tuple(each.default if each.has_default else None for each in parameters)
    found = _signatures[kernel.fn] = _Signature(names, tuple(each.is_constexpr for each in parameters), defaults)
    return found
