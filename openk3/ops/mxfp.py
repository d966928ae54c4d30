"""MXFP4: four-bit weights in blocks of 32 with one power-of-two scale each; pack, unpack, fake-quantise.

Report section 4.1.4; the released config's `mxfp4-pack-quantized` format.
"""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 32
RULES = ("even", "floor", "ceil")
# Magnitudes of the codes 0..7; bit 3 is the sign.
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NAN_BYTE = 255
# The largest scale whose 6 is finite in float32 and bfloat16: 6 * 2^(252 - 127).
_MAX_BYTE = 252


def quantize_mxfp4(
    w: torch.Tensor, rule: str = "even", *, signed_zero: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack w [..., in] into (codes uint8 [..., in/2], scales uint8 [..., in/32]).

    Two codes a byte, the even column in the low nibble; a code is sign << 3 | index into LEVELS. A scale byte s
    stands for 2^(s - 127) and is shared by 32 consecutive columns. With 2^e <= amax < 2^(e+1) the largest
    magnitude of a block, s - 127 is e - 2 under "floor", the smallest exponent with amax <= 6 * 2^(s - 127) under
    "ceil", and under "even" (what the released checkpoint's quantiser does) e - 2, or e - 1 if amax >= 1.75 * 2^e.
    Values over the scale are clamped to +-6 and rounded to the nearest level, ties to the even code.

    Edge cases: an all-zero block gets scale byte 0. Scales are clamped to 0 .. 252, so tiny blocks round to
    themselves or zero and finite values stay finite. A negative value that rounds to zero keeps its sign; an
    exact -0 becomes 0, or keeps its sign with `signed_zero`, so that packing what was unpacked gives the same
    bytes. A block with a NaN or an infinity gets scale byte 255, which decodes to NaN everywhere: MXFP4 has no
    infinity, and clamping one would hide a diverged weight.

    Raises ValueError for an unknown rule or a last dimension that is not a multiple of 32.
    """
    if rule not in RULES:
        raise ValueError(f"MXFP4 scale rule {rule!r}: expected one of {', '.join(RULES)}")
    if w.dim() == 0 or w.shape[-1] % BLOCK:
        raise ValueError(f"MXFP4 needs a last dimension that is a multiple of {BLOCK}, got shape {tuple(w.shape)}")
    blocks = w.detach().to(torch.promote_types(w.dtype, torch.float32)).unflatten(-1, (-1, BLOCK))
    scale = _scale_bytes(blocks, rule)
    codes = _codes(blocks, scale)
    negative = torch.signbit(blocks) if signed_zero else blocks < 0
    codes = codes.bitwise_or_(negative.to(torch.uint8) << 3).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale


def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values [..., in] in `dtype` of codes [..., in/2] and scale bytes [..., in/32].

    Exact in bfloat16 and wider for scale bytes up to 252 (beyond, 6 * 2^(s - 127) overflows to infinity in
    float32); scale byte 255 is NaN. Raises ValueError if the operands are not uint8 or their shapes do not fit.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"MXFP4 codes and scales must be uint8, got {packed.dtype} and {scale.dtype}")
    if packed.shape != (*scale.shape[:-1], scale.shape[-1] * BLOCK // 2):
        raise ValueError(f"MXFP4 codes {tuple(packed.shape)} and scales {tuple(scale.shape)} do not fit")
    wide = torch.promote_types(dtype, torch.float32)
    # Both values of a byte at once.
    pairs = _byte_values(wide, packed.device)[packed.int()]
    blocks = pairs.flatten(-2).unflatten(-1, (-1, BLOCK))
    return blocks.mul_(powers(wide, packed.device)[scale.int()].unsqueeze(-1)).flatten(-2).to(dtype)


def fake_quantize_mxfp4(w: torch.Tensor, rule: str = "even") -> torch.Tensor:
    """w rounded to MXFP4 and back, in its own shape and dtype: exactly what packing and loading would give.

    The gradient passes straight through, clamped values included. Raises what `quantize_mxfp4` raises.
    """
    return _StraightThrough.apply(w, rule)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: torch.Tensor, rule: str) -> torch.Tensor:
        return dequantize_mxfp4(*quantize_mxfp4(w, rule), w.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _scale_bytes(blocks: torch.Tensor, rule: str) -> torch.Tensor:
    """Scale byte of each block [..., in/32, 32] by the named rule."""
    peak = blocks.abs().amax(-1)
    # peak = mantissa * 2^exponent with mantissa in [0.5, 1), so the rules' exponent e is exponent - 1.
    mantissa, exponent = torch.frexp(peak)
    if rule == "even":
        up = mantissa >= 0.875
    elif rule == "ceil":
        up = mantissa > 0.75
    else:
        up = torch.zeros_like(mantissa, dtype=torch.bool)
    byte = (exponent.to(torch.int32) + up.to(torch.int32) + (127 - 3)).clamp_(0, _MAX_BYTE)
    byte.masked_fill_(peak == 0, 0).masked_fill_(~peak.isfinite(), _NAN_BYTE)
    return byte.to(torch.uint8)


def _codes(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Index into LEVELS of each magnitude, one a byte."""
    inverse = torch.exp2(127.0 - scale.to(blocks.dtype)).unsqueeze(-1)
    size = (blocks * inverse).abs_().clamp_(max=6).nan_to_num_(0)
    # Half-to-even rounding on each range's own grid gives ties to even codes: steps 0.5, 1 and 2.
    fine, middle, coarse = (size * 2).round_(), size.round().add_(2), (size / 2).round_().add_(4)
    # The three grids agree where they meet, and each is the smallest of the three on its own range.
    return torch.minimum(torch.minimum(fine, middle), coarse).to(torch.uint8)


def _byte_values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256, 2]: the two values of each byte, low nibble first."""
    levels = torch.tensor([*LEVELS, *(-level for level in LEVELS)], dtype=dtype, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((levels[byte & 15], levels[byte >> 4]), -1)


def powers(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256]: the scale 2^(s - 127) of each byte s, the last one NaN."""
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127)
    powers[_NAN_BYTE] = float("nan")
    return powers.to(dtype=dtype, device=device)
