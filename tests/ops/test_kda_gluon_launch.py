"""Gluon kernels are launched from a memory of what was compiled, and only where they can run."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.nvidia import driver as nvidia  # noqa: E402

from openk3.ops import KdaGate  # noqa: E402
from openk3.ops.kda import gluon_launch, prepare_gluon, prepare_kernel  # noqa: E402
from openk3.ops.kda.gluon_launch import fits, launch, matrix, tiles_of  # noqa: E402
from openk3.ops.kda.prepare_kernel import prepare  # noqa: E402
from openk3.ops.kda.tiles import tile_table  # noqa: E402
from openk3.ops.kda.workspace import CutWorkspace, Workspace, kept  # noqa: E402


class Kernel:
    """Stands for a jitted function: notes what it compiles, and what that is launched with."""

    def __init__(self) -> None:
        self.fn = self
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any, grid: tuple[int, ...], warmup: bool, **constants: Any) -> Kernel:
        assert warmup
        self.compiled.append((*arguments, constants))
        return self

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.launched.append((grid, *arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel that nothing is remembered of, on the only device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gluon_launch, "_compiled", {})
    return Kernel()


def workspace(**other: torch.Tensor) -> Workspace:
    """That of two tiles of three heads."""
    shapes = {"nkd": (32, 128), "qd": (32, 128), "kr": (32, 128), "inv": (32, 32), "mqk": (32, 32)}
    tiles = {name: torch.zeros(2, 3, *shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    return Workspace(**(tiles | {"decay": torch.zeros(2, 3, 128), "beta": torch.zeros(2, 3, 32)} | other))


def test_kinds_of_arguments_compile_once(kernel: Kernel) -> None:
    """Other addresses, sizes and numbers run what is there; another format, block, constant or None does not."""
    x, y = torch.zeros(64, 128, dtype=torch.bfloat16), torch.zeros(8)
    base: dict[str, Any] = {"arguments": [matrix(x, 128, (32, 128)), y, None, 5], "constants": {"K": 128}}

    def go(programs: int, **other: Any) -> int:
        launch(kernel, programs, **(base | other), options={"num_warps": 4})
        return len(kernel.compiled)

    assert go(7) == 1
    assert go(9, arguments=[matrix(x[:32].clone(), 128, (32, 128)), torch.ones(16), None, 6]) == 1
    assert go(7, arguments=[matrix(x, 128, (64, 128)), y, None, 5]) == 2
    assert go(7, arguments=[matrix(x, 128, (32, 128)), y, y, 5]) == 3
    assert go(7, arguments=[matrix(x, 128, (32, 128)), y.double(), None, 5]) == 4
    assert go(7, constants={"K": 64}) == 5
    assert go(7) == 5
    grids = [grid for grid, *_ in kernel.launched]
    assert grids == [(7, 1, 1), (9, 1, 1), *[(7, 1, 1)] * 5]
    assert [arguments[-2:] for _, *arguments in kernel.launched[:2]] == [[5, 128], [6, 128]]


def test_tuples_of_tensors(kernel: Kernel) -> None:
    """Their addresses are handed over as a tuple; what was compiled holds for the same formats and alignments only."""
    x, y = torch.zeros(9), torch.zeros(4, dtype=torch.bfloat16)
    cases = [(x, y), (torch.ones(9), torch.ones(4).bfloat16()), (y, x), (x,), (x[1:], y), (x, y)]
    for parts in cases:
        launch(kernel, 1, [parts, None], {}, {})
    assert [parts for parts, *_ in kernel.compiled] == [cases[0], *cases[2:5]]
    assert [parts for _, parts, _ in kernel.launched] == [tuple(z.data_ptr() for z in parts) for parts in cases]


def test_addresses_that_16_does_not_divide_are_another_kernel(kernel: Kernel) -> None:
    """What was compiled for wide accesses never meets an address that has none."""
    x = torch.zeros(9)
    for part in (x[:8], x[1:], x[:8]):
        launch(kernel, 1, [part], {}, {})
    assert len(kernel.compiled) == 2


def test_a_matrix_is_rows_of_all_that_it_is_made_of() -> None:
    """Rows and strides in elements, as the launcher of Triton encodes them."""
    x = torch.zeros(4, 3, 32, 128)
    found = matrix(x, 128, (32, 128))
    assert (found.base is x, found.shape, found.strides, found.block) == (True, (384, 128), (128, 1), (32, 128))


def test_gluon_scans_run_only_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16, 128 channels, at least one tile, contiguous and aligned; and never on a CPU."""
    v, w = torch.zeros(64, 3, 128, dtype=torch.bfloat16), workspace()
    assert not fits(w, v)
    monkeypatch.setattr(gluon_launch, "prefers_gluon", lambda device: True)
    assert fits(w, v) and fits(w, v, None, torch.zeros(3))
    odd = torch.zeros(9)[1:]
    assert not fits(w, v, odd)
    assert not fits(w, v, torch.zeros(4, 4).T)
    assert not fits(w, v.half())
    assert not fits(w, v.float())
    assert not fits(w, v[:, :, :64].contiguous())
    assert not fits(dataclasses.replace(w, nkd=w.nkd[:0]), v)
    assert not fits(dataclasses.replace(w, nkd=w.nkd.float()), v)
    assert not fits(dataclasses.replace(w, kr=w.kr.transpose(0, 1)), v)
    assert not fits(dataclasses.replace(w, nkd=w.nkd[:, :, :16].contiguous()), v)


