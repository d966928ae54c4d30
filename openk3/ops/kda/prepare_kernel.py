"""Triton kernel that turns raw tokens into the tiles of the chunkwise form: all of KDA that needs no state.

Per tile and head, with G the running sum of the log decay inside the tile (base 2) and Gl its last row:
kd = k 2^G, qd = q 2^G, kr = k 2^(Gl - G), ki = k 2^-G, mqk = lower(qd ki^T),
inv = (I + diag(beta) strict_lower(kd ki^T))^-1, decay = 2^Gl.
No exponent leaves the range of float32: products are formed relative to the middle of the tile's range of G, constant,
so that nothing depends on the gates of later tokens.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openk3.ops.backend import prefers_gluon
from openk3.ops.kda.reference import KdaGate
from openk3.ops.kda.tiles import Span
from openk3.ops.kda.workspace import FEW_HEADS, CutWorkspace, Workspace, kept
from openk3.ops.norm import L2_EPS

_LOG2E = math.log2(math.e)


def workspace_dtype(dtype: torch.dtype) -> torch.dtype:
    """Format of the workspace for inputs of this format."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def prepare(
    q_THK: Tensor,
    k_THK: Tensor,
    decay_logit_THK: Tensor,
    beta_logit_TH: Tensor,
    gate: KdaGate,
    *,
    span: Span,
    rests: tuple[str, ...] = (),
) -> Workspace:
    """Workspace of the tiles of `span`; tokens are all tokens, contiguous. The gate must be bounded.

    `rests`: what is to be there of what rounding leaves (`workspace.kept`); nothing in float32.
    """
    _, H, K = q_THK.shape
    X, C = span.num_tiles, span.chunk
    dtype = workspace_dtype(q_THK.dtype)
    w = CutWorkspace((X, H, C, K), dtype, q_THK.device, rests=() if dtype == torch.float32 else rests)
    if X * H == 0:
        return w
    assert gate.lower_bound is not None
    bound = gate.lower_bound * _LOG2E
    tokens = (q_THK, k_THK, decay_logit_THK, beta_logit_TH, gate.A_log_H, gate.dt_bias_HK)
    others = (span.start_X, span.length_X, bound, float(round(bound * C / 2)), K**-0.5, H)
    if dtype == torch.bfloat16 and (K, C) == (128, 32) and prefers_gluon(q_THK.device):
        from openk3.ops.kda import prepare_gluon

        if prepare_gluon.fits(q_THK, k_THK, decay_logit_THK):
            prepare_gluon.launch((*tokens, prepare_gluon.pointers(w), *others), X * H, K=K, C=C)
            return w
    outputs = (w.nkd, w.qd, w.kr, w.kr_rest, w.nkd_rest, w.inv_rest, w.qd_rest, w.inv, w.mqk, w.decay, w.beta)
    prepare_kernel[(X * H,)](*tokens, *outputs, *others, K=K, C=C, EXACT=dtype == torch.float32, **settings())
    return w


def settings() -> dict[str, int]:
    """Launch options."""
    return {"num_warps": 4, "num_stages": 1}


