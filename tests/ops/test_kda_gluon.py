"""The Gluon kernels of KDA's scans and gradients, run on the CPU: values, barriers, and memory used anew too early."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gluon_interpreter import Descriptor, Machine
from kda_kernel_checks import NAMES, SUMS, Case, assert_exact, cotangents, errors, everything, exact, kernel_inputs

from openk3.ops import KdaGate
from openk3.ops.kda import gluon_launch, gradient_gluon, gradient_kernel, reverse_gluon, scan_gluon, workspace
from openk3.ops.kda.fused import fused_forward
from openk3.ops.kda.fused_backward import fused_kda
from openk3.ops.kda.tiles import tile_table

PIECES = {"reverse_gluon": ("scan_gluon",), "gradient_gluon": ("gradient_pieces_gluon",)}


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Launches of Gluon kernels run here; takes what goes wrong with memory."""
    machines: dict[str, Machine] = {}

    def launch(kernel: Any, programs: int, arguments: list[Any], constants: dict[str, Any], options: Any) -> None:
        path = Path(str(sys.modules[kernel.fn.__module__].__file__))
        if path.stem not in machines:
            pieces = [path.with_stem(name) for name in PIECES.get(path.stem, ())]
            machines[path.stem] = Machine(path, *pieces)
        machine = machines[path.stem]
        given = [interpreted(x) for x in gluon_launch.separate(arguments)]
        machine.launch(kernel.fn.__name__, programs, given, constants)
        found.extend(machine.faults)
        machine.faults.clear()

    found: list[str] = []
    for module in (scan_gluon, reverse_gluon, gradient_gluon):
        monkeypatch.setattr(module, "launch", launch)
    for module in (gluon_launch, gradient_kernel):
        monkeypatch.setattr(module, "prefers_gluon", lambda device: True)
    yield found
    assert "scan_gluon" in machines


def interpreted(x: Any) -> Any:
    """An argument as kernels get it; threads that write to tensors know of no gradients."""
    if isinstance(x, gluon_launch.Matrix):
        return Descriptor(x.base.detach().as_strided(x.shape, x.strides), x.block)
    return x.detach() if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("case", [Case((70, 0, 33), H=1), Case((40,), H=1, gates="open", keys="near")], ids=str)
def test_values_and_gradients(case: Case, few: bool, faults: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles full, cut and absent; with what few heads keep in two parts, and without."""
    monkeypatch.setattr(workspace, "FEW_HEADS", 16 if few else 0)
    assert_exact(fused_kda, case)
    assert faults == []


def test_few_heads_are_nearer(faults: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates near 0, where errors of states add up: gradients of the gate's parameters by half, of states by more."""
    case = Case((130,), H=2, gates="open", seed=1)
    values, grads = kernel_inputs(case), cotangents(case)
    want = exact(case, values, grads)
    found = []
    for most in (0, 16):
        monkeypatch.setattr(workspace, "FEW_HEADS", most)
        found.append(errors(everything(fused_kda, values, case, grads), want))
    many, few = found
    assert few["d_dt_bias"] < 0.7 * many["d_dt_bias"] and few["d_state"] < 0.1 * many["d_state"], found
    assert {name: (few[name], many[name]) for name in few if few[name] > 1.05 * many[name] and name not in SUMS} == {}
    assert faults == []


def test_maps_of_few_heads(faults: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The states that parts of the backward pass start from are as near as its scans' own."""
    case = Case((256,), H=1, gates="open", seed=2)
    values = kernel_inputs(case)
    tokens = tuple(values[name] for name in NAMES[:5])
    gate = KdaGate(values["A_log"], values["dt_bias"])
    tiles = tile_table((0, 256), torch.device("cpu"), part_tiles=4)
    want = exact(replace(case, lengths=(128,)), values | {n: x[:128] for n, x in zip(NAMES, tokens)}, None)["final"]
    error = []
    for most in (0, 16):
        monkeypatch.setattr(workspace, "FEW_HEADS", most)
        found = fused_forward(tokens, gate, values["state"], tiles, split=True, careful=True)
        assert found.entering_PHKV is not None
        error.append(float((found.entering_PHKV[1] - want[0]).norm() / want.norm()))
    assert error[1] < 0.1 * error[0], error
    assert faults == []
