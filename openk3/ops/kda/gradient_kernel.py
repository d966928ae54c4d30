"""Triton kernel of the gradients inside tiles: from what the scans leave to raw q, k, decay and beta logits."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openk3.ops.backend import prefers_gluon
from openk3.ops.kda.reference import KdaGate
from openk3.ops.kda.scan_kernel import compute_capability
from openk3.ops.kda.tiles import Span

_PIECE = 256  # tokens that one program sums


@dataclass(frozen=True)
class Scanned:
    """What the scans leave for the gradients of the tiles of a span."""

    writes: Tensor  # [tokens of the span, H, V]
    states: Tensor  # [X, H, V, K]
    d_states: Tensor  # [X, H, V, K]
    d_o: Tensor  # [T, H, V]
    d_v: Tensor  # [T, H, V]


@dataclass(frozen=True)
class TokenGradients:
    """Gradients of raw q, k, v, decay logits and beta logits, for all tokens; kernels fill in the rows of a span."""

    d_q: Tensor
    d_k: Tensor
    d_v: Tensor
    d_logit: Tensor
    d_beta: Tensor


def tile_gradients(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    gate: KdaGate,
    scanned: Scanned,
    out: TokenGradients,
    *,
    span: Span,
) -> None:
    """Gradients of q, k, decay logits and beta logits of the span's tokens; tokens: contiguous, as in the forward."""
    q_THK, k_THK, _, logit_THK, beta_TH = tokens
    (_, H, K), V = q_THK.shape, scanned.writes.shape[2]
    exact = scanned.writes.dtype == torch.float32
    if span.num_tiles * H == 0:
        return
    if _suits_hopper(tokens, gate, scanned, span):
        from openk3.ops.kda import gradient_gluon

        gradient_gluon.tile_gradients(tokens, gate, scanned, out, span=span)
    else:
        gradient_kernel[(span.num_tiles * H,)](
            *(q_THK, k_THK, logit_THK, beta_TH, gate.A_log_H, gate.dt_bias_HK),
            *(scanned.writes, scanned.d_v, scanned.d_o, scanned.states, scanned.d_states),
            *(out.d_q, out.d_k, out.d_logit, out.d_beta),
            *(span.start_X, span.length_X, span.token_low, gate.lower_bound, K**-0.5, H),
            K=K,
            V=V,
            C=span.chunk,
            EXACT=exact,
            **settings(K, V, compute_capability(q_THK.device), exact=exact),
        )


def _suits_hopper(tokens: tuple[Tensor, ...], gate: KdaGate, scanned: Scanned, span: Span) -> bool:
    """Whether the Gluon kernel takes these: it moves bfloat16 tiles of 128 channels by Hopper's copy engine."""
    q, k, _, logit, beta = tokens
    moved = (q, k, logit, scanned.writes, scanned.d_o, scanned.d_v, scanned.states)
    return (
        prefers_gluon(q.device)
        and q.shape[2] == scanned.writes.shape[2] == 128
        and span.chunk == 32
        and all(x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0 for x in moved)
        and beta.dtype == torch.bfloat16
        and gate.A_log_H.dtype == gate.dt_bias_HK.dtype == torch.float32
    )


