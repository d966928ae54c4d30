"""Gluon kernels of the gradients of causal attention for Hopper: the Triton kernels' arithmetic with its schedule.

As in the forward pass a warp brings everything by the copy engine, and two warpgroups of consumers multiply. In the
first kernel each holds 64 keys: scores are formed transposed, so that probabilities, an accumulator converted in
registers, are the left operand of the values' gradient. The other one makes plain products of what that leaves.
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openk3.ops.kda.gluon_launch import block_type

SIZE = 128  # keys and queries of a score tile


def settings() -> dict[str, dict[str, int]]:
    """Queries at a time and stages of each kernel, and launch options."""
    options = {"num_warps": 4, "maxnreg": 168}
    return {
        "scores": {"STEP": 64, "Q_STAGES": 2, "O_STAGES": 2, **options},
        "products": {"STEP": 64, "STAGES": 5, **options},
    }


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _query_of(step, begin, end, diagonal, last, STEP: gl.constexpr):
    """First query of a step: those on the diagonal, then the `last` steps that need a mask as well, then all others."""
    query = begin + step * STEP
    uneven = end - (step - diagonal + 1) * STEP
    return gl.where(step < diagonal, query, gl.where(step < diagonal + last, uneven, query - last * STEP))


@gluon.jit
def _bring_scores(descriptors, buffers, bars, place, COLUMNS: gl.constexpr, STEP: gl.constexpr):
    """The copy warp: keys and values once, then queries and gradients of outputs."""
    q_a_d, q_b_d, k_a_d, k_b_d, v_d, o_d, log_d, delta_d, tile_d = descriptors
    q_a_s, q_b_s, k_a_s, k_b_s, v_s, o_s, log_s, delta_s, tile_s = buffers
    k_full, q_full, q_empty, o_full, o_empty = bars
    key, start, line, head, begin, end, diagonal, last, sees, queries, tile = place
    SIZE: gl.constexpr = k_a_s.shape[0]
    A: gl.constexpr = k_a_s.shape[1]
    B: gl.constexpr = k_b_s.shape[1]
    V: gl.constexpr = v_s.shape[1]
    Q_STAGES: gl.constexpr = q_a_s.shape[0]
    O_STAGES: gl.constexpr = o_s.shape[0]
    mbarrier.expect(k_full, 2 * SIZE * (A + B + V))
    tma.async_copy_global_to_shared(k_a_d, [key, head * COLUMNS[1]], k_full, k_a_s)
    tma.async_copy_global_to_shared(k_b_d, [key, head * COLUMNS[2]], k_full, k_b_s)
    tma.async_copy_global_to_shared(v_d, [key, head * COLUMNS[3]], k_full, v_s)
    for step in range((end - begin) // STEP):
        query = _query_of(step, begin, end, diagonal, last, STEP)
        row = start + query
        stage = step % Q_STAGES
        bar = q_full.index(stage)
        mbarrier.wait(q_empty.index(stage), ((step // Q_STAGES) & 1) ^ 1)
        mbarrier.expect(bar, 2 * STEP * (A + B) + 4 * STEP)
        tma.async_copy_global_to_shared(q_a_d, [row, head * COLUMNS[0]], bar, q_a_s.index(stage))
        tma.async_copy_global_to_shared(q_b_d, [row, head * COLUMNS[0]], bar, q_b_s.index(stage))
        tma.async_copy_global_to_shared(log_d, [head, line + query], bar, log_s.index(stage))
        stage = step % O_STAGES
        bar = o_full.index(stage)
        mbarrier.wait(o_empty.index(stage), ((step // O_STAGES) & 1) ^ 1)
        mbarrier.expect(bar, 2 * STEP * V + 4 * STEP)
        tma.async_copy_global_to_shared(o_d, [row, head * V], bar, o_s.index(stage))
        tma.async_copy_global_to_shared(delta_d, [head, line + query], bar, delta_s.index(stage))


@gluon.jit
def _score_step(d_v, descriptors, buffers, bars, place, step, scale, zero, GROUP: gl.constexpr, MASKED: gl.constexpr):
    """STEP queries: scores, probabilities, their gradients; the values' gradient is carried on."""
    tile_d = descriptors[8]
    q_a_s, q_b_s, k_a_s, k_b_s, v_s, o_s, log_s, delta_s, tile_s = buffers
    k_full, q_full, q_empty, o_full, o_empty = bars
    key, start, line, head, begin, end, diagonal, last, sees, queries, tile = place
    SIZE: gl.constexpr = k_a_s.shape[0]
    STEP: gl.constexpr = q_a_s.shape[1]
    Q_STAGES: gl.constexpr = q_a_s.shape[0]
    O_STAGES: gl.constexpr = o_s.shape[0]
    layout: gl.constexpr = zero.type.layout
    wide: gl.constexpr = d_v.type.layout
    first = _query_of(step, begin, end, diagonal, last, STEP)
    q_stage = step % Q_STAGES
    o_stage = step % O_STAGES
    k_a = k_a_s.slice(GROUP * 64, 64, 0)
    k_b = k_b_s.slice(GROUP * 64, 64, 0)
    v = v_s.slice(GROUP * 64, 64, 0)
    mbarrier.wait(q_full.index(q_stage), (step // Q_STAGES) & 1)
    scores = warpgroup_mma(k_a, q_a_s.index(q_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma(k_b, q_b_s.index(q_stage).permute((1, 0)), scores, is_async=True)
    mbarrier.wait(o_full.index(o_stage), (step // O_STAGES) & 1)
    d_probs = warpgroup_mma(v, o_s.index(o_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, (scores,))
    log = log_s.index(q_stage).reshape([STEP]).load(gl.SliceLayout(0, layout))
    probs = _exp2(scores * scale - log[None, :])
    mbarrier.arrive(q_empty.index(q_stage), count=1)
    if MASKED:
        side = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        query = first + gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))
        seen = (query[None, :] >= sees + side[:, None]) & (query < queries)[None, :]
        probs = gl.where(seen, probs, 0.0)
    narrow = gl.convert_layout(probs.to(gl.bfloat16), gl.DotOperandLayout(0, wide, 2))
    d_v = warpgroup_mma(narrow, o_s.index(o_stage), d_v, is_async=True)
    d_probs = warpgroup_mma_wait(1, (d_probs,))
    delta = delta_s.index(o_stage).reshape([STEP]).load(gl.SliceLayout(0, layout))
    if MASKED:  # behind the last query it may be anything
        delta = gl.where(first + gl.arange(0, STEP, layout=gl.SliceLayout(0, layout)) < queries, delta, 0.0)
    d_scores = (probs * (d_probs - delta[None, :])).to(gl.bfloat16)
    tma.store_wait(0)
    mine = tile_s.index(GROUP)
    mine.store(d_scores)
    fence_async_shared()
    row = (tile + first // SIZE) * SIZE + GROUP * 64
    tma.async_copy_shared_to_global(tile_d, [row, first % SIZE], mine)
    d_v, narrow = warpgroup_mma_wait(0, (d_v, narrow))
    mbarrier.arrive(o_empty.index(o_stage), count=1)
    return d_v


@gluon.jit
def _consume_scores(descriptors, buffers, bars, place, d_v_ptr, keys, scale, D_V: gl.constexpr, GROUP: gl.constexpr):
    """A warpgroup: 64 keys of one head."""
    q_a_s, q_b_s, k_a_s, k_b_s, v_s, o_s, log_s, delta_s, tile_s = buffers
    k_full, q_full, q_empty, o_full, o_empty = bars
    key, start, line, head, begin, end, diagonal, last, sees, queries, tile = place
    STEP: gl.constexpr = q_a_s.shape[1]
    V: gl.constexpr = v_s.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    zero = gl.zeros([64, STEP], gl.float32, layout=layout)
    d_v = gl.zeros([64, V], gl.float32, layout=wide)
    mbarrier.wait(k_full, 0)
    for step in range(diagonal + last):
        d_v = _score_step(d_v, descriptors, buffers, bars, place, step, scale, zero, GROUP, True)
    for step in range(diagonal + last, (end - begin) // STEP):
        d_v = _score_step(d_v, descriptors, buffers, bars, place, step, scale, zero, GROUP, False)
    side = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    channel = gl.arange(0, V, layout=gl.SliceLayout(0, wide))
    at = d_v_ptr + (key + side).to(gl.int64)[:, None] * D_V[0] + head * D_V[1] + channel[None, :]
    gl.store(at, d_v.to(gl.bfloat16), mask=(side < keys)[:, None])
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["count", "each", "strip_low", "head_low"],
    do_not_specialize_on_alignment=["key_ptr", "order_ptr"],
)
def score_gradient_gluon(
    q_a_d, q_b_d, k_a_d, k_b_d, v_d, o_d, log_d, delta_d, tile_d, d_v_ptr, key_ptr, order_ptr,
    scale, count, each, strip_low, head_low,
    COLUMNS: gl.constexpr, D_V: gl.constexpr, STEP: gl.constexpr, Q_STAGES: gl.constexpr, O_STAGES: gl.constexpr,
):  # fmt: skip
    """One tile of 128 keys of one head; as `score_gradient_kernel`.

    COLUMNS: from head to head in the rows of q, both key parts and v; D_V: from token to token and head to head in d_v.
    """
    io: gl.constexpr = gl.bfloat16
    SIZE: gl.constexpr = k_a_d.block_type.shape[0]
    A: gl.constexpr = k_a_d.block_type.shape[1]
    B: gl.constexpr = k_b_d.block_type.shape[1]
    V: gl.constexpr = v_d.block_type.shape[1]
    part = gl.program_id(0) // count
    head = head_low + part
    entry = key_ptr + gl.load(order_ptr + gl.program_id(0) % count) * 8
    key = gl.load(entry)
    keys = gl.load(entry + 1)
    start = gl.load(entry + 2)
    queries = gl.load(entry + 3)
    sees = gl.load(entry + 4)
    first = gl.load(entry + 5)
    tile = part * each + gl.load(entry + 6) - strip_low - first
    line = gl.load(entry + 7)
    begin = first * SIZE
    end = gl.maximum((queries + SIZE - 1) // SIZE * SIZE, begin)
    # From query sees + SIZE - 1 on, all keys are seen; where tiles end behind the last query, a mask is needed as well.
    diagonal = gl.minimum(gl.maximum(sees + SIZE - 1 - begin + STEP - 1, 0), end - begin) // STEP
    last = gl.minimum((end - queries + STEP - 1) // STEP, (end - begin) // STEP - diagonal)
    k_a_s = gl.allocate_shared_memory(io, [SIZE, A], k_a_d.layout)
    k_b_s = gl.allocate_shared_memory(io, [SIZE, B], k_b_d.layout)
    v_s = gl.allocate_shared_memory(io, [SIZE, V], v_d.layout)
    q_a_s = gl.allocate_shared_memory(io, [Q_STAGES, STEP, A], q_a_d.layout)
    q_b_s = gl.allocate_shared_memory(io, [Q_STAGES, STEP, B], q_b_d.layout)
    o_s = gl.allocate_shared_memory(io, [O_STAGES, STEP, V], o_d.layout)
    tile_s = gl.allocate_shared_memory(io, [2, 64, STEP], tile_d.layout)
    log_s = gl.allocate_shared_memory(gl.float32, [Q_STAGES, 1, STEP], log_d.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [O_STAGES, 1, STEP], delta_d.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    o_full = gl.allocate_shared_memory(gl.int64, [O_STAGES, 1], mbarrier.MBarrierLayout())
    o_empty = gl.allocate_shared_memory(gl.int64, [O_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=1)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(O_STAGES):
        mbarrier.init(o_full.index(i), count=1)
        mbarrier.init(o_empty.index(i), count=2)
    fence_async_shared()
    descriptors = (q_a_d, q_b_d, k_a_d, k_b_d, v_d, o_d, log_d, delta_d, tile_d)
    buffers = (q_a_s, q_b_s, k_a_s, k_b_s, v_s, o_s, log_s, delta_s, tile_s)
    bars = (k_full, q_full, q_empty, o_full, o_empty)
    place = (key, start, line, head, begin, end, diagonal, last, sees, queries, tile)
    gl.warp_specialize(
        [
            (_consume_scores, (descriptors, buffers, bars, place, d_v_ptr, keys, scale, D_V, 0)),
            (_consume_scores, (descriptors, buffers, bars, place, d_v_ptr, keys, scale, D_V, 1)),
            (_bring_scores, (descriptors, buffers, bars, place, COLUMNS, STEP)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _bring_products(descriptors, buffers, bars, place, COLUMNS: gl.constexpr, QUERIES: gl.constexpr):
    """The copy warp: pieces of score gradients, and the rows that they are multiplied with."""
    tile_d, a_d, b_d = descriptors
    tile_s, a_s, b_s = buffers
    full, empty = bars
    first, steps, row, head, tile, before, rounds = place
    STAGES: gl.constexpr = a_s.shape[0]
    STEP: gl.constexpr = a_s.shape[1]
    A: gl.constexpr = a_s.shape[2]
    B: gl.constexpr = b_s.shape[2]
    SIZE: gl.constexpr = 128
    PIECES: gl.constexpr = SIZE // STEP
    for step in range(steps):
        stage = step % STAGES
        bar = full.index(stage)
        j = first + step // PIECES
        piece = step % PIECES * STEP
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, 2 * STEP * (SIZE + A + B))
        if QUERIES:
            late = gl.maximum(j - before, 0)
            at = (tile + j * rounds - late * (late + 1) // 2) * SIZE + piece
            tma.async_copy_global_to_shared(tile_d, [at, 0], bar, tile_s.index(stage))
        else:
            tma.async_copy_global_to_shared(tile_d, [(tile + j) * SIZE, piece], bar, tile_s.index(stage))
        at = row + j * SIZE + piece
        tma.async_copy_global_to_shared(a_d, [at, head * COLUMNS[0]], bar, a_s.index(stage))
        tma.async_copy_global_to_shared(b_d, [at, head * COLUMNS[1]], bar, b_s.index(stage))


@gluon.jit
def _consume_products(
    buffers, bars, steps, outputs, scale,
    D_A: gl.constexpr, D_B: gl.constexpr, GROUP: gl.constexpr, QUERIES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 rows of both parts."""
    tile_s, a_s, b_s = buffers
    full, empty = bars
    a_ptr, b_ptr, row, rows, head = outputs
    STAGES: gl.constexpr = a_s.shape[0]
    A: gl.constexpr = a_s.shape[2]
    B: gl.constexpr = b_s.shape[2]
    layout_a: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, 16])
    layout_b: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B, 16])
    sum_a = gl.zeros([64, A], gl.float32, layout=layout_a)
    sum_b = gl.zeros([64, B], gl.float32, layout=layout_b)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        if QUERIES:
            left = tile_s.index(stage).slice(GROUP * 64, 64, 1).permute((1, 0))
        else:
            left = tile_s.index(stage).slice(GROUP * 64, 64, 0)
        sum_a = warpgroup_mma(left, a_s.index(stage), sum_a, is_async=True)
        sum_b = warpgroup_mma(left, b_s.index(stage), sum_b, is_async=True)
        sum_a, sum_b = warpgroup_mma_wait(0, (sum_a, sum_b))
        mbarrier.arrive(empty.index(stage), count=1)
    side = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout_a))
    channel = gl.arange(0, A, layout=gl.SliceLayout(0, layout_a))
    at = a_ptr + (row + side).to(gl.int64)[:, None] * D_A[0] + head * D_A[1] + channel[None, :]
    gl.store(at, (sum_a * scale).to(gl.bfloat16), mask=(side < rows)[:, None])
    side = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout_b))
    channel = gl.arange(0, B, layout=gl.SliceLayout(0, layout_b))
    at = b_ptr + (row + side).to(gl.int64)[:, None] * D_B[0] + head * D_B[1] + channel[None, :]
    gl.store(at, (sum_b * scale).to(gl.bfloat16), mask=(side < rows)[:, None])


@gluon.jit(
    do_not_specialize=["count", "each", "strip_low", "head_low"],
    do_not_specialize_on_alignment=["table_ptr", "order_ptr"],
)
def product_gradient_gluon(
    tile_d, a_d, b_d, d_a_ptr, d_b_ptr, table_ptr, order_ptr, scale, count, each, strip_low, head_low,
    COLUMNS: gl.constexpr, D_A: gl.constexpr, D_B: gl.constexpr, QUERIES: gl.constexpr, STEP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """128 keys or queries of one head: both parts of their gradient, as `key_gradient_kernel`, `query_gradient_kernel`.

    a, b: parts of the queries for keys, of the keys for queries. Without cuts between key tiles.
    """
    io: gl.constexpr = gl.bfloat16
    SIZE: gl.constexpr = 128
    A: gl.constexpr = a_d.block_type.shape[1]
    B: gl.constexpr = b_d.block_type.shape[1]
    part = gl.program_id(0) // count
    head = head_low + part
    if QUERIES:
        entry = table_ptr + gl.program_id(0) % count * 10
        tile = part * each + gl.load(entry + 9) + gl.load(entry + 2) - strip_low
        first = 0
        rounds = gl.load(entry + 8)
        steps = gl.load(entry + 6) * (SIZE // STEP)
        source = gl.load(entry + 3)
        before = gl.load(entry + 7)
    else:
        entry = table_ptr + gl.load(order_ptr + gl.program_id(0) % count) * 8
        first = gl.load(entry + 5)
        tile = part * each + gl.load(entry + 6) - first - strip_low
        rounds = (gl.load(entry + 3) + SIZE - 1) // SIZE
        steps = gl.maximum(rounds - first, 0) * (SIZE // STEP)
        source = gl.load(entry + 2)
        before = rounds
    row = gl.load(entry)
    rows = gl.load(entry + 1)
    DOWN: gl.constexpr = STEP if QUERIES else SIZE
    ACROSS: gl.constexpr = SIZE if QUERIES else STEP
    tile_s = gl.allocate_shared_memory(io, [STAGES, DOWN, ACROSS], tile_d.layout)
    a_s = gl.allocate_shared_memory(io, [STAGES, STEP, A], a_d.layout)
    b_s = gl.allocate_shared_memory(io, [STAGES, STEP, B], b_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    descriptors = (tile_d, a_d, b_d)
    buffers = (tile_s, a_s, b_s)
    bars = (full, empty)
    place = (first, steps, source, head, tile, before, rounds)
    outputs = (d_a_ptr, d_b_ptr, row, rows, head)
    gl.warp_specialize(
        [
            (_consume_products, (buffers, bars, steps, outputs, scale, D_A, D_B, 0, QUERIES)),
            (_consume_products, (buffers, bars, steps, outputs, scale, D_A, D_B, 1, QUERIES)),
            (_bring_products, (descriptors, buffers, bars, place, COLUMNS, QUERIES)),
        ],
        [4, 1],
        [240, 24],
    )


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile for 96 heads of 128 + 64 and 128 channels."""
    options = settings()["scores"]
    shape = {name: options.pop(name) for name in ("STEP", "Q_STAGES", "O_STAGES")}
    step = shape["STEP"]
    given: dict[str, Any] = {"q_a_d": block_type((step, 128)), "q_b_d": block_type((step, 64))}
    given |= {"k_a_d": block_type((SIZE, 128)), "k_b_d": block_type((SIZE, 64)), "v_d": block_type((SIZE, 128))}
    given |= {"o_d": block_type((step, 128)), "tile_d": block_type((64, step))}
    given |= dict.fromkeys(("log_d", "delta_d"), block_type((1, step), torch.float32))
    given |= {"d_v_ptr": "*bf16", "key_ptr": "*i32:1", "order_ptr": "*i32:1", "scale": "fp32"}
    numbers = dict.fromkeys(("count", "each", "strip_low", "head_low"), "i32")
    columns = {"COLUMNS": (192, 256, 0, 256), "D_V": (96 * 256, 256)}
    cases = [(score_gradient_gluon, given | numbers | columns | shape, options)]
    options = settings()["products"]
    shape = {name: options.pop(name) for name in ("STEP", "STAGES")}
    step = shape["STEP"]
    common: dict[str, Any] = {"a_d": block_type((step, 128)), "b_d": block_type((step, 64)), "d_a_ptr": "*bf16"}
    common |= {"d_b_ptr": "*bf16", "table_ptr": "*i32:1", "scale": "fp32"} | numbers | shape
    keys = {"tile_d": block_type((SIZE, step)), "order_ptr": "*i32:1", "COLUMNS": (192, 192), "QUERIES": False}
    keys |= {"D_A": (96 * 256, 256), "D_B": (96 * 64, 64)}
    queries = {"tile_d": block_type((step, SIZE)), "order_ptr": None, "COLUMNS": (256, 0), "QUERIES": True}
    queries |= {"D_A": (96 * 192, 192), "D_B": (96 * 192, 192)}
    return [*cases, *((product_gradient_gluon, common | rest, options) for rest in (keys, queries))]
