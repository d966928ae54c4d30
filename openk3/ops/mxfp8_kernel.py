"""Triton kernels of MXFP8: to values and scales, back, and both in one pass; bit for bit what `ops.mxfp8` defines.

E4M3 numbers are made and read by integer operations, which every GPU has. Blocks of 32 values lie along memory.
"""

from typing import Any

import triton
import triton.language as tl


@triton.jit
def _scale_of(peak, CEIL: tl.constexpr):
    """Scale byte of a block from the bits of its largest magnitude; subnormal ones get 0 in any case."""
    byte = (peak >> 23) - 8
    if CEIL:
        byte += ((peak & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where(peak >= 0x7F800000, 255, tl.maximum(byte, 0))


@triton.jit
def _codes_of(x, byte):
    """E4M3 codes of values over their block's scale, nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)  # of 255 it is never used
    size = tl.minimum(tl.abs(x) * inverse, 448.0)
    normal = size.to(tl.int32, bitcast=True)
    normal = ((normal + 0x7FFFF + ((normal >> 20) & 1)) >> 20) - 960
    # Below 2^-6 a float32 number at 2^14 resolves what E4M3 does.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal) | ((bits >> 24) & 128)
    return tl.where(byte == 255, 0, code)


@triton.jit
def _values_of(code, byte):
    """float32 values of codes under scale bytes: 2^-127 has no exponent, 255 is NaN."""
    signed = ((code & 128) << 24) | ((code & 127) << 20)
    value = signed.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    factor = (byte << 23) | tl.where((byte == 0) | (byte == 255), 0x400000, 0)
    return value * factor.to(tl.float32, bitcast=True)


@triton.jit
def _scaled(x, CEIL: tl.constexpr):
    """(codes, scale bytes) of blocks [rows, 32] in float32."""
    byte = _scale_of(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), CEIL)
    return _codes_of(x, byte[:, None]), byte


@triton.jit(do_not_specialize=["rows"])
def mxfp8_quantize_kernel(x, values, scale, rows, CEIL: tl.constexpr, BLOCK: tl.constexpr):
    """Values (as bytes) and scale bytes of `rows` blocks of 32."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    at = row[:, None] * 32 + tl.arange(0, 32)[None, :]
    code, byte = _scaled(tl.load(x + at, mask=live[:, None], other=0.0).to(tl.float32), CEIL)
    tl.store(values + at, code.to(tl.uint8), mask=live[:, None])
    tl.store(scale + row, byte.to(tl.uint8), mask=live)


@triton.jit(do_not_specialize=["rows"])
def mxfp8_dequantize_kernel(values, scale, out, rows, BLOCK: tl.constexpr):
    """The inverse."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    at = row[:, None] * 32 + tl.arange(0, 32)[None, :]
    code = tl.load(values + at, mask=live[:, None], other=0).to(tl.int32)
    byte = tl.load(scale + row, mask=live, other=0).to(tl.int32)[:, None]
    tl.store(out + at, _values_of(code, byte).to(out.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["rows"])
def mxfp8_round_trip_kernel(x, out, rows, CEIL: tl.constexpr, BLOCK: tl.constexpr):
    """What both of them in turn make of x."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    at = row[:, None] * 32 + tl.arange(0, 32)[None, :]
    code, byte = _scaled(tl.load(x + at, mask=live[:, None], other=0.0).to(tl.float32), CEIL)
    tl.store(out + at, _values_of(code, byte[:, None]).to(out.dtype.element_ty), mask=live[:, None])


ROWS, WARPS = 64, 4  # 16 values a thread


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16; on every GPU the same."""
    known: dict[str, Any] = {"x": "*bf16", "out": "*bf16", "values": "*u8", "scale": "*u8", "rows": "i32"}
    known |= {"CEIL": True, "BLOCK": ROWS}
    kernels = (mxfp8_quantize_kernel, mxfp8_dequantize_kernel, mxfp8_round_trip_kernel)
    options = {"num_warps": WARPS, "num_stages": 3}
    return [(kernel, {name: known[name] for name in kernel.arg_names}, options) for kernel in kernels]
