"""A few steps of chunkwise Kimi Delta Attention, forward and backward: all that a pass holds of them at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openk3.ops.kda.plan import Block
from openk3.ops.kda.scan import Chunks, Steps, scan_backward, scan_forward
from openk3.ops.kda.scores import Factors, decay_factors, score_backward, score_forward, unit_lower_inverse


@dataclass(frozen=True)
class Kept:
    """What the forward pass of a block leaves for the backward pass; rows [X, C, ...] and [X, tiles, ..., tile, K]."""

    factors: Factors
    k: Tensor
    beta: Tensor
    reads: Tensor
    writes: Tensor
    query: Tensor  # [X, C, C] scores of queries
    chunks: Chunks
    errors: Tensor

    def tensors(self) -> list[Tensor | None]:
        """Everything, in the order that `of` reads: autograd must hold it, to free it when it is used up."""
        f, c = self.factors, self.chunks
        rows = [self.k, self.beta, self.reads, self.writes, self.query, self.errors]
        rows += [c.enter, c.leave, c.total, c.inverse]
        return [*rows, f.total, f.inner, f.read, f.write, *f.halves.values()]

    @classmethod
    def of(cls, block: Block, tensors: Sequence[Any]) -> "Kept":
        """The inverse of `tensors`."""
        k, beta, reads, writes, query, errors, enter, leave, decay, inverse, total, *parts = tensors
        tile = reads.shape[-2]
        halves = {tile << level: part for level, part in enumerate(parts[3:])}
        factors = Factors(inner=parts[0], read=parts[1], write=parts[2], halves=halves, total=total)
        chunks = Chunks(block.sizes, enter, leave, decay, inverse)
        return cls(factors, k, beta, reads, writes, query, chunks, errors)


def block_forward(block: Block, tokens: list[Tensor], states: Steps, tile: int) -> tuple[Tensor, Kept]:
    """Outputs [X, C, V] of the block and what its backward pass needs; fills in the states that leave each step.

    tokens: q (scaled), k (normalised) and log decay [T, H, K], v [T, H, V], beta [T, H], in the order q, k, v, g, beta.
    """
    q, k, v, g, beta = tokens
    factors = decay_factors(block.spread(g, zero=True), tile)
    k, beta = block.spread(k, zero=False), block.spread(beta[:, :, None], zero=True)
    reads, writes = _token_rows(block.spread(q, zero=False), k, beta, factors, tile)
    query, key = score_forward(reads, writes, factors)
    enter = (reads * factors.read).view(-1, 2 * block.chunk, k.shape[2])
    leave = (writes * factors.write[:, :, 0]).view(k.shape)
    chunks = Chunks(block.sizes, enter, leave, factors.total[..., None], unit_lower_inverse(key))
    found, errors = scan_forward(chunks, block.spread(v, zero=False).unflatten(1, (-1, tile)), states)
    outputs = torch.bmm(query, errors)
    outputs.view(found.shape).add_(found)
    return outputs, Kept(factors, k, beta, reads, writes, query, chunks, errors)


def block_backward(block: Block, kept: Kept, d_o: Tensor, states: Steps, d_state: Tensor) -> tuple[Tensor, ...]:
    """Gradients [X, C, ...] of q, k, v, g and beta of the block, from that of the outputs of all tokens [T, H, V].

    d_state [N * H, K, V], that of the states leaving the block, becomes that of the states entering it.
    """
    factors, reads, writes = kept.factors, kept.reads, kept.writes
    d_outputs = block.spread(d_o, zero=True)
    gradients = (d_outputs.unflatten(1, writes.shape[1:3]), torch.bmm(kept.query.mT, d_outputs), d_state)
    scan = scan_backward(kept.chunks, gradients, kept.errors, states)
    d_scores = torch.bmm(scan.found, kept.errors.mT).view(*reads.shape[:4], block.chunk)
    d_reads, d_writes = score_backward(d_scores, reads, writes, factors)
    d_reads.addcmul_(scan.enter.view_as(d_reads), factors.read)
    d_writes.addcmul_(scan.leave.view_as(d_writes), factors.write[:, :, 0])
    d_g = _decay_gradient(reads, writes, d_reads, d_writes, scan.carried)
    d_q, d_k, d_beta = _token_gradients(d_reads, d_writes, factors, kept.k, kept.beta)
    return d_q, d_k, scan.values, d_g, d_beta


def _token_rows(q: Tensor, k: Tensor, beta: Tensor, factors: Factors, tile: int) -> tuple[Tensor, Tensor]:
    """Rows that read (q and k of each tile) and write (beta * k), relative to the middle of their tile."""
    q, k, beta = (x.unflatten(1, (-1, tile)) for x in (q, k, beta))
    X, num_tiles, _, K = q.shape
    reads = q.new_empty(X, num_tiles, 2, tile, K)
    writes = k * beta
    if factors.inner is None:
        reads[:, :, 0] = q
        reads[:, :, 1] = k
    else:
        torch.mul(q, factors.inner, out=reads[:, :, 0])
        torch.mul(k, factors.inner, out=reads[:, :, 1])
        writes.div_(factors.inner)
    return reads, writes


def _decay_gradient(reads: Tensor, writes: Tensor, d_reads: Tensor, d_writes: Tensor, carried: Tensor) -> Tensor:
    """Gradient of the log decay [X, C, K].

    Every row carries exp(+-G), so G's gradient is row times gradient, with a minus for writes; the state that leaves
    adds its own at the chunk's end. g_t is part of every later G: sum backward inside the chunk.
    """
    d_sums = reads[:, :, 0] * d_reads[:, :, 0]
    d_sums.addcmul_(reads[:, :, 1], d_reads[:, :, 1]).addcmul_(writes, d_writes, value=-1)
    d_sums = d_sums.flatten(1, 2)
    X, C, _ = d_sums.shape
    later = torch.ones(C, C, dtype=writes.dtype, device=writes.device).triu()
    return torch.baddbmm(carried[:, None], later.expand(X, -1, -1), d_sums)


def _token_gradients(
    d_reads: Tensor, d_writes: Tensor, factors: Factors, k: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and beta [X, C, ...] from those of the token rows, which are used up."""
    d_q, d_k, d_w = d_reads[:, :, 0], d_reads[:, :, 1], d_writes
    if factors.inner is not None:
        d_q, d_k, d_w = d_q * factors.inner, d_k * factors.inner, d_w.div_(factors.inner)
    d_q, d_k, d_w = (x.flatten(1, 2) for x in (d_q, d_k, d_w))
    return d_q, torch.addcmul(d_k, d_w, beta), d_w.mul_(k).sum(-1, keepdim=True)
