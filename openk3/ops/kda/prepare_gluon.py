"""Gluon (Hopper) twin of the prepare kernel: four tiles and heads a block, and a warp inverts the matrix of one each.

Layouts are chosen so that little crosses threads. Gates are made with a channel in each thread, all tokens of it: their
running sums cost no exchange. Rows of q and k are read straight into the layout of the tensor cores' left operand, with
channels renumbered (a sum over channels does not care): neither kd nor qd passes through shared memory. Logits come by
the copy engine. While a tile is computed, the rows of the next one are brought into the L2 cache; of the last one in a
block, those that the next block on this multiprocessor begins with.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openk3.ops.backend import multiprocessors
from openk3.ops.kda import gluon_launch
from openk3.ops.kda.prepare_kernel import rest_arguments
from openk3.ops.kda.workspace import CutWorkspace, copyable
from openk3.ops.norm import L2_EPS

SLOTS = 4  # tiles and heads of a block: one for each of its warps
BLOCKS = 3  # on a multiprocessor at a time


def fits(*rows_THK: Tensor) -> bool:
    """Whether the kernel takes these q, k and decay logits: 16 bits a value, at addresses that allow wide accesses."""
    return all(x.element_size() == 2 and copyable(x) for x in rows_THK)


def pointers(w: CutWorkspace) -> gluon_launch.Group:
    """All tensors of a workspace as arguments, in the order of the Triton kernel."""

    def tensors() -> tuple[Tensor | None, ...]:
        rests = (w.kr_rest, w.nkd_rest, w.inv_rest, w.qd_rest)
        return w.nkd, w.qd, w.kr, *rests, w.inv, w.mqk, w.decay, w.beta

    narrow, wide, dtype, rests, _ = w.place
    return gluon_launch.Group(("pointers", dtype, rests, (narrow | wide) % 16), w.place, tensors)


def launch(arguments: tuple[Any, ...], total: int, *, K: int, C: int) -> None:
    """Run on the arguments of the Triton kernel, in its order or in groups, for X * H = total tiles and heads."""
    q_THK, k_THK, logit_THK, *others = arguments
    logits = gluon_launch.matrix(logit_THK, logit_THK.shape[1] * K, (C, K))
    constants = {"K": K, "C": C, "SLOTS": SLOTS}
    ahead = SLOTS * BLOCKS * multiprocessors(q_THK.device)
    values = (q_THK, k_THK, logit_THK, logits, *others, total, ahead)
    gluon_launch.launch(prepare_gluon, -(-total // SLOTS), values, constants, settings())


def settings() -> dict[str, int]:
    """Launch options: registers for BLOCKS blocks on a multiprocessor."""
    return {"num_warps": 4, "maxnreg": 168}


_EPS = gl.constexpr(L2_EPS)
_LOG2E = gl.constexpr(1.4426950408889634)
# Tensor cores cut float32 to 11 bits. log2(1 + 2^-12 / ln 2) more in an exponent makes that unbiased.
_CENTRE = gl.constexpr(5.0805e-4)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _marked(a, marked_a, b, marked_b):
    """The one of two values that is marked, if any is."""
    return gl.where(marked_a != 0, a, b), marked_a | marked_b


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _sigmoid(x):
    """1 / (1 + 2^-x)."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + _exp2(-x)], gl.float32, True, 1)


