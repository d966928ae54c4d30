"""Launches of kernels without building and checking copy-engine descriptors and argument types anew every time."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openk3.ops.backend import prefers_gluon
from openk3.ops.kda.prepare_kernel import Workspace

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


def fits(workspace: Workspace, x_THV: Tensor, *others: Tensor | None) -> bool:
    """Whether the Gluon scans may run: on Hopper, with bfloat16, 128 channels of each kind and at least one tile.

    `others` may have any format. The copy engine needs contiguous tensors at addresses that 16 divides.
    """
    w = workspace
    return (
        w.nkd.dtype == torch.bfloat16 == x_THV.dtype
        and (*w.nkd.shape[2:], x_THV.shape[2]) == (32, 128, 128)
        and w.nkd.numel() > 0
        and prefers_gluon(x_THV.device)
        and all(
            y is None or (y.data_ptr() % 16 == 0 and y.is_contiguous())
            for y in (x_THV, w.nkd, w.qd, w.kr, w.inv, w.mqk, w.decay, w.beta, *others)
        )
    )


def launch(
    kernel: Any, programs: int, arguments: Sequence[Any], constants: dict[str, Any], options: dict[str, int]
) -> None:
    """Run `kernel` in `programs` programs: its arguments in order, then its compile-time ones, last in its signature.

    Its integer arguments must fit 32 bits and be ones that it does not specialise on.
    """
    key: list[Any] = [kernel.fn, torch.cuda.current_device(), *constants.values(), *options.values()]
    values: list[Any] = []
    for x in arguments:
        if isinstance(x, Tensor):  # as a number: the launcher asks the driver about every tensor
            values.append(x.data_ptr())
            key.append((x.dtype, values[-1] % 16))
        else:
            values.append(x)
            key.append((x.base.dtype, x.block) if isinstance(x, Matrix) else None if x is None else type(x))
    compiled = _compiled.get(tuple(key))
    if compiled is None:
        full = [_descriptor(x) if isinstance(x, Matrix) else x for x in arguments]
        compiled = kernel.run(*full, **constants, grid=(programs,), warmup=True, **options)
        _compiled[tuple(key)] = compiled
    compiled[(programs, 1, 1)](*values, *constants.values())


def _descriptor(x: Matrix) -> TensorDescriptor:
    return TensorDescriptor(x.base, list(x.shape), list(x.strides), list(x.block), block_layout(x.block, x.base.dtype))
