"""Triton kernel that turns raw tokens into the tiles of the chunkwise form: all of KDA that needs no state.

Per tile and head, with G the running sum of the log decay inside the tile (base 2) and e = 2^G at its end:
kd = k 2^G, qd = q 2^G, kr = k 2^(Gl - G), mqk = lower(qd ki^T), inv = (I + diag(beta) strict_lower(kd ki^T))^-1 diag(beta),
where ki = k 2^-G. No exponent leaves the range of float32: products are formed relative to the middle of the tile's
range of G, a constant, so that nothing depends on the gates of later tokens.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openk3.ops.kda.reference import KdaGate
from openk3.ops.kda.tiles import Span

_EPS = 1e-6  # of the L2 norms, inside the root
_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Workspace:
    """What the scans read, for X tiles of C tokens. kd is stored negated, so that scans only ever add products."""

    nkd: Tensor  # [X, H, C, K]
    qd: Tensor  # [X, H, C, K]
    kr: Tensor  # [X, H, C, K]
    inv: Tensor  # [X, H, C, C], its columns times beta
    mqk: Tensor  # [X, H, C, C]
    decay: Tensor  # [X, H, K] float32


def workspace_dtype(dtype: torch.dtype) -> torch.dtype:
    """Format of the workspace for inputs of this format."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def prepare(
    q_THK: Tensor, k_THK: Tensor, decay_logit_THK: Tensor, beta_logit_TH: Tensor, gate: KdaGate, *, span: Span
) -> Workspace:
    """Workspace of the tiles of `span`; tokens are all tokens, contiguous. The gate must be bounded."""
    _, H, K = q_THK.shape
    X, C = span.num_tiles, span.chunk
    dtype = workspace_dtype(q_THK.dtype)

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q_THK.device)

    workspace = Workspace(
        nkd=empty(X, H, C, K),
        qd=empty(X, H, C, K),
        kr=empty(X, H, C, K),
        inv=empty(X, H, C, C),
        mqk=empty(X, H, C, C),
        decay=empty(X, H, K, dtype=torch.float32),
    )
    if X * H:
        assert gate.lower_bound is not None
        w = workspace
        prepare_kernel[(X * H,)](
            *(q_THK, k_THK, decay_logit_THK, beta_logit_TH, gate.A_log_H, gate.dt_bias_HK),
            *(w.nkd, w.qd, w.kr, w.inv, w.mqk, w.decay, span.start_X, span.length_X),
            *(gate.lower_bound * _LOG2E, K**-0.5, H),
            K=K,
            C=C,
            EXACT=dtype == torch.float32,
            **settings(),
        )
    return workspace


def settings() -> dict[str, int]:
    """Launch options."""
    return {"num_warps": 4, "num_stages": 1}


@triton.jit
def _unit_lower_inverse(lower, C: tl.constexpr):
    """(I + lower)^-1 of a strictly lower matrix [C, C], row by row."""
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    for i in tl.static_range(1, C):
        factors = tl.sum(tl.where(row == i, lower, 0.0), 0)
        update = tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where(row == i, inverse - update[None, :], inverse)
    return inverse


@triton.jit
def prepare_kernel(
    q_ptr,
    k_ptr,
    logit_ptr,
    beta_ptr,
    a_log_ptr,
    bias_ptr,
    nkd_ptr,
    qd_ptr,
    kr_ptr,
    inv_ptr,
    mqk_ptr,
    decay_ptr,
    start_ptr,
    length_ptr,
    bound,  # of the log decay, base 2
    scale,
    H,
    K: tl.constexpr,
    C: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One tile of one head."""
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    program = tl.program_id(0).to(tl.int64)
    tile = program // H
    head = program % H
    length = tl.load(length_ptr + tile)
    start = tl.load(start_ptr + tile).to(tl.int64)
    c = tl.arange(0, C)
    channel = tl.arange(0, K)
    live = (c < length)[:, None]
    tokens = (start * H + head) * K + c[:, None] * (H * K) + channel[None, :]
    logit = tl.load(logit_ptr + tokens, mask=live, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + tokens, mask=live, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + tokens, mask=live, other=0.0).to(tl.float32)
    slope = tl.exp2(tl.load(a_log_ptr + head).to(tl.float32) * 1.4426950408889634) * -1.4426950408889634
    bias = tl.load(bias_ptr + head * K + channel).to(tl.float32)
    gate = bound / (1.0 + tl.exp2((logit + bias[None, :]) * slope))
    gate = tl.where(live, gate, 0.0)
    total = tl.cumsum(gate, 0)
    last = tl.sum(gate, 0)
    middle = bound * (C // 2)
    beta = tl.load(beta_ptr + (start + c) * H + head, mask=c < length, other=0.0).to(tl.float32)
    beta = tl.where(c < length, 1.0 / (1.0 + tl.exp2(beta * -1.4426950408889634)), 0.0)

    k *= tl.rsqrt(tl.sum(k * k, 1) + 1e-6)[:, None]
    q *= (tl.rsqrt(tl.sum(q * q, 1) + 1e-6) * scale)[:, None]
    up = tl.exp2(total - middle)
    down = tl.exp2(middle - total)
    kd = k * up
    qd = q * up
    ki = k * down
    ki_t = tl.trans(ki)
    keys = tl.dot(kd, ki_t, input_precision=precision)
    queries = tl.dot(qd, ki_t, input_precision=precision)
    lower = tl.where(c[:, None] > c[None, :], keys * beta[:, None], 0.0)
    inverse = _unit_lower_inverse(lower, C) * beta[None, :]
    mqk = tl.where(c[:, None] >= c[None, :], queries, 0.0)

    back = tl.exp2(middle)
    io = nkd_ptr.dtype.element_ty
    rows = program * (C * K) + c[:, None] * K + channel[None, :]
    tl.store(nkd_ptr + rows, (kd * -back).to(io))
    tl.store(qd_ptr + rows, (qd * back).to(io))
    tl.store(kr_ptr + rows, (ki * tl.exp2(last - middle)[None, :]).to(io))
    tl.store(decay_ptr + program * K + channel, tl.exp2(last))
    square = program * (C * C) + c[:, None] * C + c[None, :]
    tl.store(inv_ptr + square, inverse.to(io))
    tl.store(mqk_ptr + square, mqk.to(io))


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles at K = 128 in bfloat16, for compute capability `arch`."""
    arguments: dict[str, Any] = dict.fromkeys(("q_ptr", "k_ptr", "logit_ptr", "beta_ptr"), "*bf16")
    arguments |= dict.fromkeys(("nkd_ptr", "qd_ptr", "kr_ptr", "inv_ptr", "mqk_ptr"), "*bf16")
    arguments |= dict.fromkeys(("a_log_ptr", "bias_ptr", "decay_ptr"), "*fp32")
    arguments |= {"start_ptr": "*i32:1", "length_ptr": "*i32:1", "bound": "fp32", "scale": "fp32", "H": "i32"}
    return [(prepare_kernel, arguments | {"K": 128, "C": 32, "EXACT": False}, settings())]
