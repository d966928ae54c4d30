"""MXFP4: golden bytes, the rules in exact arithmetic, round trips, and blocks that are zero, tiny or broken."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import golden_input, golden_output, random
from torch import Tensor

from openk3.ops.mxfp import LEVELS, RULES, dequantize_mxfp4, fake_quantize_mxfp4, quantize_mxfp4

INF, NAN = float("inf"), float("nan")


def block(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """One block: the given values, then zeros."""
    return torch.tensor([*values, *[0.0] * (32 - len(values))], dtype=dtype)


def round_trip(w: Tensor, rule: str = "even") -> Tensor:
    """Packed and unpacked in w's dtype."""
    return dequantize_mxfp4(*quantize_mxfp4(w, rule), w.dtype)


def test_golden_quantiser() -> None:
    """Codes and scales equal the released quantiser's to the bit, from every input dtype."""
    weight = golden_input("mxfp4.weight")
    for dtype in (torch.float32, torch.float64):
        packed, scale = quantize_mxfp4(weight.to(dtype))
        assert torch.equal(packed, golden_output("mxfp4.weight_packed"))
        assert torch.equal(scale, golden_output("mxfp4.weight_scale"))
    assert torch.equal(dequantize_mxfp4(packed, scale), golden_output("mxfp4.dequant"))
    assert torch.equal(fake_quantize_mxfp4(weight), golden_output("mxfp4.dequant"))


def test_golden_decoder() -> None:
    """All 256 bytes under scales from 2^-127 up."""
    packed, scale = golden_input("mxfp4_decode.packed"), golden_input("mxfp4_decode.scale")
    assert torch.equal(dequantize_mxfp4(packed, scale, torch.float64), golden_output("mxfp4_decode.float64"))


def test_every_byte() -> None:
    """Low nibble first (the even column), sign in bit 3, and exact in bfloat16 under every scale that stays finite."""
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    signed = [*LEVELS, *(-level for level in LEVELS)]
    want = torch.tensor([[signed[b & 15], signed[b >> 4]] for b in range(256)]).view(16, 32)
    got = dequantize_mxfp4(packed, torch.full((16, 1), 127, dtype=torch.uint8))
    assert torch.equal(got, want) and torch.equal(got.signbit(), want.signbit())
    for byte in range(253):
        scale = torch.full((16, 1), byte, dtype=torch.uint8)
        exact = dequantize_mxfp4(packed, scale, torch.float64)
        assert torch.equal(exact, want.double() * 2.0 ** (byte - 127))
        assert torch.equal(dequantize_mxfp4(packed, scale, torch.bfloat16).double(), exact)
        assert torch.equal(dequantize_mxfp4(packed, scale, torch.float32).double(), exact)
    assert dequantize_mxfp4(packed, torch.full((16, 1), 255, dtype=torch.uint8)).isnan().all()


def scale_exponent(peak: float, rule: str) -> int:
    """The rule's shared exponent in exact arithmetic, clamped to what a byte stores here."""
    mantissa, exponent = math.frexp(peak)
    power = exponent - 1  # 2^power <= peak < 2^(power + 1)
    if rule == "even":
        shared = power - 2 + (Fraction(mantissa) * 2 >= Fraction(7, 4))
    elif rule == "floor":
        shared = power - 2
    else:
        shared = next(e for e in range(power - 4, power + 2) if Fraction(peak) <= 6 * Fraction(2) ** e)
    return min(max(shared, -127), 125)


def nearest(value: float, exponent: int) -> float:
    """The nearest level, ties to the even code, in exact arithmetic."""
    size = min(Fraction(abs(value)) / Fraction(2) ** exponent, Fraction(6))
    distance, _, code = min((abs(size - Fraction(level)), code % 2, code) for code, level in enumerate(LEVELS))
    assert distance <= 1
    return math.copysign(float(Fraction(LEVELS[code]) * Fraction(2) ** exponent), value)


@settings(max_examples=60)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32),
    rule=st.sampled_from(RULES),
)
def test_rules_in_exact_arithmetic(values: list[float], rule: str) -> None:
    """Any finite float32 block, subnormals and the largest included."""
    w = torch.tensor(values)
    peak = max(map(abs, values))
    _, scale = quantize_mxfp4(w, rule)
    exponent = scale_exponent(peak, rule) if peak else -127
    assert scale.item() == exponent + 127
    got = round_trip(w, rule)
    assert got.isfinite().all()
    assert got.tolist() == [nearest(value, exponent) for value in values]


@settings(max_examples=60)
@given(exponent=st.integers(-130, 120), rule=st.sampled_from(RULES), seed=st.integers(0, 999), coarse=st.booleans())
def test_second_round_trip_changes_nothing(exponent: int, rule: str, seed: int, coarse: bool) -> None:
    """M04: export and import twice: the same values, and under the default rule the same bytes with signed zeros."""
    w = random(4, 64, seed=seed, dtype=torch.float32)
    if coarse:  # multiples of half a level: ties everywhere
        w = (w * 8).round() / 8
    w = torch.ldexp(w, torch.tensor(exponent))
    packed, scale = quantize_mxfp4(w, rule, signed_zero=True)
    first = dequantize_mxfp4(packed, scale)
    again, scale_again = quantize_mxfp4(first, rule, signed_zero=True)
    assert torch.equal(dequantize_mxfp4(again, scale_again), first)
    assert torch.equal(round_trip(first, rule), first)
    if rule != "ceil" and not (first == 0).view(4, 2, 32).all(-1).any():
        assert torch.equal(again, packed) and torch.equal(scale_again, scale)


