"""Gluon kernel of causal attention for Hopper: the arithmetic of the Triton kernel, with the schedule written out.

One warp brings blocks of keys and values into rings of shared memory with the copy engine. Two warpgroups of consumers
take 64 query rows each. Within one, the product of a block's values runs while the next block's probabilities are made;
between them, one makes exponentials while the other multiplies. Blocks are taken from the diagonal back to the first
key, so that only the first ones need a mask.
"""

from typing import Any

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

ROWS = 128  # of queries: 64 for each of two warpgroups
GROUPS = 2


def settings() -> dict[str, int]:
    """Keys of a block, stages of the rings, whether warpgroups take turns, and launch options."""
    return {"BLOCK": 128, "STAGES": 2, "TURNS": 1, "num_warps": 4, "maxnreg": 168}


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def settled(x):
    """x >= 0 itself; what makes it stays before what follows in the machine code.

    The assembler would else wait for products in flight first, in whose shadow x is to be made. The fence never runs.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0fBF800000; @p membar.cta; mov.f32 $0, $1; }",
        "=f,f",
        [x],
        gl.float32,
        False,
        1,
    )


@gluon.jit
def _produce(descriptors, ring, bars, place, COLUMNS: gl.constexpr):
    """The copy warp: queries once, then keys and values from the last block to the first."""
    q_a_d, q_b_d, k_a_d, k_b_d, v_d = descriptors
    q_a_s, q_b_s, k_a_s, k_b_s, v_s = ring
    q_full, k_full, k_empty, v_full, v_empty, turn = bars
    start, key, head, blocks, past, rows = place
    STAGES: gl.constexpr = k_a_s.shape[0]
    BLOCK: gl.constexpr = k_a_s.shape[1]
    A: gl.constexpr = k_a_s.shape[2]
    B: gl.constexpr = k_b_s.shape[2]
    V: gl.constexpr = v_s.shape[2]
    mbarrier.expect(q_full, 2 * q_a_s.shape[0] * (A + B))
    tma.async_copy_global_to_shared(q_a_d, [start, head * COLUMNS[0]], q_full, q_a_s)
    tma.async_copy_global_to_shared(q_b_d, [start, head * COLUMNS[0]], q_full, q_b_s)
    for step in range(blocks + 1):
        if step < blocks:
            stage = step % STAGES
            row = key + (blocks - 1 - step) * BLOCK
            bar = k_full.index(stage)
            mbarrier.wait(k_empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 2 * BLOCK * (A + B))
            tma.async_copy_global_to_shared(k_a_d, [row, head * COLUMNS[1]], bar, k_a_s.index(stage))
            tma.async_copy_global_to_shared(k_b_d, [row, head * COLUMNS[2]], bar, k_b_s.index(stage))
        if step > 0:
            before = step - 1
            stage = before % STAGES
            row = key + (blocks - 1 - before) * BLOCK
            bar = v_full.index(stage)
            mbarrier.wait(v_empty.index(stage), ((before // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 2 * BLOCK * V)
            tma.async_copy_global_to_shared(v_d, [row, head * COLUMNS[3]], bar, v_s.index(stage))


@gluon.jit
def _scores(ring, k_full, step, zero, GROUP: gl.constexpr):
    """Start the products of a block's scores."""
    q_a_s, q_b_s, k_a_s, k_b_s, v_s = ring
    STAGES: gl.constexpr = k_a_s.shape[0]
    stage = step % STAGES
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    q_a = q_a_s.slice(GROUP * 64, 64, 0)
    q_b = q_b_s.slice(GROUP * 64, 64, 0)
    scores = warpgroup_mma(q_a, k_a_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(q_b, k_b_s.index(stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _hide(scores, first, row, column):
    """Scores of keys that a row does not see become -inf; row: the last key that it sees."""
    return gl.where((first + column)[None, :] <= row[:, None], scores, float("-inf"))


@gluon.jit
def _weigh(scores, peak, total, scale, MASKED: gl.constexpr):
    """Probabilities relative to the new maximum, new maximum and sum, and by how much what was summed shrinks."""
    new = gl.maximum(peak, gl.max(scores, 1))
    scaled = new * scale
    if MASKED:  # a row may not have seen any key yet
        scaled = gl.where(new == float("-inf"), 0.0, scaled)
    probs = _exp2(scores * scale - scaled[:, None])
    shrink = _exp2(peak * scale - scaled)
    return probs, new, total * shrink + gl.sum(probs, 1), shrink


@gluon.jit
def _step(
    state, ring, bars, step, place, scale, zero, last, column,
    GROUP: gl.constexpr, MASKED: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Scores of block `step` and values of the one before it."""
    probs, out, peak, total = state
    q_full, k_full, k_empty, v_full, v_empty, turn = bars
    q_a_s, q_b_s, k_a_s, k_b_s, v_s = ring
    start, key, head, blocks, past, rows = place
    STAGES: gl.constexpr = k_a_s.shape[0]
    BLOCK: gl.constexpr = k_a_s.shape[1]
    wide: gl.constexpr = out.type.layout
    before = step - 1
    if TURNS:
        mbarrier.wait(turn.index(GROUP), before & 1)
    scores = _scores(ring, k_full, step, zero, GROUP)
    mbarrier.wait(v_full.index(before % STAGES), (before // STAGES) & 1)
    out = warpgroup_mma(probs, v_s.index(before % STAGES), out, is_async=True)
    if TURNS:
        mbarrier.arrive(turn.index(1 - GROUP), count=1)
    scores = warpgroup_mma_wait(1, (scores,))
    mbarrier.arrive(k_empty.index(step % STAGES), count=1)
    if MASKED:
        scores = _hide(scores, (blocks - 1 - step) * BLOCK, last, column)
    exact, peak, total, shrink = _weigh(scores, peak, total, scale, MASKED)
    narrow = gl.convert_layout(exact.to(gl.bfloat16), gl.DotOperandLayout(0, wide, 2))
    total = settled(total)
    out, probs, total = warpgroup_mma_wait(0, (out, probs, total))
    mbarrier.arrive(v_empty.index(before % STAGES), count=1)
    out = out * gl.convert_layout(shrink, gl.SliceLayout(1, wide))[:, None]
    return narrow, out, peak, total


@gluon.jit
def _consume(
    ring, bars, place, outputs, scale, heads, tile, tiles,
    V: gl.constexpr, GROUP: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 query rows of one head."""
    q_a_s, q_b_s, k_a_s, k_b_s, v_s = ring
    q_full, k_full, k_empty, v_full, v_empty, turn = bars
    start, key, head, blocks, past, rows = place
    o_ptr, log_ptr, peak_ptr = outputs
    STAGES: gl.constexpr = k_a_s.shape[0]
    BLOCK: gl.constexpr = k_a_s.shape[1]
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    row = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, narrow))
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, narrow))
    zero = gl.zeros([64, BLOCK], gl.float32, layout=narrow)
    out = gl.zeros([64, V], gl.float32, layout=wide)
    peak = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, narrow))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, narrow))
    last = past + row
    masked = gl.maximum(blocks - (past + 1) // BLOCK, 1)  # of the blocks, counted from the last
    mbarrier.wait(q_full, 0)
    scores = warpgroup_mma_wait(0, (_scores(ring, k_full, 0, zero, GROUP),))
    mbarrier.arrive(k_empty.index(0), count=1)
    scores = _hide(scores, (blocks - 1) * BLOCK, last, column)
    exact, peak, total, shrink = _weigh(scores, peak, total, scale, True)
    probs = gl.convert_layout(exact.to(gl.bfloat16), gl.DotOperandLayout(0, wide, 2))
    if TURNS:
        if GROUP == 1:
            mbarrier.arrive(turn.index(0), count=1)
    state = (probs, out, peak, total)
    for step in range(1, masked):
        state = _step(state, ring, bars, step, place, scale, zero, last, column, GROUP, True, TURNS)
    for step in range(masked, blocks):
        state = _step(state, ring, bars, step, place, scale, zero, last, column, GROUP, False, TURNS)
    probs, out, peak, total = state
    final = blocks - 1
    mbarrier.wait(v_full.index(final % STAGES), (final // STAGES) & 1)
    out = warpgroup_mma(probs, v_s.index(final % STAGES), out, is_async=True)
    out, probs = warpgroup_mma_wait(0, (out, probs))
    live = row < rows
    share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, wide))
    line = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    channel = gl.arange(0, V, layout=gl.SliceLayout(0, wide))
    o_at = o_ptr + (start.to(gl.int64) * heads + head) * V + line[:, None] * (heads * V) + channel[None, :]
    gl.store(o_at, out * share[:, None], mask=(line < rows)[:, None])
    gl.store(log_ptr + row, peak * scale + gl.log2(total), mask=live)
    if peak_ptr is not None:
        largest = gl.max(gl.where(live, peak, float("-inf")), 0)
        gl.store(peak_ptr + (head * tiles + tile) * 2 + GROUP, largest)


@gluon.jit(do_not_specialize=["T", "heads", "tiles"], do_not_specialize_on_alignment=["tile_ptr"])
def attention_gluon(
    q_a_d, q_b_d, k_a_d, k_b_d, v_d, o_ptr, log_ptr, peak_ptr, tile_ptr, scale, T, heads, tiles,
    COLUMNS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """128 query rows of one head; as `attention_kernel`, with two largest products [H, tiles, 2].

    COLUMNS: from head to head in the rows of q, both key parts and v.
    """
    io: gl.constexpr = gl.bfloat16
    ROWS: gl.constexpr = q_a_d.block_type.shape[0]
    A: gl.constexpr = q_a_d.block_type.shape[1]
    B: gl.constexpr = q_b_d.block_type.shape[1]
    V: gl.constexpr = v_d.block_type.shape[1]
    tile = gl.program_id(0) % tiles
    head = gl.program_id(0) // tiles
    start = gl.load(tile_ptr + tile * 5)
    rows = gl.load(tile_ptr + tile * 5 + 1)
    key = gl.load(tile_ptr + tile * 5 + 2)
    past = gl.load(tile_ptr + tile * 5 + 3)
    line = gl.load(tile_ptr + tile * 5 + 4)
    blocks = (past + rows + BLOCK - 1) // BLOCK
    q_a_s = gl.allocate_shared_memory(io, [ROWS, A], q_a_d.layout)
    q_b_s = gl.allocate_shared_memory(io, [ROWS, B], q_b_d.layout)
    k_a_s = gl.allocate_shared_memory(io, [STAGES, BLOCK, A], k_a_d.layout)
    k_b_s = gl.allocate_shared_memory(io, [STAGES, BLOCK, B], k_b_d.layout)
    v_s = gl.allocate_shared_memory(io, [STAGES, BLOCK, V], v_d.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    mbarrier.init(turn.index(0), count=1)
    mbarrier.init(turn.index(1), count=1)
    fence_async_shared()
    descriptors = (q_a_d, q_b_d, k_a_d, k_b_d, v_d)
    ring = (q_a_s, q_b_s, k_a_s, k_b_s, v_s)
    bars = (q_full, k_full, k_empty, v_full, v_empty, turn)
    place = (start, key, head, blocks, past, rows)
    outputs = (o_ptr, log_ptr + head.to(gl.int64) * T + line, peak_ptr)
    gl.warp_specialize(
        [
            (_consume, (ring, bars, place, outputs, scale, heads, tile, tiles, V, 0, TURNS)),
            (_consume, (ring, bars, place, outputs, scale, heads, tile, tiles, V, 1, TURNS)),
            (_produce, (descriptors, ring, bars, place, COLUMNS)),
        ],
        [4, 1],
        [240, 24],
    )


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles for 96 heads of 128 + 64 and 128 channels."""
    options = settings()
    shape = {name: options.pop(name) for name in ("BLOCK", "STAGES", "TURNS")}
    block = shape["BLOCK"]
    given: dict[str, Any] = {"q_a_d": block_type((ROWS, 128)), "q_b_d": block_type((ROWS, 64))}
    given |= {"k_a_d": block_type((block, 128)), "k_b_d": block_type((block, 64)), "v_d": block_type((block, 128))}
    given |= {"o_ptr": "*fp32", "log_ptr": "*fp32", "peak_ptr": "*fp32", "tile_ptr": "*i32:1", "scale": "fp32"}
    given |= {"T": "i32", "heads": "i32", "tiles": "i32", "COLUMNS": (192, 256, 0, 256)}
    return [(attention_gluon, given | shape, options)]
