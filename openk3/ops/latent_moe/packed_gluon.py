"""Gluon kernels of packed experts for few tokens an expert: each weight is read once, and multiplied in registers.

A warp takes a unit of 32 rows of an expert's matrix and walks along it. Its weights come from memory straight into the
registers in which tensor cores want them; all tokens of the expert, 8 to 32, are multiplied with them at once. No
shared memory and no barrier: warps know nothing of each other.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from openk3.ops.latent_moe.packed_unpack_gluon import factors, tokens_operand, unpack
from openk3.ops.situ_kernel import situ_value


@gluon.jit
def _walk(x_at, live, code_at, scale_at, acc, settings: gl.constexpr):
    """Both products of a unit with an expert's tokens, over all columns."""
    K: gl.constexpr = settings[0]
    STEPS: gl.constexpr = (K + 127) // 128
    AHEAD: gl.constexpr = settings[1]
    WIDE: gl.constexpr = settings[2]
    layouts: gl.constexpr = settings[3]
    column = gl.arange(0, 64, gl.SliceLayout(0, layouts[3]))[None, :]
    first, second = acc
    x = gl.load(x_at, mask=live & (column < K // 2), other=0)
    one = _fetch(code_at, scale_at, 0, STEPS)
    two = _fetch(code_at, scale_at, 1, STEPS)
    three = two
    if AHEAD == 3:
        three = _fetch(code_at, scale_at, 2, STEPS)
    for step in range(STEPS):
        ahead = _fetch(code_at, scale_at, step + AHEAD, STEPS)
        x_ahead = gl.load(x_at + (step + 1) * 64, mask=live & (column + (step + 1) * 64 < K // 2), other=0)
        b = tokens_operand(x, layouts)
        codes_1, codes_2, scale = one
        first = mma_v2(unpack(codes_1, factors(scale, 0, layouts, WIDE), layouts, WIDE), b, first)
        second = mma_v2(unpack(codes_2, factors(scale, 1, layouts, WIDE), layouts, WIDE), b, second)
        x = x_ahead
        one = two
        if AHEAD == 3:
            two = three
            three = ahead
        else:
            two = ahead
    return first, second


@gluon.jit
def _fetch(code_at, scale_at, step, STEPS: gl.constexpr):
    """Codes and scales of a step, if there is one."""
    there = step < STEPS
    codes_1 = gl.load(code_at + step * 512, mask=there, other=0, eviction_policy="evict_first")
    codes_2 = gl.load(code_at + step * 512 + 256, mask=there, other=0, eviction_policy="evict_first")
    scale = gl.load(scale_at + step * 32, mask=there, other=0, eviction_policy="evict_first")
    return codes_1, codes_2, scale


@gluon.jit
def begin(codes, scales, expert, block, settings: gl.constexpr):
    """Where a program's codes and scales begin."""
    WARPS: gl.constexpr = settings[4]
    UNITS: gl.constexpr = settings[5]
    STEPS: gl.constexpr = (settings[0] + 127) // 128
    layouts: gl.constexpr = settings[3]
    unit = (expert.to(gl.int64) * UNITS + block * WARPS) * STEPS
    r = gl.arange(0, 16 * WARPS, gl.SliceLayout(1, layouts[1]))[:, None]
    w = gl.arange(0, 16, gl.SliceLayout(0, layouts[1]))[None, :]
    code_at = codes + unit * 512 + ((r // 16) * (STEPS * 512) + (r // 8 % 2) * 128 + (r % 8) * 16 + w)
    r = gl.arange(0, 8 * WARPS, gl.SliceLayout(1, layouts[2]))[:, None]
    q = gl.arange(0, 4, gl.SliceLayout(0, layouts[2]))[None, :]
    scale_at = scales + unit * 32 + ((r // 8) * (STEPS * 32) + (r % 8) * 4 + q)
    return code_at, scale_at


@gluon.jit
def few_gate_up_kernel(
    z, codes, scales, act, slot, tile_expert, tile_row, tile_end,
    C: gl.constexpr, I: gl.constexpr, E: gl.constexpr, K: gl.constexpr, BETA: gl.constexpr, LINEAR: gl.constexpr,
    N: gl.constexpr, WARPS: gl.constexpr, UNITS: gl.constexpr, AHEAD: gl.constexpr, WIDE: gl.constexpr,
    LAYOUTS: gl.constexpr,
):  # fmt: skip
    """act = SiTU-GLU(z w1^T, z w3^T) for a tile of rows and 16 neurons a warp; z holds two values in an int32."""
    settings: gl.constexpr = (C, AHEAD, WIDE, LAYOUTS, WARPS, UNITS)
    BLOCKS: gl.constexpr = UNITS // WARPS
    tile = gl.program_id(0) // BLOCKS
    block = gl.program_id(0) % BLOCKS
    expert = gl.load(tile_expert + tile)
    if expert >= E:
        return
    start = gl.load(tile_row + tile)
    end = gl.load(tile_end + tile)
    mma: gl.constexpr = LAYOUTS[0]
    code_at, scale_at = begin(codes, scales, expert, block, settings)
    row = start + gl.arange(0, N, gl.SliceLayout(1, LAYOUTS[3]))
    live = row < end
    token = gl.load(slot + row, mask=live, other=0) // K
    x_at = z + token.to(gl.int64)[:, None] * (C // 2) + gl.arange(0, 64, gl.SliceLayout(0, LAYOUTS[3]))[None, :]
    zero = gl.zeros([16 * WARPS, N], gl.float32, mma)
    g, u = _walk(x_at, live[:, None], code_at, scale_at, (zero, zero), settings)
    neuron = block * (16 * WARPS) + gl.arange(0, 16 * WARPS, gl.SliceLayout(1, mma))[:, None]
    row = start + gl.arange(0, N, gl.SliceLayout(0, mma))[None, :]
    g = g.to(gl.bfloat16).to(gl.float32)
    u = u.to(gl.bfloat16).to(gl.float32)
    value = situ_value(g, u, BETA, LINEAR, True).to(gl.bfloat16)
    gl.store(act + row.to(gl.int64) * I + neuron, value, mask=(row < end) & (neuron < I))


@gluon.jit
def few_down_kernel(
    act, codes, scales, y, tile_expert, tile_row, tile_end,
    I: gl.constexpr, C: gl.constexpr, E: gl.constexpr,
    N: gl.constexpr, WARPS: gl.constexpr, UNITS: gl.constexpr, AHEAD: gl.constexpr, WIDE: gl.constexpr,
    LAYOUTS: gl.constexpr,
):  # fmt: skip
    """y = act w2^T for a tile of rows and 32 neurons a warp; act holds two values in an int32."""
    settings: gl.constexpr = (I, AHEAD, WIDE, LAYOUTS, WARPS, UNITS)
    BLOCKS: gl.constexpr = UNITS // WARPS
    tile = gl.program_id(0) // BLOCKS
    block = gl.program_id(0) % BLOCKS
    expert = gl.load(tile_expert + tile)
    if expert >= E:
        return
    start = gl.load(tile_row + tile)
    end = gl.load(tile_end + tile)
    mma: gl.constexpr = LAYOUTS[0]
    code_at, scale_at = begin(codes, scales, expert, block, settings)
    row = start + gl.arange(0, N, gl.SliceLayout(1, LAYOUTS[3]))
    live = row < end
    row = gl.where(live, row, 0).to(gl.int64)
    x_at = act + row[:, None] * (I // 2) + gl.arange(0, 64, gl.SliceLayout(0, LAYOUTS[3]))[None, :]
    zero = gl.zeros([16 * WARPS, N], gl.float32, mma)
    first, second = _walk(x_at, live[:, None], code_at, scale_at, (zero, zero), settings)
    r = gl.arange(0, 16 * WARPS, gl.SliceLayout(1, mma))[:, None]
    neuron = block * (32 * WARPS) + r // 16 * 32 + r % 16
    row = start + gl.arange(0, N, gl.SliceLayout(0, mma))[None, :]
    at = y + row.to(gl.int64) * C + neuron
    gl.store(at, first.to(gl.bfloat16), mask=(row < end) & (neuron < C))
    gl.store(at + 16, second.to(gl.bfloat16), mask=(row < end) & (neuron + 16 < C))


def layouts(warps: int, tokens: int) -> tuple[Any, ...]:
    """Layouts of (products, codes, scales, tokens) for so many warps along neurons."""
    linear = gl.DistributedLinearLayout
    along = range(warps.bit_length() - 1)
    products = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])
    lanes = [[1, 0], [2, 0], [4, 0]]
    codes = linear(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], *lanes], [[16 << i, 0] for i in along], [], [16 * warps, 16]
    )
    scales = linear([], [[0, 1], [0, 2], *lanes], [[8 << i, 0] for i in along], [], [8 * warps, 4])
    more = [[8 << i, 0] for i in range((tokens // 8).bit_length() - 1)]
    rows = linear(
        [*([0, 1 << i] for i in range(4)), *more],
        [[0, 16], [0, 32], *lanes],
        [[0, 0] for _ in along],
        [],
        [tokens, 64],
    )
    return products, codes, scales, rows


def settings(tokens: int, warps: int = 2, ahead: int = 2) -> dict[str, Any]:
    """Compile-time arguments for tiles of at most so many rows, and launch options."""
    return {
        "N": tokens,
        "WARPS": warps,
        "AHEAD": ahead,
        "LAYOUTS": layouts(warps, tokens),
        "num_warps": warps,
        "maxnreg": {8: 80, 16: 128, 32: 168}[tokens] + 24 * (ahead - 2),
    }


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile for experts of the released widths, tiles of 8 to 32 rows."""
    C, I = 3584, 3072
    known: dict[str, Any] = {"C": C, "I": I, "E": 896, "K": 16, "BETA": 4.0, "LINEAR": 25.0}
    known |= dict.fromkeys(("codes", "scales", "slot", "tile_expert", "tile_row", "tile_end"), "*i32")
    cases = []
    for tokens, wide in ((8, False), (16, False), (16, True), (32, False)):
        chosen = settings(tokens) | {"WIDE": wide}
        options = {name: chosen.pop(name) for name in ("num_warps", "maxnreg")} | {"num_stages": 1}
        for kernel, units, x in ((few_gate_up_kernel, I // 16, "z"), (few_down_kernel, C // 32, "act")):
            own = known | chosen | {"UNITS": units, x: "*i32"}
            cases.append((kernel, {name: own.get(name, "*bf16") for name in kernel.arg_names}, options))
    return cases
