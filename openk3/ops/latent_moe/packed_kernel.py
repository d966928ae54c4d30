"""Triton kernels of packed experts: grouped products that unpack MXFP4 on the way, and the columns' order for Hopper.

A program takes one tile of one expert's rows, from the table that the sort leaves, and some units of 32 rows of the
expert's matrix. Values are those of `dequantize_mxfp4`, in the format of the tokens.
"""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.latent_moe.experts_kernel import _rows_of, _tile_of, _tokens
from openk3.ops.situ_kernel import situ_value

PAIR = tl.constexpr(-2118090304)  # 0x81C081C0: sign, exponent and mantissa of two codes where bfloat16 has them
MOST = tl.constexpr(-2134867776)  # 0x80C080C0: the same without the upper bit of the exponent
REST = tl.constexpr(0x01000100)


@triton.jit
def _factors(scale):
    """2^(s - 127) of scale bytes in float32: 2^-127 has no exponent, 255 is NaN."""
    bits = (scale << 23) | tl.where((scale == 0) | (scale == 255), 0x400000, 0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def unpack(codes, scale):
    """Values [rows, 128] in float32 of words of codes [rows, 16] and scale bytes [rows, 4] as int32."""
    ROWS: tl.constexpr = codes.shape[0]
    turned = (codes << 10) | ((codes >> 22) & 1023)
    even = tl.join(codes & PAIR, turned & PAIR)
    odd = tl.join((codes << 4) & PAIR, ((codes << 6) & MOST) | ((codes >> 2) & REST))
    pairs = tl.join(even, odd)
    values = tl.join(pairs << 16, pairs & -65536).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return tl.reshape(tl.reshape(values, [ROWS, 4, 32]) * _factors(scale)[:, :, None], [ROWS, 128])


@triton.jit
def _unit_rows(base, block, STEPS: tl.constexpr, UNITS: tl.constexpr, SIZE: tl.constexpr):
    """Offsets of the first step's codes [16 UNITS, 16] (SIZE 512) or scales [16 UNITS, 4] (SIZE 32) of a block."""
    r = tl.arange(0, 16 * UNITS)[:, None]
    unit = base + (block * UNITS + r // 16) * STEPS
    if SIZE == 512:
        return unit * SIZE + (r // 8 % 2) * 128 + (r % 8) * 16 + tl.arange(0, 16)[None, :]
    else:
        return unit * SIZE + (r % 8) * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def _products(x_at, live, codes, scales, expert, block, depth,
    BM: tl.constexpr, UNITS: tl.constexpr, ALL: tl.constexpr, KIND: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Both products [BM, 16 UNITS] of a tile of tokens with a block's units, over D columns."""
    STEPS: tl.constexpr = (D + 127) // 128
    base = expert.to(tl.int64) * (ALL * STEPS)
    code_at = codes + _unit_rows(base, block, STEPS, UNITS, 512)
    scale_at = scales + _unit_rows(base, block, STEPS, UNITS, 32)
    shift = (tl.arange(0, 16 * UNITS) // 8 % 2 * 8)[:, None]
    column = tl.arange(0, 128)[None, :]
    first = tl.zeros([BM, 16 * UNITS], tl.float32)
    second = tl.zeros([BM, 16 * UNITS], tl.float32)
    for low in range(0, depth, 128):
        x = tl.load(x_at, mask=live[:, None] & (low + column < D), other=0.0)
        scale = tl.load(scale_at)
        w = unpack(tl.load(code_at), (scale >> shift) & 255).to(KIND)
        first = tl.dot(x, tl.trans(w), first, input_precision="ieee")
        w = unpack(tl.load(code_at + 256), (scale >> (shift + 16)) & 255).to(KIND)
        second = tl.dot(x, tl.trans(w), second, input_precision="ieee")
        x_at += 128
        code_at += 512
        scale_at += 32
    return first, second


@triton.jit(do_not_specialize=["tiles", "depth"])
def packed_gate_up_kernel(
    z, codes, scales, act, slot, tile_expert, tile_row, tile_end, tiles, depth,
    C: tl.constexpr, I: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BETA: tl.constexpr, LINEAR: tl.constexpr,
    BM: tl.constexpr, UNITS: tl.constexpr, ALL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """act = SiTU-GLU(z w1^T, z w3^T) for each expert's rows; ALL units in all, UNITS a program."""
    tile, block = _tile_of(tl.program_id(0), tiles, ALL // UNITS, GROUP)
    expert = tl.load(tile_expert + tile)
    if expert >= E:
        return
    rows, live = _rows_of(tile_row, tile_end, tile, BM)
    x_at = z + _tokens(slot, rows, live, K)[:, None] * C + tl.arange(0, 128)[None, :]
    g, u = _products(x_at, live, codes, scales, expert, block, depth, BM, UNITS, ALL, act.dtype.element_ty, C)
    g = g.to(act.dtype.element_ty).to(tl.float32)
    u = u.to(act.dtype.element_ty).to(tl.float32)
    value = situ_value(g, u, BETA, LINEAR, act.dtype.element_ty == tl.bfloat16)
    neuron = (block * (16 * UNITS) + tl.arange(0, 16 * UNITS))[None, :]
    at = act + rows.to(tl.int64)[:, None] * I + neuron
    tl.store(at, value.to(act.dtype.element_ty), mask=live[:, None] & (neuron < I))


@triton.jit(do_not_specialize=["tiles", "depth"])
def packed_down_kernel(
    act, codes, scales, y, tile_expert, tile_row, tile_end, tiles, depth,
    I: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    BM: tl.constexpr, UNITS: tl.constexpr, ALL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y = act w2^T for each expert's rows; ALL units in all, UNITS a program."""
    tile, block = _tile_of(tl.program_id(0), tiles, ALL // UNITS, GROUP)
    expert = tl.load(tile_expert + tile)
    if expert >= E:
        return
    rows, live = _rows_of(tile_row, tile_end, tile, BM)
    x_at = act + tl.where(live, rows, 0).to(tl.int64)[:, None] * I + tl.arange(0, 128)[None, :]
    first, second = _products(x_at, live, codes, scales, expert, block, depth, BM, UNITS, ALL, y.dtype.element_ty, I)
    r = tl.arange(0, 16 * UNITS)
    neuron = (block * (32 * UNITS) + r // 16 * 32 + r % 16)[None, :]
    at = y + rows.to(tl.int64)[:, None] * C + neuron
    tl.store(at, first.to(y.dtype.element_ty), mask=live[:, None] & (neuron < C))
    tl.store(at + 16, second.to(y.dtype.element_ty), mask=live[:, None] & (neuron + 16 < C))


@triton.jit(do_not_specialize=["rows"])
def move_columns_kernel(x, out, rows, BLOCK: tl.constexpr):
    """Each 128 values of x in the order in which lanes of Hopper's products hold weights: `place_of`."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    at = row * 128 + tl.arange(0, 128)[None, :]
    value = tl.reshape(tl.load(x + at, mask=row < rows, other=0.0), [BLOCK, 4, 16, 2])
    tl.store(out + at, tl.reshape(tl.permute(value, [0, 2, 1, 3]), [BLOCK, 128]), mask=row < rows)


def place_of(column: int) -> int:
    """Where `move_columns_kernel` puts a column: pairs of four blocks of 32 in turns."""
    return column // 128 * 128 + column % 32 // 2 * 8 + column // 32 % 4 * 2 + column % 2


GROUP = 8  # tiles of rows that share a block of neurons in L2
MOVED_ROWS, MOVED_WARPS = 32, 4


def settings(rows: int, bytes_each: int) -> dict[str, int]:
    """Compile-time arguments and options for tiles of so many rows."""
    return {"BM": rows, "UNITS": 2 if bytes_each == 4 else 4, "num_warps": 8 if rows >= 128 else 4, "num_stages": 2}


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16 for experts of the released widths, tiles of 16 to 128 rows."""
    C, I = 3584, 3072
    known: dict[str, Any] = {"C": C, "I": I, "E": 896, "K": 16, "BETA": 4.0, "LINEAR": 25.0, "GROUP": GROUP}
    known |= dict.fromkeys(("codes", "scales", "slot", "tile_expert", "tile_row", "tile_end"), "*i32")
    known |= dict.fromkeys(("tiles", "depth", "rows"), "i32")
    cases = []
    for rows in (16, 64, 128):
        chosen = settings(rows, 2)
        options = {name: chosen.pop(name) for name in ("num_warps", "num_stages")}
        for kernel, units in ((packed_gate_up_kernel, I // 16), (packed_down_kernel, C // 32)):
            own = known | chosen | {"ALL": units}
            cases.append((kernel, {name: own.get(name, "*bf16") for name in kernel.arg_names}, options))
    moved = {"x": "*bf16", "out": "*bf16", "rows": "i32", "BLOCK": MOVED_ROWS}
    return [*cases, (move_columns_kernel, moved, {"num_warps": MOVED_WARPS, "num_stages": 3})]
