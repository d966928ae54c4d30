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
from openk3.ops.norm import L2_EPS

_EPS = tl.constexpr(L2_EPS)


@dataclass(frozen=True)
class Scanned:
    """What the scans leave for the gradients of the tiles of a span."""

    writes: Tensor  # [tokens of the span, H, V]
    states: Tensor  # [X, H, V, K]
    d_states: Tensor  # [X, H, V, K]
    d_o: Tensor  # [T, H, V]
    d_v: Tensor  # [T, H, V]
    along: Tensor  # [X, H, V / 16, C] float32: sums of d_v times v over each 16 channels
    writes_rest: Tensor | None = None  # as writes: what rounding left of them; None in float32
    d_states_rest: Tensor | None = None  # as d_states
    states_rest: Tensor | None = None  # as states; None: they are taken as they are


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
) -> Tensor:
    """Gradients of q, k, decay logits and beta logits of the span's tokens; tokens: contiguous, as in the forward.

    Where states come in two parts, so do rows inside tiles and what they are multiplied by.

    Returns what each tile gives to the gradients of A_log, channel by channel, and of dt_bias: [X, H, 2, K] float32. A
    logit enters the gate as exp(A_log) * (logit + dt_bias): so dt_bias gets the sum over tokens of their gradients, and
    A_log that of each times what it multiplies.
    """
    q_THK, k_THK, _, logit_THK, beta_TH = tokens
    (_, H, K), V = q_THK.shape, scanned.writes.shape[2]
    exact = scanned.writes.dtype == torch.float32
    if span.num_tiles * H and _suits_hopper(tokens, gate, scanned, span):
        from openk3.ops.kda import gradient_gluon

        return gradient_gluon.tile_gradients(tokens, gate, scanned, out, span=span)
    d_gate, fine = scanned.along.new_empty(span.num_tiles, H, 2, K), scanned.states_rest is not None
    if span.num_tiles * H:
        gradient_kernel[(span.num_tiles * H,)](
            *(q_THK, k_THK, logit_THK, beta_TH, gate.A_log_H, gate.dt_bias_HK),
            *(scanned.writes, scanned.writes_rest, scanned.d_v, scanned.d_o, scanned.states, scanned.states_rest),
            *(scanned.d_states, scanned.d_states_rest, scanned.along),
            *(out.d_q, out.d_k, out.d_logit, out.d_beta, d_gate),
            *(span.start_X, span.length_X, span.token_low, gate.lower_bound, K**-0.5, H),
            K=K,
            V=V,
            C=span.chunk,
            **settings(K, V, compute_capability(q_THK.device), exact=exact, fine=fine),
        )
    return d_gate


def _suits_hopper(tokens: tuple[Tensor, ...], gate: KdaGate, scanned: Scanned, span: Span) -> bool:
    """Whether the Gluon kernel takes these: it moves bfloat16 tiles of 128 channels by Hopper's copy engine."""
    q, k, _, logit, beta = tokens
    moved = (q, k, logit, scanned.writes, scanned.writes_rest, scanned.d_o, scanned.d_v, scanned.states)
    return (
        prefers_gluon(q.device)
        and q.shape[2] == scanned.writes.shape[2] == 128
        and span.chunk == 32
        and all(x is not None and x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0 for x in moved)
        and beta.dtype == torch.bfloat16
        and gate.A_log_H.dtype == gate.dt_bias_HK.dtype == torch.float32
    )


