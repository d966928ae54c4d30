"""Gluon (Hopper) twin of the prepare kernel: four tiles and heads a block, and a warp inverts the matrix of one each.

Layouts are chosen so that nothing but sums crosses threads: a thread holds four neighbouring tokens of eight channels.
The two products share one warpgroup instruction (keys above queries), straight from shared memory. For the inverses a
lane holds one column, and the factors of a row come from shared memory as one broadcast for all lanes.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
)

from openk3.ops.kda import gluon_launch

SLOTS = 4  # tiles and heads of a block: one for each of its warps


def launch(arguments: tuple[Any, ...], total: int, *, K: int, C: int) -> None:
    """Run on the arguments of the Triton kernel, in its order, for X * H = total tiles and heads."""
    constants = {"K": K, "C": C, "SLOTS": SLOTS}
    gluon_launch.launch(prepare_gluon, -(-total // SLOTS), (*arguments, total), constants, settings())


def settings() -> dict[str, int]:
    """Launch options: registers for three blocks on a multiprocessor."""
    return {"num_warps": 4, "maxnreg": 168}


_LOG2E = gl.constexpr(1.4426950408889634)
# Tensor cores cut float32 to 11 bits. log2(1 + 2^-12 / ln 2) more in an exponent makes that unbiased.
_CENTRE = gl.constexpr(5.0805e-4)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _add_earlier(sum_a, earlier_a, sum_b, earlier_b):
    """Sums of two runs end to end, and without their last element: no later element ever enters and leaves a sum."""
    return sum_a + sum_b, sum_a + earlier_b


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
def _raw(pointers, start_ptr, length_ptr, index, H, K: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr):
    """Raw rows [C / 8, 8, K] of logits, keys and queries of a tile and head: token near * r + j at [j, r]."""
    near: gl.constexpr = C // 8
    q_ptr, k_ptr, logit_ptr = pointers
    tile = index // H
    head = index % H
    length = gl.load(length_ptr + tile)
    start = gl.load(start_ptr + tile).to(gl.int64)
    j = gl.arange(0, near, layout=gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))
    r = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, gl.SliceLayout(1, ROWS)))
    token = j[:, None, None] + (r * near)[None, :, None]
    live = token < length
    offset = token * (H * K) + channel[None, None, :]
    first = (start * H + head) * K
    logit = gl.load(logit_ptr + first + offset, mask=live, other=0.0)
    k = gl.load(k_ptr + first + offset, mask=live, other=0.0)
    q = gl.load(q_ptr + first + offset, mask=live, other=0.0)
    return logit, k, q


@gluon.jit
def _interleave(kd, qd, C: gl.constexpr, K: gl.constexpr):
    """Rows of two tiles [C / 8, 8, K] as one matrix [2 C, K]: eight tokens of the first, then of the second, and so on.

    A thread of the product then holds the same token of both.
    """
    near: gl.constexpr = C // 8
    both = gl.join(kd, qd).permute((1, 0, 3, 2))  # [8, near, 2, K]: group of tokens, token in it, which
    both = both.reshape((C // 8, 8 // near, near, 2, K)).permute((0, 3, 1, 2, 4))
    return both.reshape((2 * C, K))


@gluon.jit(do_not_specialize=["H", "total"], do_not_specialize_on_alignment=["start_ptr", "length_ptr"])
def prepare_gluon(
    q_ptr,
    k_ptr,
    logit_ptr,
    beta_logit_ptr,
    a_log_ptr,
    bias_ptr,
    nkd_ptr,
    qd_ptr,
    kr_ptr,
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
    K: gl.constexpr,
    C: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Four neighbouring tile-heads; the last block repeats its last one."""
    near: gl.constexpr = C // 8
    io: gl.constexpr = gl.bfloat16
    ROWS: gl.constexpr = gl.BlockedLayout([near, 1, 8], [1, 256 // K, K // 8], [1, 4, 1], [2, 1, 0])
    SCAN: gl.constexpr = gl.BlockedLayout([8, K // 128], [1, 32], [1, 4], [1, 0])
    PAIR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 8])
    COLUMN: gl.constexpr = gl.BlockedLayout([1, 1, C // 2], [1, C, 1], [4, 1, 1], [2, 1, 0])  # [slot, column, row]
    left_s = gl.allocate_shared_memory(gl.float32, [2 * C, K], gl.NVMMASharedLayout(128, 32))
    right_s = gl.allocate_shared_memory(gl.float32, [C, K], gl.NVMMASharedLayout(128, 32))
    group_s = gl.allocate_shared_memory(gl.float32, [8, K], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    before_s = gl.allocate_shared_memory(gl.float32, [8, K], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    lower_s = gl.allocate_shared_memory(gl.float32, [SLOTS, C, C], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

    pointers = (q_ptr, k_ptr, logit_ptr)
    block = gl.program_id(0) * SLOTS
    back = _exp2(middle - _CENTRE)
    j = gl.arange(0, near, layout=gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))
    r = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, gl.SliceLayout(1, ROWS)))
    flat = gl.arange(0, K, layout=gl.SliceLayout(0, gl.SliceLayout(0, ROWS)))
    token = j[:, None, None] + (r * near)[None, :, None]
    place = token * K + channel[None, None, :]

    logit, k, q = _raw(pointers, start_ptr, length_ptr, gl.minimum(block, total - 1), H, K, C, ROWS)
    for slot in range(SLOTS):
        index = gl.minimum(block + slot, total - 1)
        tile = index // H
        head = index % H
        length = gl.load(length_ptr + tile)
        start = gl.load(start_ptr + tile).to(gl.int64)
        slope = _exp2(gl.load(a_log_ptr + head).to(gl.float32) * _LOG2E) * _LOG2E
        bias = gl.load(bias_ptr + head * K + channel).to(gl.float32) * slope
        gate = gl.where(token < length, _sigmoid(logit.to(gl.float32) * slope + bias[None, None, :]), 0.0)
        inside = gl.associative_scan(gate, 0, _add)
        group = gl.sum(gate, 0)
        group_s.store(group)
        groups = group_s.load(SCAN)
        _, earlier = gl.associative_scan((groups, gl.zeros_like(groups)), 0, _add_earlier)
        before_s.store(earlier)
        before = before_s.load(gl.SliceLayout(0, ROWS))
        last = before_s.slice(7, 1, 0).load(gl.SliceLayout(0, ROWS))
        last = (last + group_s.slice(7, 1, 0).load(gl.SliceLayout(0, ROWS))) * bound
        sums = inside * bound + (before * bound - middle)[None, :, :]
        at = index.to(gl.int64)
        gl.store(decay_ptr + at * K + flat[None, :], _exp2(last))
        up = _exp2(sums + _CENTRE)
        k32 = k.to(gl.float32)
        k32 *= _rsqrt(gl.sum(k32 * k32, 2) + 1e-6)[:, :, None]
        ki = k32 * _exp2(_CENTRE - sums)
        gl.store(kr_ptr + at * (C * K) + place, (ki * _exp2(last - middle - _CENTRE)[None, :, :]).to(io))
        right_s.store(ki.permute((1, 0, 2)).reshape((C, K)))
        kd = k32 * up
        gl.store(nkd_ptr + at * (C * K) + place, (kd * -back).to(io))
        q32 = q.to(gl.float32)
        q32 *= (_rsqrt(gl.sum(q32 * q32, 2) + 1e-6) * scale)[:, :, None]
        qd = q32 * up
        gl.store(qd_ptr + at * (C * K) + place, (qd * back).to(io))
        left_s.store(_interleave(kd, qd, C, K))
        fence_async_shared()
        after = gl.minimum(block + gl.minimum(slot + 1, SLOTS - 1), total - 1)
        logit, k_next, q_next = _raw(pointers, start_ptr, length_ptr, after, H, K, C, ROWS)
        pair = warpgroup_mma(left_s, right_s.permute((1, 0)), gl.zeros([2 * C, C], gl.float32, PAIR), use_acc=False)
        keys, queries = gl.split(pair.reshape((C // 8, 2, 8, C)).permute((0, 2, 3, 1)))
        keys = keys.reshape((C, C))
        queries = queries.reshape((C, C))
        row = gl.arange(0, C, layout=gl.SliceLayout(1, keys.type.layout))
        column = gl.arange(0, C, layout=gl.SliceLayout(0, keys.type.layout))
        beta = gl.load(beta_logit_ptr + (start + row) * H + head, mask=row < length, other=0.0).to(gl.float32)
        beta = gl.where(row < length, _sigmoid(beta * _LOG2E), 0.0)
        gl.store(beta_ptr + at * C + row, beta)
        keys = gl.where(row[:, None] > column[None, :], keys * beta[:, None], 0.0)
        queries = gl.where(row[:, None] >= column[None, :], queries, 0.0).to(io)
        lower_s.index(slot).store(keys)
        gl.store(mqk_ptr + at * (C * C) + row[:, None] * C + column[None, :], queries)
        k = k_next
        q = q_next

    whole: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    lower_s = lower_s._reinterpret(gl.float32, [SLOTS, C, C], whole)
    _invert(lower_s, inv_ptr, block, total, C, SLOTS, COLUMN)


@gluon.jit
def _invert(lower_s, inv_ptr, block, total, C: gl.constexpr, SLOTS: gl.constexpr, COLUMN: gl.constexpr):
    """(I + lower)^-1 of every slot, row by row: a warp for each, a lane for each column."""
    half: gl.constexpr = C // 2
    slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, COLUMN)))
    column = gl.arange(0, C, layout=gl.SliceLayout(0, gl.SliceLayout(2, COLUMN)))
    row = gl.arange(0, half, layout=gl.SliceLayout(0, gl.SliceLayout(1, COLUMN)))
    column3 = column[None, :, None]
    row3 = row[None, None, :]
    top = gl.where(column3 == row3, 1.0, gl.zeros([SLOTS, C, half], gl.float32, COLUMN))
    bottom = gl.where(column3 == row3 + half, 1.0, gl.zeros([SLOTS, C, half], gl.float32, COLUMN))
    for i in gl.static_range(1, half):
        factors = lower_s.slice(i, 1, 1).slice(0, half, 2).load(COLUMN)
        update = gl.sum(factors * top, 2)
        top = gl.where(row3 == i, top - update[:, :, None], top)
    for i in gl.static_range(half):
        factors = lower_s.slice(half + i, 1, 1).slice(0, half, 2).load(COLUMN)
        update = gl.sum(factors * top, 2)
        if i > 0:
            factors = lower_s.slice(half + i, 1, 1).slice(half, half, 2).load(COLUMN)
            update += gl.sum(factors * bottom, 2)
        bottom = gl.where(row3 == i, bottom - update[:, :, None], bottom)

    index = gl.minimum(block + slot, total - 1)
    at = (index.to(gl.int64) * (C * C))[:, None, None] + column3 + row3 * C
    io: gl.constexpr = gl.bfloat16
    gl.store(inv_ptr + at, top.to(io))
    gl.store(inv_ptr + half * C + at, bottom.to(io))


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles at K = 128 in bfloat16."""
    arguments: dict[str, Any] = dict.fromkeys(("q_ptr", "k_ptr", "logit_ptr", "beta_logit_ptr"), "*bf16")
    arguments |= dict.fromkeys(("nkd_ptr", "qd_ptr", "kr_ptr", "inv_ptr", "mqk_ptr"), "*bf16")
    arguments |= dict.fromkeys(("a_log_ptr", "bias_ptr", "decay_ptr", "beta_ptr"), "*fp32")
    arguments |= {
        "start_ptr": "*i32:1",
        "length_ptr": "*i32:1",
        "bound": "fp32",
        "middle": "fp32",
        "scale": "fp32",
        "H": "i32",
    }
    return [(prepare_gluon, arguments | {"total": "i32", "K": 128, "C": 32, "SLOTS": SLOTS}, settings())]
