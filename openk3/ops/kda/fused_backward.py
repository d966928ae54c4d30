"""Kimi Delta Attention by kernels as a differentiable function: plan, forward pass, and the backward pass in slabs.

The forward pass keeps its inputs and the state entering each part of a sequence. The backward pass goes through the
tokens from the last to the first in slabs of a few parts, and computes everything else again slab by slab: the
workspace of the tiles, the states entering them, then in reverse the gradients of the states leaving them, then the
gradients inside all tiles at once. Memory beyond inputs and gradients is that of one slab.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import check_kernels, multiprocessors, on_device
from openk3.ops.kda.fused import Forward, Plan, fused_forward, make_plan
from openk3.ops.kda.gradient_kernel import Scanned, TokenGradients, tile_gradients
from openk3.ops.kda.prepare_kernel import prepare
from openk3.ops.kda.reference import KdaGate, check_gate, check_states, check_tokens
from openk3.ops.kda.reverse_kernel import ReverseOutputs, reverse_fold, reverse_scan
from openk3.ops.kda.scan_kernel import ScanOutputs, scan
from openk3.ops.kda.tiles import Span
from openk3.ops.kda.workspace import Workspace, kept
from openk3.ops.sequences import sequence_bounds, whole_numbers

# Tiles times heads of a slab: 160 kB each, 96 of them states and their gradients (few heads: 205 and 131).
SLAB_TILES = 3 * 2**12

Tokens = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, decay logits, beta logits


def fused_kda(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    decay_logit_THK: Tensor,
    beta_logit_TH: Tensor,
    gate: KdaGate,
    *,
    state_NHKV: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention by kernels: same arguments and results as `recurrent_kda`, for what `backend.pick` admits.

    Twice the same inputs give the same bits, gradients included. Raises ValueError if shapes, dtypes or devices do not
    fit, for a gate without a bound or for what kernels cannot run on.
    """
    tokens = (q_THK, k_THK, v_THV, decay_logit_THK, beta_logit_TH)
    return checkpointed_kda(tokens, gate, (), state_NHKV=state_NHKV, cu_seqlens=cu_seqlens)[:2]


