"""RMSNorm, gated RMSNorm and L2 norm: golden vectors, order of rounding, gradients."""

from __future__ import annotations

import pytest
import torch
from op_checks import DTYPES, assert_golden, golden_input, random

from openk3.ops.norm import at_least_float32, gated_rms_norm, l2_norm, rms_norm


def test_at_least_float32() -> None:
    """Narrow formats widen, float32 and float64 stay the very tensors they are."""
    assert at_least_float32(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert at_least_float32(torch.ones(1, dtype=torch.float16)).dtype == torch.float32
    for dtype in DTYPES:
        x = torch.ones(1, dtype=dtype)
        assert at_least_float32(x) is x


@pytest.mark.parametrize("case", ["unit", "tiny", "mixed"])
@pytest.mark.parametrize(("eps", "name"), [(1e-5, "1e-05"), (1e-6, "1e-06")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_golden(case: str, eps: float, name: str, dtype: torch.dtype) -> None:
    """Both eps values; the tiny rows tell them apart."""
    x, weight = (golden_input(f"rmsnorm.{case}.{key}", dtype) for key in ("x", "weight"))
    assert_golden(rms_norm(x, weight, eps), f"rmsnorm.{case}.eps{name}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rms_norm_golden(dtype: torch.dtype) -> None:
    """norm * weight * sigmoid(gate)."""
    x, gate, weight = (golden_input(f"gated_norm.{key}", dtype) for key in ("x", "gate", "weight"))
    assert_golden(gated_rms_norm(x, gate, weight, 1e-5), "gated_norm.y")


def test_rms_norm_rounds_before_the_weight() -> None:
    """In bfloat16: normalise in float32, round, then multiply; a float32 weight gives a float32 result."""
    x, weight = random(6, 32).bfloat16(), random(32, seed=1).bfloat16()
    wide = x.float()
    normal = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-5), normal * weight)
    mixed = rms_norm(x, weight.float(), 1e-5)
    assert mixed.dtype == torch.float32 and torch.equal(mixed, normal * weight.float())


def test_gated_rms_norm_rounds_once() -> None:
    """In bfloat16 with a float32 weight: one rounding, to the gate's format."""
    o, gate, weight = random(6, 3, 16).bfloat16(), random(6, 3, 16, seed=1).bfloat16(), random(16, seed=2).float()
    wide = o.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    want = (normal * weight * gate.float().sigmoid()).bfloat16()
    got = gated_rms_norm(o, gate, weight, 1e-5)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2**-8, atol=0)
    assert (got == want).float().mean() > 0.99
    assert gated_rms_norm(o, gate.float(), weight, 1e-5).dtype == torch.float32


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_l2_norm_is_its_definition(scale: float) -> None:
    """eps inside the root: a row much smaller than sqrt(eps) is not blown up to length one."""
    x = random(5, 3, 8)
    x[0] *= 1e-6
    x[1] = 0
    want = scale * x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(l2_norm(x, scale=scale), want, rtol=1e-12, atol=1e-15)
    assert l2_norm(x)[0].norm(dim=-1).max() < 0.01
    assert l2_norm(x.bfloat16()).dtype == torch.float32


def test_gradients() -> None:
    """Hand-written derivatives against numerical ones, for any number of leading dimensions."""
    x, gate, weight = (random(*s, seed=i, grad=True) for i, s in enumerate(((4, 2, 6), (4, 2, 6), (6,))))
    check = torch.autograd.gradcheck
    assert check(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))
    assert check(lambda x, w: rms_norm(x[0, 0], w, 1e-5), (x, weight))
    assert check(lambda x, g, w: gated_rms_norm(x, g, w, 1e-5), (x, gate, weight))
    assert check(lambda x: l2_norm(x, scale=0.3), (x,))


@pytest.mark.parametrize("norm", ["rms", "gated", "l2"])
def test_gradients_of_zero_rows_are_finite(norm: str) -> None:
    """A row of zeros has slope 1 / sqrt(eps), not infinity; rows that count for nothing get exactly zero."""
    x = torch.zeros(3, 8, requires_grad=True)
    weight, gate = torch.ones(8, requires_grad=True), torch.ones(3, 8, requires_grad=True)
    y = {
        "rms": lambda: rms_norm(x, weight, 1e-6),
        "gated": lambda: gated_rms_norm(x, gate, weight, 1e-6),
        "l2": lambda: l2_norm(x),
    }[norm]()
    (grad,) = torch.autograd.grad(y[1:].sum(), x)
    assert grad.isfinite().all() and not grad[0].any()
    assert (grad[1:] >= 500).all()


def test_bfloat16_gradients_have_the_inputs_formats() -> None:
    """Gradients come back in the formats of what they belong to, close to the float64 ones."""
    values = (random(8, 2, 16), random(8, 2, 16, seed=1), random(16, seed=2))
    narrow = [v.bfloat16().requires_grad_() for v in values[:2]] + [values[2].float().requires_grad_()]
    exact = [v.detach().double().requires_grad_() for v in narrow]
    for leaves in (narrow, exact):
        gated_rms_norm(leaves[0], leaves[1], leaves[2], 1e-5).sum().backward()
    for a, b in zip(narrow, exact):
        assert a.grad is not None and b.grad is not None and a.grad.dtype == a.dtype
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=2**-7, atol=2**-8)
