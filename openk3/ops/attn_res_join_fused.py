"""Two-phase reads of depth in training: all reads of a block share one pass over the finished blocks, both ways.

`begin_reads` mixes the finished blocks for every read, `join` finishes one. Backward each join writes its part of the
gradient of phase one into memory that all share, and phase one's own node, which autograd runs when all its reads are
done, makes the gradients of the finished blocks once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops import attn_res_join_kernel as kernels
from openk3.ops import attn_res_kernel, attn_res_phase_kernel
from openk3.ops.attn_res_fused import _launch, _multiprocessors
from openk3.ops.backend import on_device


class _Gradients(NamedTuple):
    """What the reads of one phase one leave for its backward pass; numbers [Q, T], see `attn_res_join_kernel`."""

    d_mixtures_QTD: Tensor
    sums_QT: Tensor
    rests_QT: Tensor


class _Shared:
    """What the reads of one phase one share: vectors [Q, D], and while they run backward what they leave."""

    def __init__(self, eps: float) -> None:
        self.eps = eps
        self.vectors_QD: Tensor | None = None
        self._gradients: _Gradients | None = None

    def gradients(self, like_TD: Tensor, count: int) -> _Gradients:
        """Memory for what `count` reads leave."""
        if self._gradients is None:
            numbers = like_TD.new_empty(2, count, len(like_TD), dtype=torch.float32)
            self._gradients = _Gradients(like_TD.new_empty(count, *like_TD.shape), *numbers)
        return self._gradients

    def taken(self, like_TD: Tensor, grads: Sequence[Tensor | None]) -> _Gradients:
        """All that reads left, with zeros for those that nothing came of; it is forgotten here."""
        memory, self._gradients = self.gradients(like_TD, len(grads)), None
        for number, grad in enumerate(grads):
            if grad is None:
                for place in memory:
                    place[number].zero_()
            elif grad.data_ptr() != memory.d_mixtures_QTD[number].data_ptr():
                raise RuntimeError("begin_reads: each of its reads is for one join")
        return memory


class Read(NamedTuple):
    """A read of depth that phase one has prepared."""

    shared: _Shared
    number: int
    count: int
    mixture_TD: Tensor
    log_T: Tensor
    query_D: Tensor
    norm_weight_D: Tensor


def obstacle(sources: Sequence[Tensor], reads: int) -> str | None:
    """Why phase one cannot take these blocks (which `attn_res_fused` can) and so many reads, or None."""
    if len(sources) > kernels.MOST_SOURCES or not 0 < reads <= kernels.MOST_QUERIES:
        return f"{len(sources)} blocks and {reads} reads, not 1 to {kernels.MOST_SOURCES} and {kernels.MOST_QUERIES}"
    return None if len({x.dtype for x in sources}) == 1 else "blocks have several formats"


def begin_reads(sources: Sequence[Tensor], queries: Sequence[tuple[Tensor, Tensor]], eps: float) -> list[Read]:
    """Phase one for reads of the same finished blocks [T, D], given by their (query, norm weight), each [D].

    Each result is for one `join`. Mixtures are rounded to the blocks' format, which is one more rounding than
    `mix_depth_normed` has.
    """
    shared, Q = _Shared(eps), len(queries)
    vectors = [x.contiguous() for pair in zip(*queries) for x in pair]
    found = _PhaseOne.apply(shared, Q, *vectors, *(x.contiguous() for x in sources))
    return [Read(shared, n, Q, found[n], found[Q + n], *queries[n]) for n in range(Q)]


def join(
    read: Read, out_weight_D: Tensor, eps: float, partial_TD: Tensor, addend_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(norm of the softmax mixture of the finished blocks and the running one, the running block).

    `addend_TD`, if given, is added to the running block `partial_TD` first.
    """
    given = (None if x is None else x.contiguous() for x in (partial_TD, addend_TD))
    vectors = read.query_D.contiguous(), read.norm_weight_D.contiguous(), out_weight_D.contiguous()
    where = (read.shared, read.number, read.count, eps)
    normed_TD, newest_TD = _Join.apply(where, read.mixture_TD, read.log_T, *vectors, *given)
    return normed_TD, partial_TD if newest_TD is None else newest_TD


