"""Gluon twin of the decoding step on states in pages: `decode_gluon.decode_kernel` with the addressing of pages."""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from openk3.ops.kda.decode_gluon import (
    _convolve,
    _filters,
    _join_taps,
    _norm_and_gate,
    _of_row,
    _recur,
    _row_index,
    _rows_layout,
    _sigmoid,
    _split_taps,
    _start_copy,
    _taps_layout,
    _token_ptr,
    _vectors,
)

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def sizes(K: int, V: int, W: int) -> dict[str, int]:
    """Constants of the kernel."""
    return {"K": K, "V": V, "W": W, "R": 16}


@gluon.jit
def _input_index(K: gl.constexpr):
    """(row [4, 1, 1], offset [1, K, 4] in the three inputs of K channels, tap [1, 1, 4]) of a [4, K, 4] tile."""
    TAPS: gl.constexpr = _taps_layout(K)
    row = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, TAPS)))
    channel = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(2, TAPS)))
    tap = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, TAPS))), 0), 0)
    offset = gl.expand_dims(gl.expand_dims(channel, 0), 2) * 3 + tap
    return gl.expand_dims(gl.expand_dims(row, 1), 2), offset, tap


@gluon.jit
def paged_kernel(
    rows,  # projected q, k, v, decay logits, beta logits
    strides,  # of their rows
    gate_ptr,
    gate_stride,
    y_ptr,
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
    BOUND: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    W: gl.constexpr,
    R: gl.constexpr,
):
    """One token: one program for each request and head; page -1 means no request."""
    gl.static_assert(W == 4 and K == V)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    n = (gl.program_id(0) // H).to(gl.int64)
    head = gl.program_id(0) % H
    row, channel = _row_index(K)
    page = gl.load(page_ptr + n).to(gl.int64)
    y_ptr += (n * H + head) * V + channel
    if page < 0:
        gl.store(y_ptr, gl.zeros([1, V], y_ptr.dtype.element_ty, _rows_layout(V)))
    else:
        state_ptr += page * state_stride + head * (K * V)
        state = gl.allocate_shared_memory(state_ptr.dtype.element_ty, [K, V], PLAIN)
        vectors = gl.allocate_shared_memory(gl.float32, [4, K], PLAIN)
        outputs = gl.allocate_shared_memory(gl.float32, [1, V], PLAIN)
        tile = _start_copy(state, state_ptr, V, R)
        x = gl.load(_token_ptr(rows, strides, n, row, head * K + channel))
        tap_row, at, tap = _input_index(K)
        q_ptr = input_ptr + page * input_stride + head * (K * 3)
        step = H * (K * 3)
        taken_ptr = _of_row(tap_row, q_ptr, q_ptr + step, q_ptr + 2 * step, q_ptr) + at
        held = (tap_row < 3) & (tap < 3)
        window = gl.load(taken_ptr, mask=held, other=0.0).to(x.dtype)
        weights = _filters(filters, head, K)
        bias = gl.load(dt_bias_ptr + head * K + channel + row * 0, mask=row == 3, other=0.0).to(gl.float32)
        slope = gl.exp(gl.load(A_log_ptr + head).to(gl.float32))
        beta = _sigmoid(gl.load(rows[4] + n * strides[4] + head).to(gl.float32))
        gate = gl.load(gate_ptr + n * gate_stride + head * V + channel)
        norm = gl.load(norm_ptr + channel).to(gl.float32)
        t0, t1, t2, _ = _split_taps(window, K)
        gl.store(taken_ptr, _join_taps(t1, t2, x, x, K).to(input_ptr.dtype.element_ty), mask=held)
        vectors.store(_vectors(_convolve((t0, t1, t2, x), weights), x, slope, bias, row, BOUND))
        async_copy.wait_group(0)
        gl.thread_barrier()
        o = _recur(state, vectors, beta, state_ptr, tile, R)
        outputs.store(o)
        y = _norm_and_gate(outputs.load(_rows_layout(V)), gate, norm, eps)
        gl.store(y_ptr, y.to(y_ptr.dtype.element_ty))


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """What the launcher compiles at K = V = 128 in bfloat16, for compute capability `arch`."""
    arguments = {"rows": ("*bf16",) * 5, "strides": ("i32:16",) * 5, "gate_ptr": "*bf16", "gate_stride": "i32:16"}
    arguments |= {"y_ptr": "*bf16", "state_ptr": "*fp32", "state_stride": "i32:16"}
    arguments |= {"input_ptr": "*bf16", "input_stride": "i32:16", "filters": ("*fp32",) * 3, "A_log_ptr": "*fp32"}
    arguments |= {"dt_bias_ptr": "*fp32", "norm_ptr": "*fp32", "page_ptr": "*i32", "eps": "fp32", "H": "i32:16"}
    return [(paged_kernel, arguments | {"BOUND": -5.0} | sizes(128, 128, 4), OPTIONS)]
