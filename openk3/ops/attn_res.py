"""Attention Residuals: a softmax over depth sources in place of the residual stream, whole or in two phases."""

from __future__ import annotations

import torch


def _scores(v: torch.Tensor, vector: torch.Tensor, eps: float) -> torch.Tensor:
    return (v @ vector) * torch.rsqrt(v.square().mean(-1) + eps)


def mix_depth(
    sources: list[torch.Tensor], query_D: torch.Tensor, norm_weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax-weighted sum of the depth sources [T, D] -> (mixed [T, D], weights [T, L], detached)."""
    wide = torch.promote_types(sources[0].dtype, torch.float32)
    values = [s.to(wide) for s in sources]
    vector = query_D.to(wide) * norm_weight_D.to(wide)
    probs_TL = torch.stack([_scores(v, vector, eps) for v in values], -1).softmax(-1)
    mixed = torch.zeros_like(values[0])
    for i, value in enumerate(values):
        mixed = mixed + probs_TL[:, i : i + 1] * value
    return mixed.to(sources[0].dtype), probs_TL.detach()


def inter_block(
    sources: list[torch.Tensor], vectors_QD: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Phase one: mix the finished blocks for Q vectors at once -> (o [Q, T, D], max [Q, T], sum [Q, T])."""
    wide = torch.promote_types(sources[0].dtype, torch.float32)
    values_LTD = torch.stack([s.to(wide) for s in sources])
    rrms_LT = torch.rsqrt(values_LTD.square().mean(-1) + eps)
    scores_QLT = torch.einsum("qd,ltd->qlt", vectors_QD.to(wide), values_LTD) * rrms_LT
    max_QT = scores_QLT.amax(1)
    weights_QLT = torch.exp(scores_QLT - max_QT.unsqueeze(1))
    sum_QT = weights_QLT.sum(1)
    o_QTD = torch.einsum("qlt,ltd->qtd", weights_QLT, values_LTD) / sum_QT.unsqueeze(-1)
    return o_QTD, max_QT, sum_QT


def merge_partial(
    o_TD: torch.Tensor,
    max_T: torch.Tensor,
    sum_T: torch.Tensor,
    partial_TD: torch.Tensor,
    vector_D: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Phase two: add the current partial block to one vector's phase-one result -> mixed [T, D]."""
    wide = torch.promote_types(partial_TD.dtype, torch.float32)
    value_TD = partial_TD.to(wide)
    score_T = _scores(value_TD, vector_D.to(wide), eps)
    top_T = torch.maximum(max_T, score_T)
    old_T, new_T = torch.exp(max_T - top_T) * sum_T, torch.exp(score_T - top_T)
    mixed = (old_T.unsqueeze(-1) * o_TD + new_T.unsqueeze(-1) * value_TD) / (old_T + new_T).unsqueeze(-1)
    return mixed.to(partial_TD.dtype)
