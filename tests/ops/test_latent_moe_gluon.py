"""The Gluon kernels of the routed experts, run on the CPU: values, barriers, and memory used anew too early."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gluon_interpreter import Descriptor, Machine, plain, value
from latent_moe_checks import Case, by_kernels, draw, errors
from torch import Tensor

from openk3.ops import gradient_sums
from openk3.ops.kda import gluon_launch
from openk3.ops.latent_moe import experts_fused, experts_hopper

LIMITS = dict.fromkeys(("out", "d_z", "d_weights", "d_w1", "d_w3", "d_w2", "d_norm"), 8e-3)


def situ_value(g: Tensor, u: Tensor, beta: float, linear: float | None, short: bool) -> Tensor:
    """SiTU-GLU."""
    g, u = plain(g), plain(u)
    capped = u if linear is None else linear * torch.tanh(u / linear)
    return value(beta * torch.tanh(g / beta) * torch.sigmoid(g) * capped)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Launches run here: the kernels' names and FORMs as they come, and what goes wrong with memory."""
    machines: dict[str, Machine] = {}

    def launch(kernel: Any, programs: int, arguments: list[Any], constants: dict[str, Any], options: Any) -> None:
        path = sys.modules[kernel.fn.__module__].__file__
        assert path is not None
        machine = machines.setdefault(path, machines.get(path) or Machine(Path(path)))
        machine.names["situ_value"] = situ_value
        arguments = [x.detach() if isinstance(x, Tensor) else x for x in arguments]  # threads record gradients
        given = [matrix(x) if isinstance(x, gluon_launch.Matrix) else x for x in arguments]
        machine.launch(kernel.fn.__name__, programs, given, constants)
        assert not machine.faults
        found.append(kernel.fn.__name__.split("_")[0] + str(constants["FORM"][4]) + "+" * constants.get("ADD", False))

    found: list[str] = []
    monkeypatch.setattr(experts_hopper, "launch", launch)
    monkeypatch.setattr(experts_hopper, "prefers_gluon", lambda device: True)
    yield found


def matrix(x: gluon_launch.Matrix) -> Descriptor:
    """What the copy engine gets."""
    return Descriptor(x.base.detach().as_strided(x.shape, x.strides), x.block)


def test_all_products(launched: list[str]) -> None:
    """An expert without rows, tiles and last steps that are not full; every product is one of the kernels'."""
    case = Case(230, 4, 2, 256, 256, idle=(1,))
    found = errors(case)
    assert all(found[name] < LIMITS[name] for name in found), found
    assert launched == ["row1", "row0", "row2", "weight256", "weight128", "row3"]


def test_widths_that_fit_some_blocks(launched: list[str]) -> None:
    """Latents of 128, an inner width of 384: blocks of 128 columns; d_w2 is left to Triton. No cap on SiTU."""
    case = Case(130, 2, 2, 128, 384, linear_beta=None)
    found = errors(case)
    assert all(found[name] < LIMITS[name] for name in found), found
    assert launched == ["row1", "row0", "row2", "weight128", "row3"]
    launched.clear()
    assert all(x < 8e-3 for x in errors(Case(100, 2, 2, 96, 40)).values()) and not launched


def test_few_rows_other_formats_and_memory_that_cannot_be_copied(launched: list[str]) -> None:
    """Left to the Triton kernels, by shapes and addresses alone."""
    assert all(x < 8e-3 for x in errors(Case(60, 4, 3, 128, 128)).values())
    assert all(x < 2e-6 for x in errors(Case(60, 3, 2, 128, 128, torch.float32)).values())
    plan = experts_fused.Plan(*[torch.zeros(300, dtype=torch.int32)] * 6, experts_hopper.ROWS)
    x = torch.zeros(65, 64, dtype=torch.bfloat16)
    assert experts_hopper.fits(plan, x[1:]) and not experts_hopper.fits(plan, x.view(-1)[4:68])
    assert not launched


def test_sums_are_added_to(launched: list[str]) -> None:
    """The second micro-batch's gradients are rounded to bfloat16 and added, as the optimizer would."""
    case = Case(130, 2, 2, 256, 256)
    values, routed, d_out = draw(case)
    leaves = {name: x.clone().requires_grad_() for name, x in values.items()}
    totals: dict[str, Tensor] = {}
    for name in ("w1", "w3", "w2"):
        total = gradient_sums.GradientSum(totals, name)
        gradient_sums.keep_sum(leaves[name], total)
        total.is_open = True
    once: dict[str, Tensor] = {}
    for _ in range(2):
        by_kernels(case, leaves, routed).backward(d_out)
        once = once or {name: x.clone() for name, x in totals.items()}
    assert launched[3:5] == ["weight256", "weight128"] and launched[9:11] == ["weight256+", "weight128+"]
    for name, x in totals.items():
        assert leaves[name].grad is None and torch.equal(x, 2 * once[name])
        assert torch.equal(once[name], once[name].bfloat16().float()) and once[name].any()
