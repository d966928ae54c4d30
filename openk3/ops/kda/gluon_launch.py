"""Launches of kernels without building and checking copy-engine descriptors and argument types anew every time."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from openk3.ops.backend import prefers_gluon
from openk3.ops.kda.prepare_kernel import Workspace

_compiled: dict[tuple[Any, ...], Any] = {}
_encodings: dict[tuple[Any, ...], list[Any]] = {}
_NONE = compile("", "", "exec")  # code without free variables


class Matrix(NamedTuple):
    """A tensor as rows of elements (or rows of rows), moved by the copy engine in tiles of `block`.

    Has the attributes that Triton's launcher reads of a `TensorDescriptor`, and costs nothing to make.
    """

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    padding: str = "zero"


def matrix(x: Tensor, width: int, block: tuple[int, int]) -> Matrix:
    """`x`, contiguous and not empty, as rows of `width` elements."""
    return Matrix(x, (x.numel() // width, width), (width, 1), block)


def block_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a tile of `block` lies in shared memory."""
    element = gl.float32 if dtype == torch.float32 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


def block_type(block: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> str:
    """Type of a `Matrix` argument, as compilation without a launch needs it."""
    name = "fp32" if dtype == torch.float32 else "bf16"
    return f"tensordesc<{name}{list(block)},{block_layout(block, dtype)!r}>"


def fits(workspace: Workspace, x_THV: Tensor, *others: Tensor | None) -> bool:
    """Whether the Gluon scans may run: on Hopper, with bfloat16, 128 channels of each kind and at least one tile.

    `others` may have any format; all must be `copyable`.
    """
    w = workspace
    return (
        w.nkd.dtype == torch.bfloat16 == x_THV.dtype
        and (*w.nkd.shape[2:], x_THV.shape[2]) == (32, 128, 128)
        and w.nkd.numel() > 0
        and prefers_gluon(x_THV.device)
        and all(copyable(y) for y in (x_THV, w.nkd, w.qd, w.kr, w.inv, w.mqk, w.decay, w.beta))
        and all(y is None or copyable(y) for y in others)
    )


def copyable(x: Tensor) -> bool:
    """Whether the copy engine takes a tensor: it must be contiguous, at an address that 16 divides."""
    return x.data_ptr() % 16 == 0 and x.is_contiguous()


def launch(
    kernel: Any, programs: int, arguments: Sequence[Any], constants: dict[str, Any], options: dict[str, int]
) -> None:
    """Run `kernel` in `programs` programs: its arguments in order, then its compile-time ones, last in its signature.

    An argument may be a tuple of tensors. Integers must fit 32 bits and be ones that the kernel does not specialise on.
    """
    device = torch.cuda.current_device()
    key: list[Any] = [kernel.fn, device, *constants.values(), *options.values()]
    values: list[Any] = []
    for x in arguments:
        if isinstance(x, Tensor):  # as a number: the launcher asks the driver about every tensor
            address = x.data_ptr()
            values.append(address)
            key.append((x.dtype, address % 16))
        elif type(x) is tuple:
            addresses = tuple(y.data_ptr() for y in x)
            values.append(addresses)
            key.append(tuple((y.dtype, address % 16) for y, address in zip(x, addresses)))
        else:
            values.append(x)
            key.append((x.base.dtype, x.block) if isinstance(x, Matrix) else None if x is None else type(x))
    found = _compiled.get(tuple(key))
    if found is None:
        full = [_descriptor(x) if isinstance(x, Matrix) else x for x in arguments]
        found = _Compiled.of(kernel.run(*full, **constants, grid=(programs,), warmup=True, **options))
        _compiled[tuple(key)] = found
    found.run(programs, device, values, constants.values())


class _Compiled(NamedTuple):
    """A compiled kernel, and the function that launches it once copy-engine arguments are encoded."""

    kernel: Any
    raw: Any  # None: launch as Triton does
    encodings: tuple[Any, ...]  # how each copy-engine argument is encoded

    @classmethod
    def of(cls, kernel: Any) -> "_Compiled":
        """Looks into Triton's launcher; what does not look as expected is left to Triton."""
        launcher = kernel.run
        if getattr(launcher, "global_scratch_size", 1) or getattr(launcher, "profile_scratch_size", 1):
            return cls(kernel, None, ())
        raw, encodings = launcher.launch, ()
        inside = dict(zip(getattr(raw, "__code__", _NONE).co_freevars, getattr(raw, "__closure__", None) or ()))
        if "tensordesc_meta" in inside and "launcher" in inside:
            raw, encodings = inside["launcher"].cell_contents, tuple(inside["tensordesc_meta"].cell_contents)
        return cls(kernel, raw, encodings)

    def run(self, programs: int, device: int, values: list[Any], constants: Iterable[Any]) -> None:
        """Launch on the current stream."""
        if self.raw is None:
            self.kernel[(programs, 1, 1)](*values, *constants)
            return
        final = values
        if self.encodings:
            encodings, final = iter(self.encodings), []
            for x in values:
                if isinstance(x, Matrix):
                    final += _encoded(x, next(encodings))
                else:
                    final.append(x)
        kernel, launcher = self.kernel, self.kernel.run
        stream = driver.active.get_current_stream(device)
        flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        unused = (None, None)  # scratch memory
        hooks = (None, None, None)
        self.raw(
            *(programs, 1, 1, stream, kernel.function, *flags, *unused, kernel.packed_metadata, *hooks),
            *final,
            *constants,
        )


def _encoded(x: Matrix, encoding: Any) -> list[Any]:
    """What a kernel gets for a copy-engine argument; remembered, because encoding takes longer than the launch."""
    if encoding is None:  # not for the copy engine
        return make_tensordesc_arg(x, encoding)
    key = (x.base.data_ptr(), x.shape, x.strides, x.block, x.base.dtype)
    found = _encodings.get(key)
    if found is None:
        if len(_encodings) > 4096:
            _encodings.clear()
        found = _encodings[key] = make_tensordesc_arg(x, encoding)
    return found


def _descriptor(x: Matrix) -> TensorDescriptor:
    return TensorDescriptor(x.base, list(x.shape), list(x.strides), list(x.block), block_layout(x.block, x.base.dtype))
