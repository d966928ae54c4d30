"""MXFP4: four-bit weights in blocks of 32 with one power-of-two scale each; pack, unpack, fake-quantise."""

from __future__ import annotations

import torch

BLOCK = 32
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NAN_BYTE = 255
_MAX_BYTE = 252  # 6 * 2^125 is the largest value that float32 holds
# A block whose largest mantissa (in [0.5, 1)) reaches this takes the next power of two as its exponent.
_ROUND_UP = {"even": 0.875, "floor": 1.0, "ceil": 0.75}


def quantize_mxfp4(
    w: torch.Tensor, rule: str = "even", *, signed_zero: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed uint8 [..., in/2], scale uint8 [..., in/32]) of w [..., in].

    As in the released quantiser an exact -0.0 becomes +0; with `signed_zero` it keeps its sign, so that packing what
    was unpacked gives the same bytes.
    """
    if rule not in _ROUND_UP:
        raise ValueError(f"rule {rule!r}: expected one of {', '.join(_ROUND_UP)}")
    if w.dim() == 0 or w.shape[-1] % BLOCK:
        raise ValueError(f"shape {tuple(w.shape)}: the last dimension must be a multiple of {BLOCK}")
    blocks = w.detach().to(torch.promote_types(w.dtype, torch.float32)).unflatten(-1, (-1, BLOCK))
    peak = blocks.abs().amax(-1)
    mantissa, exponent = torch.frexp(peak)
    limit = _ROUND_UP[rule]
    up = mantissa > limit if rule == "ceil" else mantissa >= limit
    byte = (exponent.to(torch.int32) - 3 + up.to(torch.int32) + 127).clamp(0, _MAX_BYTE)
    byte = torch.where(peak == 0, 0, byte)
    scaled = torch.ldexp(blocks, (127 - byte).unsqueeze(-1))
    a = scaled.abs().clamp_max(6)
    code = torch.where(a < 2, (a * 2).round(), torch.where(a < 4, a.round() + 2, (a / 2).round() + 4))
    negative = torch.signbit(blocks) if signed_zero else blocks < 0
    code = torch.nan_to_num(code).to(torch.uint8) | (negative.to(torch.uint8) << 3)
    byte = torch.where(peak.isfinite(), byte, _NAN_BYTE).to(torch.uint8)
    code = code.flatten(-2)
    return code[..., 0::2] | (code[..., 1::2] << 4), byte


def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values [..., in] of packed codes and scale bytes; exact in bfloat16 and wider."""
    levels = torch.tensor(_LEVELS + tuple(-v for v in _LEVELS), dtype=torch.float32, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    values = levels[codes.int()].unflatten(-1, (-1, BLOCK))
    values = torch.ldexp(values.double(), (scale.int() - 127).unsqueeze(-1))
    return torch.where((scale == _NAN_BYTE).unsqueeze(-1), float("nan"), values).flatten(-2).to(dtype)


def fake_quantize_mxfp4(w: torch.Tensor, rule: str = "even") -> torch.Tensor:
    """w rounded to MXFP4 and back in its own dtype; the gradient passes straight through."""
    rounded = dequantize_mxfp4(*quantize_mxfp4(w, rule), w.dtype)
    return w + (rounded - w).detach()