def rows(dtype: torch.dtype = torch.bfloat16, *, odd: bool = False) -> torch.Tensor:
    """70 tokens of three heads, at an even or an odd address."""
    return torch.zeros(70 * 3 * 128 + 1, dtype=dtype)[int(odd) :][: 70 * 3 * 128].view(70, 3, 128)


def test_prepare_takes_gluon_where_its_rows_can_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any other address, in float32 and on other devices the Triton twin gets the same arguments."""
    taken: list[tuple[str, int]] = []
    monkeypatch.setattr(prepare_kernel, "prefers_gluon", lambda device: True)
    monkeypatch.setattr(prepare_gluon, "launch", lambda arguments, total, **sizes: taken.append(("gluon", total)))
    twin = type("Twin", (), {"__getitem__": lambda self, grid: lambda *xs, **named: taken.append(("triton", *grid))})
    monkeypatch.setattr(prepare_kernel, "prepare_kernel", twin())
    span = tile_table((0, 70), torch.device("cpu")).sequences()
    gate = KdaGate(torch.zeros(3), torch.zeros(3, 128))

    def go(*qkz: torch.Tensor) -> str:
        prepare(*qkz, torch.zeros(70, 3, dtype=qkz[0].dtype), gate, span=span)
        assert taken[-1][1] == 9
        return taken[-1][0]

    assert go(rows(), rows(), rows()) == "gluon"
    assert go(rows(torch.float16), rows(torch.float16), rows(torch.float16)) == "gluon"
    assert go(rows(), rows(), rows(odd=True)) == "triton"
    assert go(rows(odd=True), rows(), rows()) == "triton"
    assert go(rows(), rows(), rows(torch.float32)) == "triton"
    assert go(rows(torch.float32), rows(torch.float32), rows(torch.float32)) == "triton"
    monkeypatch.setattr(prepare_kernel, "prefers_gluon", lambda device: False)
    assert go(rows(), rows(), rows()) == "triton"


def test_prepare_in_gluon_gets_logits_as_a_matrix_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of the Triton twin in their order, and logits once more, as rows of all heads."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=100))
    monkeypatch.setattr(gluon_launch, "launch", lambda *arguments: seen.append(arguments))
    q, k, z = rows(), rows(), rows()
    prepare_gluon.launch((q, k, z, *range(20)), 9, K=128, C=32)
    ((kernel, programs, values, constants, _),) = seen
    names = [p.name for p in kernel.params]
    assert programs == 3 and names == [*names[: len(values)], *constants]
    named = dict(zip(names, values))
    assert named["q_ptr"] is q and named["k_ptr"] is k and named["logit_ptr"] is z and named["logit_d"].base is z
    assert named["logit_d"].shape == (70, 384) and named["logit_d"].block == (32, 128)
    assert list(values[4:]) == [*range(20), 9, 1200] and names[4] == "beta_logit_ptr"
    assert names[len(values) - 2 : len(values)] == ["total", "ahead"]


def test_the_short_way_to_the_driver_passes_what_triton_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same arguments in the same order as by Triton's own launcher, and a copy-engine argument is encoded once."""
    passed: list[tuple[Any, ...]] = []
    encoded: list[int] = []

    def encode(x: Any, encoding: str) -> list[Any]:
        encoded.append(x.base.data_ptr())
        return [f"{encoding} at {x.base.data_ptr()}", *x.shape, *x.strides]

    monkeypatch.setattr(nvidia, "make_tensordesc_arg", encode)
    monkeypatch.setattr(gluon_launch, "make_tensordesc_arg", encode)
    monkeypatch.setattr(gluon_launch, "_encodings", {})
    active = SimpleNamespace(get_current_stream=lambda device: 85 + device)
    monkeypatch.setattr(gluon_launch, "driver", SimpleNamespace(active=active))
    signature = {"a": "tensordesc<bf16[32, 128]>", "b": "*fp32", "c": "tensordesc<fp32[1, 128]>", "d": "i32"}
    for kinds, encodings in ((signature, ["first", "second"]), ({"b": "*fp32", "d": "i32"}, None)):
        launcher = object.__new__(nvidia.CudaLauncher)
        launcher.launch = nvidia.wrap_handle_tensordesc(lambda *xs: passed.append(xs), kinds, encodings)
        launcher.global_scratch_size = launcher.profile_scratch_size = 0
        launcher.global_scratch_align = launcher.profile_scratch_align = launcher.num_ctas = 1
        launcher.launch_cooperative_grid, launcher.launch_pdl = False, True
        kernel = SimpleNamespace(run=launcher, function="function", packed_metadata="metadata")
        x, y = torch.zeros(64, 128, dtype=torch.bfloat16), torch.zeros(3, 128)
        values = {"a": matrix(x, 128, (32, 128)), "b": 4096, "c": matrix(y, 128, (1, 128)), "d": 7}
        arguments = [values[name] for name in kinds]
        launcher(9, 1, 1, 85, "function", "metadata", None, None, None, *arguments, 32)
        encoded.clear()
        for _ in range(3):
            gluon_launch.Compiled.of(kernel).run(9, 0, arguments, [32])
        assert len(passed) == 4 and passed[0] == passed[1] == passed[2] == passed[3]
        assert encoded == ([x.data_ptr(), y.data_ptr()] if encodings else [])
        passed.clear()


