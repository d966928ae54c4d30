"""Gluon kernel of the routed experts' row products for Hopper: copying, multiplying and finishing at the same time.

Four warps bring: token rows by copies of 16 bytes, weights by the copy engine. Two warpgroups multiply 64 rows each by
256 columns, or by 128 where that alone divides the width, and leave them in bfloat16 in shared memory, where four more
warps finish, with SiTU and stores, while the next tile is multiplied. Rows that are not the expert's are masked in the
stores alone.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openk3.ops.kda.gluon_launch import block_type
from openk3.ops.situ_kernel import situ_value

ROWS, COLUMNS, STEP = 128, 128, 64  # of a tile; of either half of its columns; of a sum at a time
PLAIN, VALUE, ACROSS, BOTH = 0, 1, 2, 3  # x w^T; SiTU-GLU(x w1^T, x w3^T); x w; x w1 + beside w3
GROUP = 8  # tiles of rows whose blocks of columns run side by side


@gluon.jit
def _entry(n, tables, tiles, BLOCKS: gl.constexpr, GROUP: gl.constexpr):
    """(expert, first row, end of the expert's rows, block of columns) of the n-th tile."""
    tile_expert, tile_row, tile_end = tables
    group = n // (GROUP * BLOCKS)
    size = gl.minimum(tiles - group * GROUP, GROUP)
    inside = n % (GROUP * BLOCKS)
    tile = group * GROUP + inside % size
    return gl.load(tile_expert + tile), gl.load(tile_row + tile), gl.load(tile_end + tile), inside // size


@gluon.jit
def _bring(sources, slot, tables, weights, buffers, bars, tiles, programs, FORM: gl.constexpr, COPY: gl.constexpr):
    """The copying warps: a tile's rows and the halves of its weights, step by step."""
    DEPTH: gl.constexpr = FORM[0]
    WIDTH: gl.constexpr = FORM[1]
    E: gl.constexpr = FORM[2]
    K: gl.constexpr = FORM[3]
    KIND: gl.constexpr = FORM[4]
    GROUP: gl.constexpr = FORM[5]
    HALVES: gl.constexpr = FORM[8]
    SOURCES: gl.constexpr = 2 if KIND == 3 else 1
    first_d, second_d = weights
    x_s, first_s, second_s, staged_s = buffers
    full, empty, staged, free = bars
    STAGES: gl.constexpr = x_s.shape[0]
    ROWS: gl.constexpr = x_s.shape[1]
    STEP: gl.constexpr = x_s.shape[2]
    WIDE: gl.constexpr = 128 if KIND == 1 else 128 * HALVES
    BLOCKS: gl.constexpr = WIDTH // WIDE
    done = 0
    for n in range(gl.program_id(0), tiles * BLOCKS, programs):
        expert, start, end, block = _entry(n, tables, tiles, BLOCKS, GROUP)
        if expert < E:
            row = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
            row = gl.where(row < end, row, start)
            if slot is not None:
                row = gl.load(slot + row) // K
            inside = row.to(gl.int64)[:, None] * DEPTH + gl.arange(0, STEP, layout=gl.SliceLayout(0, COPY))[None, :]
            column = block * WIDE
            for source in gl.static_range(SOURCES):
                x_at = sources[source] + inside
                for step in range(DEPTH // STEP):
                    stage = done % STAGES
                    bar = full.index(stage)
                    mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
                    mbarrier.expect(bar, 256 * HALVES * STEP)
                    if KIND >= 2:
                        line = expert * DEPTH + step * STEP
                        half = weights[source]
                        tma.async_copy_global_to_shared(half, [line, column], bar, first_s.index(stage))
                        if HALVES == 2:
                            tma.async_copy_global_to_shared(half, [line, column + 128], bar, second_s.index(stage))
                    else:
                        line = expert * WIDTH + column
                        other = line if KIND == 1 else line + 128
                        tma.async_copy_global_to_shared(first_d, [line, step * STEP], bar, first_s.index(stage))
                        if HALVES == 2:
                            tma.async_copy_global_to_shared(second_d, [other, step * STEP], bar, second_s.index(stage))
                    async_copy.async_copy_global_to_shared(x_s.index(stage), x_at)
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                    x_at += STEP
                    done += 1


@gluon.jit
def _multiply(tables, buffers, bars, tiles, programs, FORM: gl.constexpr, PART: gl.constexpr):
    """A warpgroup: 64 rows of each tile by each half."""
    DEPTH: gl.constexpr = FORM[0]
    WIDTH: gl.constexpr = FORM[1]
    E: gl.constexpr = FORM[2]
    KIND: gl.constexpr = FORM[4]
    GROUP: gl.constexpr = FORM[5]
    HALVES: gl.constexpr = FORM[8]
    SOURCES: gl.constexpr = 2 if KIND == 3 else 1
    x_s, first_s, second_s, staged_s = buffers
    full, empty, staged, free = bars
    STAGES: gl.constexpr = x_s.shape[0]
    STEP: gl.constexpr = x_s.shape[2]
    BLOCKS: gl.constexpr = WIDTH // (128 if KIND == 1 else 128 * HALVES)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    done = 0
    count = 0
    for n in range(gl.program_id(0), tiles * BLOCKS, programs):
        expert, start, end, block = _entry(n, tables, tiles, BLOCKS, GROUP)
        if expert < E:
            first = gl.zeros([64, 128], gl.float32, layout=layout)
            second = gl.zeros([64, 128], gl.float32, layout=layout)
            for _ in range(SOURCES * DEPTH // STEP):
                stage = done % STAGES
                mbarrier.wait(full.index(stage), (done // STAGES) & 1)
                fence_async_shared()  # rows did not come by the copy engine
                rows = x_s.index(stage).slice(PART * 64, 64, 0)
                if KIND >= 2:
                    first = warpgroup_mma(rows, first_s.index(stage), first, is_async=True)
                    if HALVES == 2:
                        second = warpgroup_mma(rows, second_s.index(stage), second, is_async=True)
                else:
                    first = warpgroup_mma(rows, first_s.index(stage).permute((1, 0)), first, is_async=True)
                    if HALVES == 2:
                        second = warpgroup_mma(rows, second_s.index(stage).permute((1, 0)), second, is_async=True)
                if HALVES == 2:
                    first, second = warpgroup_mma_wait(0, (first, second))
                else:
                    first = warpgroup_mma_wait(0, (first,))
                mbarrier.arrive(empty.index(stage), count=1)
                done += 1
            mbarrier.wait(free.index(PART), (count & 1) ^ 1)
            staged_s.index(HALVES * PART).store(first.to(gl.bfloat16))
            if HALVES == 2:
                staged_s.index(HALVES * PART + 1).store(second.to(gl.bfloat16))
            mbarrier.arrive(staged.index(PART), count=1)
            count += 1


@gluon.jit
def _finish(tables, results, buffers, bars, tiles, programs, FORM: gl.constexpr, FINISH: gl.constexpr):
    """The finishing warps of a value: 32 rows at a time."""
    WIDTH: gl.constexpr = FORM[1]
    E: gl.constexpr = FORM[2]
    KIND: gl.constexpr = FORM[4]
    GROUP: gl.constexpr = FORM[5]
    HALVES: gl.constexpr = FORM[8]
    x_s, first_s, second_s, staged_s = buffers
    full, empty, staged, free = bars
    out, gate, up = results
    WIDE: gl.constexpr = 128 if KIND == 1 else 128 * HALVES
    BLOCKS: gl.constexpr = WIDTH // WIDE
    count = 0
    for n in range(gl.program_id(0), tiles * BLOCKS, programs):
        expert, start, end, block = _entry(n, tables, tiles, BLOCKS, GROUP)
        if expert < E:
            side = gl.arange(0, 32, layout=gl.SliceLayout(1, FINISH))
            across = gl.arange(0, 128, layout=gl.SliceLayout(0, FINISH))
            inside = side[:, None] * WIDTH + across[None, :]
            for part in range(2):
                mbarrier.wait(staged.index(part), count & 1)
                for piece in gl.static_range(0, 64, 32):
                    low = start + part * 64 + piece
                    there = (low + side < end)[:, None]
                    at = low.to(gl.int64) * WIDTH + block * WIDE
                    g = staged_s.index(HALVES * part).slice(piece, 32, 0).load(FINISH)
                    if KIND == 1:
                        u = staged_s.index(HALVES * part + 1).slice(piece, 32, 0).load(FINISH)
                        if gate is not None:
                            gl.store(gate + at + inside, g, mask=there)
                            gl.store(up + at + inside, u, mask=there)
                        value = situ_value(g.to(gl.float32), u.to(gl.float32), FORM[6], FORM[7], True)
                        gl.store(out + at + inside, value.to(gl.bfloat16), mask=there)
                    else:
                        gl.store(out + at + inside, g, mask=there)
                        if HALVES == 2:
                            u = staged_s.index(HALVES * part + 1).slice(piece, 32, 0).load(FINISH)
                            gl.store(out + at + 128 + inside, u, mask=there)
                mbarrier.arrive(free.index(part), count=1)
            count += 1


@gluon.jit(do_not_specialize=["tiles", "programs"])
def row_product_gluon(
    x, beside, slot, tile_expert, tile_row, tile_end, first_d, second_d, out, gate, up, tiles, programs,
    FORM: gl.constexpr, STAGES: gl.constexpr, COPY: gl.constexpr, FINISH: gl.constexpr,
):  # fmt: skip
    """FORM: (depth, width, experts, choices of a token, kind of product, tiles side by side, betas of SiTU, halves).

    out [M, width] for each expert's rows of x: those of `slot`'s tokens, or without slots x's own. VALUE: gate and up
    are written too if they are given. BOTH: rows of `beside` times the second matrices are added; else it is x. Weights
    are [experts, width, depth], or ACROSS and BOTH [experts, depth, width]. One half, not of VALUE: 128 columns a tile.
    """
    io: gl.constexpr = gl.bfloat16
    DOWN: gl.constexpr = first_d.block_type.shape[0]
    ACROSS: gl.constexpr = first_d.block_type.shape[1]
    x_s = gl.allocate_shared_memory(io, [STAGES, 128, 64], gl.NVMMASharedLayout.get_default_for([128, 64], io))
    first_s = gl.allocate_shared_memory(io, [STAGES, DOWN, ACROSS], first_d.layout)
    HALVES: gl.constexpr = FORM[8]
    if HALVES == 2:
        second_s = gl.allocate_shared_memory(io, [STAGES, DOWN, ACROSS], first_d.layout)
    else:
        second_s = first_s
    staged_s = gl.allocate_shared_memory(io, [2 * HALVES, 64, 128], gl.NVMMASharedLayout.get_default_for([64, 128], io))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    staged = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129)  # the copy engine's bytes, and every thread of the copying warps
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(staged.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    tables = (tile_expert, tile_row, tile_end)
    buffers = (x_s, first_s, second_s, staged_s)
    bars = (full, empty, staged, free)
    gl.warp_specialize(
        [
            (_multiply, (tables, buffers, bars, tiles, programs, FORM, 0)),
            (_multiply, (tables, buffers, bars, tiles, programs, FORM, 1)),
            (_bring, ((x, beside), slot, tables, (first_d, second_d), buffers, bars, tiles, programs, FORM, COPY)),
            (_finish, (tables, (out, gate, up), buffers, bars, tiles, programs, FORM, FINISH)),
        ],
        [4, 4, 4],
        [160, 64, 128],
    )


def halves(kind: int, width: int) -> int:
    """Of 128 columns that a tile has."""
    return 2 if kind == VALUE or width % (2 * COLUMNS) == 0 else 1


def settings(halves: int = 2) -> tuple[dict[str, Any], dict[str, int]]:
    """Compile-time arguments that no shape changes, and launch options."""
    copy = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    finish = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    return {"STAGES": 3 if halves == 2 else 5, "COPY": copy, "FINISH": finish}, {"num_warps": 4, "maxnreg": 128}


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles for experts of 768 x 768, with and without gate and up, and of 384 x 384."""
    given: dict[str, Any] = dict.fromkeys(("x", "beside", "out", "gate", "up"), "*bf16")
    given |= {"tiles": "i32", "programs": "i32"} | dict.fromkeys(
        ("slot", "tile_expert", "tile_row", "tile_end"), "*i32"
    )
    along = dict.fromkeys(("first_d", "second_d"), block_type((COLUMNS, STEP)))
    across = dict.fromkeys(("first_d", "second_d"), block_type((STEP, COLUMNS)))
    bare = dict.fromkeys(("gate", "up"))
    own = bare | {"slot": None}

    def case(kind: int, width: int, *changes: dict[str, Any]) -> tuple[Any, dict[str, Any], dict[str, int]]:
        count = halves(kind, width)
        fixed, options = settings(count)
        form = {"FORM": (width, width, 80, 4, kind, GROUP, 4.0, 25.0, count)}
        arguments = given | (across if kind >= ACROSS else along) | form | fixed
        for change in changes:
            arguments |= change
        return row_product_gluon, arguments, options

    kinds = ((PLAIN, own), (ACROSS, bare), (BOTH, own))
    values = [case(VALUE, 768), case(VALUE, 768, bare)]
    return values + [case(kind, width, change) for width in (768, 384) for kind, change in kinds]
