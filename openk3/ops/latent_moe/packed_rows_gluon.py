"""Gluon kernels of packed experts for many tokens an expert, for Hopper: weights become operands in registers.

A program multiplies 32 neurons of each of its warps, the left operand, with a tile of an expert's tokens, the right
one. Codes come from memory into registers and are unpacked there, one half of a unit while the products of the other
half run, so that unpacked weights never lie in memory of any kind. Tokens come through a ring in shared memory, their
columns in the order in which lanes hold weights (`place_of`).
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from openk3.ops.latent_moe.packed_gluon import begin
from openk3.ops.latent_moe.packed_gluon import layouts as unit_layouts
from openk3.ops.latent_moe.packed_unpack_gluon import factors, unpack
from openk3.ops.situ_kernel import situ_value


@gluon.jit
def _codes(code_at, scale_at, step, STEPS: gl.constexpr):
    """Codes and scales of a step, if there is one."""
    there = step < STEPS
    codes_1 = gl.load(code_at + step * 512, mask=there)
    codes_2 = gl.load(code_at + step * 512 + 256, mask=there)
    scale = gl.load(scale_at + step * 32, mask=there)
    return codes_1, codes_2, scale


@gluon.jit
def _bring(x_s, x_at, step, STEPS: gl.constexpr):
    """Begin to copy a step's columns of all tokens, if there is one."""
    STAGES: gl.constexpr = x_s.shape[0]
    if step < STEPS:
        async_copy.async_copy_global_to_shared(x_s.index(step % STAGES), x_at + step * 128)
    async_copy.commit_group()


@gluon.jit
def _products(x_at, code_at, scale_at, settings: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr):
    """Both products of the units with a tile of tokens."""
    STEPS: gl.constexpr = (settings[0] + 127) // 128
    WIDE: gl.constexpr = settings[2]
    layouts: gl.constexpr = settings[3]
    WARPS: gl.constexpr = settings[4]
    mma: gl.constexpr = layouts[0]
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, 128], gl.NVMMASharedLayout(128, 16, 2))
    for stage in gl.static_range(STAGES - 1):
        _bring(x_s, x_at, stage, STEPS)
    codes_1, codes_2, scale = _codes(code_at, scale_at, 0, STEPS)
    first = gl.zeros([16 * WARPS, N], gl.float32, mma)
    second = gl.zeros([16 * WARPS, N], gl.float32, mma)
    left = unpack(codes_1, factors(scale, 0, layouts, WIDE), layouts, WIDE)
    for step in range(STEPS):
        next_1, next_2, next_scale = _codes(code_at, scale_at, step + 1, STEPS)
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        gl.thread_barrier()
        right = x_s.index(step % STAGES).permute((1, 0))
        first = warpgroup_mma(left, right, first, is_async=True)
        _bring(x_s, x_at, step + STAGES - 1, STEPS)
        other = unpack(codes_2, factors(scale, 1, layouts, WIDE), layouts, WIDE)
        second = warpgroup_mma(other, right, second, is_async=True)
        first = warpgroup_mma_wait(1, deps=[first])
        left = unpack(next_1, factors(next_scale, 0, layouts, WIDE), layouts, WIDE)
        second = warpgroup_mma_wait(0, deps=[second])
        codes_2 = next_2
        scale = next_scale
    return first, second


@gluon.jit
def _tile(tile_expert, tile_row, tile_end, tiles, BLOCKS: gl.constexpr, GROUP: gl.constexpr):
    """(expert, first row, row behind its last, block of neurons): all blocks of GROUP tiles before the next tiles."""
    program = gl.program_id(0)
    group = program // (GROUP * BLOCKS)
    size = gl.minimum(tiles - group * GROUP, GROUP)
    inside = program % (GROUP * BLOCKS)
    tile = group * GROUP + inside % size
    return gl.load(tile_expert + tile), gl.load(tile_row + tile), gl.load(tile_end + tile), inside // size


@gluon.jit
def _turned(value, store: gl.constexpr):
    """[neurons, tokens] in float32 -> [tokens, neurons] in bfloat16, as it is stored."""
    return gl.convert_layout(value.to(gl.bfloat16).permute(1, 0), store)


