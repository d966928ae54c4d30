"""SiTU-GLU's kernels in Triton's interpreter: values and gradients against float64, small and large arguments."""

from __future__ import annotations

import math

import pytest
import torch
from op_checks import random
from torch import Tensor

from openk3.ops.situ import situ_glu


def run(gate: Tensor, up: Tensor, d_out: Tensor, linear_beta: float | None, beta: float = 4.0) -> tuple[Tensor, ...]:
    """Output and both gradients."""
    leaves = [x.clone().requires_grad_() for x in (gate, up)]
    out = situ_glu(leaves[0], leaves[1], beta, linear_beta)
    return out.detach(), *torch.autograd.grad(out, leaves, d_out)


@pytest.mark.parametrize(("linear_beta", "beta"), [(25.0, 4.0), (None, 4.0), (25.0, 3.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_float64(
    dtype: torch.dtype, linear_beta: float | None, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to each value, over nine orders of magnitude and both signs; saturated slopes too; odd sizes."""
    size = 37 * 61
    scale = torch.logspace(-6, 2, size, dtype=torch.float64)
    gate = (random(size).sign() * scale).clamp(-60, 60).to(dtype).view(37, 61)
    up = (random(size, seed=1).sign() * scale.roll(901)).to(dtype).view(61, 37).T
    d_out = (1 + random(37, 61, seed=2).abs()).to(dtype)
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    got = run(gate, up, d_out, linear_beta, beta)
    monkeypatch.setenv("OPENK3_BACKEND", "reference")
    want = run(gate.double(), up.double(), d_out.double(), linear_beta, beta)
    rtol = 4e-6 if dtype == torch.float32 else 2**-8
    capped = up.double() if linear_beta is None else linear_beta * torch.tanh(up.double() / linear_beta)
    # The derivative by the gate is a sum of two terms, which cancel where it changes its sign.
    terms = d_out.double() * capped.abs() * torch.sigmoid(gate.double())
    for ours, theirs, beside in zip(got, want, (0 * terms, terms, 0 * terms)):
        assert ours.dtype == dtype
        assert ((ours.double() - theirs).abs() <= rtol * (theirs.abs() + beside) + 1e-30).all()


def test_bounds_and_not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinite arguments give the bound, NaN stays; nothing in, nothing out."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    inf, nan = math.inf, math.nan
    gate, up = torch.tensor([inf, inf, -inf, nan, 1.0, 0.0]), torch.tensor([inf, -inf, inf, 1.0, nan, 3.0])
    out = situ_glu(gate, up, 4.0, 25.0)
    assert out[:3].tolist() == [100.0, -100.0, 0.0] and out[3:5].isnan().all() and out[5] == 0
    assert situ_glu(torch.empty(0, 8), torch.empty(0, 8), 4.0, 25.0).shape == (0, 8)
