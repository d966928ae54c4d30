"""Launches of Gluon kernels that take copy-engine descriptors, without building and checking them anew every time."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_compiled: dict[tuple[Any, ...], Any] = {}


class Matrix(NamedTuple):
    """A contiguous tensor as rows of `shape[1]` elements, moved by the copy engine in tiles of `block`.

    Has the attributes that Triton's launcher reads of a `TensorDescriptor`, and costs nothing to make.
    """

    base: Tensor
    shape: tuple[int, int]
    strides: tuple[int, int]
    block: tuple[int, int]
    padding: str = "zero"


def matrix(x: Tensor, width: int, block: tuple[int, int]) -> Matrix:
    """`x`, contiguous and not empty, as rows of `width` elements."""
    return Matrix(x, (x.numel() // width, width), (width, 1), block)


def block_layout(block: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a tile of `block` lies in shared memory."""
    element = gl.float32 if dtype == torch.float32 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


def block_type(block: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> str:
    """Type of a `Matrix` argument, as compilation without a launch needs it."""
    name = "fp32" if dtype == torch.float32 else "bf16"
    return f"tensordesc<{name}{list(block)},{block_layout(block, dtype)!r}>"


def fits(x: Tensor, *others: Tensor | None, width: int, chunk: int) -> bool:
    """Whether the Gluon kernels may run: Hopper, and non-empty, contiguous, aligned bfloat16 tensors of 128 channels.

    `others` may have any format (the copy engine needs addresses that 16 divides); `width`: key channels.
    """
    return (
        x.device.type == "cuda"
        and _is_hopper(x.device)
        and x.dtype == torch.bfloat16
        and (width, x.shape[-1], chunk) == (128, 128, 32)
        and x.numel() > 0
        and all(y is None or (y.data_ptr() % 16 == 0 and y.is_contiguous()) for y in (x, *others))
    )


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def launch(
    kernel: Any, programs: int, arguments: Sequence[Any], constants: dict[str, Any], options: dict[str, int]
) -> None:
    """Run `kernel` in `programs` programs: its arguments in order, then its compile-time ones, last in its signature.

    Its integer arguments must fit 32 bits and be ones that it does not specialise on.
    """
    key = (kernel.fn, torch.cuda.current_device(), *map(_kind, arguments), *constants.values(), *options.values())
    compiled = _compiled.get(key)
    if compiled is None:
        full = [_descriptor(x) if isinstance(x, Matrix) else x for x in arguments]
        compiled = kernel.run(*full, **constants, grid=(programs,), warmup=True, **options)
        _compiled[key] = compiled
    compiled[(programs, 1, 1)](*arguments, *constants.values())


def _kind(x: Tensor | Matrix | int | None) -> Any:
    """What a compiled kernel depends on of an argument."""
    if isinstance(x, Matrix):
        return x.base.dtype, x.block
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    return x if x is None else int


def _descriptor(x: Matrix) -> TensorDescriptor:
    return TensorDescriptor(x.base, list(x.shape), list(x.strides), list(x.block), block_layout(x.block, x.base.dtype))
