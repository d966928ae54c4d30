"""Gluon kernel of attention over cached latents for Hopper, for 33 to 48 rows at a time: two blocks of keys at once.

Two warpgroups share the rows. Each makes the scores [keys, 64 rows] of a block of its own, tells the other its largest
ones, and makes probabilities, which both read from shared memory; then each sums half of the channels, of both blocks.
So every latent is read from shared memory twice for all rows, and products of 64 rows keep the tensor cores busy. Rows
behind the 48th are whatever lies there and are dropped.
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
ROWS = 48


def settings() -> dict[str, int]:
    """Launch options."""
    return {"num_warps": 4, "maxnreg": 168}


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
def _bring(latent_d, ring_s, bars, pair, there, page, token, HALF: gl.constexpr, I: gl.constexpr):
    """The shared key (first) or two pieces of a block's latents; if it is missing it is said to be there.

    The order is that in which pieces get free: one half of the channels for each warpgroup.
    """
    full, empty = bars
    BLOCK: gl.constexpr = ring_s.shape[2]
    part: gl.constexpr = I + (I == 2) - (I == 3)
    bar = full.index(HALF * 5 + part)
    mbarrier.wait(empty.index(HALF * 5 + part), (pair & 1) ^ 1)
    if there:
        mbarrier.expect(bar, (2 if part else 1) * 2 * BLOCK * 64)
        if part == 0:
            tma.async_copy_global_to_shared(latent_d, [page, token, 512], bar, ring_s.index(HALF * 9))
        else:
            for k in gl.static_range(2):
                buffer = ring_s.index(HALF * 9 + 2 * part - 1 + k)
                tma.async_copy_global_to_shared(latent_d, [page, token, (2 * part - 2 + k) * 64], bar, buffer)
    else:
        mbarrier.arrive(bar, count=1)


@gluon.jit
def _produce(latent_d, ring_s, bars, page_ptr, before_ptr, place, PAGE: gl.constexpr):
    """The copy warp: a fifth of one block, a fifth of the other."""
    N, page_row, block, last, n = place
    BLOCK: gl.constexpr = ring_s.shape[2]
    pair = gl.to_tensor(0)
    while block < last:
        begin = gl.load(before_ptr + n)
        end = gl.load(before_ptr + n + 1)
        stop = gl.minimum(end, last)
        for j in range(block, stop, 2):
            first = (j - begin) * BLOCK
            second = (gl.minimum(j + 1, stop - 1) - begin) * BLOCK
            page_0 = gl.load(page_ptr + n * page_row + first // PAGE)
            page_1 = gl.load(page_ptr + n * page_row + second // PAGE)
            for i in gl.static_range(5):
                _bring(latent_d, ring_s, bars, pair, True, page_0, first % PAGE, 0, i)
                _bring(latent_d, ring_s, bars, pair, j + 1 < stop, page_1, second % PAGE, 1, i)
            pair += 1
        block = gl.maximum(stop, block)
        n += 1


@gluon.jit
def _load_queries(
    q_latent_ptr, q_shared_ptr, q_s, start, new, heads, first, Q_STRIDES: gl.constexpr, GROUP: gl.constexpr
):
    """Half of the pieces of 48 rows into shared memory, one behind the other; zeros where there is no row."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    channel = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    for slab in gl.static_range(3):
        line = first + slab * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
        live = line // heads < new
        origin = (start + line // heads).to(gl.int64)
        head = line % heads
        if GROUP == 0:
            shared = q_shared_ptr + (origin * Q_STRIDES[2] + head * Q_STRIDES[3])[:, None] + channel[None, :]
            q_s.index(slab).store(gl.load(shared, mask=live[:, None], other=0.0))
        latent = q_latent_ptr + (origin * Q_STRIDES[0] + head * Q_STRIDES[1])[:, None] + channel[None, :]
        for k in gl.static_range(4):
            values = gl.load(latent + (4 * GROUP + k) * 64, mask=live[:, None], other=0.0)
            q_s.index(3 * (4 * GROUP + k + 1) + slab).store(values)
    fence_async_shared()


@gluon.jit
def _wipe(ring_s, valid, GROUP: gl.constexpr):
    """Make rows from `valid` on of a block's latents zero: nobody wrote there, and 0 * NaN is NaN."""
    BLOCK: gl.constexpr = ring_s.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    mine = _afresh(gl.to_tensor(0))
    for piece in gl.static_range(1, 9):
        buffer = ring_s.index(mine + GROUP * 9 + piece).reshape([BLOCK, 64])
        values = buffer.load(layout)
        buffer.store(gl.where((row < valid)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _score(ring_s, q_s, scores, piece: gl.constexpr, GROUP: gl.constexpr):
    """Start a product of 64 channels."""
    BLOCK: gl.constexpr = ring_s.shape[2]
    rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], q_s.dtype)
    mine = _afresh(gl.to_tensor(0))
    keys = ring_s.index(mine + GROUP * 9 + piece).reshape([BLOCK, 64])
    queries = q_s.index(mine + 3 * piece)._reinterpret(q_s.dtype, [64, 64], rows).permute((1, 0))
    return warpgroup_mma(keys, queries, scores, use_acc=piece > 0, is_async=True)


@gluon.jit
def _scores(ring_s, q_s, full, empty, pair, zero, GROUP: gl.constexpr):
    """Scores of this warpgroup's block: nine pieces, as they arrive."""
    parity = pair & 1
    mbarrier.wait(full.index(GROUP * 5), parity)
    scores = _score(ring_s, q_s, zero, 0, GROUP)
    for k in gl.static_range(2):
        mbarrier.wait(full.index(GROUP * 5 + 1 + k), parity)
        scores = _score(ring_s, q_s, scores, 1 + 2 * k, GROUP)
        scores = _score(ring_s, q_s, scores, 2 + 2 * k, GROUP)
        mbarrier.wait(full.index(GROUP * 5 + 3 + k), parity)
        scores = _score(ring_s, q_s, scores, 5 + 2 * k, GROUP)
        scores = _score(ring_s, q_s, scores, 6 + 2 * k, GROUP)
    scores = warpgroup_mma_wait(0, (scores,))
    mbarrier.arrive(empty.index(GROUP * 5), count=1)
    return scores


@gluon.jit
def _values(ring_s, probs_s, piece: gl.constexpr, context):
    """A piece of both blocks' latents, turned, times probabilities."""
    BLOCK: gl.constexpr = ring_s.shape[2]
    mine = _afresh(gl.to_tensor(0))
    for half in gl.static_range(2):
        keys = ring_s.index(mine + half * 9 + piece).reshape([BLOCK, 64])
        context = warpgroup_mma(keys.permute((1, 0)), probs_s.index(half), context, is_async=True)
    return context


@gluon.jit
def _step(state, buffers, bars, pair, at, limit, length, scale, zero, GROUP: gl.constexpr, LAST: gl.constexpr):
    """Two blocks of keys, from token `at` of the request on; LAST: not every row sees all that lie before `limit`."""
    ring_s, q_s, probs_s, peaks_s, sums_s, seen_s, past_s = buffers
    full, empty, meet = bars
    c0, c1, c2, c3 = state
    BLOCK: gl.constexpr = ring_s.shape[2]
    scores = _scores(ring_s, q_s, full, empty, pair, zero, GROUP)
    mine = _afresh(gl.to_tensor(0))
    if LAST:
        seen = gl.minimum(seen_s.index(mine + GROUP).load(gl.SliceLayout(0, zero.type.layout)), limit)
        key = at + GROUP * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, zero.type.layout))
        scores = gl.where(key[:, None] < seen[None, :], scores, float("-inf"))
    local = gl.max(scores, 0)
    peaks_s.index(mine + GROUP).store(local)
    mbarrier.arrive(meet, count=1)
    mbarrier.wait(meet, 1)
    past = past_s.index(mine + GROUP)
    peak = past.load(local.type.layout)
    largest = gl.maximum(peak, gl.maximum(local, peaks_s.index(mine + 1 - GROUP).load(local.type.layout)))
    base = largest * scale
    if LAST:
        base = gl.where(largest == float("-inf"), 0.0, base)
    probs = _exp2(scores * scale - base[None, :])
    probs_s.index(mine + GROUP).store(probs.to(gl.bfloat16))
    if LAST:
        _wipe(ring_s, gl.minimum(length, limit) - at - GROUP * BLOCK, GROUP)
    fence_async_shared()
    mbarrier.arrive(meet, count=1)
    shrink = _exp2(peak * scale - base)
    past.store(largest)
    c0 = c0 * shrink[None, :]
    c1 = c1 * shrink[None, :]
    c2 = c2 * shrink[None, :]
    c3 = c3 * shrink[None, :]
    mbarrier.wait(meet, 0)
    c0 = _values(ring_s, probs_s, 4 * GROUP + 1, c0)
    c1 = _values(ring_s, probs_s, 4 * GROUP + 2, c1)
    c2 = _values(ring_s, probs_s, 4 * GROUP + 3, c2)
    c3 = _values(ring_s, probs_s, 4 * GROUP + 4, c3)
    kept = sums_s.index(mine + GROUP)
    kept.store(kept.load(local.type.layout) * shrink + gl.sum(probs, 0))
    c0, c1 = warpgroup_mma_wait(4, (c0, c1))
    mbarrier.arrive(empty.index(2 * GROUP + 1), count=1)
    mbarrier.arrive(empty.index(2 * GROUP + 6), count=1)
    c2, c3 = warpgroup_mma_wait(0, (c2, c3))
    mbarrier.arrive(empty.index(2 * GROUP + 2), count=1)
    mbarrier.arrive(empty.index(2 * GROUP + 7), count=1)
    return c0, c1, c2, c3