def test_arguments_in_groups_are_those_that_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces of two kinds give a kernel the same; tiles at new addresses are encoded, others are remembered."""
    passed: list[tuple[Any, ...]] = []
    encoded: list[int] = []

    def encode(x: Any, encoding: str) -> list[Any]:
        encoded.append(x.base.data_ptr())
        return [f"{encoding} at {x.base.data_ptr()}", *x.shape, *x.strides]

    monkeypatch.setattr(gluon_launch, "make_tensordesc_arg", encode)
    monkeypatch.setattr(gluon_launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=abs)))
    cut = [CutWorkspace((2, 3, 32, 128), torch.bfloat16, torch.device("cpu"), rests=("kr_rest",)) for _ in range(2)]
    v = torch.zeros(64, 384, dtype=torch.bfloat16)
    for rest in (True, False):
        monkeypatch.setattr(gluon_launch, "_encodings", {})
        names = [str(n) for n in range(9 if rest else 8)]
        compiled = gluon_launch.Compiled("kernel", lambda *xs: passed.append(xs), tuple(names), ())
        for w in (*cut, *cut):
            plain = Workspace(w.nkd, w.qd, w.kr, w.inv, w.mqk, w.decay, w.beta, w.kr_rest)
            for given in (w, plain):
                compiled.run(7, 0, [*tiles_of(given, ("kr_rest",), rest=rest), matrix(v, 384, (32, 128)), 5], [128])
            assert passed[-1] == passed[-2] and len(passed[-1]) == 4 + 5 * len(names) + (0 if rest else 1) + 2
            assert passed[-1][4:7] == (f"0 at {w.nkd.data_ptr()}", 192, 128)
            assert passed[-1][-7:] == (f"{len(names) - 1} at {v.data_ptr()}", 64, 384, 384, 1, 5, 128)
            (pointers,) = gluon_launch.separate([prepare_gluon.pointers(w)])[3:4]
            assert pointers is w.kr_rest
    assert encoded.count(v.data_ptr()) == 2 and encoded.count(cut[0].decay.data_ptr()) == 4


def test_a_workspace_is_cut_into_tensors_that_do_not_meet() -> None:
    """All of both allocations, each tensor aligned for the copy engine."""
    w = CutWorkspace((2, 3, 32, 128), torch.bfloat16, torch.device("cpu"), rests=kept(1))
    names = ("nkd", "qd", "kr", "inv", "mqk", *kept(1), "decay", "beta")
    for number, name in enumerate(names):
        getattr(w, name).fill_(number)
    assert all((getattr(w, name) == number).all() for number, name in enumerate(names))
    assert sum(getattr(w, name).numel() for name in names) == w.narrow.numel() + w.wide.numel()
    assert w.movable and w.sizes == workspace().sizes == (2, 3, 32, 128)
    assert all(getattr(w, name).data_ptr() % 16 == 0 for name in names)
    assert CutWorkspace((2, 3, 32, 128), torch.bfloat16, torch.device("cpu"), rests=()).kr_rest is None
    with pytest.raises(AttributeError):
        w.nothing  # noqa: B018