def checkpointed_kda(
    tokens: Tokens,
    gate: KdaGate,
    checkpoints: Sequence[int],
    *,
    state_NHKV: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`fused_kda` of (q, k, v, decay logits, beta logits) that also returns states on the way.

    `checkpoints` are M token positions that rise strictly within 1..T; the third result [M, H, K, V] float32 holds the
    states behind the token before each, found in the same pass and not differentiable.
    """
    q_THK, k_THK, v_THV, decay_logit_THK, beta_logit_TH = tokens
    check_tokens(q_THK, k_THK, v_THV, decay_logit_THK, beta_logit_TH)
    check_gate(decay_logit_THK, gate)
    if gate.lower_bound is None:
        raise ValueError("fused_kda: the gate must have a lower bound; chunk_kda takes gates without")
    check_kernels("fused_kda", q_THK, name="q_THK", channels=(q_THK.shape[2], v_THV.shape[2]))
    positions = whole_numbers("checkpoints", checkpoints)
    bounds = sequence_bounds(cu_seqlens, q_THK.shape[0])
    state = state_NHKV
    if state is not None:
        check_states(state, len(bounds) - 1, k_THK, v_THV)
        state = state.float().contiguous()
    logit_THK = decay_logit_THK
    parameters = (gate.A_log_H, gate.dt_bias_HK)
    given = (q_THK, k_THK, v_THV, logit_THK, beta_logit_TH, *parameters, state)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    plan = _plan(bounds, q_THK, positions, keep)
    channels_H2K = None
    if keep and any(x.requires_grad for x in parameters):
        logit_THK, channels_H2K = _GateParameters.apply(logit_THK, *parameters)
    q, k, v, logit, beta = [x.contiguous() for x in (q_THK, k_THK, v_THV, logit_THK, beta_logit_TH)]
    if keep:
        fixed = KdaGate(gate.A_log_H.detach().contiguous(), gate.dt_bias_HK.detach().contiguous(), gate.lower_bound)
        return _FusedKda.apply(plan, fixed, channels_H2K, q, k, v, logit, beta, state)
    if not (gate.A_log_H.is_contiguous() and gate.dt_bias_HK.is_contiguous()):
        gate = KdaGate(gate.A_log_H.contiguous(), gate.dt_bias_HK.contiguous(), gate.lower_bound)
    result = _forward(plan, gate, (q, k, v, logit, beta), state)
    return result.o_THV, result.final_NHKV, result.checkpoints_MHKV


def _plan(bounds: tuple[int, ...], q_THK: Tensor, checkpoints: tuple[int, ...], keep: bool) -> Plan:
    """Plan of a call; where a backward pass may follow, parts so small that those of a slab occupy the device."""
    heads, device = q_THK.shape[1], q_THK.device
    plan = make_plan(bounds, heads, device, checkpoints=checkpoints, part_tiles=_room(heads) if keep else None)
    if not (keep and plan.split):
        return plan
    pieces = -(-multiprocessors(device) // heads)
    return make_plan(bounds, heads, device, checkpoints=checkpoints, part_tiles=max(1, _room(heads) // pieces))


def _forward(plan: Plan, gate: KdaGate, tokens: Tokens, state_NHKV: Tensor | None, *, keep: bool = False) -> Forward:
    with on_device(tokens[0]):
        return fused_forward(tokens, gate, state_NHKV, plan.tiles, split=plan.split, careful=keep)


class _GateParameters(torch.autograd.Function):
    """The decay logits as they are, and A_log and dt_bias of each channel [H, 2, K], to which the core gives gradients.

    Kept outside the core: whoever asks for gradients of activations first and of parameters later runs it once.
    """

    @staticmethod
    def forward(ctx: Any, logit_THK: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor) -> tuple[Tensor, Tensor]:
        ctx.formats = A_log_H.dtype, dt_bias_HK.dtype
        channels = torch.stack((A_log_H[:, None].expand_as(dt_bias_HK).float(), dt_bias_HK.float()), 1)
        return logit_THK.view_as(logit_THK), channels

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_logit_THK, d_channels_H2K = grads
        d_A_log, d_dt_bias = d_channels_H2K.unbind(1)
        return d_logit_THK, d_A_log.sum(1).to(ctx.formats[0]), d_dt_bias.to(ctx.formats[1])


class _FusedKda(torch.autograd.Function):
    """The core: gradients of the tokens, of the initial states and of the gate's parameters, channel by channel.

    The latter are constants but for `channels`, which says that somebody wants their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, gate: KdaGate, channels: Tensor | None, *inputs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        *tokens, state = inputs
        result = _forward(plan, gate, tuple(tokens), state, keep=True)
        ctx.plan, ctx.lower_bound = plan, gate.lower_bound
        ctx.save_for_backward(*tokens, gate.A_log_H, gate.dt_bias_HK, result.entering_PHKV, result.maps_PHRK)
        ctx.mark_non_differentiable(result.checkpoints_MHKV)
        return result.o_THV, result.final_NHKV, result.checkpoints_MHKV

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_o, d_final, _ = grads
        *tokens, A_log, dt_bias, entering, maps = ctx.saved_tensors
        passed = _Backward(ctx.plan, tuple(tokens), KdaGate(A_log, dt_bias, ctx.lower_bound), entering, maps)
        with on_device(d_o):
            out, d_state, d_channels = passed.run(d_o.contiguous(), d_final)
        return (
            None,
            None,
            d_channels if ctx.needs_input_grad[2] else None,
            out.d_q,
            out.d_k,
            out.d_v,
            out.d_logit,
            out.d_beta,
            d_state if ctx.needs_input_grad[8] else None,
        )


@dataclass(frozen=True)
class _Backward:
    """The backward pass of one call."""

    plan: Plan
    tokens: Tokens
    gate: KdaGate
    entering_PHKV: Tensor | None
    maps_PHRK: Tensor | None

    def run(self, d_o_THV: Tensor, d_final_NHKV: Tensor) -> tuple[TokenGradients, Tensor, Tensor]:
        """Gradients of the tokens, of the initial states and, [H, 2, K] float32, of A_log and dt_bias by channel."""
        out = TokenGradients(*(torch.empty_like(x) for x in self.tokens))
        d_state_NHKV = d_final_NHKV.clone(memory_format=torch.contiguous_format)
        _, H, K = self.tokens[0].shape
        d_channels_H2K = d_o_THV.new_zeros(H, 2, K, dtype=torch.float32)
        for low, high in _slabs(self.plan, H):
            d_channels_H2K += self._slab(low, high, d_o_THV, d_state_NHKV, out).sum(0)
        return out, d_state_NHKV, d_channels_H2K

    def _slab(self, low: int, high: int, d_o_THV: Tensor, d_state_NHKV: Tensor, out: TokenGradients) -> Tensor:
        """Gradients of the tokens of parts [low, high) and of the states that enter them; returns those of the gate."""
        q, k, v, logit, beta = self.tokens
        span = self.plan.tiles.slab(low, high)
        workspace = prepare(q, k, logit, beta, self.gate, span=span, rests=kept(q.shape[1], self.plan.tiles.num_tiles))
        (X, H, C, K), V = workspace.sizes, v.shape[2]
        empty, parts = workspace.qd.new_empty, 1 if workspace.kr_rest is None else 2
        few = workspace.nkd_rest is not None
        states, d_states = empty(2 if few else 1, X, H, V, K), empty(parts, X, H, V, K)
        writes, states_rest = empty(parts, span.num_tokens, H, V), states[1] if few else None
        d_states_rest, writes_rest = (None, None) if parts == 1 else (d_states[1], writes[1])
        along = d_o_THV.new_empty(X, H, V // 16, C, dtype=torch.float32)
        entering = None if self.entering_PHKV is None else self.entering_PHKV[low:high]
        kept_states = ScanOutputs(r=writes[0], r_rest=writes_rest, states=states[0], states_rest=states_rest)
        scan(workspace, v, span, entering, kept_states)
        d_leaving, d_entering = self._leaving(low, high, workspace, span, d_o_THV=d_o_THV, d_state_NHKV=d_state_NHKV)
        outputs = ReverseOutputs(
            d_v=out.d_v, d_states=d_states[0], d_states_rest=d_states_rest, d_entering=d_entering, along=along
        )
        reverse_scan(workspace, d_o_THV, span, d_leaving, outputs, v_THV=v)
        two = (writes_rest, d_states_rest, states_rest)
        scanned = Scanned(writes[0], states[0], d_states[0], d_o_THV, out.d_v, along, *two)
        return tile_gradients(self.tokens, self.gate, scanned, out, span=span)

    def _leaving(
        self, low: int, high: int, workspace: Workspace, span: Span, *, d_o_THV: Tensor, d_state_NHKV: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of the states leaving each part of a slab, and where those of the entering ones still must go."""
        tiles = self.plan.tiles
        first, last = bisect_right(tiles.sequence_parts, low) - 1, bisect_left(tiles.sequence_parts, high)
        d_state = d_state_NHKV[first:last]
        if high - low == last - first:
            return d_state, d_state
        assert self.maps_PHRK is not None
        d_leaving = d_state.new_empty(high - low, *d_state.shape[1:])
        reverse_scan(workspace, d_o_THV, span, None, ReverseOutputs(d_entering=d_leaving))
        reverse_fold(self.maps_PHRK, d_state, d_leaving, tiles.parts_N[first : last + 1], low)
        return d_leaving, None


def _room(heads: int) -> int:
    """Tiles that a slab holds."""
    return max(1, SLAB_TILES // max(1, heads))


def _slabs(plan: Plan, heads: int) -> Iterator[tuple[int, int]]:
    """Consecutive parts [low, high) of each slab, from the last to the first.

    A slab takes parts while it has room; unless parts are scanned at once, only one part of a sequence.
    """
    tiles, room = plan.tiles, _room(heads)
    high = tiles.num_parts
    while high:
        sequence = bisect_right(tiles.sequence_parts, high - 1) - 1
        low = high - 1
        while low and tiles.part_first[high] - tiles.part_first[low - 1] <= room:
            before = bisect_right(tiles.sequence_parts, low - 1) - 1
            if before == sequence and not plan.split:
                break
            sequence, low = before, low - 1
        yield low, high
        high = low
