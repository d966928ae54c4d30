"""Kimi Delta Attention chunk by chunk: the form for training and prefill, with its own backward pass."""

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import pick
from openk3.ops.kda.block import Kept, block_backward, block_forward
from openk3.ops.kda.plan import ChunkPlan, chunk_plan
from openk3.ops.kda.reference import KdaGate, check_gate, check_tokens, initial_states, kda_gate
from openk3.ops.kda.scan import final_states, kept_steps, lay_out_states
from openk3.ops.norm import at_full_precision, at_least_float32, l2_norm
from openk3.ops.saved import name
from openk3.ops.sequences import sequence_bounds

_BLOCK_VALUES = 2**21  # of one tensor in a block: about twenty such tensors are in use at once


@at_full_precision
def chunk_kda(
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
    """Kimi Delta Attention by chunks (report eq. 3-4, UT transform): same arguments and result as `recurrent_kda`.

    Sequences of any lengths, empty ones included, are scanned side by side. Arithmetic is in at least float32. On a GPU
    the kernels of `fused_kda` run instead where `backend.pick` says that they apply; their products take operands
    rounded to the widest format among the tokens' tensors. A token that is not finite spoils its whole chunk, earlier
    tokens included, and what follows it, but no other sequence.
    """
    check_tokens(q_THK, k_THK, v_THV, decay_logit_THK, beta_logit_TH)
    check_gate(decay_logit_THK, gate)
    channels, bounded = (q_THK.shape[2], v_THV.shape[2]), gate.lower_bound is not None
    if pick("kda", q_THK, name="q_THK", channels=channels, bounded=bounded) == "triton":
        from openk3.ops.kda.fused_backward import fused_kda

        tokens = (q_THK, k_THK, v_THV, decay_logit_THK, beta_logit_TH)
        wide = reduce(torch.promote_types, (x.dtype for x in tokens))
        q, k, v, decay_logit, beta_logit = (x.to(wide) for x in tokens)
        o_THV, state_NHKV = fused_kda(
            q, k, v, decay_logit, beta_logit, gate, state_NHKV=state_NHKV, cu_seqlens=cu_seqlens
        )
        return o_THV.to(v_THV.dtype), state_NHKV
    q = l2_norm(q_THK, scale=q_THK.shape[-1] ** -0.5)
    k = l2_norm(k_THK)
    v = at_least_float32(v_THV)
    g = kda_gate(decay_logit_THK, gate)
    beta = torch.sigmoid(at_least_float32(beta_logit_TH))
    bounds = sequence_bounds(cu_seqlens, q.shape[0])
    inputs = (q, k, v, g, beta, initial_states(state_NHKV, len(bounds) - 1, k, v))
    longest = max((b - a for a, b in zip(bounds, bounds[1:])), default=0)
    heads, width = q.shape[1], min(q.shape[2], v.shape[2])
    chunk = _chunk_size(longest, (len(bounds) - 1) * heads, width)
    plan = chunk_plan(bounds, chunk, heads, _BLOCK_VALUES // max(q.shape[2], v.shape[2]), q.device)
    if not plan.blocks:
        return v.to(v_THV.dtype), inputs[-1]
    tile = 1 if gate.lower_bound is None else 16
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    o_THV, state_NHKV = _ChunkKda.apply(_Run(plan, tile, keep), *inputs)
    return o_THV.to(v_THV.dtype), state_NHKV


def _chunk_size(longest: int, matrices: int, width: int) -> int:
    """Tokens in a chunk: few for few tokens, many where a scan step has few but wide states: fewer, larger products.

    Work inside chunks grows with their size, the number of steps falls. All sizes give the same result up to rounding.
    """
    if longest <= 16:
        return 16
    return 64 if matrices <= 8 and width >= 64 else 32


@dataclass(frozen=True)
class _Run:
    """What the core needs besides tensors."""

    plan: ChunkPlan
    tile: int
    keep: bool  # whether a backward pass may follow


class _ChunkKda(torch.autograd.Function):
    """The core: q (scaled), k (normalised), v, log decay, beta and the initial state; gradients of all six."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        *tokens, state = inputs
        plan = run.plan
        first = plan.sort(state).flatten(0, 1)
        steps, memory = lay_out_states(plan, first, run.keep)
        outputs, kept = [], []
        for block in plan.blocks:
            rows, saved = block_forward(block, tokens, steps.part(block.steps), run.tile)
            outputs.append(rows)
            kept += saved.tensors() if run.keep else []
        final = final_states(plan, first, steps) if run.keep else memory
        if run.keep:
            ctx.run = run
            name("kda_core", *inputs, first, memory, *kept)
            ctx.save_for_backward(first, memory, *kept)
        return plan.collect(outputs), plan.unsort(final.view(state.shape))

    @staticmethod
    @once_differentiable
    @at_full_precision
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_o, d_final = grads
        plan, (first, memory, *kept) = ctx.run.plan, ctx.saved_tensors
        steps, count = kept_steps(plan, first, memory), len(kept) // len(plan.blocks)
        d_state = plan.sort(d_final).flatten(0, 1).clone()
        d_rows = []
        for n, block in reversed(list(enumerate(plan.blocks))):
            saved = Kept.of(block, kept[n * count : (n + 1) * count])
            d_rows.append(block_backward(block, saved, d_o, steps.part(block.steps), d_state))
        d_q, d_k, d_v, d_g, d_beta = (plan.collect(list(rows)) for rows in zip(*d_rows[::-1]))
        return None, d_q, d_k, d_v, d_g, d_beta.squeeze(2), plan.unsort(d_state.view(d_final.shape))
