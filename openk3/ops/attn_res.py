"""Attention Residuals: a softmax over depth sources in place of the residual stream, whole or in two phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from openk3.ops.backend import pick
from openk3.ops.norm import rms_norm
from openk3.ops.unrecorded import apply


class NormedMix(NamedTuple):
    """What `mix_depth_normed` returns."""

    normed_TD: torch.Tensor
    mixed_TD: torch.Tensor | None  # if asked for
    newest_TD: torch.Tensor  # the last source, with what was added to it
    probs_TL: torch.Tensor
    earlier: list[torch.Tensor]  # all other sources, as later reads should take them


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
    if fuses(sources):
        return _mixed_by_kernel(sources, query_D, norm_weight_D, eps)
    wide = torch.promote_types(sources[0].dtype, torch.float32)
    vector_D = query_D.to(wide) * norm_weight_D.to(wide)
    mixed_TD, probs_TL = apply(_MixDepth, vector_D, eps, *sources)
    return mixed_TD, probs_TL


def mix_depth_normed(
    sources: Sequence[torch.Tensor],
    query_D: torch.Tensor,
    norm_weight_D: torch.Tensor,
    out_weight_D: torch.Tensor,
    eps: float,
    *,
    addend_TD: torch.Tensor | None = None,
    keep_mixed: bool = False,
) -> NormedMix:
    """`mix_depth`, then the `rms_norm` of the mixture by `out_weight_D`, with one `eps` for both.

    `addend_TD`, if given, is added to the last source first: the sum is the last source that is mixed, and is
    returned as `newest_TD`. Kernels do all of it in one pass over the sources; the mixture itself is written only if
    `keep_mixed`. If a later read takes `earlier` and `newest_TD` as its sources, in place of those given here, kernels
    also add up the gradients that sources have from many reads. Raises ValueError if there is no source.
    """
    if not sources:
        raise ValueError("sources: need at least one depth source")
    dtypes = {x.dtype for x in (*sources, *(() if addend_TD is None else (addend_TD,)))}
    if len(dtypes) == 1 and fuses(sources):
        from openk3.ops.attn_res_fused import Wanted, mix
        from openk3.ops.few.mixture import read_few, reads_few

        weights = query_D, norm_weight_D, out_weight_D
        if not keep_mixed and reads_few(sources, weights, addend_TD):
            normed_TD, newest_TD, probs_TL = read_few(sources, weights, eps, addend_TD)
            return NormedMix(normed_TD, None, newest_TD, probs_TL, list(sources[:-1]))

        wanted = Wanted(keep_mixed, True, eps, passed=True)
        found = mix(sources, (query_D, norm_weight_D, out_weight_D), wanted, addend_TD)
        assert found.normed_TD is not None
        *earlier, newest_TD = found.sources
        return NormedMix(found.normed_TD, found.mixed_TD, newest_TD, found.probs_TL, earlier)
    newest_TD = sources[-1] if addend_TD is None else sources[-1] + addend_TD
    mixed_TD, probs_TL = mix_depth([*sources[:-1], newest_TD], query_D, norm_weight_D, eps)
    normed_TD = rms_norm(mixed_TD, out_weight_D, eps)
    return NormedMix(normed_TD, mixed_TD if keep_mixed else None, newest_TD, probs_TL, list(sources[:-1]))


def fuses(sources: Sequence[torch.Tensor]) -> bool:
    """Whether kernels mix these sources; then reading and norming at once saves passes over them."""

    def obstacle() -> str | None:
        from openk3.ops.attn_res_fused import obstacle

        return obstacle(sources)

    return pick("attn_res", sources[0]) == "triton" and pick("attn_res", sources[0], obstacle=obstacle()) == "triton"


def _mixed_by_kernel(
    sources: Sequence[torch.Tensor], query_D: torch.Tensor, norm_weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mix_depth` by kernels, which take sources of one format: different ones are widened first."""
    from openk3.ops.attn_res_fused import Wanted, mix

    kind = sources[0].dtype
    for source_TD in sources[1:]:
        kind = torch.promote_types(kind, source_TD.dtype)
    rows = [source_TD.to(kind) for source_TD in sources]
    found = mix(rows, (query_D, norm_weight_D, None), Wanted(True, False, eps))
    assert found.mixed_TD is not None
    return found.mixed_TD.to(sources[0].dtype), found.probs_TL


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
    sources: Sequence[torch.Tensor], vectors_QD: torch.Tensor, eps: float, *, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Phase one of the two-phase form: mix the finished blocks for Q vectors at once.

    `sources`: L >= 1 tensors [T, D] in any floating dtype; `vectors_QD`: one `norm_weight * query` per sub-layer
    that reads these blocks. Returns (o_QTD the normalised mix, max_QT the largest score, sum_QT the sum of
    exponentials relative to it), all in at least float32 unless o_QTD's `dtype` is given (half the memory, one more
    rounding); `merge_partial` finishes each one. Report §5.4.2.
    """
    wide = torch.promote_types(sources[0].dtype, torch.float32)
    if _in_phases(sources):
        from openk3.ops import attn_res_fused

        return attn_res_fused.inter_block(sources, vectors_QD, eps, dtype or wide)
    values_TLD = torch.stack([source_TD.to(wide) for source_TD in sources], 1)
    rrms_TL = _reciprocal_rms(values_TLD, eps)
    scores_TLQ = (values_TLD @ vectors_QD.to(wide).T) * rrms_TL.unsqueeze(-1)
    max_TQ = scores_TLQ.amax(1)
    weights_TLQ = torch.exp(scores_TLQ - max_TQ.unsqueeze(1))
    sum_TQ = weights_TLQ.sum(1)
    o_TQD = torch.bmm((weights_TLQ / sum_TQ.unsqueeze(1)).mT, values_TLD)
    return o_TQD.transpose(0, 1).to(dtype or wide), max_TQ.T, sum_TQ.T


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
    if _in_phases([partial_TD]):
        from openk3.ops.attn_res_fused import merge

        return merge((o_TD, max_T, sum_T), partial_TD, vector_D, eps=eps)[0]
    wide = torch.promote_types(partial_TD.dtype, torch.float32)
    value_TD = partial_TD.to(wide)
    score_T = (value_TD @ vector_D.to(wide)) * _reciprocal_rms(value_TD, eps)
    top_T = torch.maximum(max_T, score_T)
    old_T, new_T = torch.exp(max_T - top_T) * sum_T, torch.exp(score_T - top_T)
    total_T = old_T + new_T
    mixed_TD = o_TD * (old_T / total_T).unsqueeze(-1) + value_TD * (new_T / total_T).unsqueeze(-1)
    return mixed_TD.to(partial_TD.dtype)


def merge_normed(
    phase_one: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    partial_TD: torch.Tensor,
    vector_D: torch.Tensor,
    out_weight_D: torch.Tensor,
    *,
    eps: float,
    addend_TD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_partial`, then the `rms_norm` of the mixture: (normed, newest block sum).

    `phase_one` is (o_TD, max_T, sum_T) of one vector. `addend_TD`, if given, is added to the block sum first.
    """
    same = addend_TD is None or addend_TD.dtype == partial_TD.dtype
    if same and _in_phases([partial_TD]):
        from openk3.ops.attn_res_fused import merge

        return merge(phase_one, partial_TD, vector_D, eps=eps, addend=addend_TD, out_weight=out_weight_D)
    newest_TD = partial_TD if addend_TD is None else partial_TD + addend_TD
    mixed_TD = merge_partial(*phase_one, newest_TD, vector_D=vector_D, eps=eps)
    return rms_norm(mixed_TD, out_weight_D, eps), newest_TD


def _in_phases(sources: Sequence[torch.Tensor]) -> bool:
    """Whether kernels do the two phases; they have no gradients."""
    return not torch.is_grad_enabled() and len({x.dtype for x in sources}) == 1 and fuses(sources)


def _reciprocal_rms(value: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean value^2 + eps) over the last dimension, without writing the squares."""
    norm = torch.linalg.vector_norm(value, dim=-1)
    return torch.rsqrt(norm.square_().div_(value.shape[-1]).add_(eps))
