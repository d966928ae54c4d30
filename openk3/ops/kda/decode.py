"""Decoding with Kimi Delta Attention: one token for each request, drafts verified, accepted drafts replayed.

States and convolution windows of all requests lie in pools, and a request names its slot. Slot -1 means no request:
nothing of a pool belongs to it, and its outputs are zero. The functions here are the definitions, request by request
where the layout asks for it; on a GPU each is one launch of `decode_kernel`, which reads nothing back to the host.

Shapes, formats and devices that do not fit raise ValueError, and so do pools whose values share memory. Values of
slots, bounds and counts are checked too where they lie on the CPU; on a GPU, where a look at them would wait for all
its work, they are the caller's word: every negative slot means no request, and counts are cut to what rows there are.
Only `step_kda` is differentiable.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.backend import pick
from openk3.ops.kda.decode_checks import (
    check_accepted,
    check_bounds,
    check_counts,
    check_kept,
    check_layer,
    check_rows,
    check_step,
    check_values,
)
from openk3.ops.kda.reference import KdaGate, kda_gate
from openk3.ops.norm import at_full_precision, at_least_float32, gated_rms_norm, l2_norm
from openk3.ops.short_conv import short_conv


@dataclass(frozen=True)
class Projected:
    """A layer's projections of tokens, as they are before the convolution; C is heads times channels.

    The same five kept for later are pools with two dimensions more in place of T: slot and draft.
    """

    q_TC: Tensor
    k_TC: Tensor
    v_TC: Tensor
    decay_logit_TC: Tensor
    beta_logit_TH: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """The five, in the order of their names."""
        return self.q_TC, self.k_TC, self.v_TC, self.decay_logit_TC, self.beta_logit_TH

    def rows(self, index: Tensor | slice) -> "Projected":
        """The tokens of this index."""
        return Projected(*(x[index] for x in self.tensors()))


@dataclass(frozen=True)
class DecodeWeights:
    """A layer's parameters that decoding needs: three convolutions, the gate of the decay and the output norm."""

    conv_q_CW: Tensor
    conv_k_CW: Tensor
    conv_v_CW: Tensor
    gate: KdaGate
    norm_weight_V: Tensor
    norm_eps: float

    def convolutions(self) -> tuple[Tensor, ...]:
        """Of q, k and v."""
        return self.conv_q_CW, self.conv_k_CW, self.conv_v_CW


@dataclass(frozen=True)
class DecodePool:
    """What S requests carry from token to token: states [S, H, K, V] and windows of raw q, k, v inputs [S, C, W].

    Windows hold the last W inputs, oldest first, as `short_conv` has them.
    """

    state_SHKV: Tensor
    window_q_SCW: Tensor
    window_k_SCW: Tensor
    window_v_SCW: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """State, then the windows of q, k and v."""
        return self.state_SHKV, self.window_q_SCW, self.window_k_SCW, self.window_v_SCW


def step_kda(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    decay_logit_NHK: Tensor,
    beta_logit_NH: Tensor,
    gate: KdaGate,
    state_NHKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """One step of `recurrent_kda` for N sequences at once (report eq. 1).

    Arguments as there, with one token per sequence. Returns o [N, H, V] in v.dtype and a new state [N, H, K, V] in at
    least float32; the given state is left as it was.
    """
    tokens = (q_NHK, k_NHK, v_NHV, decay_logit_NHK, beta_logit_NH)
    check_step(tokens, gate, state_NHKV)
    parameters = (gate.A_log_H, gate.dt_bias_HK, state_NHKV)
    wants_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (*tokens, *parameters))
    if wants_gradients or not _has_kernels(q_NHK, state_NHKV):
        return _step(tokens, gate, state_NHKV)
    from openk3.ops.kda import decode_launch

    state_NHKV = at_least_float32(state_NHKV).contiguous()
    slot_N = torch.arange(len(q_NHK), dtype=torch.int32, device=q_NHK.device)
    into_NHKV = torch.empty_like(state_NHKV)
    return decode_launch.step(tokens, gate, state_NHKV, slot_N, into_NHKV), into_NHKV


@torch.no_grad()
def step_kda_in_place(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    decay_logit_NHK: Tensor,
    beta_logit_NH: Tensor,
    *,
    gate: KdaGate,
    state_SHKV: Tensor,
    slot_N: Tensor,
) -> Tensor:
    """`step_kda` on the states of a pool, which it overwrites at the (distinct) slots; slot -1 steps nothing.

    state_SHKV in float32, float64 or rounded to bfloat16. Returns o [N, H, V] in v.dtype.
    """
    tokens = (q_NHK, k_NHK, v_NHV, decay_logit_NHK, beta_logit_NH)
    check_step(tokens, gate, state_SHKV, slot_N, pooled=True)
    check_values(len(state_SHKV), slot_N)
    if _has_kernels(q_NHK, state_SHKV):
        from openk3.ops.kda import decode_launch

        return decode_launch.step(tokens, gate, state_SHKV, slot_N, state_SHKV)
    live = slot_N >= 0
    slots = slot_N[live].long()
    o_NHV = torch.zeros_like(v_NHV)
    o_NHV[live], state = _step(tuple(x[live] for x in tokens), gate, state_SHKV[slots])
    state_SHKV[slots] = state.to(state_SHKV.dtype)
    return o_NHV