def settings(K: int, V: int, arch: int, *, exact: bool = False, fine: bool = False) -> dict[str, int]:
    """Block of value channels, and launch options.

    On Hopper nothing is fetched ahead: Triton 3.6 would let copies overwrite blocks that products still read, because
    here the same blocks are also read into registers. With larger blocks its ptxas runs out of registers, or, for 64
    key channels, gives a product an address that nothing has computed.
    """
    ahead = arch != 90
    block = 16 if ahead or exact or K == 64 or (fine and K == 32) else 32
    warps = 8 if K == 32 and not (ahead or exact) else max(4, K // 16)
    return {"BV": min(V, block), "num_warps": warps, "num_stages": 2 if ahead and not fine else 1}


@triton.jit
def _columns(first, tokens, live):
    """Rows of the tile as columns, float32; zero behind its last token."""
    return tl.trans(tl.load(first + tokens, mask=live[:, None], other=0.0)).to(tl.float32)


@triton.jit
def _exponent(first, tokens, live, slope, shift):
    """What the gate's sigmoid takes, [K, C]."""
    return _columns(first, tokens, live) * slope + shift[:, None]


@triton.jit
def _rest(x, rounded):
    """What rounding left of x, in the format of what it is rounded to."""
    return (x - rounded.to(tl.float32)).to(rounded.dtype)


@triton.jit
def _product(row, other, other_rest, acc, precision: tl.constexpr, FINE: tl.constexpr):
    """acc + row @ other, the float32 row rounded to the other's format; FINE: both in two parts."""
    rounded = row.to(other.dtype)
    acc = tl.dot(rounded, other, acc, input_precision=precision)
    if FINE:
        acc = tl.dot(_rest(row, rounded), other, acc, input_precision=precision)
        acc = tl.dot(rounded, other_rest, acc, input_precision=precision)
    return acc


@triton.jit
def _seen(row, io: tl.constexpr, FINE: tl.constexpr):
    """The row as products took it."""
    return row if FINE else row.to(io).to(tl.float32)


@triton.jit
def _sums(x, ones):
    """x @ ones for float32 x: exactly in float32, or in three bfloat16 parts of x where ones are bfloat16."""
    if ones.dtype == tl.float32:
        total = tl.dot(x, ones, input_precision="ieee")
    else:
        part = x.to(tl.bfloat16)
        total = tl.dot(part, ones)
        for _ in tl.static_range(2):
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
    writes_rest_ptr,
    d_v_ptr,
    d_o_ptr,
    states_ptr,
    states_rest_ptr,
    d_states_ptr,
    d_states_rest_ptr,
    along_ptr,
    d_q_ptr,
    d_k_ptr,
    d_logit_ptr,
    d_beta_ptr,
    d_gate_ptr,
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
):
    """One tile of one head; FINE where states come in two parts.

    Rows of writes are counted from token_low, all others from the first of all tokens.
    """
    FINE: tl.constexpr = states_rest_ptr is not None
    precision: tl.constexpr = "ieee" if writes_ptr.dtype.element_ty == tl.float32 else "tf32"
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
        both = d_leaving.to(tl.float32)
        if d_states_rest_ptr is not None:  # gradients of the gate are small differences: both in two parts
            write_rest = tl.load(writes_rest_ptr + values_low + v + rows, mask=live[:, None], other=0.0)
            rest = tl.load(d_states_rest_ptr + state + v * K + block)
            both += rest.to(tl.float32)
            d_mqk = tl.dot(d_o, tl.trans(write_rest), d_mqk, input_precision=precision)
            d_keys = tl.dot(d_r, tl.trans(write_rest), d_keys, input_precision=precision)
            d_kr = tl.dot(tl.trans(rest), tl.trans(write), d_kr, input_precision=precision)
            d_kr = tl.dot(tl.trans(d_leaving), tl.trans(write_rest), d_kr, input_precision=precision)
        if FINE:
            rest = tl.load(states_rest_ptr + state + v * K + block)
            carried += tl.sum((entering.to(tl.float32) + rest.to(tl.float32)) * both, 0)
            d_qd = tl.dot(tl.trans(rest), tl.trans(d_o), d_qd, input_precision=precision)
            d_kd = tl.dot(tl.trans(rest), tl.trans(d_r), d_kd, input_precision=precision)
        else:
            carried += tl.sum(entering.to(tl.float32) * both, 0)
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
    d_mqk *= shrink
    d_keys *= shrink
    d_mqk_rest, d_keys_rest = _rest(d_mqk, d_mqk.to(io)), _rest(d_keys, d_keys.to(io))
    d_mqk, d_keys = d_mqk.to(io), d_keys.to(io)
    own *= shrink * scale

    keys = (start * H + head) * K
    tokens = c[:, None] * (H * K) + channel[None, :]
    q_at, k_at, logit_at = q_ptr + keys, k_ptr + keys, logit_ptr + keys
    slope = tl.minimum(tl.exp2(tl.load(a_log_ptr + head).to(tl.float32) * 1.4426950408889634), 1e30)
    shift = tl.load(bias_ptr + head * K + channel).to(tl.float32) * slope
    upper = tl.where(c[:, None] <= c[None, :], 1.0, 0.0).to(io)
    x = _exponent(logit_at, tokens, live, slope, shift)
    gate = (bound * 1.4426950408889634) / (1.0 + tl.exp2(x * -1.4426950408889634))
    gate = tl.where(live[None, :], gate, 0.0)
    middle = 0.5 * tl.sum(gate, 1)
    total = _sums(gate, upper) - middle[:, None]
    half = tl.exp2(middle)
    k = _columns(k_at, tokens, live)
    k_norm = tl.rsqrt(tl.sum(k * k, 0) + _EPS)
    # Gradients of the decay take the rows that the products take: then what a pair of tokens gives to the decay up to
    # the one and takes from that up to the other cancels exactly where it should.
    row_ki = k * k_norm[None, :] * tl.exp2(-total)
    ki = _seen(row_ki, io, FINE)
    d_kr = d_kr * shrink * half[:, None]
    carried = carried * shrink * half * half + tl.sum(d_kr * row_ki, 1)
    if not FINE:
        alone = d_kr * (row_ki - ki)  # what the state gets has no partner: the exact row
    kd = k * k_norm[None, :] * tl.exp2(total)
    d_kd = d_kd * -shrink * half[:, None]
    d_kd = _product(row_ki, tl.trans(d_keys), tl.trans(d_keys_rest), d_kd, precision, FINE)
    d_log = d_kd * _seen(kd, io, FINE)
    # Of what a token reads, its value counts for it and what its key finds against it. 1 - beta is exact.
    part = tl.arange(0, V // 16)
    d_read = tl.sum(tl.load(along_ptr + (program * (V // 16) + part[:, None]) * C + c[None, :]), 0)
    d_read += tl.sum(d_log, 0) * size
    beta_logit = tl.load(beta_ptr + (start + c) * H + head, mask=live, other=0.0).to(tl.float32)
    d_beta = d_read / (1.0 + tl.exp2(beta_logit * 1.4426950408889634))
    tl.store(d_beta_ptr + (start + c) * H + head, d_beta.to(d_beta_ptr.dtype.element_ty), mask=live)
    d_k = d_kd * tl.exp2(total)
    d_qd = d_qd * shrink * half[:, None]
    d_qd = _product(row_ki, tl.trans(d_mqk), tl.trans(d_mqk_rest), d_qd, precision, FINE)
    q = _columns(q_at, tokens, live)
    q_norm = tl.rsqrt(tl.sum(q * q, 0) + _EPS)
    qd = q * q_norm[None, :] * (tl.exp2(total) * scale)
    d_log += d_qd * _seen(qd, io, FINE)
    d_ki = _product(kd, d_keys, d_keys_rest, d_kr, precision, FINE)
    d_ki = _product(qd, d_mqk, d_mqk_rest, d_ki, precision, FINE)
    if FINE:
        d_log -= d_ki * (_columns(k_at, tokens, live) * k_norm[None, :] * tl.exp2(-total))
    else:
        d_log -= d_ki * ki + alone
    d_k += d_ki * tl.exp2(-total)
    d_q = d_qd * (tl.exp2(total) * scale)

    d_log = _sums(d_log, tl.trans(upper)) + carried[:, None]
    x = _exponent(logit_at, tokens, live, slope, shift)
    small = tl.exp2(tl.abs(x) * -1.4426950408889634)  # the sigmoid's derivative, exact even where it is nearly 0 or 1
    share = 1.0 / (1.0 + small)
    d_x = tl.where(live[None, :], d_log * (small * share * share) * (bound * size), 0.0)
    x = tl.minimum(tl.maximum(x, -1e4), 1e4)  # d_x is zero far out, where x may be inf
    tl.store(d_gate_ptr + program * (2 * K) + channel, tl.sum(d_x * x, 1))
    tl.store(d_gate_ptr + program * (2 * K) + K + channel, tl.sum(d_x, 1) * slope)
    d_logit = d_x * slope
    tl.store(d_logit_ptr + keys + tokens, tl.trans(d_logit.to(d_logit_ptr.dtype.element_ty)), mask=live[:, None])
    q = _columns(q_at, tokens, live) * q_norm[None, :]
    k = _columns(k_at, tokens, live) * k_norm[None, :]
    d_q += k * own[None, :]
    d_q = (d_q - q * tl.sum(d_q * q, 0)[None, :]) * (q_norm * size)[None, :]
    tl.store(d_q_ptr + keys + tokens, tl.trans(d_q.to(d_q_ptr.dtype.element_ty)), mask=live[:, None])
    d_k += q * own[None, :]
    d_k = (d_k - k * tl.sum(d_k * k, 0)[None, :]) * (k_norm * size)[None, :]
    tl.store(d_k_ptr + keys + tokens, tl.trans(d_k.to(d_k_ptr.dtype.element_ty)), mask=live[:, None])


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16 at K = V = 128, and on Hopper at fewer channels, for capability `arch`."""
    tokens = ["q", "k", "logit", "beta", "writes", "writes_rest", "d_v", "d_o", "states", "d_states", "d_states_rest"]
    tokens += ["d_q", "d_k", "d_logit", "d_beta"]
    given: dict[str, Any] = {f"{name}_ptr": "*bf16" for name in tokens}
    given |= dict.fromkeys(("a_log_ptr", "bias_ptr", "along_ptr", "d_gate_ptr"), "*fp32")
    given |= {"start_ptr": "*i32:1", "length_ptr": "*i32:1"}
    given |= {"token_low": "i32", "bound": "fp32", "scale": "fp32", "H": "i32", "C": 32}
    cases = []
    fewer = [(128, 64), (64, 128), (64, 64), (64, 16), (32, 64), (16, 64)] if arch == 90 else []
    for K, V in [(128, 128), *fewer]:
        for fine, rest in ((False, None), (True, "*bf16")):
            options = settings(K, V, arch, fine=fine)
            shape = {"K": K, "V": V, "BV": options.pop("BV"), "states_rest_ptr": rest}
            cases.append((gradient_kernel, given | shape, options))
    return cases