@gluon.jit
def _rsqrt(x):
    return gl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _prefetch(at, wanted):
    """Bring the lines at these addresses into the L2 cache, where wanted."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [at, wanted],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def _place(index, start_ptr, length_ptr, a_log_ptr, bias_ptr, channel, H, K: gl.constexpr):
    """Head, first token and length of a tile-head, and the parameters of its gate."""
    tile = index // H
    head = index % H
    length = gl.load(length_ptr + tile)
    start = gl.load(start_ptr + tile)
    a_log = gl.load(a_log_ptr + head).to(gl.float32)
    bias = gl.load(bias_ptr + head * K + channel).to(gl.float32)
    return head, start, length, a_log, bias


@gluon.jit
def _rows(q_ptr, k_ptr, at, live):
    """Keys and queries of a tile and head, in four pieces of 32 channels."""
    k0 = gl.load(k_ptr + at, mask=live, other=0.0)
    q0 = gl.load(q_ptr + at, mask=live, other=0.0)
    k1 = gl.load(k_ptr + at + 32, mask=live, other=0.0)
    q1 = gl.load(q_ptr + at + 32, mask=live, other=0.0)
    k2 = gl.load(k_ptr + at + 64, mask=live, other=0.0)
    q2 = gl.load(q_ptr + at + 64, mask=live, other=0.0)
    k3 = gl.load(k_ptr + at + 96, mask=live, other=0.0)
    q3 = gl.load(q_ptr + at + 96, mask=live, other=0.0)
    return (k0, k1, k2, k3), (q0, q1, q2, q3)


@gluon.jit
def _norm(x, zero):
    """1 / length of rows in four pieces; `zero` comes from memory late, so that nobody waits for the rows early."""
    x0, x1, x2, x3 = x
    total = zero[:, None] + x0.to(gl.float32) * x0.to(gl.float32) + x1.to(gl.float32) * x1.to(gl.float32)
    total += x2.to(gl.float32) * x2.to(gl.float32) + x3.to(gl.float32) * x3.to(gl.float32)
    return _rsqrt(gl.sum(total, 1) + _EPS)[:, None]


@gluon.jit
def _put(x, ptr, rest_ptr, at):
    """Store x in bfloat16, and what rounding leaves of it where that is wanted."""
    rounded = x.to(gl.bfloat16)
    gl.store(ptr + at, rounded)
    if rest_ptr is not None:
        gl.store(rest_ptr + at, (x - rounded.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def _piece(k, q, k_norm, q_norm, sums_s, factor_s, right_s, outputs, at, back, FIRST: gl.constexpr):
    """32 channels: outputs written, ki in shared memory; kd and qd as the left operand of the product.

    Its rows are eight tokens of kd, the same eight of qd, and so on: a thread of the product holds a token of both. Its
    columns are channels in an order in which a thread has eight neighbouring ones; ki is stored in the same order.
    """
    nkd_ptr, qd_ptr, kr_ptr, kr_rest_ptr, nkd_rest_ptr, qd_rest_ptr = outputs
    C: gl.constexpr = k.shape[0]
    sums = sums_s.slice(FIRST, 32, 1).load(k.type.layout)
    factor = factor_s.slice(FIRST, 32, 0).load(gl.SliceLayout(0, k.type.layout))
    k32 = k.to(gl.float32) * k_norm
    up = _exp2(sums)
    ki = k32 * _exp2(2 * _CENTRE - sums)
    right_s.store(ki.reshape((C, 4, 8)).permute((0, 2, 1)).reshape((C, 32)))
    _put(ki * factor[None, :], kr_ptr, kr_rest_ptr, at + FIRST)
    kd = k32 * up
    _put(kd * -back, nkd_ptr, nkd_rest_ptr, at + FIRST)
    qd = q.to(gl.float32) * q_norm * up
    _put(qd * back, qd_ptr, qd_rest_ptr, at + FIRST)
    return gl.join(kd, qd).reshape((C // 8, 8, 4, 8, 2)).permute((0, 4, 1, 3, 2)).reshape((2 * C, 32))


@gluon.jit
def _both(pair, C: gl.constexpr):
    """Keys and queries of a product whose rows are eight tokens of the first, eight of the second, and so on."""
    keys, queries = gl.split(pair.reshape((C // 8, 2, 8, C)).permute((0, 2, 3, 1)))
    return keys.reshape((C, C)), queries.reshape((C, C))


@gluon.jit(do_not_specialize=["H", "total", "ahead"], do_not_specialize_on_alignment=["start_ptr", "length_ptr"])
def prepare_gluon(
    q_ptr,
    k_ptr,
    logit_ptr,
    logit_d,
    beta_logit_ptr,
    a_log_ptr,
    bias_ptr,
    nkd_ptr,
    qd_ptr,
    kr_ptr,
    kr_rest_ptr,
    nkd_rest_ptr,
    inv_rest_ptr,
    qd_rest_ptr,
    inv_ptr,
    mqk_ptr,
    decay_ptr,
    beta_ptr,
    start_ptr,
    length_ptr,
    bound,  # of the log decay, base 2
    middle,  # of the range of its sums
    scale,
    H,
    total,
    ahead,  # tile-heads from a block to the one that runs when it is done
    K: gl.constexpr,
    C: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Four neighbouring tile-heads; the last block repeats its last one."""
    io: gl.constexpr = gl.bfloat16
    CHANNEL: gl.constexpr = gl.BlockedLayout([C, 1], [1, 32], [1, 4], [1, 0])
    FRAGMENT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    PAIR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PAIR, 1)
    RIGHT: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    right0_s = gl.allocate_shared_memory(gl.float32, [C, 32], RIGHT)
    right1_s = gl.allocate_shared_memory(gl.float32, [C, 32], RIGHT)
    right2_s = gl.allocate_shared_memory(gl.float32, [C, 32], RIGHT)
    right3_s = gl.allocate_shared_memory(gl.float32, [C, 32], RIGHT)
    logit_s = gl.allocate_shared_memory(logit_d.dtype, [C, K], logit_d.layout)
    sums_s = gl.allocate_shared_memory(gl.float32, [C, K], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    factor_s = gl.allocate_shared_memory(gl.float32, [K], PLAIN)
    zero_s = gl.allocate_shared_memory(gl.float32, [C], PLAIN)
    lower_s = gl.allocate_shared_memory(gl.float32, [SLOTS, C, C], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    zero_s.store(gl.zeros([C], gl.float32, gl.SliceLayout(1, FRAGMENT)))
    mbarrier.init(bar, count=1)
    fence_async_shared()

    block = gl.program_id(0) * SLOTS
    back = _exp2(middle - _CENTRE)
    moment = gl.arange(0, C, layout=gl.SliceLayout(1, CHANNEL))
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, CHANNEL))
    final = gl.where((moment == C - 1)[:, None], 1, gl.zeros([C, K], gl.int32, CHANNEL))
    token = gl.arange(0, C, layout=gl.SliceLayout(1, FRAGMENT))
    part = gl.arange(0, 32, layout=gl.SliceLayout(0, FRAGMENT))
    offset = token[:, None] * (H * K) + part[None, :]
    place = token[:, None] * K + part[None, :]
    line = gl.arange(0, C, layout=gl.SliceLayout(1, LINES))
    lines = line[:, None] * (H * K) + gl.arange(0, 4, layout=gl.SliceLayout(0, LINES))[None, :] * 32
    zero = gl.zeros([2 * C, C], gl.float32, PAIR)
    square = _both(zero, C)[0]
    row = gl.arange(0, C, layout=gl.SliceLayout(1, square.type.layout))
    column = gl.arange(0, C, layout=gl.SliceLayout(0, square.type.layout))

    index = gl.minimum(block, total - 1)
    head, start, length, a_log, bias = _place(index, start_ptr, length_ptr, a_log_ptr, bias_ptr, channel, H, K)
    mbarrier.expect(bar, 2 * C * K)
    tma.async_copy_global_to_shared(logit_d, [start, head * K], bar, logit_s)
    first = (start.to(gl.int64) * H + head) * K
    k, q = _rows(q_ptr, k_ptr, first + offset, (token < length)[:, None])
    for slot in range(SLOTS):
        at = index.to(gl.int64)
        beta = gl.load(beta_logit_ptr + (start.to(gl.int64) + row) * H + head, mask=row < length, other=0.0)

        more = slot + 1 < SLOTS
        index = gl.minimum(block + gl.where(more, slot + 1, ahead), total - 1)
        head_next, start_next, length_next, a_log_next, bias_next = _place(
            index, start_ptr, length_ptr, a_log_ptr, bias_ptr, channel, H, K
        )
        first = (start_next.to(gl.int64) * H + head_next) * K
        wanted = (line < length_next).to(gl.int32)[:, None] + gl.zeros([C, 4], gl.int32, LINES)
        _prefetch(q_ptr + first + lines, wanted)
        _prefetch(k_ptr + first + lines, wanted)
        _prefetch(logit_ptr + first + lines, wanted)
        length_next = gl.where(more, length_next, 0)

        slope = gl.minimum(_exp2(a_log * _LOG2E), 1e30) * _LOG2E
        mbarrier.wait(bar, slot & 1)
        logit = logit_s.load(CHANNEL).to(gl.float32)
        gate = gl.where((moment < length)[:, None], _sigmoid(logit * slope + (bias * slope)[None, :]), 0.0)
        sums = gl.associative_scan(gate, 0, _add)
        last = gl.reduce((sums, final), 0, _marked)[0]
        last *= bound
        gl.store(decay_ptr + at * K + channel, _exp2(last))
        sums_s.store(sums * bound - (middle - _CENTRE))
        factor_s.store(_exp2(last - middle - _CENTRE))

        mbarrier.expect(bar, 2 * C * K, pred=more)  # between two barriers: all have waited, and none waits anew
        late = zero_s.load(gl.SliceLayout(1, FRAGMENT))
        k_norm = _norm(k, late)
        q_norm = _norm(q, late) * scale
        tma.async_copy_global_to_shared(logit_d, [start_next, head_next * K], bar, logit_s, pred=more)
        outputs = (nkd_ptr, qd_ptr, kr_ptr, kr_rest_ptr, nkd_rest_ptr, qd_rest_ptr)
        rows = at * (C * K) + place
        left0 = _piece(k[0], q[0], k_norm, q_norm, sums_s, factor_s, right0_s, outputs, rows, back, 0)
        left1 = _piece(k[1], q[1], k_norm, q_norm, sums_s, factor_s, right1_s, outputs, rows, back, 32)
        left2 = _piece(k[2], q[2], k_norm, q_norm, sums_s, factor_s, right2_s, outputs, rows, back, 64)
        left3 = _piece(k[3], q[3], k_norm, q_norm, sums_s, factor_s, right3_s, outputs, rows, back, 96)
        fence_async_shared()
        left0 = gl.convert_layout(left0, LEFT)
        pair = warpgroup_mma(left0, right0_s.permute((1, 0)), zero, use_acc=False, is_async=True)
        pair = warpgroup_mma(gl.convert_layout(left1, LEFT), right1_s.permute((1, 0)), pair, is_async=True)
        pair = warpgroup_mma(gl.convert_layout(left2, LEFT), right2_s.permute((1, 0)), pair, is_async=True)
        pair = warpgroup_mma(gl.convert_layout(left3, LEFT), right3_s.permute((1, 0)), pair, is_async=True)
        pair = warpgroup_mma_wait(0, (pair,))
        k, q = _rows(q_ptr, k_ptr, first + offset, (token < length_next)[:, None])

        keys, queries = _both(pair, C)
        beta = gl.where(row < length, _sigmoid(beta.to(gl.float32) * _LOG2E), 0.0)
        gl.store(beta_ptr + at * C + row, beta)
        keys = gl.where(row[:, None] > column[None, :], keys * beta[:, None], 0.0)
        queries = gl.where(row[:, None] >= column[None, :], queries, 0.0).to(io)
        lower_s.index(slot).permute((1, 0)).store(keys)
        gl.store(mqk_ptr + at * (C * C) + row[:, None] * C + column[None, :], queries)
        head = head_next
        start = start_next
        length = length_next
        a_log = a_log_next
        bias = bias_next

    whole: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    turned_s = lower_s._reinterpret(gl.float32, [SLOTS, C, C], whole)
    _invert(turned_s, inv_ptr, inv_rest_ptr, block, total, C, SLOTS)


