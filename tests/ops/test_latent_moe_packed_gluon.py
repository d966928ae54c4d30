"""The Gluon kernels of packed experts, run on the CPU: addresses, masks, the ring of tokens; unpacking by stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gluon_interpreter
import pytest
import torch
from gluon_interpreter import Machine, Pointer, Shared, plain, value
from op_checks import random
from test_latent_moe_packed import definition, experts
from torch import Tensor

from openk3.ops.latent_moe import packed, packed_fused
from openk3.ops.latent_moe.experts_fused import Form
from openk3.ops.latent_moe.packed_fused import Way, mix_packed
from openk3.ops.latent_moe.route_fused import Choice, route, sort
from openk3.ops.mxfp import dequantize_mxfp4

FORM = Form(4.0, 25.0, 1e-5)


def moved(x: Tensor) -> Tensor:
    """[N, 128] with columns in the order of the products' operands."""
    return x.reshape(len(x), 4, 16, 2).permute(0, 2, 1, 3).reshape(len(x), 128)


def factors(scales: Tensor, part: int, *_: Any) -> Tensor:
    """Scale byte of each row of a half unit and of each block [16 warps, 4]."""
    found = plain(scales).contiguous().view(torch.uint8).view(-1, 8, 4, 2, 2)[:, :, :, part]
    return found.permute(0, 3, 1, 2).reshape(-1, 4)


def unpack(codes: Tensor, scale: Tensor, *_: Any) -> Tensor:
    """Values of codes [rows, 16] as the left operand."""
    values = dequantize_mxfp4(packed.gather_bits(plain(codes)).contiguous().view(torch.uint8), scale.contiguous())
    return value(moved(values))


def situ_value(g: Tensor, u: Tensor, beta: float, linear: float, short: bool) -> Tensor:
    """SiTU-GLU."""
    g, u = plain(g), plain(u)
    return value(beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear * torch.tanh(u / linear))


class Copies:
    """Copies into shared memory, made when they are waited for."""

    def __init__(self) -> None:
        self.groups: list[list[tuple[Shared, Pointer]]] = []
        self.open: list[tuple[Shared, Pointer]] = []

    def async_copy_global_to_shared(self, target: Shared, at: Pointer) -> None:
        """Begin one; until it has ended nothing can be read there."""
        target.data.fill_(float("nan"))
        self.open.append((target, at))

    def commit_group(self) -> None:
        """What was begun is waited for together."""
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, pending: int) -> None:
        """All groups but the last ones have ended."""
        while len(self.groups) > pending:
            for target, at in self.groups.pop(0):
                target.data.copy_(at.memory[at.place])


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches of the Gluon kernels run here; takes what goes wrong with memory."""
    found: list[str] = []

    def interpreted(kernel: Any) -> Any:
        module = sys.modules[kernel.fn.__module__]
        machine = Machine(Path(str(module.__file__)))
        begin = Machine(Path(str(sys.modules["openk3.ops.latent_moe.packed_gluon"].__file__))).names["begin"]
        load = machine.names["gl"].load
        machine.names["gl"].load = lambda at, mask=None, other=0, **_: load(at, mask, other)
        machine.names["gl"].thread_barrier = lambda: None
        machine.names["gl"].NVMMASharedLayout = lambda *_: None
        machine.names |= {"factors": factors, "unpack": unpack, "situ_value": situ_value, "async_copy": Copies()}
        machine.names["tokens_operand"] = lambda x, _: value(moved(plain(x).contiguous().view(torch.bfloat16)).T)
        machine.names["mma_v2"] = lambda a, b, sums: value(plain(a).float() @ plain(b).float() + plain(sums))
        machine.names["warpgroup_mma_wait"] = lambda pending, deps: machine.wait_products(pending, deps)
        if "packed_rows" in module.__name__:
            machine.names["begin"] = begin

        def launch(*tensors: Tensor, **named: Any) -> None:
            for option in ("num_warps", "maxnreg"):
                named.pop(option, None)
            gluon_interpreter._here.products = []
            pointers = {name: Pointer.to(x) for name, x in named.items() if isinstance(x, Tensor)}
            machine.launch(kernel.fn.__name__, grid[0], tensors, named | pointers)
            found.extend(machine.faults)

        grid = [0]
        return SimpleNamespace(arg_names=kernel.arg_names, launch=launch, grid=grid)

    class Kernel:
        def __init__(self, kernel: Any) -> None:
            self.it = interpreted(kernel)
            self.arg_names = kernel.arg_names

        def __getitem__(self, grid: tuple[int]) -> Any:
            self.it.grid[0] = grid[0]
            return self.it.launch

    known = packed_fused.KERNELS
    replaced = {kind: {name: Kernel(known[kind][name]) for name in known[kind]} for kind in ("few", "many")}
    monkeypatch.setattr(packed_fused, "KERNELS", known | replaced)
    return found


@pytest.mark.parametrize(
    ("way", "T", "E", "k", "C", "inner"),
    [
        (Way("few", 8), 3, 4, 2, 160, 96),
        (Way("few", 16), 21, 2, 2, 64, 160),
        (Way("many", 64), 70, 3, 2, 256, 256),
        (Way("many", 64), 5, 4, 2, 384, 256),
    ],
)
def test_experts_against_float64(
    way: Way, T: int, E: int, k: int, C: int, inner: int, faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tiles of an expert, tiles of few rows, widths that no unit divides, units of four and eight warps."""
    monkeypatch.setattr(packed_fused, "_way", lambda *_: way)
    tiles, values = experts(E, C, inner)
    z = random(T, C).bfloat16()
    routed = route(random(T, E, seed=7).float(), torch.zeros(E), Choice(k, True, 1.0))
    plan = sort(routed, max(16, way.rows))
    got = mix_packed(z, routed.weights_Tk, plan, tiles, (torch.ones(C, dtype=torch.bfloat16), FORM))
    want = definition(z, routed, values, FORM)
    assert float((got.double() - want).norm()) < 8e-3 * float(want.norm())
    assert faults == []