def gate_gradients(logit_THK: Tensor, d_logit_THK: Tensor, dt_bias_HK: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of A_log [H] and dt_bias [H, K] from that of the decay logits, in float32.

    The logits enter the gate as exp(A_log) * (logit + dt_bias): so dt_bias gets their sum over tokens, and A_log that
    of each times what it multiplies. Tokens are summed in pieces, and the pieces in one fixed order.
    """
    T, H, K = logit_THK.shape
    pieces = triton.cdiv(T, _PIECE)
    d_bias = torch.empty(pieces, H, K, dtype=torch.float32, device=logit_THK.device)
    d_slope = torch.empty(pieces, H, K, dtype=torch.float32, device=logit_THK.device)
    if pieces * H:
        gate_gradient_kernel[(pieces * H,)](
            *(logit_THK, d_logit_THK, dt_bias_HK, d_bias, d_slope, T, H), K=K, ROWS=32, PIECE=_PIECE, num_warps=4
        )
    return d_slope.sum((0, 2)), d_bias.sum(0)


def settings(K: int, V: int, arch: int, *, exact: bool = False) -> dict[str, int]:
    """Block of value channels, and launch options.

    On Hopper nothing is fetched ahead: Triton 3.6 would let copies overwrite blocks that products still read, because
    here the same blocks are also read into registers. And for few key channels its ptxas takes operands from elsewhere
    if blocks are larger.
    """
    ahead = arch != 90
    block = 16 if ahead or exact else 64 if K == 128 else 32
    return {"BV": min(V, block), "num_warps": max(4, K // 16), "num_stages": 2 if ahead else 1}


@triton.jit
def _columns(first, tokens, live):
    """Rows of the tile as columns, float32; zero behind its last token."""
    return tl.trans(tl.load(first + tokens, mask=live[:, None], other=0.0)).to(tl.float32)


@triton.jit
def _gate(first, tokens, live, slope, shift):
    """Sigmoid of the gate, [K, C]; zero behind the tile's last token."""
    opened = 1.0 / (1.0 + tl.exp2((_columns(first, tokens, live) * slope + shift[:, None]) * -1.4426950408889634))
    return tl.where(live[None, :], opened, 0.0)


@triton.jit
def _gate_slope(first, tokens, live, slope, shift):
    """Derivative of that sigmoid in the logit, exact to float32 even where the sigmoid is nearly 0 or 1."""
    small = tl.exp2(tl.abs(_columns(first, tokens, live) * slope + shift[:, None]) * -1.4426950408889634)
    share = 1.0 / (1.0 + small)
    return small * share * share * slope


@triton.jit
def _sums(x, ones, PARTS: tl.constexpr):
    """x @ ones for float32 x: exactly in float32, or in that many bfloat16 parts of x where ones are bfloat16."""
    if ones.dtype == tl.float32:
        total = tl.dot(x, ones, input_precision="ieee")
    else:
        part = x.to(tl.bfloat16)
        total = tl.dot(part, ones)
        for _ in tl.static_range(PARTS - 1):
            x -= part.to(tl.float32)
            part = x.to(tl.bfloat16)
            total = tl.dot(part, ones, total)
    return total


@triton.jit(
    do_not_specialize=["H", "token_low"],
    do_not_specialize_on_alignment=["start_ptr", "length_ptr"],
)
def gradient_kernel(
    q_ptr,
    k_ptr,
    logit_ptr,
    beta_ptr,
    a_log_ptr,
    bias_ptr,
    writes_ptr,
    d_v_ptr,
    d_o_ptr,
    states_ptr,
    d_states_ptr,
    d_q_ptr,
    d_k_ptr,
    d_logit_ptr,
    d_beta_ptr,
    start_ptr,
    length_ptr,
    token_low,
    bound,
    scale,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One tile of one head. Rows of writes are counted from token_low, all others from the first of all tokens."""
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    program = tl.program_id(0).to(tl.int64)
    tile, head = program // H, program % H
    start, length = tl.load(start_ptr + tile).to(tl.int64), tl.load(length_ptr + tile)
    c, channel = tl.arange(0, C), tl.arange(0, K)
    live = c < length
    io = writes_ptr.dtype.element_ty

    d_mqk = tl.zeros([C, C], tl.float32)
    d_keys = tl.zeros([C, C], tl.float32)
    d_qd = tl.zeros([K, C], tl.float32)
    d_kd = tl.zeros([K, C], tl.float32)
    d_kr = tl.zeros([K, C], tl.float32)
    along = tl.zeros([C], tl.float32)
    carried = tl.zeros([K], tl.float32)
    column = tl.arange(0, BV)
    values = (start * H + head) * V
    values_low = ((start - token_low) * H + head) * V
    rows = c[:, None] * (H * V) + column[None, :]
    block = column[:, None] * K + channel[None, :]
    state = program * (V * K)
    for v in tl.range(0, V, BV):
        write = tl.load(writes_ptr + values_low + v + rows, mask=live[:, None], other=0.0)
        d_o = tl.load(d_o_ptr + values + v + rows, mask=live[:, None], other=0.0).to(io)
        d_r = tl.load(d_v_ptr + values + v + rows, mask=live[:, None], other=0.0).to(io)
        entering = tl.load(states_ptr + state + v * K + block)
        d_leaving = tl.load(d_states_ptr + state + v * K + block)
        carried += tl.sum(entering.to(tl.float32) * d_leaving.to(tl.float32), 0)
        along += tl.sum(d_r.to(tl.float32) * write.to(tl.float32), 1)
        d_mqk = tl.dot(d_o, tl.trans(write), d_mqk, input_precision=precision)
        d_keys = tl.dot(d_r, tl.trans(write), d_keys, input_precision=precision)
        d_qd = tl.dot(tl.trans(entering), tl.trans(d_o), d_qd, input_precision=precision)
        d_kd = tl.dot(tl.trans(entering), tl.trans(d_r), d_kd, input_precision=precision)
        d_kr = tl.dot(tl.trans(d_leaving), tl.trans(write), d_kr, input_precision=precision)

    # A token's query reads its own key without any decay between: the diagonal is left out of the products, where its
    # two shares in the gradient of the decay would cancel only up to rounding.
    own = tl.sum(tl.where(c[:, None] == c[None, :], d_mqk, 0.0), 1)
    below = c[:, None] > c[None, :]
    d_mqk = tl.where(below, d_mqk, 0.0)
    d_keys = tl.where(below, -d_keys, 0.0)
    # Decay may span 2^-231 in a tile and gradients may be tiny: products are taken relative to the largest. But what
    # comes from the states may be large where nothing was written: the scale leaves room for that.
    size = tl.maximum(tl.max(tl.abs(d_mqk)), tl.maximum(tl.max(tl.abs(d_keys)), tl.max(tl.abs(own))))
    size = tl.exp2(tl.ceil(tl.log2(tl.maximum(size, 1e-27))))
    shrink = 1.0 / size
    d_mqk = (d_mqk * shrink).to(io)
    d_keys = (d_keys * shrink).to(io)
    own *= shrink * scale

    keys = (start * H + head) * K
    tokens = c[:, None] * (H * K) + channel[None, :]
    q_at, k_at, logit_at = q_ptr + keys, k_ptr + keys, logit_ptr + keys
    slope = tl.minimum(tl.exp2(tl.load(a_log_ptr + head).to(tl.float32) * 1.4426950408889634), 1e30)
    shift = tl.load(bias_ptr + head * K + channel).to(tl.float32) * slope
    upper = tl.where(c[:, None] <= c[None, :], 1.0, 0.0).to(io)
    gate = _gate(logit_at, tokens, live, slope, shift) * (bound * 1.4426950408889634)
    middle = 0.5 * tl.sum(gate, 1)
    total = _sums(gate, upper, 3) - middle[:, None]
    half = tl.exp2(middle)
    k = _columns(k_at, tokens, live)
    k_norm = tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    # Gradients of the decay take the rounded rows that the products take: then what a pair of tokens gives to the decay
    # up to the one and takes from that up to the other cancels exactly where it should.
    ki = (k * k_norm[None, :] * tl.exp2(-total)).to(io)
    d_kr = d_kr * shrink * half[:, None]
    carried = carried * shrink * half * half + tl.sum(d_kr * ki.to(tl.float32), 1)
    kd = (k * k_norm[None, :] * tl.exp2(total)).to(io)
    d_kd = tl.dot(ki, tl.trans(d_keys), d_kd * -shrink * half[:, None], input_precision=precision)
    d_log = d_kd * kd.to(tl.float32)
    d_k = d_kd * tl.exp2(total)
    d_qd = tl.dot(ki, tl.trans(d_mqk), d_qd * shrink * half[:, None], input_precision=precision)
    q = _columns(q_at, tokens, live)
    q_norm = tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
    qd = (q * q_norm[None, :] * (tl.exp2(total) * scale)).to(io)
    d_log += d_qd * qd.to(tl.float32)
    d_ki = tl.dot(kd, d_keys, d_kr, input_precision=precision)
    d_ki = tl.dot(qd, d_mqk, d_ki, input_precision=precision)
    d_log -= d_ki * ki.to(tl.float32)
    d_k += d_ki * tl.exp2(-total)
    d_q = d_qd * (tl.exp2(total) * scale)

    d_log = _sums(d_log, tl.trans(upper), 2) + carried[:, None]
    d_logit = d_log * _gate_slope(logit_at, tokens, live, slope, shift) * (bound * size)
    tl.store(d_logit_ptr + keys + tokens, tl.trans(d_logit.to(d_logit_ptr.dtype.element_ty)), mask=live[:, None])
    q = _columns(q_at, tokens, live) * q_norm[None, :]
    k = _columns(k_at, tokens, live) * k_norm[None, :]
    d_q += k * own[None, :]
    d_q = (d_q - q * tl.sum(d_q * q, 0)[None, :]) * (q_norm * size)[None, :]
    tl.store(d_q_ptr + keys + tokens, tl.trans(d_q.to(d_q_ptr.dtype.element_ty)), mask=live[:, None])
    d_k += q * own[None, :]
    d_k = (d_k - k * tl.sum(d_k * k, 0)[None, :]) * (k_norm * size)[None, :]
    tl.store(d_k_ptr + keys + tokens, tl.trans(d_k.to(d_k_ptr.dtype.element_ty)), mask=live[:, None])
    # (1 - beta) / beta is exp(-x) of the logit x; along falls as beta^2, so nothing is lost where that is limited.
    beta_logit = tl.load(beta_ptr + (start + c) * H + head, mask=live, other=0.0).to(tl.float32)
    d_beta = along * tl.exp2(tl.minimum(beta_logit * -1.4426950408889634, 80.0))
    tl.store(d_beta_ptr + (start + c) * H + head, d_beta.to(d_beta_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["T", "H"])
def gate_gradient_kernel(
    logit_ptr,
    d_logit_ptr,
    bias_ptr,
    d_bias_ptr,
    d_slope_ptr,
    T,
    H,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """One piece of the tokens of one head: sums over its tokens, each channel by itself."""
    program = tl.program_id(0).to(tl.int64)
    piece, head = program // H, program % H
    row, channel = tl.arange(0, ROWS), tl.arange(0, K)
    bias = tl.load(bias_ptr + head * K + channel).to(tl.float32)
    d_bias = tl.zeros((ROWS, K), tl.float32)
    d_slope = tl.zeros((ROWS, K), tl.float32)
    for first in range(0, PIECE, ROWS):
        token = piece * PIECE + first + row
        at = (token[:, None] * H + head) * K + channel[None, :]
        live = (token < T)[:, None]
        d_logit = tl.load(d_logit_ptr + at, mask=live, other=0.0).to(tl.float32)
        logit = tl.load(logit_ptr + at, mask=live, other=0.0).to(tl.float32)
        d_bias += d_logit
        d_slope += d_logit * (logit + bias[None, :])
    tl.store(d_bias_ptr + program * K + channel, tl.sum(d_bias, 0))
    tl.store(d_slope_ptr + program * K + channel, tl.sum(d_slope, 0))


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16 at K = V = 128, and on Hopper at fewer channels, for capability `arch`."""
    tokens = ["q", "k", "logit", "beta", "writes", "d_v", "d_o", "states", "d_states"]
    tokens += ["d_q", "d_k", "d_logit", "d_beta"]
    given: dict[str, Any] = {f"{name}_ptr": "*bf16" for name in tokens}
    given |= {"a_log_ptr": "*fp32", "bias_ptr": "*fp32", "start_ptr": "*i32:1", "length_ptr": "*i32:1"}
    given |= {"token_low": "i32", "bound": "fp32", "scale": "fp32", "H": "i32", "C": 32, "EXACT": False}
    cases = []
    for K, V in ((128, 128), (64, 64), (64, 128)) if arch == 90 else ((128, 128),):
        options = settings(K, V, arch)
        cases.append((gradient_kernel, given | {"K": K, "V": V, "BV": options.pop("BV")}, options))
    sums: dict[str, Any] = {"logit_ptr": "*bf16", "d_logit_ptr": "*bf16", "bias_ptr": "*fp32"}
    sums |= {"d_bias_ptr": "*fp32", "d_slope_ptr": "*fp32", "T": "i32", "H": "i32", "K": 128, "ROWS": 32}
    return [*cases, (gate_gradient_kernel, sums | {"PIECE": _PIECE}, {"num_warps": 4})]
