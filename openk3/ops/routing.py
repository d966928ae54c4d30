"""Expert choice by biased score, and the row permutation between token order and expert order."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Routes(NamedTuple):
    """Where each token goes: expert ids and weights in descending biased score, and the next best score."""

    expert_ids_Tk: torch.Tensor
    weights_Tk: torch.Tensor
    threshold_T: torch.Tensor


def route(
    scores_TE: torch.Tensor,
    bias_E: torch.Tensor,
    k: int,
    *,
    groups: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
) -> Routes:
    """Choose the k experts with the largest `scores + bias`; weights come from the scores alone."""
    with torch.no_grad():
        biased_TE = scores_TE + bias_E
        if groups > topk_group:
            grouped = biased_TE.unflatten(-1, (groups, -1))
            best_TG = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
            kept = torch.sort(best_TG, dim=-1, descending=True, stable=True).indices[:, :topk_group]
            mask_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, kept, False)
            biased_TE = grouped.masked_fill(mask_TG.unsqueeze(-1), float("-inf")).flatten(1)
        values, ids = torch.sort(biased_TE, dim=-1, descending=True, stable=True)
        ids_Tk = ids[:, :k].contiguous()
        threshold_T = values[:, k].clone() if k < values.shape[1] else values.new_full(values.shape[:1], float("-inf"))
    weights_Tk = scores_TE.gather(1, ids_Tk)
    if renormalize and k > 1:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + 1e-20)
    return Routes(ids_Tk, weights_Tk * scale, threshold_T)


def sort_by_expert(expert_ids_Tk: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order_M, counts_E): the stable permutation of the M = T*k slots that groups them by expert."""
    flat_M = expert_ids_Tk.reshape(-1)
    return torch.argsort(flat_M, stable=True), torch.bincount(flat_M, minlength=num_experts)


def gather_rows(x_TC: torch.Tensor, order_M: torch.Tensor, k: int) -> torch.Tensor:
    """Rows of x in expert order, one per slot [M, C]."""
    return x_TC[order_M // k]


def combine_rows(y_MC: torch.Tensor, order_M: torch.Tensor, weights_Tk: torch.Tensor) -> torch.Tensor:
    """Weighted sum over each token's k expert rows, in at least float32 -> [T, C] in y's dtype."""
    y_TkC = torch.empty_like(y_MC).index_copy(0, order_M, y_MC).unflatten(0, weights_Tk.shape)
    wide = torch.promote_types(y_MC.dtype, weights_Tk.dtype)
    return (y_TkC.to(wide) * weights_Tk.unsqueeze(-1)).sum(1).to(y_MC.dtype)
