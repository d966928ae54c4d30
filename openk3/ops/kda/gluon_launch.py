"""Launches of kernels without building and checking copy-engine descriptors and argument types anew every time."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from openk3.ops.backend import prefers_gluon
from openk3.ops.kda.workspace import CutWorkspace, Workspace, copyable

_compiled: dict[tuple[Any, ...], Any] = {}
_encodings: dict[tuple[Any, ...], tuple[list[Any], int]] = {}
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

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a kernel is compiled for."""
        return self.block, self.base.dtype

    @property
    def key(self) -> tuple[Any, ...]:
        """All that its encoding depends on."""
        return self.base.data_ptr(), self.shape, self.strides, self.block, self.base.dtype


class Group(NamedTuple):
    """Arguments that go together: they are made only if what a kernel gets for them is not remembered.

    `kind` tells apart what a kernel is compiled for, `place` where they lie and how large they are.
    """

    kind: tuple[Any, ...]
    place: Any
    make: Callable[[], Sequence[Tensor | Matrix | None]]

    @property
    def key(self) -> tuple[Any, ...]:
        """All that their encodings depend on."""
        return self.kind, self.place


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


def tiles_of(workspace: Workspace, slots: tuple[str, ...], *, rest: bool) -> Sequence[Matrix | Group | None]:
    """nkd, qd, kr, those rests (None where there is none, or none wanted), inv, mqk, decay and beta as arguments."""
    w = workspace
    _, _, C, K = w.sizes

    def make() -> list[Matrix | None]:
        rows = [matrix(x, K, (C, K)) for x in (w.nkd, w.qd, w.kr)]
        found = [getattr(w, name) if rest else None for name in slots]
        rests = [None if x is None else matrix(x, x.shape[3], (C, x.shape[3])) for x in found]
        squares = [matrix(x, C, (C, C)) for x in (w.inv, w.mqk)]
        return [*rows, *rests, *squares, matrix(w.decay, K, (1, K)), matrix(w.beta, C, (1, C))]

    if isinstance(w, CutWorkspace):
        return [Group(("tiles", slots, rest and w.place[3], w.place[2], C, K), w.place, make)]
    return make()


def fits(workspace: Workspace, x_THV: Tensor, *others: Tensor | None) -> bool:
    """Whether the Gluon scans may run: on Hopper, with bfloat16, 128 channels of each kind and at least one tile.

    `others` may have any format; all must be `copyable`.
    """
    return (
        x_THV.dtype == torch.bfloat16
        and x_THV.shape[2] == 128
        and workspace.movable
        and prefers_gluon(x_THV.device)
        and copyable(x_THV)
        and all(y is None or copyable(y) for y in others)
    )


_OTHERS = frozenset((Matrix, Group, tuple, int, float, type(None)))  # types of arguments that are no tensors


def launch(
    kernel: Any, programs: int, arguments: Sequence[Any], constants: dict[str, Any], options: dict[str, int]
) -> None:
    """Run `kernel` in `programs` programs: its arguments in order, then its compile-time ones, last in its signature.

    An argument may be a tuple of tensors, a `Matrix`, or a `Group` in place of several. Integers must fit 32 bits and
    be ones that the kernel does not specialise on.
    """
    device = torch.cuda.current_device()
    key: list[Any] = [kernel.fn, device, *constants.values(), *options.values()]
    values: list[Any] = []
    encoded = True
    for x in arguments:
        kind = type(x)
        if kind is Tensor or (kind not in _OTHERS and isinstance(x, Tensor)):
            # As a number: the launcher asks the driver about every tensor.
            address = x.data_ptr()
            values.append(address)
            key += (x.dtype, address % 16)
        elif kind is tuple:
            addresses = _plain(x)
            values.append(addresses)
            key.append(tuple((y.dtype, address % 16) for y, address in zip(x, addresses)))
        elif kind is Matrix or kind is Group:
            key += x.kind
            known = _encodings.get(x.key)
            if known is None:
                encoded = False
            else:
                values += known[0]
        else:
            values.append(x)
            key.append(None if x is None else kind)
    found = _compiled.get(tuple(key))
    if found is None:
        full = [_descriptor(x) if isinstance(x, Matrix) else x for x in separate(arguments)]
        found = Compiled.of(kernel.run(*full, **constants, grid=(programs,), warmup=True, **options))
        _compiled[tuple(key)] = found
    if encoded and found.raw is not None:
        found.pass_on(programs, device, values, constants.values())
    else:
        found.run(programs, device, arguments, constants.values())