@gluon.jit
def _row(x, place, i):
    """x[:, :, i] as [., ., 1], of a dimension that a thread holds whole; place: its indices."""
    value, _ = gl.reduce((x, (place == i).to(gl.int32)), 2, _marked)
    return value[:, :, None]


@gluon.jit
def _put_row(done, left, inv_ptr, inv_rest_ptr, offset):
    """Store a row of the inverse with what rounding left of the one above it; and what this leaves."""
    rounded = (done + left).to(gl.bfloat16)
    gl.store(inv_ptr + offset, rounded)
    if inv_rest_ptr is not None:
        gl.store(inv_rest_ptr + offset, (done - rounded.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def _invert(turned_s, inv_ptr, inv_rest_ptr, block, total, C: gl.constexpr, SLOTS: gl.constexpr):
    """(I + lower)^-1 of every slot: a warp for each, a lane for each column; turned_s[slot, i, j] = lower[j, i].

    A finished row goes into all later ones at once: no chain of sums. The factors of a step are one broadcast. Each
    entry is rounded with what rounding left of the one above it: then what tokens make of a write adds up to what was
    written. With keys that are nearly one this is as good as a format of twice the digits.
    """
    io: gl.constexpr = gl.bfloat16
    half: gl.constexpr = C // 2
    COLUMN: gl.constexpr = gl.BlockedLayout([1, 1, half], [1, C, 1], [4, 1, 1], [2, 1, 0])  # [slot, column, row]
    slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, COLUMN)))
    column = gl.arange(0, C, layout=gl.SliceLayout(0, gl.SliceLayout(2, COLUMN)))
    row = gl.arange(0, half, layout=gl.SliceLayout(0, gl.SliceLayout(1, COLUMN)))
    column3 = column[None, :, None]
    row3 = row[None, None, :]
    top = gl.where(column3 == row3, 1.0, gl.zeros([SLOTS, C, half], gl.float32, COLUMN))
    bottom = gl.where(column3 == row3 + half, 1.0, gl.zeros([SLOTS, C, half], gl.float32, COLUMN))
    place = gl.zeros([SLOTS, C, half], gl.int32, COLUMN) + row3
    index = gl.minimum(block + slot, total - 1)
    offset = (index.to(gl.int64) * (C * C))[:, None, None] + column3
    left = gl.zeros([SLOTS, C, 1], gl.float32, COLUMN)
    for i in gl.static_range(C - 1):
        below = turned_s.slice(i, 1, 1).slice(half, half, 2).load(COLUMN)
        if i < half:
            done = _row(top, place, i)
            if i < half - 1:
                beside = turned_s.slice(i, 1, 1).slice(0, half, 2).load(COLUMN)
                top = gl.where(row3 > i, top - beside * done, top)
            bottom = bottom - below * done
        else:
            done = _row(bottom, place, i - half)
            bottom = gl.where(row3 > i - half, bottom - below * done, bottom)
        _put_row(done, left, inv_ptr, inv_rest_ptr, offset + i * C)
        left = done - done.to(io).to(gl.float32)
    _put_row(_row(bottom, place, half - 1), left, inv_ptr, inv_rest_ptr, offset + (C - 1) * C)


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles at K = 128 in bfloat16."""
    arguments: dict[str, Any] = dict.fromkeys(("q_ptr", "k_ptr", "logit_ptr", "beta_logit_ptr"), "*bf16")
    arguments |= {"logit_d": gluon_launch.block_type((32, 128))}
    arguments |= dict.fromkeys(("nkd_ptr", "qd_ptr", "kr_ptr", "inv_ptr", "mqk_ptr"), "*bf16")
    arguments |= dict.fromkeys(("a_log_ptr", "bias_ptr", "decay_ptr", "beta_ptr"), "*fp32")
    arguments |= dict.fromkeys(("start_ptr", "length_ptr"), "*i32:1")
    arguments |= dict.fromkeys(("bound", "middle", "scale"), "fp32")
    arguments |= dict.fromkeys(("H", "total", "ahead"), "i32")
    arguments |= {"K": 128, "C": 32, "SLOTS": SLOTS}
    return [(prepare_gluon, arguments | rests, settings()) for rests in rest_arguments("*bf16")]