@gluon.jit
def _put(contexts, share, pointer, count, GROUP: gl.constexpr):
    """Write four pieces of contexts [64, rows] to so many rows of 512 values."""
    layout: gl.constexpr = contexts[0].type.layout
    channel = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    at = row[None, :] * 512 + channel[:, None]
    for piece in gl.static_range(4):
        values = contexts[piece] * share[None, :]
        gl.store(pointer + (GROUP * 256 + piece * 64) + at, values, mask=(row < count)[None, :])


@gluon.jit
def _put_logs(log, pointer, zero):
    """Write a number for each row, by the threads that hold channel 0: so no register says all along which they are."""
    channel = gl.arange(0, 64, layout=gl.SliceLayout(1, zero.type.layout))[:, None]
    row = gl.arange(0, 64, layout=gl.SliceLayout(0, zero.type.layout))[None, :]
    gl.store(pointer + row + channel * 0, log[None, :] + zero, mask=(channel == 0) & (row < 48))


@gluon.jit
def _consume(buffers, bars, inputs, outputs, work, Q_STRIDES: gl.constexpr, GROUP: gl.constexpr):
    """A warpgroup: a block of every two, and half of the channels of all rows, of all requests of a run."""
    ring_s, q_s, probs_s, peaks_s, sums_s, seen_s, past_s = buffers
    full, empty, meet = bars
    place, scale, heads, part, runs, run = work
    q_latent_ptr, q_shared_ptr, length_ptr, cu_ptr, before_ptr = inputs
    out_ptr, part_ptr, log_ptr = outputs
    N, page_row, block, last, n = place
    BLOCK: gl.constexpr = ring_s.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    lines: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    zero = gl.zeros([64, 64], gl.float32, layout=layout)
    pair = gl.to_tensor(0)
    while block < last:
        begin = gl.load(before_ptr + n)
        end = gl.load(before_ptr + n + 1)
        stop = gl.minimum(end, last)
        start = gl.load(cu_ptr + n)
        new = gl.load(cu_ptr + n + 1) - start
        length = gl.load(length_ptr + n)
        if stop > block:
            fresh = _afresh(heads)
            _load_queries(q_latent_ptr, q_shared_ptr, q_s, start, new, fresh, _afresh(part * 48), Q_STRIDES, GROUP)
            mbarrier.arrive(meet, count=1)
            each = gl.arange(0, 64, layout=lines)
            token = (_afresh(part * 48) + each) // fresh
            seen = gl.where((each < 48) & (token < new), length - new + 1 + token, 0)
            seen_s.index(GROUP).store(seen)
            mbarrier.wait(meet, 0)
            past_s.index(GROUP).store(gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(0, layout)))
            sums_s.index(GROUP).store(gl.zeros([64], gl.float32, layout=gl.SliceLayout(0, layout)))
        state = (zero, zero, zero, zero)
        limit = (stop - begin) * BLOCK
        whole = gl.minimum(begin + (length - new + 1) // BLOCK, stop)  # blocks that every row sees
        even = block + gl.maximum(whole - block, 0) // 2 * 2
        for j in range(block, even, 2):
            state = _step(state, buffers, bars, pair, (j - begin) * BLOCK, limit, length, scale, zero, GROUP, False)
            pair += 1
        for j in range(even, stop, 2):
            state = _step(state, buffers, bars, pair, (j - begin) * BLOCK, limit, length, scale, zero, GROUP, True)
            pair += 1
        c0, c1, c2, c3 = state
        if stop > block:
            mbarrier.arrive(meet, count=1)
            mbarrier.wait(meet, 1)
            sums = sums_s.index(0).load(gl.SliceLayout(0, layout)) + sums_s.index(1).load(gl.SliceLayout(0, layout))
            share = 1.0 / gl.where(sums == 0.0, 1.0, sums)
            contexts = (c0, c1, c2, c3)
            m = _afresh(n)
            start = gl.load(cu_ptr + m)  # once more, not kept in registers meanwhile
            count = gl.minimum((gl.load(cu_ptr + m + 1) - start) * heads - part * 48, 48)
            if (gl.load(before_ptr + m) == block) & (stop == gl.load(before_ptr + m + 1)):
                _put(contexts, share, out_ptr + (start * heads + part * 48).to(gl.int64) * 512, count, GROUP)
            else:
                first = (part * (_afresh(runs) + N) + run + m).to(gl.int64) * 48
                _put(contexts, share, part_ptr + first * 512, count, GROUP)
                if GROUP == 0:
                    peak = past_s.index(0).load(gl.SliceLayout(0, layout))
                    logs = gl.where(sums == 0.0, float("-inf"), peak * scale + gl.log2(sums))
                    _put_logs(logs, log_ptr + first, zero)
        block = gl.maximum(stop, block)
        n += 1


@gluon.jit(
    do_not_specialize=["N", "heads", "page_row", "runs"],
    do_not_specialize_on_alignment=["length_ptr", "cu_ptr", "before_ptr", "page_ptr"],
)
def latent_pair_gluon(
    latent_d, q_latent_ptr, q_shared_ptr, page_ptr, length_ptr, cu_ptr, before_ptr, out_ptr, part_ptr, log_ptr,
    scale, N, heads, page_row, runs,
    Q_STRIDES: gl.constexpr, PARTS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """As `latent_kernel`, with 48 rows a program; latents of 512 + 64 values in pages of whole blocks."""
    io: gl.constexpr = gl.bfloat16
    BLOCK: gl.constexpr = latent_d.block_type.shape[1]
    part = gl.program_id(0) % PARTS
    run = gl.program_id(0) // PARTS
    before_ptr += part * (N + 1)
    total = gl.load(before_ptr + N).to(gl.int64)
    used = gl.maximum(gl.minimum(total, runs), 1)  # each of these has a block at least
    block = (gl.minimum(run, used) * total // used).to(gl.int32)
    last = (gl.minimum(run + 1, used) * total // used).to(gl.int32)
    n = _request_of(before_ptr, N, block)
    slab: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, 64], io)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, 64], io)
    ring_s = gl.allocate_shared_memory(io, [18, 1, BLOCK, 64], latent_d.layout)
    q_s = gl.allocate_shared_memory(io, [28, 16, 64], slab)  # nine pieces of 48 rows; products read 16 rows more
    probs_s = gl.allocate_shared_memory(io, [2, BLOCK, 64], square)
    peaks_s = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sums_s = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    seen_s = gl.allocate_shared_memory(gl.int32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    past_s = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [10, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [10, 1], mbarrier.MBarrierLayout())
    meet = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(10):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(meet, count=2)
    fence_async_shared()
    inputs = (q_latent_ptr, q_shared_ptr, length_ptr, cu_ptr, before_ptr)
    outputs = (out_ptr, part_ptr, log_ptr)
    place = (N, page_row, block, last, n)
    buffers = (ring_s, q_s, probs_s, peaks_s, sums_s, seen_s, past_s)
    bars = (full, empty, meet)
    work = (place, scale, heads, part, runs, run)
    gl.warp_specialize(
        [
            (_consume, (buffers, bars, inputs, outputs, work, Q_STRIDES, 0)),
            (_consume, (buffers, bars, inputs, outputs, work, Q_STRIDES, 1)),
            (_produce, (latent_d, ring_s, (full, empty), page_ptr, before_ptr, place, PAGE)),
        ],
        [4, 1],
        [240, 24],
    )


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles for 96 and 48 heads."""
    cases = []
    for heads in (96, 48):
        given: dict[str, Any] = {"latent_d": block_type((1, BLOCK, 64))}
        given |= {"q_latent_ptr": "*bf16", "q_shared_ptr": "*bf16"}
        given |= {f"{name}_ptr": "*i32:1" for name in ("page", "length", "cu", "before")}
        given |= {f"{name}_ptr": "*fp32" for name in ("out", "part", "log")} | {"scale": "fp32"}
        given |= dict.fromkeys(("N", "heads", "page_row", "runs"), "i32")
        given |= {"Q_STRIDES": (heads * 512, 512, heads * 192, 192), "PARTS": -(-heads // ROWS), "PAGE": 6144}
        cases.append((latent_pair_gluon, given, settings()))
    return cases
