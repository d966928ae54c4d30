"""Triton kernels between a KDA layer's first maps and its last one, for few tokens, a head's channels shared out.

The first makes the decay, convolves, and moves states on: a program has some value channels of a head, whose state it
reads while another kernel still runs. The second norms and gates what those give and multiplies it by the last map;
other programs of it move the windows on, which all programs of the first have read.
"""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.few.product_kernel import wait_for_inputs
from openk3.ops.kda.decode_kernel import _decay, _normalise, _recur


@triton.jit
def _past(window, filters, channel, TAPS: tl.constexpr, W: tl.constexpr):
    """(what the W - 1 inputs before give to the convolution, the weight of the next one), [channels] in float32."""
    y = tl.zeros(channel.shape, tl.float32)
    for i in tl.static_range(W - 1):
        tap = tl.load(window + channel * TAPS + (TAPS - W + 1 + i)).to(tl.float32)
        y += tap * tl.load(filters + channel * W + i).to(tl.float32)
    return y, tl.load(filters + channel * W + (W - 1)).to(tl.float32)


@triton.jit
def _convolved(x, past):
    """SiLU of the convolution."""
    y = past[0] + x.to(tl.float32) * past[1]
    return y * tl.sigmoid(y)


@triton.jit
def step_kernel(
    q, k, v, narrow, beta, widen, states, q_window, k_window, v_window, q_filter, k_filter, v_filter,
    A_log, dt_bias, slots, out, state_stride, window_stride,
    STRIDE: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, PN: tl.constexpr,
    TAPS: tl.constexpr, W: tl.constexpr, BOUND: tl.constexpr, B: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """o [tokens, H, V] in float32 before its norm; states of slots move on in place, windows stay.

    Rows of the first maps lie STRIDE apart; decay logits are `narrow` [N] times `widen` [H, K, N]. Windows have TAPS
    inputs of a channel, of which the last W - 1 count.
    """
    BLOCKS: tl.constexpr = V // B
    token = (tl.program_id(0) // (H * BLOCKS)).to(tl.int64)
    head = tl.program_id(0) // BLOCKS % H
    key = tl.arange(0, K)
    value = tl.program_id(0) % BLOCKS * B + tl.arange(0, B)
    slot = tl.load(slots + token).to(tl.int64)
    live = slot >= 0
    place = tl.maximum(slot, 0)
    cell = states + place * state_stride + head * (K * V) + key[:, None, None] * V + value[None, None, :]
    state = tl.load(cell, mask=live, other=0.0).to(tl.float32)
    lane = tl.arange(0, PN)
    here = (lane < N)[None, :]
    matrix = tl.load(widen + (head * K + key)[:, None] * N + lane[None, :], mask=here, other=0.0)
    slope, bias = tl.load(A_log + head), tl.load(dt_bias + head * K + key)
    shift = place * window_stride
    q_past = _past(q_window + shift, q_filter, head * K + key, TAPS, W)
    k_past = _past(k_window + shift, k_filter, head * K + key, TAPS, W)
    v_past = _past(v_window + shift, v_filter, head * V + value, TAPS, W)
    wait_for_inputs(EARLY)
    row = token * STRIDE
    x_q, x_k = tl.load(q + row + head * K + key), tl.load(k + row + head * K + key)
    x_v = tl.load(v + row + head * V + value)
    small = tl.load(narrow + row + lane, mask=lane < N, other=0.0)
    open_ = tl.sigmoid(tl.load(beta + row + head).to(tl.float32))
    logit = tl.sum(matrix.to(tl.float32) * small.to(tl.float32)[None, :], 1).to(small.dtype)
    qs = _normalise(_convolved(x_q, q_past), K**-0.5)
    ks = _normalise(_convolved(x_k, k_past), 1.0)
    vs = _convolved(x_v, v_past)
    o, state = _recur(state, qs, ks, vs[None, :], _decay(logit, slope, bias, BOUND), open_)
    tl.store(cell, state.to(states.dtype.element_ty), mask=live)
    to = out + (token * H + head) * V + value[None, :]
    tl.store(to, tl.where(live, o, 0.0))


@triton.jit
def _shift(x, window, channel, TAPS: tl.constexpr, PT: tl.constexpr):
    """Make x [channels] the last of a window's inputs."""
    tap = tl.arange(0, PT)
    at = window + channel[:, None] * TAPS + tap[None, :]
    later = tl.load(at + 1, mask=(tap < TAPS - 1)[None, :], other=0.0)
    tl.debug_barrier()  # threads write what others have read
    value = tl.where((tap < TAPS - 1)[None, :], later, x.to(later.dtype)[:, None])
    tl.store(at, value, mask=(tap < TAPS)[None, :])


@triton.jit(do_not_specialize=["tokens", "eps"])
def gated_kernel(
    o, gate, norm, weight, before, out, q, k, v, q_window, k_window, v_window, slots,
    tokens, eps, window_stride,
    STRIDE: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr, PH: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    TAPS: tl.constexpr, PT: tl.constexpr, R: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [tokens, ROWS] = before + (sigmoid(gate) RMSNorm(o), rounded) weight^T; windows move on by q, k and v.

    `before` may be `out`, or None for zeros.
    """
    BLOCKS: tl.constexpr = (ROWS + R - 1) // R
    program = tl.program_id(0)
    if program < BLOCKS:
        KIND: tl.constexpr = out.dtype.element_ty
        row = program * R + tl.arange(0, R)
        head, value = tl.arange(0, PH), tl.arange(0, V)
        here = (head < H)[:, None]
        inside = head[:, None] * V + value[None, :]
        at = weight + row.to(tl.int64)[:, None, None] * (H * V) + inside[None, :, :]
        matrix = tl.load(at, mask=(row < ROWS)[:, None, None] & here[None, :, :], other=0.0)
        scale = tl.load(norm + value).to(tl.float32)
        wait_for_inputs(EARLY)
        for token in range(tokens):
            x = tl.load(o + token * (H * V) + inside, mask=here, other=0.0)
            z = tl.load(gate + token * STRIDE + inside, mask=here, other=0.0).to(tl.float32)
            unit = x * tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None]
            y = (unit * scale[None, :] * tl.sigmoid(z)).to(KIND).to(tl.float32)
            total = tl.sum(tl.sum(matrix.to(tl.float32) * y[None, :, :], 2), 1)
            to = token * ROWS + row
            if before is not None:
                total = total.to(KIND).to(tl.float32)
                total += tl.load(before + to, mask=row < ROWS, other=0.0).to(tl.float32)
            tl.store(out + to, total.to(KIND), mask=row < ROWS)
    else:
        cell = program - BLOCKS
        slot = tl.load(slots + cell // H).to(tl.int64)
        wait_for_inputs(EARLY)
        if slot >= 0:
            begin = (cell // H).to(tl.int64) * STRIDE
            keys = cell % H * K + tl.arange(0, K)
            values = cell % H * V + tl.arange(0, V)
            x_q, x_k, x_v = tl.load(q + begin + keys), tl.load(k + begin + keys), tl.load(v + begin + values)
            _shift(x_q, q_window + slot * window_stride, keys, TAPS, PT)
            _shift(x_k, k_window + slot * window_stride, keys, TAPS, PT)
            _shift(x_v, v_window + slot * window_stride, values, TAPS, PT)


def step_settings(K: int, V: int, narrow: int, taps: int, W: int) -> tuple[dict[str, int], int]:
    """(constants, warps) of `step_kernel`: 16 value channels a program."""
    power = triton.next_power_of_2
    return {"K": K, "V": V, "N": narrow, "PN": power(narrow), "TAPS": taps, "W": W, "B": min(V, 16)}, 4


def gated_settings(rows: int, heads: int, K: int, V: int, taps: int) -> tuple[dict[str, int], int]:
    """(constants, warps) of `gated_kernel`."""
    power = triton.next_power_of_2
    known = {"ROWS": rows, "H": heads, "PH": power(heads), "K": K, "V": V, "TAPS": taps, "PT": power(taps)}
    return known | {"R": 4 if rows <= 1056 else 8}, 4 if heads * V <= 1024 else 8


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16 for `small` and `medium`."""
    cases = []
    early = {"launch_pdl": True} if arch >= 90 else {}
    for width, H, added in ((768, 6, True), (1536, 12, False)):
        names = ("states", "o", "A_log", "dt_bias", "q_filter", "k_filter", "v_filter")
        known: dict[str, Any] = dict.fromkeys(names, "*fp32") | {"slots": "*i32", "eps": "fp32", "STRIDE": 4 * width}
        known |= {"state_stride": "i32:16", "window_stride": "i32:16", "tokens": "i32"}
        known |= {"H": H, "BOUND": -5.0, "EARLY": arch >= 90} | ({} if added else {"before": None})
        for kernel, (own, warps) in (
            (step_kernel, step_settings(128, 128, 128, 4, 4)),
            (gated_kernel, gated_settings(width, H, 128, 128, 4)),
        ):
            here = known | own | ({"out": "*fp32"} if kernel is step_kernel else {})
            arguments = {name: here.get(name, "*bf16") for name in kernel.arg_names}
            cases.append((kernel, arguments, {"num_warps": warps, "num_stages": 1} | early))
    return cases
