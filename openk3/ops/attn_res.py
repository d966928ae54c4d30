"""Attention Residuals: a softmax over depth sources in place of the residual stream, whole or in two phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def mix_depth(
    sources: Sequence[torch.Tensor], query_D: torch.Tensor, norm_weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax-weighted sum of depth sources: (mixed [T, D] in the sources' dtype, weights [T, L] detached).

    `sources` are L tensors [T, D] of one dtype: the embedding, the finished blocks, the running block sum.
    A source's key is itself divided by its root mean square (`eps` inside the root), its score is the dot
    product of that key with `norm_weight * query`, its value is the raw source. All in at least float32,
    one cast at the end. Gradients reach every source, the query and the norm weight; what is kept for them is
    the sources themselves and two numbers per token and source. A query of zeros weighs all sources alike.

    Raises ValueError if there is no source. Report §2.2, eqs. 8-10.
    """
    if not sources:
        raise ValueError("sources: need at least one depth source")
    wide = torch.promote_types(sources[0].dtype, torch.float32)
    vector_D = query_D.to(wide) * norm_weight_D.to(wide)
    mixed_TD, probs_TL = _MixDepth.apply(vector_D, eps, *sources)
    return mixed_TD, probs_TL


class _MixDepth(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, vector_D: torch.Tensor, eps: float, *sources: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = vector_D.dtype
        scores, rrms = [], []
        for source_TD in sources:
            value_TD = source_TD.to(wide)
            rrms.append(_reciprocal_rms(value_TD, eps))
            scores.append((value_TD @ vector_D.unsqueeze(1)).squeeze(1).mul_(rrms[-1]))
        scores_LT = torch.stack(scores)
        probs_LT = scores_LT.softmax(0)
        mixed_TD = sources[0].to(wide) * probs_LT[0].unsqueeze(1)
        for source_TD, prob_T in zip(sources[1:], probs_LT[1:]):
            mixed_TD.addcmul_(source_TD.to(wide), prob_T.unsqueeze(1))
        ctx.save_for_backward(vector_D, scores_LT, torch.stack(rrms), *sources)
        ctx.set_materialize_grads(False)
        probs_TL = probs_LT.T
        ctx.mark_non_differentiable(probs_TL)
        return mixed_TD.to(sources[0].dtype), probs_TL

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        vector_D, scores_LT, rrms_LT, *sources = ctx.saved_tensors
        grad_out = grads[0]
        if grad_out is None:
            return (None,) * (2 + len(sources))
        wide = vector_D.dtype
        grad_TD, probs_LT = grad_out.to(wide), scores_LT.softmax(0)
        values = [source_TD.to(wide) for source_TD in sources]
        grad_probs_LT = torch.stack([torch.linalg.vecdot(grad_TD, value_TD) for value_TD in values])
        grad_scores_LT = probs_LT * (grad_probs_LT - (probs_LT * grad_probs_LT).sum(0))
        toward_vector_LT = grad_scores_LT * rrms_LT
        # score = rrms * (value . vector), and d rrms / d value = -rrms^3 * value / D
        shrink_LT = grad_scores_LT * scores_LT * rrms_LT.square() / -vector_D.shape[0]
        grad_vector_1D = torch.zeros_like(vector_D).unsqueeze(0)
        grad_sources: list[torch.Tensor | None] = []
        for i, value_TD in enumerate(values):
            grad_vector_1D += toward_vector_LT[i : i + 1] @ value_TD
            if not ctx.needs_input_grad[2 + i]:
                grad_sources.append(None)
                continue
            grad_value_TD = value_TD * shrink_LT[i].unsqueeze(1)
            grad_value_TD.addcmul_(grad_TD, probs_LT[i].unsqueeze(1)).addr_(toward_vector_LT[i], vector_D)
            grad_sources.append(grad_value_TD.to(grad_out.dtype))
        return grad_vector_1D.squeeze(0), None, *grad_sources


def inter_block(
    sources: Sequence[torch.Tensor], vectors_QD: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Phase one of the two-phase form: mix the finished blocks for Q vectors at once.

    `sources`: L >= 1 tensors [T, D] in any floating dtype; `vectors_QD`: one `norm_weight * query` per sub-layer
    that reads these blocks. Returns (o_QTD the normalised mix, max_QT the largest score, sum_QT the sum of
    exponentials relative to it), all in at least float32; `merge_partial` finishes each one. Report §5.4.2.
    """
    wide = torch.promote_types(sources[0].dtype, torch.float32)
    values_TLD = torch.stack([source_TD.to(wide) for source_TD in sources], 1)
    rrms_TL = _reciprocal_rms(values_TLD, eps)
    scores_TLQ = (values_TLD @ vectors_QD.to(wide).T) * rrms_TL.unsqueeze(-1)
    max_TQ = scores_TLQ.amax(1)
    weights_TLQ = torch.exp(scores_TLQ - max_TQ.unsqueeze(1))
    sum_TQ = weights_TLQ.sum(1)
    o_TQD = torch.bmm((weights_TLQ / sum_TQ.unsqueeze(1)).mT, values_TLD)
    return o_TQD.transpose(0, 1), max_TQ.T, sum_TQ.T


def merge_partial(
    o_TD: torch.Tensor,
    max_T: torch.Tensor,
    sum_T: torch.Tensor,
    partial_TD: torch.Tensor,
    *,
    vector_D: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Phase two: join the running block sum to one vector's phase-one result -> mixed [T, D].

    `o_TD`, `max_T`, `sum_T` are one row q of what `inter_block` returned, `vector_D` is its vector, `partial_TD`
    the running block sum. Equal to `mix_depth` over the blocks and the partial sum; in partial_TD's dtype.
    """
    wide = torch.promote_types(partial_TD.dtype, torch.float32)
    value_TD = partial_TD.to(wide)
    score_T = (value_TD @ vector_D.to(wide)) * _reciprocal_rms(value_TD, eps)
    top_T = torch.maximum(max_T, score_T)
    old_T, new_T = torch.exp(max_T - top_T) * sum_T, torch.exp(score_T - top_T)
    total_T = old_T + new_T
    mixed_TD = o_TD * (old_T / total_T).unsqueeze(-1) + value_TD * (new_T / total_T).unsqueeze(-1)
    return mixed_TD.to(partial_TD.dtype)


def _reciprocal_rms(value: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean value^2 + eps) over the last dimension, without writing the squares."""
    norm = torch.linalg.vector_norm(value, dim=-1)
    return torch.rsqrt(norm.square_().div_(value.shape[-1]).add_(eps))
