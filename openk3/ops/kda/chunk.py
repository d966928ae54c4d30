"""Kimi Delta Attention chunk by chunk: the form for training and prefill, with its own backward pass."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.kda.plan import ChunkPlan, chunk_plan
from openk3.ops.kda.reference import KdaGate, check_tokens, initial_states, kda_gate
from openk3.ops.kda.scan import Chunks, Past, scan_backward, scan_forward
from openk3.ops.kda.scores import Factors, decay_factors, score_backward, score_forward, unit_lower_inverse
from openk3.ops.norm import at_least_float32, l2_norm
from openk3.ops.sequences import sequence_bounds

_CHUNK, _SHORT_CHUNK = 32, 16


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

    Sequences of any lengths, empty ones included, are scanned side by side. Arithmetic is in at least float32.
    """
    check_tokens(q_THK, k_THK, v_THV, decay_logit_THK, beta_logit_TH)
    q = l2_norm(q_THK, scale=q_THK.shape[-1] ** -0.5)
    k = l2_norm(k_THK)
    v = at_least_float32(v_THV)
    g = kda_gate(decay_logit_THK, gate)
    beta = torch.sigmoid(at_least_float32(beta_logit_TH))
    bounds = sequence_bounds(cu_seqlens, q.shape[0])
    inputs = (q, k, v, g, beta, initial_states(state_NHKV, len(bounds) - 1, k, v))
    longest = max((b - a for a, b in zip(bounds, bounds[1:])), default=0)
    plan = chunk_plan(bounds, _CHUNK if longest > _SHORT_CHUNK else _SHORT_CHUNK, q.shape[1], q.device)
    if not plan.active:
        return v.to(v_THV.dtype), inputs[-1]
    tile = 1 if gate.lower_bound is None else 16
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    o_THV, state_NHKV = _ChunkKda.apply(_Run(plan, tile, keep), *inputs)
    return o_THV.to(v_THV.dtype), state_NHKV


def _token_rows(q: Tensor, k: Tensor, beta: Tensor, factors: Factors, tile: int) -> tuple[Tensor, Tensor]:
    """Rows that read (q and k of each tile) and write (beta * k), relative to the middle of their tile."""
    q, k, beta = (x.unflatten(2, (-1, tile)) for x in (q, k, beta))
    M, H, num_tiles, _, K = q.shape
    reads = q.new_empty(M, H, num_tiles, 2, tile, K)
    writes = k * beta
    if factors.inner is None:
        reads[:, :, :, 0] = q
        reads[:, :, :, 1] = k
    else:
        torch.mul(q, factors.inner, out=reads[:, :, :, 0])
        torch.mul(k, factors.inner, out=reads[:, :, :, 1])
        writes.div_(factors.inner)
    return reads, writes


def _state_rows(reads: Tensor, writes: Tensor, factors: Factors) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that read the state entering the chunk and write the one leaving it, and the decay between the two."""
    M, H, _, _, _, K = reads.shape
    enter = (reads * factors.read).view(M * H, -1, K)
    leave = (writes * factors.write[:, :, :, 0]).view(M * H, -1, K)
    return enter, leave, factors.total.reshape(M * H, K, 1)


def _decay_gradient(reads: Tensor, writes: Tensor, d_reads: Tensor, d_writes: Tensor, carried: Tensor) -> Tensor:
    """Gradient of the log decay [M, H, C, K].

    Every row carries exp(+-G), so G's gradient is row times gradient, with a minus for writes; the state that leaves
    adds its own at the chunk's end. g_t is part of every later G: sum backward inside the chunk.
    """
    M, H, num_tiles, tile, K = writes.shape
    d_sums = reads[:, :, :, 0] * d_reads[:, :, :, 0]
    d_sums.addcmul_(reads[:, :, :, 1], d_reads[:, :, :, 1]).addcmul_(writes, d_writes, value=-1)
    C = num_tiles * tile
    later = torch.ones(C, C, dtype=writes.dtype, device=writes.device).triu()
    d_g = torch.baddbmm(carried[:, None], later.expand(M * H, -1, -1), d_sums.view(M * H, C, K))
    return d_g.view(M, H, C, K)


def _token_gradients(
    d_reads: Tensor, d_writes: Tensor, factors: Factors, k: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and beta [M, H, C, ...] from those of the token rows, which are used up."""
    d_q, d_k, d_w = d_reads[:, :, :, 0], d_reads[:, :, :, 1], d_writes
    if factors.inner is not None:
        d_q, d_k, d_w = d_q * factors.inner, d_k * factors.inner, d_w.div_(factors.inner)
    d_q, d_k, d_w = (x.reshape(k.shape) for x in (d_q, d_k, d_w))
    d_k.addcmul_(d_w, beta)
    return d_q, d_k, d_w.mul_(k).sum(-1, keepdim=True)


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
        q, k, v, g, beta, state = inputs
        plan, tile = run.plan, run.tile
        C, size = plan.chunk, plan.num_chunks * q.shape[1]
        factors = decay_factors(plan.spread(g, zero=True), tile)
        k, beta = plan.spread(k, zero=False), plan.spread(beta[:, :, None], zero=True)
        reads, writes = _token_rows(plan.spread(q, zero=False), k, beta, factors, tile)
        query, key = score_forward(reads, writes, factors)
        query, inverse = query.view(size, C, C), unit_lower_inverse(key.view(size, C, C))
        chunks = Chunks(plan, *_state_rows(reads, writes, factors), query, inverse)
        values = plan.spread(v, zero=False)
        outputs, final, past = scan_forward(chunks, values, state, tile=tile, keep=run.keep)
        if run.keep:
            ctx.plan, ctx.factors = plan, factors
            ctx.save_for_backward(k, beta, reads, writes, query, inverse, past.initial, past.errors, past.states)
        return plan.collect(outputs), final

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_o, d_final = grads
        plan, factors = ctx.plan, ctx.factors
        k, beta, reads, writes, query, inverse, *past = ctx.saved_tensors
        M, H, num_tiles, _, tile, _ = reads.shape
        chunks = Chunks(plan, *_state_rows(reads, writes, factors), query, inverse)
        d_outputs = plan.spread(d_o, zero=True).unflatten(2, (num_tiles, tile))
        scan = scan_backward(chunks, d_outputs, d_final, Past(*past))
        d_scores = torch.bmm(scan.found, past[1].mT).view(M, H, num_tiles, 2, tile, -1)
        d_reads, d_writes = score_backward(d_scores, reads, writes, factors)
        d_reads.addcmul_(scan.enter.view_as(d_reads), factors.read)
        d_writes.addcmul_(scan.leave.view_as(d_writes), factors.write[:, :, :, 0])
        d_g = _decay_gradient(reads, writes, d_reads, d_writes, scan.carried)
        d_q, d_k, d_beta = _token_gradients(d_reads, d_writes, factors, k, beta)
        d_v = scan.found.view(M, H, num_tiles, 2, tile, -1)[:, :, :, 1].neg().view(M, H, plan.chunk, -1)
        d_q, d_k, d_v, d_g, d_beta = (plan.collect(d) for d in (d_q, d_k, d_v, d_g, d_beta))
        return None, d_q, d_k, d_v, d_g, d_beta.squeeze(2), scan.state
