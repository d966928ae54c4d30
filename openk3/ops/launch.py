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
    values = list(given)
    if len(given) < len(signature.names):
        pairs = zip(signature.names[len(given) :], signature.defaults[len(given) :])
        values += [named.pop(name, default) for name, default in pairs]
    key: list[Any] = [kernel.fn, torch.cuda.current_device(), *named.items()]
    final: list[Any] = []
    for x, constant in zip(values, signature.constant):
        kind = type(x)
        if constant:
            key.append((kind, x))
        elif kind is int:
            key.append((x == 1, x % 16 == 0, x in _INT32))
        elif kind in _NUMBERS:
            key.append(kind)
        else:
            # As a number: the launcher asks the driver about every tensor.
            x = _address(x)
            key.append((values[len(final)].dtype, x % 16 == 0))
        final.append(x)
    found = _compiled.get(tuple(key))
    if found is None:
        found = Compiled.of(kernel.run(*values, grid=grid, warmup=True, **named))
        _compiled[tuple(key)] = found
    if found.raw is None:
        kernel[grid](*values, **named)
    else:
        found.start((*grid, 1, 1)[:3], key[1], final)


def _address(x: Any) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"a kernel's argument must be a tensor, a number or None, got {type(x).__name__}")
    return x.data_ptr()


def _signature(kernel: Any) -> _Signature:
    parameters = kernel.params
    names = tuple(each.name for each in parameters)
    defaults = tuple(each.default if each.has_default else None for each in parameters)
    found = _signatures[kernel.fn] = _Signature(names, tuple(each.is_constexpr for each in parameters), defaults)
    return found
