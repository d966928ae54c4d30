"""Run Gluon kernels on the CPU: partitions as threads, barriers that block, copies and products that take their time.

A kernel's source is executed with stand-ins for Gluon's functions on torch tensors. What a product or an outgoing copy
reads is compared when it is waited for with what was there when it began, so memory that is used anew too early is
found out, as are results used before they are waited for, barriers that nobody reaches, and reads of what nobody wrote
(NaN). The innermost place of a copy must be a multiple of 16 bytes, which a GPU answers with an illegal instruction.
Layouts mean nothing here, and neither do registers: those are checked by compiling.
"""

from __future__ import annotations

import re
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

PATIENCE = 100.0  # seconds until a wait counts as a deadlock
_here = threading.local()  # program, number of programs, products and copies in flight of this partition


class Value(Tensor):
    """A tensor with what kernels ask of one: a layout, and in-place operators that make new values."""

    type = property(lambda self: types.SimpleNamespace(layout=None))  # type: ignore[assignment]

    def __iadd__(self, other: Any) -> Value:
        return self + other


def value(x: Any) -> Value:
    """Any number or tensor as a Value."""
    return Tensor._make_subclass(Value, x if isinstance(x, Tensor) else torch.tensor(x))


def plain(x: Any) -> Tensor:
    """Any number or tensor as a tensor."""
    return x.as_subclass(Tensor) if isinstance(x, Tensor) else torch.tensor(x)


class Pointer(NamedTuple):
    """Places in a tensor's memory."""

    memory: Tensor
    place: Tensor

    dtype = property(lambda self: types.SimpleNamespace(element_ty=self.memory.dtype))

    def __add__(self, other: Any) -> Pointer:  # type: ignore[override]
        return Pointer(self.memory, self.place + plain(other))

    @classmethod
    def to(cls, x: Tensor) -> Pointer:
        """The first value of a tensor, and all behind it."""
        extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride())) if x.numel() else 0
        return cls(x.as_strided((extent,), (1,)), torch.tensor(0))


