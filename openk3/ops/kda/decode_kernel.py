"""Triton kernels of KDA decoding: a program takes one head of one request, and its state passes through registers once.

The kernels do a token's arithmetic by the same functions on tiles of the same layout, and products enter sums only
where it is written (fma), so a state does not depend on which kernel took it over a token. Between projections and
outputs all is float32: nothing is rounded to the tokens' format on the way.
"""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.norm import L2_EPS

EPS = tl.constexpr(L2_EPS)

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def sizes(name: str, K: int, V: int, W: int) -> tuple[dict[str, int], int]:
    """Constants of the kernel of that name, and how many programs a head has."""
    B = min(V, 32)
    if name == "step_kernel":
        return {"K": K, "V": V, "B": B}, V // B
    stages = {"STAGES": 3} if name == "decode_kernel" else {}
    return {"K": K, "V": V, "W": W, "B": B} | stages, 1


@triton.jit
def _window(window_ptr, channel, W: tl.constexpr, DTYPE: tl.constexpr):
    """The last W inputs, oldest first."""
    taps = ()
    for i in tl.static_range(W):
        taps = taps + (tl.load(window_ptr + channel * W + i).to(DTYPE),)
    return taps


@triton.jit
def _store_window(taps, window_ptr, channel, W: tl.constexpr):
    """Make the last W inputs the window."""
    for i in tl.static_range(W):
        tl.store(window_ptr + channel * W + i, taps[i].to(window_ptr.dtype.element_ty))


@triton.jit
def _convolve(taps, weight_ptr, channel, W: tl.constexpr):
    """SiLU of the convolution, float32."""
    y = taps[0].to(tl.float32) * tl.load(weight_ptr + channel * W).to(tl.float32)
    for i in tl.static_range(1, W):
        y += taps[i].to(tl.float32) * tl.load(weight_ptr + channel * W + i).to(tl.float32)
    return y * tl.sigmoid(y)


@triton.jit
def _normalise(x, SCALE: tl.constexpr):
    """SCALE * x / |x|."""
    return x * (tl.rsqrt(tl.sum(x * x, 0) + EPS) * SCALE)


@triton.jit
def _decay(logit, A_log, dt_bias, BOUND: tl.constexpr):
    """Factor exp(kda_gate(logit)) of each key channel."""
    x = logit.to(tl.float32) + dt_bias.to(tl.float32)
    slope = tl.exp(A_log.to(tl.float32))
    if BOUND is None:
        return tl.exp(-slope * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))))
    else:
        return tl.exp2((BOUND * 1.4426950408889634) * tl.sigmoid(slope * x))


@triton.jit
def _recur(state, q, k, v, alpha, beta):
    """(o, next state) of some value channels: the state [K, P, B], v and o [P, B].

    o = S^T q with S = diag(alpha) S' + k u^T is S'^T (alpha q) + (q k) u: one pass over the old state gives both sums.
    Of the next state's terms the smaller one is rounded twice.
    """
    seen = tl.sum(state * (k * alpha)[:, None, None], 0)
    read = tl.sum(state * (q * alpha)[:, None, None], 0)
    u = beta * (v - seen)
    state = tl.fma(state, alpha[:, None, None], k[:, None, None] * u[None, :, :])
    return read + tl.sum(q * k, 0) * u, state


@triton.jit
def _finish(y_ptr, o_ptr, gate_ptr, norm_ptr, eps, V: tl.constexpr):
    """y = sigmoid(gate) * RMSNorm(o)."""
    value = tl.arange(0, V)
    o = tl.load(o_ptr + value)
    gate = tl.load(gate_ptr + value).to(tl.float32)
    y = o * tl.rsqrt(tl.sum(o * o, 0) / V + eps) * tl.load(norm_ptr + value).to(tl.float32) * tl.sigmoid(gate)
    tl.store(y_ptr + value, y.to(y_ptr.dtype.element_ty))