@gluon.jit
def many_gate_up_kernel(
    z, codes, scales, act, slot, tile_expert, tile_row, tile_end, tiles,
    C: gl.constexpr, I: gl.constexpr, E: gl.constexpr, K: gl.constexpr, BETA: gl.constexpr, LINEAR: gl.constexpr,
    N: gl.constexpr, WARPS: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    WIDE: gl.constexpr, LAYOUTS: gl.constexpr, COPY: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """act = SiTU-GLU(z w1^T, z w3^T) for a tile of rows and 16 neurons a warp; columns of z and act are moved."""
    settings: gl.constexpr = (C, 0, WIDE, LAYOUTS, WARPS, UNITS)
    expert, start, end, block = _tile(tile_expert, tile_row, tile_end, tiles, UNITS // WARPS, GROUP)
    if expert >= E:
        return
    code_at, scale_at = begin(codes, scales, expert, block, settings)
    row = start + gl.arange(0, N, gl.SliceLayout(1, COPY))
    token = gl.load(slot + gl.where(row < end, row, start)) // K
    x_at = z + token.to(gl.int64)[:, None] * C + gl.arange(0, 128, gl.SliceLayout(0, COPY))[None, :]
    g, u = _products(x_at, code_at, scale_at, settings, N, STAGES)
    g = g.to(gl.bfloat16).to(gl.float32)
    u = u.to(gl.bfloat16).to(gl.float32)
    value = _turned(situ_value(g, u, BETA, LINEAR, True), STORE)
    neuron = block * (16 * WARPS) + gl.arange(0, 16 * WARPS, gl.SliceLayout(0, STORE))[None, :]
    place = neuron // 128 * 128 + neuron % 32 // 2 * 8 + neuron // 32 % 4 * 2 + neuron % 2
    row = start + gl.arange(0, N, gl.SliceLayout(1, STORE))[:, None]
    gl.store(act + row.to(gl.int64) * I + place, value, mask=row < end)


@gluon.jit
def many_down_kernel(
    act, codes, scales, y, tile_expert, tile_row, tile_end, tiles,
    I: gl.constexpr, C: gl.constexpr, E: gl.constexpr,
    N: gl.constexpr, WARPS: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    WIDE: gl.constexpr, LAYOUTS: gl.constexpr, COPY: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """y = act w2^T for a tile of rows and 32 neurons a warp; columns of act are moved."""
    settings: gl.constexpr = (I, 0, WIDE, LAYOUTS, WARPS, UNITS)
    expert, start, end, block = _tile(tile_expert, tile_row, tile_end, tiles, UNITS // WARPS, GROUP)
    if expert >= E:
        return
    code_at, scale_at = begin(codes, scales, expert, block, settings)
    row = start + gl.arange(0, N, gl.SliceLayout(1, COPY))
    row = gl.where(row < end, row, start)
    x_at = act + row.to(gl.int64)[:, None] * I + gl.arange(0, 128, gl.SliceLayout(0, COPY))[None, :]
    first, second = _products(x_at, code_at, scale_at, settings, N, STAGES)
    r = gl.arange(0, 16 * WARPS, gl.SliceLayout(0, STORE))[None, :]
    row = start + gl.arange(0, N, gl.SliceLayout(1, STORE))[:, None]
    at = y + row.to(gl.int64) * C + block * (32 * WARPS) + r // 16 * 32 + r % 16
    gl.store(at, _turned(first, STORE), mask=row < end)
    gl.store(at + 16, _turned(second, STORE), mask=row < end)


def layouts(warps: int, tokens: int) -> dict[str, Any]:
    """Layouts of products and codes, of copies of tokens into shared memory, and of results on their way out."""
    products = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, tokens, 16])
    return {
        "LAYOUTS": (products, *unit_layouts(warps, 8)[1:3]),
        "COPY": gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0]),
        "STORE": gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0]),
    }


def settings(tokens: int, warps: int = 8, stages: int = 3) -> dict[str, Any]:
    """Compile-time arguments for tiles of so many rows, and launch options."""
    return {
        "N": tokens,
        "WARPS": warps,
        "STAGES": stages,
        "GROUP": 8,
        **layouts(warps, tokens),
        "num_warps": warps,
    }


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile for experts of the released widths, tiles of 64 and 128 rows."""
    C, I = 3584, 3072
    known: dict[str, Any] = {"C": C, "I": I, "E": 896, "K": 16, "BETA": 4.0, "LINEAR": 25.0, "tiles": "i32"}
    known |= dict.fromkeys(("codes", "scales", "slot", "tile_expert", "tile_row", "tile_end"), "*i32")
    cases = []
    for tokens, warps, wide in ((64, 8, False), (128, 8, False), (128, 8, True), (128, 4, False)):
        chosen = settings(tokens, warps) | {"WIDE": wide}
        options = {"num_warps": chosen.pop("num_warps"), "num_stages": 1}
        for kernel, units in ((many_gate_up_kernel, I // 16), (many_down_kernel, C // 32)):
            own = known | chosen | {"UNITS": units}
            cases.append((kernel, {name: own.get(name, "*bf16") for name in kernel.arg_names}, options))
    return cases
