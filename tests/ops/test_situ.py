"""SiTU-GLU against golden vectors, its definition, and its bounds."""

from __future__ import annotations

import pytest
import torch
from op_checks import DTYPES, assert_golden, golden_input, golden_output, random

from openk3.ops.situ import situ_glu

BETAS = [(1, None), (3, 12), (4, 25), (4, None)]


@pytest.mark.parametrize(("beta", "linear_beta"), BETAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_golden(dtype: torch.dtype, beta: float, linear_beta: float | None) -> None:
    """All stored pairs of bounds."""
    got = situ_glu(golden_input("situ.gate", dtype), golden_input("situ.up", dtype), beta, linear_beta)
    assert_golden(got, f"situ.beta{beta}_linear{linear_beta}")


def test_golden_bfloat16() -> None:
    """One rounding at the end: equal to the last bit."""
    gate, up = golden_input("situ.bf16_gate_up").chunk(2, dim=-1)
    assert torch.equal(situ_glu(gate, up, 4, 25), golden_output("situ.bf16_out_beta4_linear25"))


@pytest.mark.parametrize(("beta", "linear_beta"), BETAS)
def test_gradient(beta: float, linear_beta: float | None) -> None:
    """The hand-written gradient is the derivative, from far below to far above the caps."""
    gate, up = (random(40, seed=1) * 6).requires_grad_(), (random(40, seed=2) * 30).requires_grad_()
    assert torch.autograd.gradcheck(lambda g, u: situ_glu(g, u, beta, linear_beta), (gate, up))


def test_float32_gradient_and_small_values() -> None:
    """float32 keeps its relative precision at every magnitude; gradients relative to the factor they belong to."""
    sizes = torch.logspace(-12, 2, 57, dtype=torch.float64)
    gate, up = torch.cat((sizes, -sizes)), torch.cat((sizes.flip(0), sizes))
    results = {}
    for dtype in DTYPES:
        g, u = gate.to(dtype).requires_grad_(), up.to(dtype).requires_grad_()
        out = situ_glu(g, u, 4.0, 25.0)
        results[dtype] = [x.double() for x in (out, *torch.autograd.grad(out.sum(), (g, u)))]
    act, capped = 4 * torch.tanh(gate / 4) * gate.sigmoid(), 25 * torch.tanh(up / 25)
    for narrow, exact, size in zip(*results.values(), (act * capped, capped, act)):
        assert ((narrow - exact).abs() <= 2e-6 * size.abs() + 1e-37).all()


def test_bounded_and_finite() -> None:
    """|out| <= beta * linear_beta for any input, infinities included; a NaN stays visible."""
    values = torch.tensor([0.0, 1e-30, 3.0, 80.0, 1e4, 1e30, float("inf")])
    values = torch.cat((values, -values))
    gate, up = (x.reshape(-1) for x in torch.meshgrid(values, values, indexing="ij"))
    out = situ_glu(gate.requires_grad_(), up.requires_grad_(), 4.0, 25.0)
    assert out.abs().max() == 100
    out.sum().backward()
    assert gate.grad is not None and up.grad is not None
    assert gate.grad.isfinite().all() and up.grad.isfinite().all()
    nan = torch.tensor([float("nan")])
    assert situ_glu(nan, torch.ones(1), 4.0, 25.0).isnan() and situ_glu(torch.ones(1), nan, 4.0, 25.0).isnan()


def test_large_beta_is_swiglu() -> None:
    """Without effective caps the activation is SwiGLU."""
    gate, up = random(50, seed=3), random(50, seed=4)
    swiglu = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(situ_glu(gate, up, 1e6, 1e6), swiglu, rtol=1e-9, atol=1e-9)


def test_keeps_only_its_inputs() -> None:
    """The backward pass needs gate and up, and nothing else stays in memory."""
    gate, up = random(8, 16, seed=5, grad=True), random(8, 16, seed=6, grad=True)
    out = situ_glu(gate, up, 4.0, 25.0)
    assert out.grad_fn is not None
    assert [x.data_ptr() for x in out.grad_fn.saved_tensors] == [gate.data_ptr(), up.data_ptr()]


def test_shapes() -> None:
    """No tokens, and strided halves of one projection; different shapes or dtypes are refused."""
    assert situ_glu(torch.empty(0, 8), torch.empty(0, 8), 4.0, 25.0).shape == (0, 8)
    both = random(5, 12, dtype=torch.float32)
    gate, up = both.chunk(2, dim=-1)
    assert torch.equal(situ_glu(gate, up, 4.0, 25.0), situ_glu(gate.contiguous(), up.contiguous(), 4.0, 25.0))
    with pytest.raises(ValueError, match="one shape and dtype"):
        situ_glu(gate, up[:4], 4.0, 25.0)
    with pytest.raises(ValueError, match="one shape and dtype"):
        situ_glu(gate, up.double(), 4.0, 25.0)
