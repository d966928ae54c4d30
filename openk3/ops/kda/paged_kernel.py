"""Triton kernel of a KDA decoding step on states in pages: `decode_kernel.decode_kernel` with another addressing.

A page's state lies `state_stride` numbers behind that of the page before it, and its convolution inputs, W - 1 of each
channel of q, k and v one behind the other, `input_stride` numbers. Both are moved on where they lie.
"""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.kda.decode_kernel import _convolve, _decay, _finish, _normalise, _recur

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def sizes(K: int, V: int, W: int) -> dict[str, int]:
    """Constants of the kernel."""
    return {"K": K, "V": V, "W": W, "B": min(V, 32), "STAGES": 3}


@triton.jit
def _inputs(input_ptr, channel, W: tl.constexpr, DTYPE: tl.constexpr):
    """The last W - 1 inputs, oldest first."""
    taps = ()
    for i in tl.static_range(W - 1):
        taps = taps + (tl.load(input_ptr + channel * (W - 1) + i).to(DTYPE),)
    return taps


@triton.jit
def _store_inputs(taps, input_ptr, channel, W: tl.constexpr):
    """Keep the newest W - 1 of W inputs."""
    for i in tl.static_range(W - 1):
        tl.store(input_ptr + channel * (W - 1) + i, taps[i + 1].to(input_ptr.dtype.element_ty))


@triton.jit
def paged_kernel(
    rows,  # projected q, k, v, decay logits, beta logits
    strides,  # of their rows
    gate_ptr,
    gate_stride,
    y_ptr,
    spare_ptr,  # float32, as many values as y has
    state_ptr,
    state_stride,  # of pages
    input_ptr,
    input_stride,
    filters,  # convolution weights of q, k, v
    A_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    page_ptr,
    eps,
    H,
    BOUND: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One token: one program for each request and head, B value channels at a time; page -1 means no request."""
    n = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    key = tl.arange(0, K)
    value = tl.arange(0, V)
    y_ptr += (n * H + head) * V
    spare_ptr += (n * H + head) * V
    page = tl.load(page_ptr + n).to(tl.int64)
    if page < 0:
        tl.store(y_ptr + value, tl.zeros([V], y_ptr.dtype.element_ty))
    else:
        state_ptr += page * state_stride + head * (K * V)
        q_ptr = input_ptr + page * input_stride + head * (K * (W - 1))
        k_ptr = q_ptr + H * (K * (W - 1))
        v_ptr = input_ptr + page * input_stride + 2 * H * (K * (W - 1)) + head * (V * (W - 1))
        x_q = tl.load(rows[0] + n * strides[0] + head * K + key)
        x_k = tl.load(rows[1] + n * strides[1] + head * K + key)
        x_v = tl.load(rows[2] + n * strides[2] + head * V + value)
        logit = tl.load(rows[3] + n * strides[3] + head * K + key)
        beta = tl.sigmoid(tl.load(rows[4] + n * strides[4] + head).to(tl.float32))
        q_taps = _inputs(q_ptr, key, W, x_q.dtype) + (x_q,)
        k_taps = _inputs(k_ptr, key, W, x_k.dtype) + (x_k,)
        v_taps = _inputs(v_ptr, value, W, x_v.dtype) + (x_v,)
        q = _normalise(_convolve(q_taps, filters[0] + head * (K * W), key, W), K**-0.5)
        k = _normalise(_convolve(k_taps, filters[1] + head * (K * W), key, W), 1.0)
        v = _convolve(v_taps, filters[2] + head * (V * W), value, W)
        tl.store(spare_ptr + value, v)
        alpha = _decay(logit, tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head * K + key), BOUND)
        tl.debug_barrier()  # threads read what others have written: v. They write what others have read: the inputs.
        _store_inputs(q_taps, q_ptr, key, W)
        _store_inputs(k_taps, k_ptr, key, W)
        _store_inputs(v_taps, v_ptr, value, W)
        part = tl.arange(0, B)[None, :]
        tile = key[:, None, None] * V + part[None, :, :]
        for first in tl.range(0, V, B, num_stages=STAGES):
            state = tl.load(state_ptr + first + tile)
            v_part = tl.load(spare_ptr + first + part)
            o, state = _recur(state.to(tl.float32), q, k, v_part, alpha, beta)
            tl.store(state_ptr + first + tile, state.to(state_ptr.dtype.element_ty))
            tl.store(spare_ptr + first + part, o)
        tl.debug_barrier()
        _finish(y_ptr, spare_ptr, gate_ptr + n * gate_stride + head * V, norm_ptr, eps, V)


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """What the launcher compiles at K = V = 128 in bfloat16, for compute capability `arch`."""
    arguments = {"rows": ("*bf16",) * 5, "strides": ("i32:16",) * 5, "gate_ptr": "*bf16", "gate_stride": "i32:16"}
    arguments |= {"y_ptr": "*bf16", "spare_ptr": "*fp32", "state_ptr": "*fp32", "state_stride": "i32:16"}
    arguments |= {"input_ptr": "*bf16", "input_stride": "i32:16", "filters": ("*fp32",) * 3, "A_log_ptr": "*fp32"}
    arguments |= {"dt_bias_ptr": "*fp32", "norm_ptr": "*fp32", "page_ptr": "*i32", "eps": "fp32", "H": "i32:16"}
    return [(paged_kernel, arguments | {"BOUND": -5.0} | sizes(128, 128, 4), OPTIONS)]