@torch.no_grad()
def decode_kda(
    projected: Projected,
    output_gate_NC: Tensor,
    weights: DecodeWeights,
    pool: DecodePool,
    slot_N: Tensor,
    *,
    into: DecodePool | None = None,
) -> Tensor:
    """All of a KDA layer between its projections, one token for each of N requests: convolution to output gate.

    Request n is row n of the projections and slot_N[n] (distinct) of the pool, whose state and windows move on by the
    token; with `into` they are written there, at the same slots, and `pool` is left as it was. Returns
    sigmoid(output gate) * RMSNorm(o) [N, H * V] in the gate's dtype (report §2.1, eq. 1).
    """
    into = into or pool
    check_layer(weights, pool, into)
    num_requests = check_rows(pool.state_SHKV, projected, slot_N, output_gate=output_gate_NC)
    if num_requests != len(output_gate_NC):
        raise ValueError(f"slot_N: {num_requests} slots for {len(output_gate_NC)} tokens")
    check_values(len(pool.state_SHKV), slot_N)
    if _has_kernels(projected.q_TC, pool.state_SHKV):
        from openk3.ops.kda import decode_launch

        return decode_launch.decode(projected, output_gate_NC, weights, pool, slot_N, into=into)
    o_NHV = _step_pool(projected, weights, pool, slot_N, into)
    gate_NHV = output_gate_NC.unflatten(-1, o_NHV.shape[1:])
    y_NC = gated_rms_norm(o_NHV, gate_NHV, weights.norm_weight_V, weights.norm_eps).flatten(-2)
    return torch.where(slot_N[:, None] >= 0, y_NC, 0)


@torch.no_grad()
def verify_kda(
    projected: Projected,
    output_gate_TC: Tensor,
    weights: DecodeWeights,
    pool: DecodePool,
    slot_N: Tensor,
    *,
    cu_seqlens: Tensor,
    kept: Projected | None = None,
    accepted_N: Tensor | None = None,
) -> Tensor:
    """Outputs of `decode_kda` for drafts that may be refused: several tokens per request, and the pool stays as it was.

    Request n has rows cu_seqlens[n] : cu_seqlens[n + 1]. `kept` (pools [S, D, C], D at least the most rows of a
    request) takes a copy of its rows at [slot, 0, 1, ...], for `replay_kda`. With accepted_N [N] the rows that the
    previous call kept are replayed first, as many as were accepted, and the new ones continue from there: the pool
    then moves on by the accepted rows. Returns y [T, H * V] in the gate's dtype; rows past the last bound are no
    request's and have no value. Raises ValueError for accepted_N without `kept`.
    """
    if accepted_N is not None and kept is None:
        raise ValueError("verify_kda: accepted_N counts rows of `kept`, which is missing")
    check_layer(weights, pool, pool)
    num_requests = check_rows(pool.state_SHKV, projected, slot_N, output_gate=output_gate_TC)
    check_counts(pool.state_SHKV, ("cu_seqlens", cu_seqlens, num_requests + 1))
    if kept is not None:
        check_rows(pool.state_SHKV, kept, slot_N, packed=False, name="kept")
        check_kept(projected, kept)
    check_values(len(pool.state_SHKV), slot_N)
    check_bounds(cu_seqlens, len(output_gate_TC), None if kept is None else kept.q_TC.shape[1])
    if kept is not None and accepted_N is not None:
        check_counts(pool.state_SHKV, ("accepted_N", accepted_N, num_requests))
        check_accepted(accepted_N, slot_N, kept.q_TC.shape[1])
    if _has_kernels(projected.q_TC, pool.state_SHKV):
        from openk3.ops.kda import decode_launch

        more = {"cu_seqlens": cu_seqlens, "kept": kept, "accepted_N": accepted_N}
        return decode_launch.verify(projected, output_gate_TC, weights, pool, slot_N, **more)
    if kept is not None and accepted_N is not None:
        replay_kda(kept, weights, pool, slot_N, accepted_N)
    y_TC = torch.zeros_like(output_gate_TC)
    draft = DecodePool(*(x.clone() for x in pool.tensors()))
    for position, row_M, slot_M in _tokens(cu_seqlens[:-1], cu_seqlens.diff(), slot_N):
        token = projected.rows(row_M)
        y_TC[row_M] = decode_kda(token, output_gate_TC[row_M], weights, draft, slot_M)
        for store, x in zip(kept.tensors() if kept is not None else (), token.tensors()):
            store[slot_M, position] = x
    return y_TC