def test_zero_and_tiny_blocks() -> None:
    """M01: zeros stay exact zeros; tiny values return themselves or zero, never a maximum; a NaN stays visible."""
    normal = random(32, seed=1, dtype=torch.float32)
    zeros, negative_zeros = torch.zeros(32), torch.full((32,), -0.0)
    for rule in RULES:
        packed, scale = quantize_mxfp4(torch.cat((zeros, normal, negative_zeros)), rule)
        assert scale[0] == scale[2] == 0 and (packed[:16] == 0).all() and (packed[32:] == 0).all()
        got = dequantize_mxfp4(packed, scale)
        assert (got[:32] == 0).all() and (got[64:] == 0).all() and not got[:32].signbit().any()
        assert torch.equal(got[32:64], round_trip(normal, rule))
        for value in (1e-38, 1e-40, 2.0**-130, 2.0**-149, -1e-40):
            for w in (torch.full((32,), value), block(value)):
                got = round_trip(w, rule)
                assert got.isfinite().all() and (got * value >= 0).all()
                assert ((got - w).abs() <= max(abs(value) / 4, 2.0**-129)).all()


def test_tiny_blocks_when_subnormals_are_flushed() -> None:
    """M01: with subnormals flushed to zero a tiny block becomes zero, nothing else."""
    w = torch.cat((torch.full((32,), 1e-40), block(1e-40), torch.full((32,), 3e-38)))
    assert torch.set_flush_denormal(True)
    try:
        got = round_trip(w)
    finally:
        torch.set_flush_denormal(False)
    assert ((got == 0) | ((got - w).abs() <= w / 4)).all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_broken_blocks_stay_visible(bad: float) -> None:
    """M01: a NaN or an infinity makes its whole block NaN (scale byte 255) and touches no other block."""
    normal = random(32, seed=1, dtype=torch.float32)
    broken = normal.clone()
    broken[5] = bad
    for rule in RULES:
        _, scale = quantize_mxfp4(torch.cat((normal, broken)), rule)
        assert scale[1] == 255
        got = round_trip(torch.cat((normal, broken)), rule)
        assert torch.equal(got[:32], round_trip(normal, rule)) and got[32:].isnan().all()


def test_width_must_be_whole_blocks() -> None:
    """M01: a last dimension that is no multiple of 32 is refused, naming the shape; width 0 is empty."""
    for width in (33, 31, 1):
        with pytest.raises(ValueError, match=rf"multiple of 32, got shape \(2, {width}\)"):
            quantize_mxfp4(torch.ones(2, width))
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize_mxfp4(torch.tensor(1.0))
    packed, scale = quantize_mxfp4(torch.ones(2, 0))
    assert packed.shape == (2, 0) and scale.shape == (2, 0)
    assert dequantize_mxfp4(packed, scale).shape == (2, 0)


PEAKS = {  # block maximum -> what it becomes
    "floor": {1: 1, 3: 3, 3.1: 3, 4: 4, 6: 6, 6.5: 6, 7: 6, 7.9: 6, 8: 8},
    "ceil": {1: 1, 3: 3, 3.1: 3, 4: 4, 6: 6, 6.5: 6, 7: 8, 7.9: 8, 8: 8},
    "even": {1: 1, 3: 3, 3.1: 3, 4: 4, 6: 6, 6.5: 6, 7: 8, 7.9: 8, 8: 8},
}


@pytest.mark.parametrize("rule", RULES)
def test_one_scale_rule_everywhere(rule: str) -> None:
    """M04: fake quantisation and export agree to the bit; the maximum stays within 25 % of the true one."""
    w = torch.stack([block(peak, -peak / 3, peak / 7) for peak in PEAKS[rule]])
    exported = dequantize_mxfp4(*quantize_mxfp4(w, rule))
    trained = fake_quantize_mxfp4(w, rule)
    assert torch.equal(trained.view(torch.int32), exported.view(torch.int32))
    assert exported.amax(-1).tolist() == list(PEAKS[rule].values())
    peaks = torch.tensor(list(PEAKS[rule]))
    assert ((exported.amax(-1) - peaks).abs() <= peaks / 4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_straight_through(dtype: torch.dtype) -> None:
    """The result has w's shape and dtype, every value is exact in it, the gradient passes unchanged."""
    w = random(3, 4, 64, seed=1, dtype=dtype, grad=True)
    out = fake_quantize_mxfp4(w)
    assert out.shape == w.shape and out.dtype == dtype
    assert torch.equal(out.double(), round_trip(w.detach().double()))
    upstream = random(3, 4, 64, seed=2, dtype=dtype)
    assert torch.equal(torch.autograd.grad(out, w, upstream)[0], upstream)


def test_refuses_unknown_rules_and_operands() -> None:
    """A rule is chosen by name; codes and scales must belong together."""
    with pytest.raises(ValueError, match="'round': expected one of even, floor, ceil"):
        quantize_mxfp4(torch.ones(32), "round")
    packed, scale = quantize_mxfp4(torch.ones(2, 64))
    with pytest.raises(ValueError, match="do not fit"):
        dequantize_mxfp4(packed, scale[:, :1])
    with pytest.raises(ValueError, match="uint8"):
        dequantize_mxfp4(packed.int(), scale)