class Shared:
    """A view of shared memory, which is NaN until something is written."""

    layout = None

    def __init__(self, data: Tensor) -> None:
        self.data = data

    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: self.data.dtype)

    def index(self, i: Any) -> Shared:
        """One of several buffers."""
        return Shared(self.data[int(i)])

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        """Part of a buffer."""
        return Shared(self.data.narrow(dim, int(start), length))

    def permute(self, order: Sequence[int]) -> Shared:
        """The buffer turned."""
        return Shared(self.data.permute(*order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        """The buffer in another shape."""
        return Shared(self.data.view(*shape))

    def load(self, layout: Any) -> Value:
        """Into registers."""
        return value(self.data.clone())

    def store(self, x: Tensor) -> None:
        """From registers."""
        self.data.copy_(plain(x))

    def _keep_alive(self) -> None:
        """Nothing: no memory is ever given to somebody else here."""


class Barrier:
    """A memory barrier: phases end when so many have arrived and so many bytes have come.

    Only the parity of a phase can be waited for: one that ends before somebody waited for the one before it would be
    waited for in vain. So whoever waits must wait for each phase in turn.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.left = self.bytes = self.phase = 0
        self.awaited: dict[int, int] = {}  # by thread: the phase that it waits for next

    def move(self, arrivals: int, expected: int) -> None:
        """Some arrive, and bytes are announced (or come, if negative)."""
        with self.changed:
            self.left -= arrivals
            self.bytes += expected
            assert self.left >= 0, "more arrivals than the barrier counts"
            if self.left == 0 and self.bytes == 0:
                assert all(self.phase <= next for next in self.awaited.values()), "a phase ends too early for a waiter"
                self.phase += 1
                self.left = self.count
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        """Until the phase of this parity has ended."""
        with self.changed:
            mine = self.awaited.setdefault(threading.get_ident(), -int(parity))
            assert mine & 1 == int(parity), "a phase is waited for twice, or left out"
            assert self.phase <= mine + 1, "a phase ended too early for a waiter"
            if not self.changed.wait_for(lambda: self.phase > mine, PATIENCE):
                raise RuntimeError(f"deadlock: phase {self.phase}, {self.left} missing, {self.bytes} bytes missing")
            self.awaited[threading.get_ident()] = mine + 1


class Barriers:
    """Several, or one that is used without an index."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    shape = property(lambda self: [len(self.all), 1])

    def _keep_alive(self) -> None:
        """Nothing, as of shared memory."""

    def index(self, i: Any) -> Barriers:
        """One of them."""
        one = Barriers(0)
        one.all = [self.all[int(i)]]
        return one


class Descriptor:
    """A tensor as the copy engine sees it."""

    layout = None

    def __init__(self, data: Tensor, block: Sequence[int]) -> None:
        self.data = data
        self.block_shape = list(block)
        self.block_type = types.SimpleNamespace(shape=self.block_shape)

    def inside(self, place: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of a block lies inside the tensor: there, and in the block."""
        assert int(place[-1]) * self.data.element_size() % 16 == 0, f"place {list(map(int, place))} of a copy"
        there, here = [], []
        for start, length, size in zip(map(int, place), self.block_type.shape, self.data.shape):
            low = min(max(start, 0), size)
            high = max(low, min(start + length, size))
            there.append(slice(low, high))
            here.append(slice(low - start, high - start))
        return tuple(there), tuple(here)


class Flight(NamedTuple):
    """A product or copy under way: what it reads, and what that was when it began."""

    sources: tuple[Any, ...]
    before: tuple[Tensor, ...]

    def check(self, faults: list[str], what: str) -> None:
        """Note a fault if what it reads has changed."""
        for source, old in zip(self.sources, self.before):
            if not torch.equal(operand(source).nan_to_num(nan=7e30), old.nan_to_num(nan=7e30)):
                faults.append(f"memory that a {what} reads was written to before it ended")


class Accumulator(NamedTuple):
    """The result of a product that may still run."""

    result: Tensor
    flight: Flight
    type = types.SimpleNamespace(layout=None)


def operand(x: Any) -> Tensor:
    """What a product multiplies, in float32."""
    return (x.data if isinstance(x, Shared) else plain(x)).float().clone()


class Machine:
    """One module's kernels, with what went wrong in `faults`."""

    def __init__(self, path: Path, *pieces: Path) -> None:
        """`pieces`: modules whose functions those of `path` call."""
        self.faults: list[str] = []
        self.pool = ThreadPoolExecutor(4)
        self.names: dict[str, Any] = {"__name__": "interpreted"} | self.functions()
        known = "|".join([r"triton\.experimental\S*", *(rf"openk3\S*\.{piece.stem}" for piece in pieces)])
        for source in (*pieces, path):
            text = re.sub(rf"from ({known}) import (\([^)]*\)|[^\n]*)\n", "\n", source.read_text(encoding="utf-8"))
            exec(compile(text, str(source), "exec"), self.names)

    def launch(self, name: str, programs: int, arguments: Sequence[Any], constants: dict[str, Any]) -> None:
        """Run a kernel's programs one after the other; tensors become pointers."""
        given = [Pointer.to(x) if isinstance(x, Tensor) else x for x in arguments]
        for program in range(programs):
            _here.program, _here.programs, _here.products, _here.copies = program, programs, [], []
            self.names[name](*given, **constants)
            self.wait_sent(0)

    def functions(self) -> dict[str, Any]:
        """Everything that sources import from Gluon."""
        barrier = types.SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=self.init_barrier,
            wait=lambda bar, parity: bar.all[0].wait(parity),
            arrive=lambda bar, count=1: bar.all[0].move(count, 0),
            expect=lambda bar, size: bar.all[0].move(1, int(size)),
        )
        copies = types.SimpleNamespace(
            async_copy_global_to_shared=self.fetch, async_copy_shared_to_global=self.send, store_wait=self.wait_sent
        )
        return {
            "gluon": types.SimpleNamespace(jit=lambda kernel=None, **_: kernel if kernel else lambda k: k),
            "gl": types.SimpleNamespace(**LANGUAGE, warp_specialize=self.specialize),
            "mbarrier": barrier,
            "tma": copies,
            "async_copy": types.SimpleNamespace(
                async_copy_global_to_shared=self.gather, mbarrier_arrive=self.arrive_gathered
            ),
            "fence_async_shared": lambda: None,
            "mma_v2": lambda left, right, sums: value(operand(left) @ operand(right) + plain(sums)),
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait_products,
        }

    @staticmethod
    def init_barrier(bar: Barriers, count: int) -> None:
        """Set how many arrive in a phase."""
        bar.all[0].count = bar.all[0].left = count

    def fetch(self, source: Descriptor, place: Sequence[Any], bar: Barriers, target: Shared) -> None:
        """A copy into shared memory, some time later; zeros where there is nothing."""
        there, here = source.inside(place)

        def arrive() -> None:
            time.sleep(0.0005)
            target.data.zero_()
            target.data[here] = source.data[there]
            bar.all[0].move(0, -target.data.numel() * target.data.element_size())

        self.pool.submit(arrive)

    def send(self, target: Descriptor, place: Sequence[Any], source: Shared) -> None:
        """A copy out of shared memory, made when it is waited for."""
        _here.copies.append((target, list(place), Flight((source,), (operand(source),))))

    def gather(self, target: Shared, at: Pointer, mask: Any = None) -> None:
        """Copies of values from anywhere into shared memory, some time later; zeros where the mask is false."""
        source = plain(_load(at, mask))
        target.data.fill_(float("nan"))

        def arrive() -> None:
            time.sleep(0.0005)
            target.data.copy_(source)

        _here.gathered.append(self.pool.submit(arrive))

    def arrive_gathered(self, bar: Barriers, increment_count: bool = True) -> None:
        """Each of 128 threads arrives when its copies have ended."""
        assert not increment_count
        waiting, _here.gathered = _here.gathered, []

        def arrive() -> None:
            for each in waiting:
                each.result()
            bar.all[0].move(128, 0)

        threading.Thread(target=arrive, daemon=True).start()

    def wait_sent(self, pending: int) -> None:
        """All copies but the last ones have been made."""
        while len(_here.copies) > pending:
            target, place, flight = _here.copies.pop(0)
            flight.check(self.faults, "copy")
            there, here = target.inside(place)
            target.data[there] = flight.sources[0].data[here]

    def multiply(
        self, left: Any, right: Any, sums: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> Accumulator | Value:
        """A product that ends when it is waited for."""
        before = operand(left), operand(right)
        start = sums.result if isinstance(sums, Accumulator) else plain(sums)
        flight = Flight((left, right), before)
        _here.products.append(flight)
        found = Accumulator(before[0] @ before[1] + (start if use_acc else 0), flight)
        return found if is_async else self.wait_products(0, (found,))

    def wait_products(self, pending: int, results: Sequence[Any]) -> Any:
        """Results of products of which all but the last ones have ended."""
        time.sleep(0.0002)
        while len(_here.products) > pending:
            _here.products.pop(0).check(self.faults, "product")
        for x in results:
            if isinstance(x, Accumulator) and any(x.flight is flight for flight in _here.products):
                self.faults.append("a result is used before its product has ended")
        found = tuple(value(x.result) if isinstance(x, Accumulator) else x for x in results)
        return found[0] if len(found) == 1 else found

    def specialize(self, partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
        """All partitions at once."""
        program, programs, failed = _here.program, _here.programs, list[str]()

        def run(partition: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            _here.program, _here.programs, _here.products, _here.copies = program, programs, [], []
            _here.gathered = []
            try:
                partition(*arguments)
                self.wait_sent(0)
                assert not _here.products, "products run on behind the end"
            except BaseException:
                failed.append(traceback.format_exc())

        threads = [threading.Thread(target=run, args=partition, daemon=True) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        assert not failed, failed[0]
        assert not any(thread.is_alive() for thread in threads), "a partition never ends"


def _pair(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    a, b = plain(a), plain(b)
    return (a, b.to(a.dtype)) if a.is_floating_point() or not b.is_floating_point() else (a.to(b.dtype), b)


def _load(at: Pointer, mask: Any = None, other: Any = 0.0) -> Value:
    if mask is None:
        return value(at.memory[at.place])
    mask = plain(mask).expand(at.place.shape)
    found = at.memory[at.place.where(mask, torch.tensor(0))]
    return value(torch.where(mask, found, torch.tensor(other, dtype=found.dtype)))


def _store(at: Pointer, x: Any, mask: Any = None) -> None:
    x = plain(x).to(at.memory.dtype).expand(at.place.shape)
    mask = torch.tensor(True) if mask is None else plain(mask)
    mask = mask.expand(at.place.shape)
    at.memory[at.place[mask]] = x[mask]


def _allocate(dtype: torch.dtype, shape: Sequence[Any], layout: Any, x: Any = None) -> Shared | Barriers:
    sizes = [int(n) for n in shape]
    if dtype == torch.int64:
        return Barriers(sizes[0])
    found = Shared(torch.full(sizes, float("nan"), dtype=dtype))
    if x is not None:
        found.store(x)
    return found


def _assembly(code: str, constraints: str, arguments: Sequence[Any], *_: Any) -> Any:
    if "ex2" in code:
        return value(plain(arguments[0]).exp2())
    assert "mov" in code, code  # every other one returns what it is given
    return arguments[0]


LANGUAGE: dict[str, Any] = {
    "constexpr": lambda x: x,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "NVMMASharedLayout": types.SimpleNamespace(get_default_for=lambda *_: None),
    "program_id": lambda axis: value(_here.program),
    "num_programs": lambda axis: value(_here.programs),
    "to_tensor": lambda x: value(int(x)),
    "static_range": range,
    "arange": lambda first, last, layout=None: value(torch.arange(first, last)),
    "zeros": lambda shape, dtype, layout=None: value(torch.zeros(*shape, dtype=dtype)),
    "full": lambda shape, x, dtype, layout=None: value(torch.full(tuple(shape), x, dtype=dtype)),
    "zeros_like": lambda x: value(torch.zeros_like(plain(x))),
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "thread_barrier": lambda: None,
    "associative_scan": lambda x, axis, combine: value(plain(x).cumsum(axis)),  # only sums are asked for
    "where": lambda condition, a, b: value(torch.where(plain(condition), *_pair(a, b))),
    "maximum": lambda a, b: value(torch.maximum(*_pair(a, b))),
    "minimum": lambda a, b: value(torch.minimum(*_pair(a, b))),
    "max": lambda x, axis: value(plain(x).amax(axis)),
    "sum": lambda x, axis: value(plain(x).sum(axis)),
    "load": _load,
    "store": _store,
    "allocate_shared_memory": _allocate,
    "inline_asm_elementwise": _assembly,
}


def _elementwise(name: str) -> Callable[[Any], Value]:
    return lambda x: value(getattr(torch, name)(plain(x)))


LANGUAGE |= {name: _elementwise(name) for name in ("exp2", "log2", "abs", "ceil", "rsqrt")}
_LAYOUTS = ("SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SwizzledSharedLayout")
LANGUAGE |= dict.fromkeys(_LAYOUTS, lambda *_: None)