@torch.no_grad()
def replay_kda(
    projected: Projected,
    weights: DecodeWeights,
    pool: DecodePool,
    slot_N: Tensor,
    accepted_N: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Move states and windows on by the first accepted_N[n] tokens of each request, as `decode_kda` would have.

    `projected` is what `verify_kda` kept (pools by slot), or with cu_seqlens the rows that it was given. Raises
    ValueError where accepted_N lies on the CPU and a request accepts fewer than none or more than its rows; on a GPU
    none and all of them are accepted then.
    """
    check_layer(weights, pool, pool)
    packed = cu_seqlens is not None
    num_requests = check_rows(pool.state_SHKV, projected, slot_N, packed=packed, name="projected" if packed else "kept")
    check_counts(pool.state_SHKV, ("accepted_N", accepted_N, num_requests))
    check_values(len(pool.state_SHKV), slot_N)
    if cu_seqlens is not None:
        check_counts(pool.state_SHKV, ("cu_seqlens", cu_seqlens, num_requests + 1))
        check_bounds(cu_seqlens, len(projected.q_TC), None)
    check_accepted(accepted_N, slot_N, projected.q_TC.shape[1] if cu_seqlens is None else cu_seqlens.diff())
    if _has_kernels(projected.q_TC, pool.state_SHKV):
        from openk3.ops.kda import decode_launch

        decode_launch.replay(projected, weights, pool, slot_N, accepted_N, cu_seqlens=cu_seqlens)
        return
    if cu_seqlens is None:
        start_N, rows_N = slot_N.long() * projected.q_TC.shape[1], projected.q_TC.shape[1]
        projected = Projected(*(x.flatten(0, 1) for x in projected.tensors()))
    else:
        start_N, rows_N = cu_seqlens[:-1], cu_seqlens.diff()
    for _, row_M, slot_M in _tokens(start_N, accepted_N.clamp(max=rows_N), slot_N):
        _step_pool(projected.rows(row_M), weights, pool, slot_M, pool)


def _has_kernels(x: Tensor, state_SHKV: Tensor) -> bool:
    """Whether the kernels run for inputs like x; they take both forms of the gate."""
    return pick("kda", x, name="q", channels=state_SHKV.shape[2:]) != "reference"


@at_full_precision
def _step(tokens: tuple[Tensor, ...], gate: KdaGate, state_NHKV: Tensor) -> tuple[Tensor, Tensor]:
    """`step_kda` by its definition."""
    q_NHK, k_NHK, v_NHV, decay_logit_NHK, beta_logit_NH = tokens
    q = l2_norm(q_NHK, scale=q_NHK.shape[-1] ** -0.5).unsqueeze(-2)
    k = l2_norm(k_NHK).unsqueeze(-2)
    alpha = kda_gate(decay_logit_NHK, gate).exp().unsqueeze(-1)
    beta = torch.sigmoid(at_least_float32(beta_logit_NH))[..., None, None]
    state = at_least_float32(state_NHKV) * alpha
    error = beta * (at_least_float32(v_NHV).unsqueeze(-2) - k @ state)
    state = state + k.mT * error
    return (q @ state).squeeze(-2).to(v_NHV.dtype), state


def _tokens(start_N: Tensor, length_N: Tensor, slot_N: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each position in turn: it, and the row and slot of every request that has a token there."""
    length_N = torch.where(slot_N >= 0, length_N, 0)
    for position in range(int(length_N.max()) if len(length_N) else 0):
        has_N = length_N > position
        yield position, start_N[has_N].long() + position, slot_N[has_N].long()


def _step_pool(
    projected: Projected, weights: DecodeWeights, pool: DecodePool, slot_N: Tensor, into: DecodePool
) -> Tensor:
    """Outputs o [N, H, V] before the norm, zero without a slot; state and windows move on from `pool` into `into`.

    What lies between projections and outputs stays in at least float32.
    """
    live = slot_N >= 0
    slots = slot_N[live].long()
    *inputs, decay_logit, beta_logit = projected.rows(live).tensors()
    bounds = torch.arange(len(slots) + 1)
    tokens = []
    for n, (x, weight) in enumerate(zip(inputs, weights.convolutions()), start=1):
        window = pool.tensors()[n][slots]
        y, window = short_conv(at_least_float32(x), weight, window_NCW=window, cu_seqlens=bounds)
        into.tensors()[n][slots] = window.to(into.tensors()[n].dtype)
        tokens.append(y)
    heads = weights.gate.dt_bias_HK.shape[0]
    q, k, v, decay = (x.unflatten(-1, (heads, -1)) for x in (*tokens, decay_logit))
    o, state = _step((q, k, v, decay, beta_logit), weights.gate, pool.state_SHKV[slots])
    into.state_SHKV[slots] = state.to(into.state_SHKV.dtype)
    return o.new_zeros(len(slot_N), *o.shape[1:]).index_put((live,), o)