@triton.jit
def step_kernel(
    tokens,  # q, k, v after the convolution, decay logits, beta logits
    strides,  # of their tokens
    o_ptr,
    state_ptr,
    next_ptr,
    A_log_ptr,
    dt_bias_ptr,
    slot_ptr,
    H,
    BOUND: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    B: tl.constexpr,
):
    """Recurrence only: one program for each request, head and B value channels."""
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr = tokens
    n = (tl.program_id(0) // (V // B) // H).to(tl.int64)
    head = tl.program_id(0) // (V // B) % H
    key = tl.arange(0, K)
    value = tl.program_id(0) % (V // B) * B + tl.arange(0, B)[None, :]
    o_ptr += (n * H + head) * V + value
    slot = tl.load(slot_ptr + n).to(tl.int64)
    if slot < 0:
        tl.store(o_ptr, tl.zeros([1, B], o_ptr.dtype.element_ty))
    else:
        tile = (slot * H + head) * (K * V) + (key[:, None, None] * V + value[None, :, :])
        state = tl.load(state_ptr + tile).to(tl.float32)
        q = _normalise(tl.load(q_ptr + n * strides[0] + head * K + key).to(tl.float32), K**-0.5)
        k = _normalise(tl.load(k_ptr + n * strides[1] + head * K + key).to(tl.float32), 1.0)
        v = tl.load(v_ptr + n * strides[2] + head * V + value).to(tl.float32)
        logit = tl.load(decay_ptr + n * strides[3] + head * K + key)
        beta = tl.sigmoid(tl.load(beta_ptr + n * strides[4] + head).to(tl.float32))
        alpha = _decay(logit, tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head * K + key), BOUND)
        o, state = _recur(state, q, k, v, alpha, beta)
        tl.store(next_ptr + tile, state.to(next_ptr.dtype.element_ty))
        tl.store(o_ptr, o.to(o_ptr.dtype.element_ty))


@triton.jit
def decode_kernel(
    rows,  # projected q, k, v, decay logits, beta logits
    strides,  # of their rows
    gate_ptr,
    gate_stride,
    y_ptr,
    spare_ptr,  # float32, as many values as y has
    pool,  # states, windows of q, k, v
    into,  # the same four, where the next ones go
    filters,  # convolution weights of q, k, v
    A_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    slot_ptr,
    eps,
    H,
    BOUND: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The layer between its projections, one token: one program for each request and head, B value channels at a time.

    v and then o stand in the spare memory until all channels are there and can be normed.
    """
    n = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    key = tl.arange(0, K)
    value = tl.arange(0, V)
    y_ptr += (n * H + head) * V
    spare_ptr += (n * H + head) * V
    slot = tl.load(slot_ptr + n).to(tl.int64)
    if slot < 0:
        tl.store(y_ptr + value, tl.zeros([V], y_ptr.dtype.element_ty))
    else:
        cell = slot * H + head
        x_q = tl.load(rows[0] + n * strides[0] + head * K + key)
        x_k = tl.load(rows[1] + n * strides[1] + head * K + key)
        x_v = tl.load(rows[2] + n * strides[2] + head * V + value)
        logit = tl.load(rows[3] + n * strides[3] + head * K + key)
        beta = tl.sigmoid(tl.load(rows[4] + n * strides[4] + head).to(tl.float32))
        q_taps = _window(pool[1] + cell * (K * W), key, W, x_q.dtype)[1:W] + (x_q,)
        k_taps = _window(pool[2] + cell * (K * W), key, W, x_k.dtype)[1:W] + (x_k,)
        v_taps = _window(pool[3] + cell * (V * W), value, W, x_v.dtype)[1:W] + (x_v,)
        q = _normalise(_convolve(q_taps, filters[0] + head * (K * W), key, W), K**-0.5)
        k = _normalise(_convolve(k_taps, filters[1] + head * (K * W), key, W), 1.0)
        v = _convolve(v_taps, filters[2] + head * (V * W), value, W)
        tl.store(spare_ptr + value, v)
        alpha = _decay(logit, tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head * K + key), BOUND)
        tl.debug_barrier()  # threads read what others have written: v. They write what others have read: the windows.
        _store_window(q_taps, into[1] + cell * (K * W), key, W)
        _store_window(k_taps, into[2] + cell * (K * W), key, W)
        _store_window(v_taps, into[3] + cell * (V * W), value, W)
        part = tl.arange(0, B)[None, :]
        tile = cell * (K * V) + (key[:, None, None] * V + part[None, :, :])
        for first in tl.range(0, V, B, num_stages=STAGES):
            state = tl.load(pool[0] + first + tile)
            v_part = tl.load(spare_ptr + first + part)
            o, state = _recur(state.to(tl.float32), q, k, v_part, alpha, beta)
            tl.store(into[0] + first + tile, state.to(into[0].dtype.element_ty))
            tl.store(spare_ptr + first + part, o)
        tl.debug_barrier()
        _finish(y_ptr, spare_ptr, gate_ptr + n * gate_stride + head * V, norm_ptr, eps, V)


@triton.jit
def _tokens(
    state,
    taps,
    rows,
    strides,
    first,
    count,
    o_ptr,
    kept,
    first_kept,
    room,
    filters,
    A_log,
    dt_bias,
    head,
    H,
    BOUND: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    STATE: tl.constexpr,
    READ: tl.constexpr,
    KEEP: tl.constexpr,
):
    """(state, taps of q, k and v) after `count` rows from `first` on; READ: o is stored; KEEP: `room` copies."""
    key = tl.arange(0, K)
    value = tl.arange(0, V)
    part = tl.arange(0, V // B)[:, None] * B + tl.arange(0, B)[None, :]
    j = count * 0
    while j < count:
        row = first + j
        x_q = tl.load(rows[0] + row * strides[0] + head * K + key)
        x_k = tl.load(rows[1] + row * strides[1] + head * K + key)
        x_v = tl.load(rows[2] + row * strides[2] + head * V + value)
        logit = tl.load(rows[3] + row * strides[3] + head * K + key)
        beta_logit = tl.load(rows[4] + row * strides[4] + head)
        if KEEP:
            if j < room:  # what has no room must not lie in another slot
                cell = (first_kept + j) * H + head
                tl.store(kept[0] + cell * K + key, x_q)
                tl.store(kept[1] + cell * K + key, x_k)
                tl.store(kept[2] + cell * V + value, x_v)
                tl.store(kept[3] + cell * K + key, logit)
                tl.store(kept[4] + cell, beta_logit)
        taps = taps[1:W] + (x_q,) + taps[W + 1 : 2 * W] + (x_k,) + taps[2 * W + 1 : 3 * W] + (x_v,)
        q = _normalise(_convolve(taps[0:W], filters[0] + head * (K * W), key, W), K**-0.5)
        k = _normalise(_convolve(taps[W : 2 * W], filters[1] + head * (K * W), key, W), 1.0)
        v = _convolve(taps[2 * W : 3 * W], filters[2] + head * (V * W), value, W)
        alpha = _decay(logit, A_log, dt_bias, BOUND)
        beta = tl.sigmoid(beta_logit.to(tl.float32))
        o, state = _recur(state, q, k, tl.reshape(v, [V // B, B]), alpha, beta)
        state = state.to(STATE).to(tl.float32)
        if READ:
            tl.store(o_ptr + (row * H + head) * V + part, o)
        j += 1
    return state, taps


@triton.jit
def draft_kernel(
    rows,  # drafts: projected q, k, v, decay logits, beta logits
    strides,  # of their rows
    gate_ptr,
    gate_stride,
    y_ptr,
    spare_ptr,  # float32, as many values as y has
    old,  # drafts to replay, as `rows`; KEPT: the pools that take the new ones
    old_strides,
    pool,  # states, windows of q, k, v
    filters,  # convolution weights of q, k, v
    A_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    slot_ptr,
    bounds_ptr,
    accepted_ptr,
    eps,
    H,
    depth,
    KEPT: tl.constexpr,
    BOUND: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    REPLAY: tl.constexpr,
    VERIFY: tl.constexpr,
):
    """Replay accepted drafts, then verify new ones: one program for each request and head.

    Old drafts lie in row slot * depth and the following, or unless KEPT in the rows that the bounds give.
    """
    n = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    key = tl.arange(0, K)
    value = tl.arange(0, V)
    slot = tl.load(slot_ptr + n).to(tl.int64)
    begin = n * 0
    length = n * 0
    if VERIFY or not KEPT:
        begin = tl.load(bounds_ptr + n).to(tl.int64)
        length = tl.load(bounds_ptr + n + 1).to(tl.int64) - begin
    if slot >= 0:
        cell = slot * H + head
        part = tl.arange(0, V // B)[:, None] * B + tl.arange(0, B)[None, :]
        tile = cell * (K * V) + (key[:, None, None] * V + part[None, :, :])
        STATE: tl.constexpr = pool[0].dtype.element_ty
        state = tl.load(pool[0] + tile).to(tl.float32)
        taps = (
            _window(pool[1] + cell * (K * W), key, W, old[0].dtype.element_ty)
            + _window(pool[2] + cell * (K * W), key, W, old[1].dtype.element_ty)
            + _window(pool[3] + cell * (V * W), value, W, old[2].dtype.element_ty)
        )
        A_log = tl.load(A_log_ptr + head)
        dt_bias = tl.load(dt_bias_ptr + head * K + key)
        if REPLAY:
            accepted = tl.load(accepted_ptr + n).to(tl.int64)
            count = tl.minimum(accepted, depth) if KEPT else tl.minimum(accepted, length)
            first = slot * depth if KEPT else begin
            state, taps = _tokens(
                *(state, taps, old, old_strides, first, count, spare_ptr, old, first, 0, filters, A_log, dt_bias),
                *(head, H, BOUND, K, V, W, B, STATE, False, False),
            )
            tl.debug_barrier()  # windows and kept drafts are written where other threads have read them
            if count > 0:
                tl.store(pool[0] + tile, state.to(STATE))
                _store_window(taps[0:W], pool[1] + cell * (K * W), key, W)
                _store_window(taps[W : 2 * W], pool[2] + cell * (K * W), key, W)
                _store_window(taps[2 * W : 3 * W], pool[3] + cell * (V * W), value, W)
        if VERIFY:
            _tokens(
                *(
                    state,
                    taps,
                    rows,
                    strides,
                    begin,
                    length,
                    spare_ptr,
                    old,
                    slot * depth,
                    depth,
                    filters,
                    A_log,
                    dt_bias,
                    head,
                    H,
                ),
                *(BOUND, K, V, W, B, STATE, True, KEPT),
            )
            tl.debug_barrier()
            j = begin
            while j < begin + length:
                gate_row = gate_ptr + j * gate_stride + head * V
                at = (j * H + head) * V
                _finish(y_ptr + at, spare_ptr + at, gate_row, norm_ptr, eps, V)
                j += 1
    elif VERIFY:
        i = begin
        while i < begin + length:
            tl.store(y_ptr + (i * H + head) * V + value, tl.zeros([V], y_ptr.dtype.element_ty))
            i += 1


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """What the launcher compiles at K = V = 128 in bfloat16, for compute capability `arch`."""
    bf16 = ("*bf16",) * 3
    rows, strides, pool = ("*bf16",) * 5, ("i32:16",) * 5, ("*fp32", *bf16)
    gate = {"A_log_ptr": "*fp32", "dt_bias_ptr": "*fp32", "slot_ptr": "*i32", "H": "i32:16", "BOUND": -5.0}
    layer = gate | {"filters": ("*fp32",) * 3, "norm_ptr": "*fp32", "eps": "fp32", "pool": pool}
    tokens = {"rows": rows, "strides": strides, "gate_ptr": "*bf16", "gate_stride": "i32:16", "y_ptr": "*bf16"}
    tokens |= {"spare_ptr": "*fp32"}
    bounds = {"bounds_ptr": "*i32", "accepted_ptr": "*i32"}
    old = {"old": rows, "old_strides": strides, "depth": "i32"}
    draft = layer | tokens | old | bounds
    step = {"tokens": rows, "strides": strides, "o_ptr": "*bf16", "state_ptr": "*fp32", "next_ptr": "*fp32"}
    no_output = {"gate_ptr": None, "gate_stride": "i32:16", "y_ptr": None, "spare_ptr": None}
    cases = [
        (draft_kernel, draft | {"KEPT": True, "REPLAY": True, "VERIFY": True}),
        (draft_kernel, draft | {"KEPT": True, "REPLAY": False, "VERIFY": True, "accepted_ptr": None}),
        (draft_kernel, draft | {"KEPT": False, "REPLAY": False, "VERIFY": True, "accepted_ptr": None}),
        (draft_kernel, draft | no_output | {"KEPT": True, "REPLAY": True, "VERIFY": False, "bounds_ptr": None}),
        (draft_kernel, draft | no_output | {"KEPT": False, "REPLAY": True, "VERIFY": False}),
        (decode_kernel, layer | tokens | {"into": pool}),
        (step_kernel, gate | step),
    ]
    return [(kernel, values | sizes(kernel.__name__, 128, 128, 4)[0], OPTIONS) for kernel, values in cases]
