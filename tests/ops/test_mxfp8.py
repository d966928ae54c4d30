"""MXFP8: the definition in exact arithmetic, and the kernels in the interpreter bit for bit the definition."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import random
from torch import Tensor

from openk3.ops.mxfp8 import RULES, dequantize_mxfp8, fake_quantize_mxfp8, quantize_mxfp8
from openk3.ops.mxfp8_fused import fused_dequantize, fused_quantize, fused_round_trip

FINITE: list[float] = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def scale_exponent(peak: float, rule: str) -> int:
    """The rule's shared exponent in exact arithmetic, clamped to what a byte stores."""
    power = math.frexp(peak)[1] - 1
    if rule == "floor":
        shared = power - 8
    else:
        shared = next(e for e in range(power - 9, power - 6) if Fraction(peak) <= 448 * Fraction(2) ** e)
    return min(max(shared, -127), 127)


def nearest(value: float, exponent: int) -> float:
    """The nearest E4M3 number under a scale, ties to the even code, in exact arithmetic."""
    size = min(Fraction(abs(value)) / Fraction(2) ** exponent, Fraction(448))
    _, _, code = min((abs(size - Fraction(level)), code % 2, code) for code, level in enumerate(FINITE))
    return math.copysign(float(Fraction(FINITE[code]) * Fraction(2) ** exponent), value)


@settings(max_examples=25)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32),
    rule=st.sampled_from(RULES),
    shift=st.integers(-20, 20),
    narrow=st.booleans(),
)
def test_rules_in_exact_arithmetic(values: list[float], rule: str, shift: int, narrow: bool) -> None:
    """Any finite float32 block, subnormals and the largest included, and blocks whose values are near each other."""
    x = torch.tensor(values)
    if narrow:
        x = torch.ldexp((x.clamp(-1e6, 1e6).frexp()[0] * 64).round(), torch.tensor(shift))
    peak = float(x.abs().max())
    codes, scale = quantize_mxfp8(x.double(), rule)
    exponent = scale_exponent(peak, rule) if peak else -127
    assert scale.item() == exponent + 127
    got = dequantize_mxfp8(codes, scale, torch.float64)
    assert got.tolist() == [nearest(value, exponent) for value in x.tolist()]
    assert torch.equal(got.signbit(), x.signbit())
    if rule == "ceil":
        assert float(((got - x).abs() - x.abs() / 16).max()) <= 2.0 ** (exponent - 10)


def cases(dtype: torch.dtype) -> Tensor:
    """Blocks of all sizes, zeros, ties, broken ones."""
    span = range(-20, 15, 5) if dtype == torch.float16 else (-149, -140, -130, -126, -100, -7, 0, 9, 100, 126)
    parts = [torch.ldexp(random(6, 64, seed=i).float(), torch.tensor(e)).to(dtype) for i, e in enumerate(span)]
    ties = (random(16, 64, seed=99) * 40).round().to(dtype) / 8
    x = torch.cat([*parts, ties])
    x[0, :32], x[1, 3], x[2, 40], x[3, 5] = 0, math.nan, math.inf, -0.0
    return x


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_equal_the_definition(dtype: torch.dtype, rule: str) -> None:
    """Codes, scale bytes, values back, and both in one pass."""
    x = cases(dtype)
    codes, scale = quantize_mxfp8(x, rule)
    got_codes, got_scale = fused_quantize(x, rule)
    assert torch.equal(got_codes.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(got_scale, scale)
    want = dequantize_mxfp8(codes, scale, dtype)
    assert torch.equal(want.view(INTEGERS[dtype]), fake_quantize_mxfp8(x, rule).view(INTEGERS[dtype]))
    for got in (fused_dequantize(codes, scale, dtype), fused_round_trip(x, rule)):
        assert torch.equal(got.isnan(), want.isnan())
        finite = ~want.isnan()
        assert torch.equal(got[finite].view(INTEGERS[dtype]), want[finite].view(INTEGERS[dtype]))


def test_broken_blocks_stay_visible() -> None:
    """A NaN or an infinity makes its whole block NaN and touches no other; zeros stay zeros."""
    for bad in (math.nan, math.inf, -math.inf):
        x = random(2, 64).float()
        x[0, 40], x[1, :32] = bad, 0
        codes, scale = quantize_mxfp8(x)
        back = dequantize_mxfp8(codes, scale)
        assert scale[0, 1] == 255 and back[0, 32:].isnan().all() and back[0, :32].isfinite().all()
        assert scale[1, 0] == 0 and not back[1, :32].any()


def test_gradient_passes_through() -> None:
    """Unchanged, in x's shape and dtype."""
    x = random(3, 4, 64, dtype=torch.bfloat16, grad=True)
    out, upstream = fake_quantize_mxfp8(x), random(3, 4, 64, seed=2, dtype=torch.bfloat16)
    assert out.shape == x.shape and out.dtype == x.dtype
    assert torch.equal(torch.autograd.grad(out, x, upstream)[0], upstream)


def test_refuses_what_does_not_fit() -> None:
    """A rule by name, whole blocks, operands that belong together; no values are empty."""
    with pytest.raises(ValueError, match="'even': expected one of ceil, floor"):
        quantize_mxfp8(torch.ones(32), "even")
    for width in (1, 33):
        with pytest.raises(ValueError, match="multiple of 32"):
            fake_quantize_mxfp8(torch.ones(2, width))
    codes, scale = quantize_mxfp8(torch.ones(2, 64))
    with pytest.raises(ValueError, match="do not fit"):
        dequantize_mxfp8(codes, scale[:, :1])
    with pytest.raises(ValueError, match="float8_e4m3fn and uint8"):
        dequantize_mxfp8(codes.float(), scale)
    assert fake_quantize_mxfp8(torch.ones(0, 32)).shape == (0, 32)
    assert [part.shape for part in fused_quantize(torch.ones(0, 32), "ceil")] == [(0, 32), (0, 1)]