_EPS = tl.constexpr(L2_EPS)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _exp2(x):
    """2^x; results below the normal range are zero."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _sigmoid(x):
    """1 / (1 + 2^-x)."""
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp2(-x))
    else:
        grown = 1.0 + _exp2(-x)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [grown], tl.float32, True, 1)


@triton.jit
def _add_earlier(sum_a, earlier_a, sum_b, earlier_b):
    """Sums of two runs end to end, and without their last element: no later element ever enters and leaves a sum."""
    return sum_a + sum_b, sum_a + earlier_b


@triton.jit
def _unit_lower_inverse(lower, C: tl.constexpr, EXACT: tl.constexpr):
    """(I + lower)^-1 of a strictly lower matrix [C, C]: blocks of two rows, then block substitution with larger ones.

    The corner of [[A, 0], [B, D]]^-1 is -D^-1 B A^-1; all blocks of one size are merged by one pair of products.
    """
    precision: tl.constexpr = "ieee" if EXACT or INTERPRETED else "bf16x3"
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    apart = row ^ column  # its highest bit is the size of the blocks whose merging fills the entry
    inverse = tl.where(apart == 0, 1.0, tl.where(apart == 1, -lower, 0.0))
    levels: tl.constexpr = 5 if C == 32 else 4
    for level in tl.range(1, levels, num_stages=1):
        corners = tl.where((apart >> level) == 1, lower, 0.0)
        inverse -= tl.dot(inverse, tl.dot(corners, inverse, input_precision=precision), input_precision=precision)
    return inverse


@triton.jit(do_not_specialize=["H"], do_not_specialize_on_alignment=["start_ptr", "length_ptr"])
def prepare_kernel(
    q_ptr,
    k_ptr,
    logit_ptr,
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
    middle,  # of the range of its sums; a whole number, so that scaling by 2^middle is exact
    scale,
    H,
    K: tl.constexpr,
    C: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One tile of one head.

    Token rows are [C / 8, 8, K] with token 4 r + j of 32 at [j, r]: a thread then holds neighbouring tokens, and their
    running sum costs no exchange.
    """
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    near: tl.constexpr = C // 8
    program = tl.program_id(0).to(tl.int64)
    tile = program // H
    head = program % H
    length = tl.load(length_ptr + tile)
    start = tl.load(start_ptr + tile).to(tl.int64)
    channel = tl.arange(0, K)
    token = tl.arange(0, 8)[None, :, None] * near + tl.arange(0, near)[:, None, None]
    live = token < length
    tokens = (start * H + head) * K + token * (H * K) + channel[None, None, :]
    logit = tl.load(logit_ptr + tokens, mask=live, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + tokens, mask=live, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + tokens, mask=live, other=0.0).to(tl.float32)
    slope = _exp2(tl.load(a_log_ptr + head).to(tl.float32) * 1.4426950408889634) * 1.4426950408889634
    bias = tl.load(bias_ptr + head * K + channel).to(tl.float32)
    gate = tl.where(live, bound * _sigmoid((logit + bias[None, None, :]) * slope), 0.0)
    group = tl.sum(gate, 0)
    last = tl.sum(group, 0)
    _, earlier = tl.associative_scan((group, tl.zeros_like(group)), 0, _add_earlier)
    total = tl.cumsum(gate, 0) + (earlier - middle)[None, :, :]

    k *= tl.rsqrt(tl.sum(k * k, 2) + _EPS)[:, :, None]
    q *= (tl.rsqrt(tl.sum(q * q, 2) + _EPS) * scale)[:, :, None]
    up = _exp2(total)
    kd = k * up
    qd = q * up
    ki = k * _exp2(-total)
    back = _exp2(middle)
    io = nkd_ptr.dtype.element_ty
    rows = program * (C * K) + token * K + channel[None, None, :]
    nkd, qd_back = kd * -back, qd * back
    tl.store(nkd_ptr + rows, nkd.to(io))
    tl.store(qd_ptr + rows, qd_back.to(io))
    if nkd_rest_ptr is not None:
        tl.store(nkd_rest_ptr + rows, (nkd - nkd.to(io).to(tl.float32)).to(io))
    if qd_rest_ptr is not None:
        tl.store(qd_rest_ptr + rows, (qd_back - qd_back.to(io).to(tl.float32)).to(io))
    kr = ki * _exp2(last - middle)[None, None, :]
    tl.store(kr_ptr + rows, kr.to(io))
    if kr_rest_ptr is not None:
        tl.store(kr_rest_ptr + rows, (kr - kr.to(io).to(tl.float32)).to(io))
    tl.store(decay_ptr + program * K + channel, _exp2(last))

    c = tl.arange(0, C)
    beta = tl.load(beta_logit_ptr + (start + c) * H + head, mask=c < length, other=0.0).to(tl.float32)
    beta = tl.where(c < length, _sigmoid(beta * 1.4426950408889634), 0.0)
    tl.store(beta_ptr + program * C + c, beta)
    ki_t = tl.trans(tl.reshape(tl.permute(ki, (1, 0, 2)), (C, K)))
    queries = tl.dot(tl.reshape(tl.permute(qd, (1, 0, 2)), (C, K)), ki_t, input_precision=precision)
    keys = tl.dot(tl.reshape(tl.permute(kd, (1, 0, 2)), (C, K)), ki_t, input_precision=precision)
    square = program * (C * C) + c[:, None] * C + c[None, :]
    tl.store(mqk_ptr + square, tl.where(c[:, None] >= c[None, :], queries, 0.0).to(io))
    lower = tl.where(c[:, None] > c[None, :], keys * beta[:, None], 0.0)
    inverse = _unit_lower_inverse(lower, C, EXACT)
    if not EXACT:
        # Each entry is rounded with what rounding left of the one above it: then what tokens make of a write adds up
        # to what was written. With keys that are nearly one this is as good as a format of twice the digits.
        left = inverse - inverse.to(io).to(tl.float32)
        below = tl.where(c[:, None] == c[None, :] + 1, 1.0, 0.0)
        shifted = inverse + tl.dot(below, left, input_precision=precision)
        if inv_rest_ptr is not None:
            tl.store(inv_rest_ptr + square, (inverse - shifted.to(io).to(tl.float32)).to(io))
        inverse = shifted
    tl.store(inv_ptr + square, inverse.to(io))


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles at K = 128 in bfloat16, for compute capability `arch`."""
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
    arguments |= {"K": 128, "C": 32, "EXACT": False}
    return [(prepare_kernel, arguments | rests, settings()) for rests in rest_arguments("*bf16")]


def rest_arguments(kind: str) -> list[dict[str, str | None]]:
    """Which rests the launchers ask for, as arguments of this kind: those for many heads, none, those for few."""
    names = kept(1)
    return [{f"{x}_ptr": kind if x in asked else None for x in names} for asked in (kept(FEW_HEADS + 1), (), names)]