class _PhaseOne(torch.autograd.Function):
    """Queries, norm weights, finished blocks; mixtures (whose gradients stand for those of logs too), then logs."""

    @staticmethod
    def forward(ctx: Any, shared: _Shared, Q: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        queries, norm_weights, sources = tensors[:Q], tensors[Q : 2 * Q], tensors[2 * Q :]
        x, L = sources[0], len(sources)
        T, D = x.shape
        vectors = torch.stack(queries).float() * torch.stack(norm_weights).float()
        mixtures, weights = x.new_empty(Q, T, D), vectors.new_empty(T, L, Q)
        tops, totals = vectors.new_empty(2, Q, T).unbind()
        if T:
            flags = attn_res_phase_kernel.score_constants(D, Q)
            grid = (triton.cdiv(T, flags["ROWS"]), triton.cdiv(Q, flags["QUERIES"]))
            with on_device(x):
                run = attn_res_phase_kernel.phase_score_kernel[grid]
                run(sources, vectors, weights, tops, totals, T, Q, shared.eps, 1.0, **flags)
                flags = attn_res_phase_kernel.mix_constants(D)
                run = attn_res_phase_kernel.phase_mix_kernel[(T * triton.cdiv(D, flags["BLOCK"]),)]
                run(sources, weights, mixtures, T, Q, **flags)
        logs = totals.log_().add_(tops)
        shared.vectors_QD = vectors
        ctx.save_for_backward(*tensors, vectors, weights, logs, mixtures)
        ctx.set_materialize_grads(False)
        ctx.shared, ctx.Q = shared, Q
        rows = logs.unbind()
        ctx.mark_non_differentiable(*rows)
        return *mixtures.unbind(), *rows

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        Q, shared = ctx.Q, ctx.shared
        *tensors, vectors, weights, logs, mixtures = ctx.saved_tensors
        queries, norm_weights, sources = tensors[:Q], tensors[Q : 2 * Q], tuple(tensors[2 * Q :])
        needed = ctx.needs_input_grad[2:]
        memory = shared.taken(sources[0], grads[:Q])
        kept = (vectors, weights, logs, mixtures)
        d_sources, d_vectors = _phase_one_gradients(sources, kept, memory, shared.eps, needed[2 * Q :])
        scaled = [d * by for by in (norm_weights, queries) for d, by in zip(d_vectors, by)]
        d_weights = [d.to(x.dtype) if need else None for d, x, need in zip(scaled, tensors, needed)]
        return None, None, *d_weights, *d_sources


def _phase_one_gradients(
    sources: tuple[Tensor, ...],
    kept: tuple[Tensor, Tensor, Tensor, Tensor],
    left: _Gradients,
    eps: float,
    needed: Sequence[bool],
) -> tuple[list[Tensor | None], Tensor]:
    """Gradients of the blocks that need one, and of the vectors [Q, D] in float32."""
    vectors, weights, logs, mixtures = kept
    (T, D), L, Q = sources[0].shape, len(sources), len(vectors)
    grads = [torch.empty_like(source) if need else None for source, need in zip(sources, needed)]
    if T == 0:
        return grads, torch.zeros_like(vectors)
    shares, shrinks = torch.empty_like(weights), weights.new_empty(T, L)
    wanted = sum(need << i for i, need in enumerate(needed))
    places = tuple(source if grad is None else grad for source, grad in zip(sources, grads))
    chosen, options = kernels.vectors_constants(D, Q)
    blocks = triton.cdiv(D, chosen["BLOCK"])
    parts = max(1, min(triton.cdiv(T, 4 * chosen["ROWS"]), 4 * _multiprocessors(sources[0].device) // blocks))
    tokens = triton.cdiv(T, parts)
    parts = triton.cdiv(T, tokens)
    d_vectors = vectors.new_empty(parts, Q, D)
    with on_device(sources[0]):
        arguments = (sources, mixtures, left.d_mixtures_QTD, weights, logs, left.sums_QT, left.rests_QT)
        arguments = (*arguments, shares, shrinks, T, Q, eps)
        _launch(kernels.phase_dots_kernel, T, arguments, *kernels.dots_constants(D, Q))
        if wanted:
            flags = kernels.sources_constants(D, wanted)
            programs = triton.cdiv(T, flags[0]["ROWS"]) * triton.cdiv(D, flags[0]["BLOCK"])
            arguments = (sources, places, left.d_mixtures_QTD, vectors, weights, shares, shrinks, T, Q)
            _launch(kernels.phase_sources_kernel, programs, arguments, *flags)
        arguments = (sources, shares, d_vectors, T, Q, tokens)
        _launch(kernels.phase_vectors_kernel, parts * blocks, arguments, chosen, options)
    return grads, d_vectors.sum(0)


class _Join(torch.autograd.Function):
    """Mixture, log, query, norm weight, out weight, running block, addend or None; normed, newest or None."""

    @staticmethod
    def forward(ctx: Any, where: tuple[_Shared, int, int, float], *tensors: Any) -> tuple[Tensor | None, Tensor | None]:
        shared, number, count, norm_eps = where
        mixture, log, query, norm_weight, out_weight, partial, addend = tensors
        T, D = mixture.shape
        newest = None if addend is None else torch.empty_like(mixture)
        normed = mixture.new_empty(T, D, dtype=torch.promote_types(mixture.dtype, out_weight.dtype))
        stats = log.new_empty(3, T)
        if T:
            assert shared.vectors_QD is not None
            vector = shared.vectors_QD[number]
            given = (mixture, log, partial, addend, vector, out_weight, newest, normed, stats, T, shared.eps, norm_eps)
            with on_device(mixture):
                _launch(kernels.join_forward_kernel, T, given, *kernels.join_constants(D, backward=False))
        ctx.save_for_backward(mixture, query, norm_weight, out_weight, partial if newest is None else newest, stats)
        ctx.set_materialize_grads(False)
        ctx.where = where
        return normed, newest

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        shared, number, count, norm_eps = ctx.where
        mixture, query, norm_weight, out_weight, partial, stats = ctx.saved_tensors
        d_normed, d_newest = (None if d is None else d.contiguous() for d in grads)
        of_rows = ctx.needs_input_grad[6:]
        if d_normed is None:
            return *(None,) * 6, *(d_newest if need else None for need in of_rows)
        T, D = mixture.shape
        d_mixture, sums, rests = (x[number] for x in shared.gradients(mixture, count))
        d_partial = torch.empty_like(partial)
        vectors = query, norm_weight, out_weight
        if T == 0:
            return None, d_mixture, None, *map(torch.zeros_like, vectors), *(d_partial if x else None for x in of_rows)
        programs = min(T, _multiprocessors(mixture.device))
        d_vectors, d_outs = shared.vectors_QD.new_empty(2, programs, D).unbind()
        into = tuple(torch.empty_like(x) for x in vectors)
        given = (mixture, partial, shared.vectors_QD[number], out_weight, d_normed, d_newest, stats)
        given = (*given, d_mixture, d_partial, sums, rests, d_vectors, d_outs, T, norm_eps)
        with on_device(mixture):
            _launch(kernels.join_backward_kernel, programs, given, *kernels.join_constants(D, backward=True))
            arguments = d_vectors, d_outs, query, norm_weight, *into, programs
            flags = {"D": D} | attn_res_kernel.VECTORS
            blocks = triton.cdiv(D, attn_res_kernel.VECTORS["BLOCK"])
            _launch(attn_res_kernel.mix_vectors_kernel, blocks, arguments, flags, attn_res_kernel.VECTORS_OPTIONS)
        return None, d_mixture, None, *into, *(d_partial if need else None for need in of_rows)
