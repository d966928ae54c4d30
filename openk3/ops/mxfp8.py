"""MXFP8: eight-bit activations in blocks of 32 with one power-of-two scale each; pack, unpack, fake-quantise.

Inputs of the routed experts in quantisation-aware training (report section 4.1.4). Elements are E4M3, scales E8M0,
as the OCP Microscaling formats specification 1.0 has them.
"""

from __future__ import annotations

from typing import Any

import torch

from openk3.ops.backend import pick
from openk3.ops.mxfp import BLOCK, powers

RULES = ("ceil", "floor")
LARGEST = 448.0  # 1.75 * 2^8
_NAN_BYTE = 255


def quantize_mxfp8(x: torch.Tensor, rule: str = "ceil") -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., in] as (values float8_e4m3fn [..., in], scale bytes uint8 [..., in/32]); a byte s stands for 2^(s - 127).

    With amax the largest magnitude of a block, s - 127 is the smallest exponent with amax <= 448 * 2^(s - 127) under
    "ceil", so that nothing is clamped, and floor(log2 amax) - 8 under "floor", the OCP specification's own, which
    clamps what lies above 1.75 of 2 to 448. Scaled values are rounded to the nearest E4M3 number, ties to even.

    Scales are clamped to 0 .. 254; an all-zero block gets 0. A negative value that rounds to zero keeps its sign. A
    block with a NaN or an infinity gets 255, which decodes to NaN everywhere, and values of zero.
    Raises ValueError for an unknown rule or a last dimension that is not a multiple of 32.
    """
    _check(x, rule)
    if pick("mxfp", x) == "triton":
        from openk3.ops.mxfp8_fused import fused_quantize

        return fused_quantize(x.detach(), rule)
    blocks = x.detach().to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, BLOCK))
    scale = _scale_bytes(blocks.abs().amax(-1), rule)
    inverse = torch.ldexp(torch.ones_like(scale, dtype=blocks.dtype), 127 - scale.int()).unsqueeze(-1)
    scaled = (blocks * inverse).clamp_(-LARGEST, LARGEST)
    scaled.masked_fill_((scale == _NAN_BYTE).unsqueeze(-1), 0)
    return _round(scaled).to(torch.float8_e4m3fn).flatten(-2), scale


def dequantize_mxfp8(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values [..., in] in `dtype` of what `quantize_mxfp8` gives: products in at least float32, then one cast.

    Raises ValueError if dtypes or shapes do not fit.
    """
    if values.dtype != torch.float8_e4m3fn or scale.dtype != torch.uint8:
        raise ValueError(f"MXFP8 values and scales must be float8_e4m3fn and uint8: {values.dtype}, {scale.dtype}")
    if values.shape != (*scale.shape[:-1], scale.shape[-1] * BLOCK):
        raise ValueError(f"MXFP8 values {tuple(values.shape)} and scales {tuple(scale.shape)} do not fit")
    if dtype in (torch.float32, torch.bfloat16, torch.float16) and pick("mxfp", scale.new_empty(0, dtype=dtype)) == (
        "triton"
    ):
        from openk3.ops.mxfp8_fused import fused_dequantize

        return fused_dequantize(values, scale, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    blocks = values.to(wide).unflatten(-1, (-1, BLOCK))
    return (blocks * powers(wide, scale.device)[scale.int()].unsqueeze(-1)).flatten(-2).to(dtype)


def fake_quantize_mxfp8(x: torch.Tensor, rule: str = "ceil") -> torch.Tensor:
    """x rounded to MXFP8 and back in its own shape and dtype, in one pass on a GPU; the gradient passes unchanged.

    Raises what `quantize_mxfp8` raises.
    """
    _check(x, rule)
    return _StraightThrough.apply(x, rule)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rule: str) -> torch.Tensor:
        if pick("mxfp", x) == "triton":
            from openk3.ops.mxfp8_fused import fused_round_trip

            return fused_round_trip(x, rule)
        return dequantize_mxfp8(*quantize_mxfp8(x, rule), x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _check(x: torch.Tensor, rule: str) -> None:
    if rule not in RULES:
        raise ValueError(f"MXFP8 scale rule {rule!r}: expected one of {', '.join(RULES)}")
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"MXFP8 needs a last dimension that is a multiple of {BLOCK}, got shape {tuple(x.shape)}")


def _scale_bytes(peak: torch.Tensor, rule: str) -> torch.Tensor:
    """Scale byte of each block's largest magnitude."""
    # peak = mantissa * 2^exponent with mantissa in [0.5, 1): at most 448 = 0.875 * 2^9 after the scale.
    mantissa, exponent = torch.frexp(peak)
    byte = exponent.to(torch.int32) + (127 - 9)
    if rule == "ceil":
        byte += (mantissa > 0.875).to(torch.int32)
    byte.clamp_(0, _NAN_BYTE - 1)
    byte.masked_fill_(peak == 0, 0).masked_fill_(~peak.isfinite(), _NAN_BYTE)
    return byte.to(torch.uint8)


def _round(x: torch.Tensor) -> torch.Tensor:
    """To the nearest multiple of what E4M3 resolves at x, ties to even: exact also from float64."""
    _, exponent = torch.frexp(x)
    step = exponent.clamp_(min=-5) - 4  # normal numbers have four digits, the smallest exponent is -6
    return torch.ldexp(torch.ldexp(x, -step).round_(), step)
