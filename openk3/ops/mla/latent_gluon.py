"""Gluon kernel of attention over cached latents for Hopper: the arithmetic of the Triton kernel, scheduled by hand.

A copy warp brings blocks of 64 keys, a third of their channels at a time, into a ring of shared memory. A warpgroup of
consumers takes 32 rows (16 if there are no more), and there are two of them if there are more rows: its scores are
[keys, rows], and its context lies in eight accumulators of [64 channels, rows], so both products take the same latents
as their left operand, once as they lie and once turned. Two warpgroups take turns at starting products, half a block
apart: while one makes probabilities, the other multiplies.
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

BLOCK = 64  # keys
CHANNELS = 512  # of a latent, in eight pieces; the shared key is one more


def settings(rows: int) -> dict[str, int]:
    """Rows of each warpgroup (there may be no second), slots of the ring (a third of a block each), launch options.

    Several programs that share the rows read the same latents at about the same time, from L2 but once: an even number
    of 32 rows goes by 64 to a program; few odd ones by 32, which is faster than a program that is half empty.
    """
    if rows <= 32:
        first, second = (16 if rows <= 16 else 32), 0
    elif rows <= 64:
        first, second = 32, (16 if rows <= 48 else 32)
    else:
        first, second = 32, (32 if -(-rows // 32) % 2 == 0 or rows > 320 else 0)
    slots = (230_000 - (first + second) * 2 * (CHANNELS + 2 * BLOCK)) // (3 * 2 * BLOCK * 64)
    return {"FIRST": first, "SECOND": second, "SLOTS": slots, "num_warps": 4, "maxnreg": 168 if second else 136}


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _afresh(x):
    """The same number, but the compiler does not see that: addresses made of it are not kept in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def _request_of(before_ptr, N, block):
    """The request that a block belongs to: the last n with before[n] <= block."""
    low = gl.to_tensor(0)
    high = N
    while low + 1 < high:
        middle = (low + high) // 2
        after = gl.load(before_ptr + middle) > block
        low = gl.where(after, low, middle)
        high = gl.where(after, middle, high)
    return low