def separate(arguments: Iterable[Any]) -> list[Any]:
    """The arguments one by one."""
    return [y for x in arguments for y in (x.make() if isinstance(x, Group) else (x,))]


def _plain(x: Any) -> Any:
    """A tensor or a tuple of them as addresses, anything else as it is."""
    if isinstance(x, Tensor):
        return x.data_ptr()
    return tuple(y.data_ptr() for y in x) if type(x) is tuple else x


class Compiled(NamedTuple):
    """A compiled kernel, and the function that launches it once copy-engine arguments are encoded."""

    kernel: Any
    raw: Any  # None: launch as Triton does
    encodings: tuple[Any, ...]  # how each copy-engine argument is encoded
    before: tuple[Any, ...]  # what that function gets between the stream and the arguments

    @classmethod
    def of(cls, kernel: Any) -> "Compiled":
        """Looks into Triton's launcher; what does not look as expected is left to Triton."""
        launcher = kernel.run
        if getattr(launcher, "global_scratch_size", 1) or getattr(launcher, "profile_scratch_size", 1):
            return cls(kernel, None, (), ())
        raw, encodings = launcher.launch, ()
        inside = dict(zip(getattr(raw, "__code__", _NONE).co_freevars, getattr(raw, "__closure__", None) or ()))
        if "tensordesc_meta" in inside and "launcher" in inside:
            raw, encodings = inside["launcher"].cell_contents, tuple(inside["tensordesc_meta"].cell_contents)
        flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        unused, hooks = (None, None), (None, None, None)  # scratch memory
        return cls(kernel, raw, encodings, (kernel.function, *flags, *unused, kernel.packed_metadata, *hooks))

    def run(self, programs: int, device: int, arguments: Sequence[Any], constants: Iterable[Any]) -> None:
        """Launch on the current stream."""
        if self.raw is None:
            self.kernel[(programs, 1, 1)](*(_plain(x) for x in separate(arguments)), *constants)
            return
        final, position = [], 0
        for x in arguments:
            if isinstance(x, Matrix | Group):
                several, count = _encodings.get(x.key) or _encode(x, self.encodings[position:])
                final += several
                position += count
            else:
                final.append(_plain(x))
        self.pass_on(programs, device, final, constants)

    def pass_on(self, programs: int, device: int, final: list[Any], constants: Iterable[Any]) -> None:
        """`run` with all arguments encoded."""
        self.start((programs, 1, 1), device, (*final, *constants))

    def start(self, grid: tuple[int, ...], device: int, arguments: Iterable[Any]) -> None:
        """Launch on the current stream, with every argument as the launcher takes it."""
        self.raw(*grid, driver.active.get_current_stream(device), *self.before, *arguments)


def _encode(x: Matrix | Group, encodings: tuple[Any, ...]) -> tuple[list[Any], int]:
    """What a kernel gets for such an argument, and for how many copy-engine ones that stands.

    Remembered, because encoding takes longer than the launch.
    """
    final, left = [], list(encodings)
    for y in separate([x]):
        if isinstance(y, Matrix):
            final += make_tensordesc_arg(y, left.pop(0))
        else:
            final.append(_plain(y))
    count = len(encodings) - len(left)
    if None not in encodings[:count]:  # all for the copy engine, which gets no tensors
        if len(_encodings) > 4096:
            _encodings.clear()
        _encodings[x.key] = final, count
    return final, count


def _descriptor(x: Matrix) -> TensorDescriptor:
    return TensorDescriptor(x.base, list(x.shape), list(x.strides), list(x.block), block_layout(x.block, x.base.dtype))
