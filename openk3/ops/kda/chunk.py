"""Kimi Delta Attention chunk by chunk: the form for training and prefill, with its own backward pass."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.kda.plan import ChunkPlan, chunk_plan
from openk3.ops.kda.reference import KdaGate, kda_gate
from openk3.ops.kda.scores import Factors, decay_factors, score_backward, score_forward, unit_lower_inverse
from openk3.ops.norm import at_least_float32, l2_norm


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
    q = l2_norm(q_THK) * q_THK.shape[-1] ** -0.5
    k = l2_norm(k_THK)
    v = at_least_float32(v_THV)
    g = kda_gate(decay_logit_THK, gate)
    beta = torch.sigmoid(at_least_float32(beta_logit_TH))
    bounds = (0, q.shape[0]) if cu_seqlens is None else tuple(cu_seqlens.tolist())
    if state_NHKV is None:
        state_NHKV = v.new_zeros(len(bounds) - 1, q.shape[1], q.shape[2], v.shape[2])
    plan = chunk_plan(bounds, 32, q.device)
    tile = 1 if gate.lower_bound is None else 16
    inputs = (q, k, v, g, beta, state_NHKV.to(v.dtype))
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    o_THV, state_NHKV = _ChunkKda.apply(*inputs, plan, tile, keep)
    return o_THV.to(v_THV.dtype), state_NHKV


def _by_head(x_MCHD: Tensor, tile: int) -> Tensor:
    """View of token rows [M, C, H, D] as [M, H, tiles, tile, D]."""
    return x_MCHD.unflatten(1, (-1, tile)).permute(0, 3, 1, 2, 4)


def _rows(q: Tensor, k: Tensor, beta: Tensor, factors: Factors, tile: int) -> tuple[Tensor, Tensor]:
    """Read rows (q and k of each tile) and write rows (beta * k), relative to the middle of their tile."""
    M, C, H, K = q.shape
    reads = q.new_empty(M, H, C // tile, 2, tile, K)
    writes = q.new_empty(M, H, C // tile, tile, K)
    torch.mul(_by_head(k, tile), _by_head(beta[..., None], tile), out=writes)
    if factors.inner_MHtsK is None:
        reads[:, :, :, 0] = _by_head(q, tile)
        reads[:, :, :, 1] = _by_head(k, tile)
    else:
        torch.mul(_by_head(q, tile), factors.inner_MHtsK, out=reads[:, :, :, 0])
        torch.mul(_by_head(k, tile), factors.inner_MHtsK, out=reads[:, :, :, 1])
        writes.div_(factors.inner_MHtsK)
    return reads, writes


def _state_rows(reads: Tensor, writes: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
    """Rows that read the state entering the chunk [MH, 2C, K] and that write the state leaving it [MH, C, K]."""
    M, H, num_tiles, _, tile, K = reads.shape
    enter = (reads * factors.read).view(M * H, -1, K)
    leave = (writes * factors.write[..., 0, :, :]).view(M * H, -1, K)
    return enter, leave


class _ChunkKda(torch.autograd.Function):
    """The core: q (scaled) and k normalised, log decay g and beta given; gradients of all six tensors."""

    @staticmethod
    def forward(ctx: Any, q, k, v, g, beta, state, plan: ChunkPlan, tile: int, keep: bool):
        H, K, V = q.shape[1], q.shape[2], v.shape[2]
        C, M = plan.chunk, plan.num_chunks
        factors = decay_factors(plan.spread(g), tile)
        reads, writes = _rows(plan.spread(q), plan.spread(k), plan.spread(beta), factors, tile)
        query_MHCC, key_MHCC = score_forward(reads, writes, factors)
        inverse = unit_lower_inverse(key_MHCC.view(M * H, C, C))
        query = query_MHCC.view(M * H, C, C)
        enter, leave = _state_rows(reads, writes, factors)
        total = factors.total_MHK.reshape(M * H, K, 1)
        values = plan.spread(v)
        o = torch.empty_like(values)
        errors = v.new_empty(M * H, C, V)
        states = v.new_empty(M * H if keep else 2 * plan.active[0] * H, K, V) if M else None
        current = state if plan.order_N is None else state[plan.order_N]
        first = current = current.reshape(-1, K, V)
        finals = []
        done = 0
        for step, count in enumerate(plan.active):
            n = count * H
            here = slice(done * H, done * H + n)
            finals.append(current[n:])
            current = current[:n]
            found = torch.bmm(enter[here], current).view(count, H, -1, 2, tile, V)
            error = torch.sub(_by_head(values[done : done + count], tile), found[:, :, :, 1])
            error = torch.bmm(inverse[here], error.reshape(n, C, V), out=errors[here])
            local = torch.bmm(query[here], error).view(count, H, -1, tile, V)
            torch.add(found[:, :, :, 0], local, out=_by_head(o[done : done + count], tile))
            slot = done * H if keep else (step % 2) * plan.active[0] * H
            after = torch.mul(current, total[here], out=states[slot : slot + n])
            current = after.baddbmm_(leave[here].mT, error)
            done += count
        finals.append(current)
        final = torch.cat(finals[::-1]).view(state.shape)
        if plan.rank_N is not None:
            final = final[plan.rank_N]
        if keep:
            ctx.plan, ctx.factors, ctx.tile = plan, factors, tile
            ctx.save_for_backward(
                plan.spread(k), plan.spread(beta), reads, writes, query, inverse, errors, first, states
            )
        return plan.collect(o), final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads):
        d_o, d_final = grads
        plan, factors, tile = ctx.plan, ctx.factors, ctx.tile
        k, beta, reads, writes, query, inverse, errors, first, states = ctx.saved_tensors
        M, H, num_tiles, _, _, K = reads.shape
        C, V = plan.chunk, errors.shape[-1]
        d_out = _by_head(plan.spread(d_o), tile)
        enter, leave = _state_rows(reads, writes, factors)
        total = factors.total_MHK.reshape(M * H, K, 1)
        d_read = errors.new_empty(M, H, num_tiles, 2, tile, V)
        d_read[:, :, :, 0] = d_out
        d_value = d_read[:, :, :, 1]
        d_read_X = d_read.view(M * H, 2 * C, V)
        d_error = torch.bmm(query.mT, d_out.reshape(M * H, C, V))
        d_enter, d_leave = torch.empty_like(enter), torch.empty_like(leave)
        carried = errors.new_empty(M * H, K)
        d_state = d_final if plan.order_N is None else d_final[plan.order_N]
        d_state = d_state.reshape(-1, K, V).clone()
        done = M
        for step in range(len(plan.active) - 1, -1, -1):
            count = plan.active[step]
            done -= count
            n = count * H
            here = slice(done * H, done * H + n)
            before = first[:n] if step == 0 else states[(done - plan.active[step - 1]) * H :][:n]
            d_current = d_state[:n]
            torch.sum(d_current * states[here], -1, out=carried[here])
            torch.bmm(errors[here], d_current.mT, out=d_leave[here])
            inner = d_error[here].baddbmm_(leave[here], d_current)
            solved = torch.bmm(inverse[here].mT, inner).view(count, H, -1, tile, V)
            torch.neg(solved, out=d_value[done : done + count])
            torch.bmm(d_read_X[here], before.mT, out=d_enter[here])
            d_current.mul_(total[here]).baddbmm_(enter[here].mT, d_read_X[here])

        d_scores = torch.bmm(d_read_X, errors.mT).view(M, H, num_tiles, 2, tile, C)
        d_reads, d_writes = score_backward(d_scores, reads, writes, factors)
        d_reads.addcmul_(d_enter.view_as(d_reads), factors.read)
        d_writes.addcmul_(d_leave.view_as(d_writes), factors.write[..., 0, :, :])
        d_sum = torch.empty_like(k)
        out = _by_head(d_sum, tile)
        torch.mul(reads[:, :, :, 0], d_reads[:, :, :, 0], out=out)
        out.addcmul_(reads[:, :, :, 1], d_reads[:, :, :, 1]).addcmul_(writes, d_writes, value=-1)
        later = torch.ones(C, C, dtype=k.dtype, device=k.device).triu()
        d_g = torch.baddbmm(carried.view(M, 1, H * K), later.expand(M, -1, -1), d_sum.view(M, C, H * K)).view_as(k)
        d_q, d_k, d_w = (torch.empty_like(k) for _ in range(3))
        inner = factors.inner_MHtsK
        if inner is None:
            _by_head(d_q, tile).copy_(d_reads[:, :, :, 0])
            _by_head(d_k, tile).copy_(d_reads[:, :, :, 1])
            _by_head(d_w, tile).copy_(d_writes)
        else:
            torch.mul(d_reads[:, :, :, 0], inner, out=_by_head(d_q, tile))
            torch.mul(d_reads[:, :, :, 1], inner, out=_by_head(d_k, tile))
            torch.div(d_writes, inner, out=_by_head(d_w, tile))
        d_beta = (d_w * k).sum(-1)
        d_k.addcmul_(d_w, beta[..., None])
        d_v = torch.empty(M, C, H, V, dtype=k.dtype)
        torch.neg(d_read[:, :, :, 1], out=_by_head(d_v, tile))
        if plan.rank_N is not None:
            d_state = d_state.view(d_final.shape)[plan.rank_N]
        c = plan.collect
        return c(d_q), c(d_k), c(d_v), c(d_g), c(d_beta), d_state.view(d_final.shape), None, None, None