@gluon.jit
def _produce(latent_d, ring_s, full, empty, page_ptr, before_ptr, place, PAGE: gl.constexpr):
    """The copy warp: of each block first the shared key and two pieces of the latent, then three, then three."""
    N, page_row, block, last, n = place
    SLOTS: gl.constexpr = full.shape[0]
    BLOCK: gl.constexpr = ring_s.shape[2]
    step = gl.to_tensor(0)
    while block < last:
        begin = gl.load(before_ptr + n)
        end = gl.load(before_ptr + n + 1)
        stop = gl.minimum(end, last)
        for j in range(block, stop):
            key = (j - begin) * BLOCK
            page = gl.load(page_ptr + n * page_row + key // PAGE)
            token = key % PAGE
            for third in gl.static_range(3):
                slot = step % SLOTS
                bar = full.index(slot)
                mbarrier.wait(empty.index(slot), ((step // SLOTS) & 1) ^ 1)
                mbarrier.expect(bar, 3 * 2 * BLOCK * 64)
                for piece in gl.static_range(3):
                    column = (3 * third + piece + 8) % 9 * 64
                    buffer = ring_s.index(slot * 3 + piece)
                    tma.async_copy_global_to_shared(latent_d, [page, token, column], bar, buffer)
                step += 1
        block = gl.maximum(stop, block)
        n += 1


@gluon.jit
def _load_queries(q_latent_ptr, q_shared_ptr, q_s, origin, head, live, Q_STRIDES: gl.constexpr):
    """A warpgroup's rows into shared memory, 64 channels at a time; zeros where there is no row."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    channel = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    shared = q_shared_ptr + (origin * Q_STRIDES[2] + head * Q_STRIDES[3])[:, None] + channel[None, :]
    latent = q_latent_ptr + (origin * Q_STRIDES[0] + head * Q_STRIDES[1])[:, None] + channel[None, :]
    q_s.index(0).store(gl.load(shared, mask=live[:, None], other=0.0))
    for piece in gl.static_range(8):
        q_s.index(piece + 1).store(gl.load(latent + piece * 64, mask=live[:, None], other=0.0))
    fence_async_shared()


@gluon.jit
def _wipe(ring_s, slot, valid, SLOTS: gl.constexpr):
    """Make rows from `valid` on zero in the eight pieces of a latent: nobody wrote there, and 0 * NaN is NaN.

    All warpgroups do the same; where others read meanwhile, what they read there does not count.
    """
    BLOCK: gl.constexpr = ring_s.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    for piece in gl.static_range(1, 9):
        buffer = ring_s.index((slot + piece // 3) % SLOTS * 3 + piece % 3).reshape([BLOCK, 64])
        values = buffer.load(layout)
        buffer.store(gl.where((row < valid)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def _scores(ring_s, q_s, full, step, zero, SLOTS: gl.constexpr, WAIT: gl.constexpr):
    """Start the products of a block's scores: nine pieces, as they arrive, or when all are there."""
    BLOCK: gl.constexpr = ring_s.shape[2]
    scores = zero
    mine = _afresh(gl.to_tensor(0))
    for third in gl.static_range(3):
        slot = (step + third) % SLOTS
        if WAIT:
            mbarrier.wait(full.index(slot), ((step + third) // SLOTS) & 1)
        for piece in gl.static_range(3):
            keys = ring_s.index(slot * 3 + piece).reshape([BLOCK, 64])
            queries = q_s.index(mine + 3 * third + piece).permute((1, 0))
            scores = warpgroup_mma(keys, queries, scores, use_acc=third + piece > 0, is_async=True)
    return scores


@gluon.jit
def _values(ring_s, slot, piece: gl.constexpr, probs_s, context, SLOTS: gl.constexpr):
    """Piece 1 to 8 of the latents, turned, times probabilities."""
    BLOCK: gl.constexpr = ring_s.shape[2]
    keys = ring_s.index((slot + piece // 3) % SLOTS * 3 + piece % 3).reshape([BLOCK, 64])
    return warpgroup_mma(keys.permute((1, 0)), probs_s, context, is_async=True)


@gluon.jit
def _step(
    state, buffers, bars, step, at, rows, scale, zero,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """A block of keys, from token `at` of the request on; LAST: not every row sees all of them."""
    ring_s, q_s, probs_s = buffers
    full, empty, turn = bars
    peak, sums, c0, c1, c2, c3, c4, c5, c6, c7 = state
    row, first, heads, length, new = rows
    SLOTS: gl.constexpr = full.shape[0]
    BLOCK: gl.constexpr = ring_s.shape[2]
    slot = step % SLOTS
    if GROUPS == 2:
        for third in gl.static_range(3):
            mbarrier.wait(full.index((step + third) % SLOTS), ((step + third) // SLOTS) & 1)
        mbarrier.wait(turn.index(GROUP), 1)
    scores = _scores(ring_s, q_s, full, step, zero, SLOTS, GROUPS == 1)
    if GROUPS == 2:
        mbarrier.arrive(turn.index(1 - GROUP), count=1)
    scores = warpgroup_mma_wait(0, (scores,))
    if LAST:
        seen = length - new + 1 + gl.minimum((row + first) // heads, new - 1)
        key = at + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, zero.type.layout))
        scores = gl.where(key[:, None] < seen[None, :], scores, float("-inf"))
    largest = gl.maximum(peak, gl.max(scores, 0))
    base = largest * scale
    if LAST:
        base = gl.where(largest == float("-inf"), 0.0, base)
    probs = _exp2(scores * scale - base[None, :])
    shrink = _exp2(peak * scale - base)
    sums = sums * shrink + gl.sum(probs, 0)
    probs_s.store(probs.to(gl.bfloat16))
    if LAST:
        _wipe(ring_s, slot, length - at, SLOTS)
    fence_async_shared()
    if GROUPS == 2:
        mbarrier.wait(turn.index(GROUP), 0)
    c0 = _values(ring_s, slot, 1, probs_s, c0 * shrink[None, :], SLOTS)
    c1 = _values(ring_s, slot, 2, probs_s, c1 * shrink[None, :], SLOTS)
    c2 = _values(ring_s, slot, 3, probs_s, c2 * shrink[None, :], SLOTS)
    c3 = _values(ring_s, slot, 4, probs_s, c3 * shrink[None, :], SLOTS)
    c4 = _values(ring_s, slot, 5, probs_s, c4 * shrink[None, :], SLOTS)
    c5 = _values(ring_s, slot, 6, probs_s, c5 * shrink[None, :], SLOTS)
    c6 = _values(ring_s, slot, 7, probs_s, c6 * shrink[None, :], SLOTS)
    c7 = _values(ring_s, slot, 8, probs_s, c7 * shrink[None, :], SLOTS)
    if GROUPS == 2:
        mbarrier.arrive(turn.index(1 - GROUP), count=1)
    c0, c1 = warpgroup_mma_wait(6, (c0, c1))
    mbarrier.arrive(empty.index(slot), count=1)
    c2, c3, c4 = warpgroup_mma_wait(3, (c2, c3, c4))
    mbarrier.arrive(empty.index((step + 1) % SLOTS), count=1)
    c5, c6, c7 = warpgroup_mma_wait(0, (c5, c6, c7))
    mbarrier.arrive(empty.index((step + 2) % SLOTS), count=1)
    return largest, sums, c0, c1, c2, c3, c4, c5, c6, c7


@gluon.jit
def _put(contexts, share, pointer, row, live, C: gl.constexpr):
    """Write eight pieces of contexts [64, rows] to rows of C values."""
    layout: gl.constexpr = contexts[0].type.layout
    channel = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    at = pointer + row[None, :] * C + channel[:, None]
    for piece in gl.static_range(8):
        gl.store(at + piece * 64, contexts[piece] * share[None, :], mask=live[None, :])


@gluon.jit
def _put_logs(log, pointer, row, zero):
    """Write a number for each row, by the threads that hold channel 0: so no register says all along which they are."""
    channel = gl.arange(0, 64, layout=gl.SliceLayout(1, zero.type.layout))[:, None]
    gl.store(pointer + row[None, :] + channel * 0, log[None, :] + zero, mask=(channel == 0) & (row >= 0)[None, :])


@gluon.jit
def _consume(
    buffers, bars, inputs, outputs, work,
    Q_STRIDES: gl.constexpr, FIRST: gl.constexpr, TOTAL: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its rows of all requests of a run, from row FIRST on of a program's TOTAL."""
    ring_s, q_s, probs_s = buffers
    full, empty, turn = bars
    place, scale, heads, part, runs, run = work
    q_latent_ptr, q_shared_ptr, length_ptr, cu_ptr, before_ptr = inputs
    out_ptr, part_ptr, log_ptr = outputs
    N, page_row, block, last, n = place
    BLOCK: gl.constexpr = ring_s.shape[2]
    ROWS: gl.constexpr = q_s.shape[1]
    C: gl.constexpr = 512
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    lines: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    zero = gl.zeros([64, ROWS], gl.float32, layout=layout)
    first = part * TOTAL + FIRST
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    line = first + gl.arange(0, ROWS, layout=lines)
    step = gl.to_tensor(0)
    some = block < last
    if GROUPS == 2:
        if GROUP == 1:
            if some:  # the second one's turns are one ahead: it begins when the first one has had two
                mbarrier.wait(turn.index(1), 0)
                mbarrier.arrive(turn.index(0), count=1)
    while block < last:
        begin = gl.load(before_ptr + n)
        end = gl.load(before_ptr + n + 1)
        stop = gl.minimum(end, last)
        start = gl.load(cu_ptr + n)
        new = gl.load(cu_ptr + n + 1) - start
        length = gl.load(length_ptr + n)
        if stop > block:
            origin = (start + line // heads).to(gl.int64)
            there = line // heads < new
            _load_queries(q_latent_ptr, q_shared_ptr, q_s, origin, line % heads, there, Q_STRIDES)
        peak = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, layout))
        sums = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(0, layout))
        state = (peak, sums, zero, zero, zero, zero, zero, zero, zero, zero)
        whole = gl.minimum(begin + (length - new + 1) // BLOCK, stop)  # blocks that every row sees
        rows = (row, first, heads, length, new)
        for j in range(block, whole):
            state = _step(state, buffers, bars, step, (j - begin) * BLOCK, rows, scale, zero, GROUP, GROUPS, False)
            step += 3
        for j in range(gl.maximum(whole, block), stop):
            state = _step(state, buffers, bars, step, (j - begin) * BLOCK, rows, scale, zero, GROUP, GROUPS, True)
            step += 3
        peak, sums, c0, c1, c2, c3, c4, c5, c6, c7 = state
        if stop > block:
            share = 1.0 / gl.where(sums == 0.0, 1.0, sums)
            contexts = (c0, c1, c2, c3, c4, c5, c6, c7)
            start = gl.load(cu_ptr + n)  # once more, not kept in registers meanwhile
            mine = row + first
            live = mine // heads < gl.load(cu_ptr + n + 1) - start
            if (gl.load(before_ptr + n) == block) & (stop == gl.load(before_ptr + n + 1)):
                _put(contexts, share, out_ptr, (start * heads + mine).to(gl.int64), live, C)
            else:
                slot_row = (part * (_afresh(runs) + N) + run + n).to(gl.int64) * TOTAL + FIRST + row
                _put(contexts, share, part_ptr, slot_row, live, C)
                _put_logs(gl.where(sums == 0.0, float("-inf"), peak * scale + gl.log2(sums)), log_ptr, slot_row, zero)
        block = gl.maximum(stop, block)
        n += 1
    if GROUPS == 2:
        if GROUP == 0:
            if some:  # the second one's last turn, not before it has had the one before
                mbarrier.wait(turn.index(0), 1)
                mbarrier.arrive(turn.index(1), count=1)


@gluon.jit(
    do_not_specialize=["N", "heads", "page_row", "runs", "parts"],
    do_not_specialize_on_alignment=["length_ptr", "cu_ptr", "before_ptr", "page_ptr"],
)
def latent_gluon(
    latent_d, q_latent_ptr, q_shared_ptr, page_ptr, length_ptr, cu_ptr, before_ptr, out_ptr, part_ptr, log_ptr,
    scale, N, heads, page_row, runs, parts,
    Q_STRIDES: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, PAGE: gl.constexpr,
    SLOTS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """As `latent_kernel`, with FIRST + SECOND rows a program; latents of 512 + 64 values in pages of whole blocks.

    SPLIT: there may be more than one part; else no register holds which it is.
    """
    io: gl.constexpr = gl.bfloat16
    BLOCK: gl.constexpr = latent_d.block_type.shape[1]
    part = gl.program_id(0) % (parts if SPLIT else 1)
    run = gl.program_id(0) // (parts if SPLIT else 1)
    before_ptr += part * (N + 1)
    total = gl.load(before_ptr + N).to(gl.int64)
    used = gl.maximum(gl.minimum(total, runs), 1)  # each of these has a block at least
    block = (gl.minimum(run, used) * total // used).to(gl.int32)
    last = (gl.minimum(run + 1, used) * total // used).to(gl.int32)
    n = _request_of(before_ptr, N, block)
    GROUPS: gl.constexpr = 1 if SECOND == 0 else 2
    pieces: gl.constexpr = gl.NVMMASharedLayout.get_default_for([FIRST, 64], io)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, FIRST], io)
    ring_s = gl.allocate_shared_memory(io, [3 * SLOTS, 1, BLOCK, 64], latent_d.layout)
    q_s = gl.allocate_shared_memory(io, [9, FIRST, 64], pieces)
    probs_s = gl.allocate_shared_memory(io, [BLOCK, FIRST], narrow)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    turn = empty
    if GROUPS == 2:
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(turn.index(0), count=1)
        mbarrier.init(turn.index(1), count=1)
    fence_async_shared()
    inputs = (q_latent_ptr, q_shared_ptr, length_ptr, cu_ptr, before_ptr)
    outputs = (out_ptr, part_ptr, log_ptr)
    place = (N, page_row, block, last, n)
    buffers = (ring_s, q_s, probs_s)
    bars = (full, empty, turn)
    work = (place, scale, heads, part, runs, run)
    if SECOND == 0:
        gl.warp_specialize(
            [
                (_consume, (buffers, bars, inputs, outputs, work, Q_STRIDES, 0, FIRST, 0, 1)),
                (_produce, (latent_d, ring_s, full, empty, page_ptr, before_ptr, place, PAGE)),
            ],
            [1],
            [24],
        )
    else:
        pieces2: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SECOND, 64], io)
        narrow2: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, SECOND], io)
        q2_s = gl.allocate_shared_memory(io, [9, SECOND, 64], pieces2)
        probs2_s = gl.allocate_shared_memory(io, [BLOCK, SECOND], narrow2)
        buffers2 = (ring_s, q2_s, probs2_s)
        gl.warp_specialize(
            [
                (_consume, (buffers, bars, inputs, outputs, work, Q_STRIDES, 0, FIRST + SECOND, 0, 2)),
                (_consume, (buffers2, bars, inputs, outputs, work, Q_STRIDES, FIRST, FIRST + SECOND, 1, 2)),
                (_produce, (latent_d, ring_s, full, empty, page_ptr, before_ptr, place, PAGE)),
            ],
            [4, 1],
            [240, 24],
        )


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles for 96, 64, 48, 24 and 8 heads."""
    cases = []
    for heads in (96, 64, 48, 24, 8):
        options = settings(heads)
        shape = {name: options.pop(name) for name in ("FIRST", "SECOND", "SLOTS")}
        given: dict[str, Any] = {"latent_d": block_type((1, BLOCK, 64))}
        given |= {"q_latent_ptr": "*bf16", "q_shared_ptr": "*bf16"}
        given |= {f"{name}_ptr": "*i32:1" for name in ("page", "length", "cu", "before")}
        given |= {f"{name}_ptr": "*fp32" for name in ("out", "part", "log")} | {"scale": "fp32"}
        given |= {
            "N": "i32",
            "heads": "i32",
            "page_row": "i32",
            "runs": "i32",
            "parts": "i32",
            "Q_STRIDES": (heads * 512, 512, heads * 192, 192),
        }
        given |= {"PAGE": 6144, "SPLIT": heads > shape["FIRST"] + shape["SECOND"]}
        cases.append((latent_gluon, given | shape, options))
    return cases
