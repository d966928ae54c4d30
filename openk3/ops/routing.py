"""Expert choice by biased score, and the row permutation between token order and expert order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from openk3.ops.unrecorded import apply


class Routes(NamedTuple):
    """Where each token goes."""

    expert_ids_Tk: torch.Tensor  # int64, k distinct experts in descending biased score
    weights_Tk: torch.Tensor  # what their outputs are multiplied with; carries the router's gradient
    threshold_T: torch.Tensor  # the (k+1)-th largest biased score, detached; -inf where there is none
    load_E: torch.Tensor | None = None  # int64, tokens of each expert, where sorting them has counted them


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
    """Send each token to the k experts with the largest `scores + bias`; weights come from the scores alone.

    `scores_TE` are the router's sigmoids in at least float32, `bias_E` the balancing bias. Equal biased scores are
    settled in favour of the lower expert index, the same on every run. If `topk_group < groups`, the experts form
    `groups` equal groups, only the `topk_group` groups with the largest sum of their two best biased scores stay
    eligible. With `renormalize` and k > 1 the weights are divided by (their sum + 1e-20); then times `scale`.
    `threshold_T` is Quantile Balancing's alpha (among eligible experts; -inf if none is left beyond the k).

    Raises ValueError if k is not between 1 and the number of eligible experts. Report eqs. 11-13.
    """
    num_experts = scores_TE.shape[1]
    if groups < 1 or num_experts % groups or not 1 <= topk_group <= groups:
        raise ValueError(f"groups={groups}, topk_group={topk_group}: must split {num_experts} experts evenly")
    if not 1 <= k <= num_experts // groups * topk_group:
        raise ValueError(f"k={k}: must lie between 1 and {num_experts // groups * topk_group} eligible experts")
    with torch.no_grad():
        biased_TE = scores_TE + bias_E
        if topk_group < groups:
            biased_TE = _keep_groups(biased_TE, groups, topk_group)
        ids_TJ, values_TJ = _largest(biased_TE, min(k + 1, num_experts))
        threshold_T = values_TJ[:, k] if k < num_experts else values_TJ.new_full(values_TJ.shape[:1], float("-inf"))
        ids_Tk = ids_TJ[:, :k].contiguous()
    weights_Tk = scores_TE.gather(1, ids_Tk)
    if renormalize and k > 1:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + 1e-20)
    return Routes(ids_Tk, weights_Tk * scale, threshold_T)


def sort_by_expert(
    expert_ids_Tk: torch.Tensor, num_experts: int, *, max_padding: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group the T*k slots by expert: (order_M, counts_E), both int64.

    Slot t*k + i is token t's i-th choice. `order_M` lists slots by expert, in token order within one expert;
    `counts_E` is the number of rows of each expert. M = T*k, unless all experts have rows and giving each as many as
    the fullest has makes at most `max_padding` times as many: then they all get that many, which lets one batched
    product serve them, and the rows beyond an expert's own name slot T*k, which does not exist.
    """
    slots = expert_ids_Tk.reshape(-1)
    order_M, counts_E = torch.argsort(slots, stable=True), torch.bincount(slots, minlength=num_experts)
    least, most = (int(x) for x in counts_E.aminmax())
    if least == 0 or least == most or most * num_experts > max_padding * slots.shape[0]:
        return order_M, counts_E
    expert_M = slots[order_M]
    place_M = torch.arange(slots.shape[0], device=slots.device) - (counts_E.cumsum(0) - counts_E)[expert_M]
    padded_M = torch.full((num_experts * most,), slots.shape[0], device=slots.device)
    padded_M[expert_M * most + place_M] = order_M
    return padded_M, torch.full_like(counts_E, most)


def gather_rows(x_TC: torch.Tensor, order_M: torch.Tensor, k: int) -> torch.Tensor:
    """Copy each token's row to its k slots in expert order: [T, C] -> [M, C]. Padding repeats the last token's row."""
    return apply(_GatherRows, x_TC, order_M, k)


def combine_rows(y_MC: torch.Tensor, order_M: torch.Tensor, weights_Tk: torch.Tensor) -> torch.Tensor:
    """Weighted sum of each token's k expert outputs, `y_MC` being in expert order: [M, C] -> [T, C].

    Products and sums are in at least float32 (and in no less than the weights' dtype), then one cast to y's dtype.
    Padding rows count for nothing and get zero gradients.
    """
    return apply(_CombineRows, y_MC, order_M, weights_Tk)


def _keep_groups(biased_TE: torch.Tensor, groups: int, topk_group: int) -> torch.Tensor:
    grouped_TGX = biased_TE.unflatten(-1, (groups, -1))
    best_TG = grouped_TGX.topk(min(2, grouped_TGX.shape[-1]), dim=-1).values.sum(-1)
    kept, _ = _largest(best_TG, topk_group)
    dropped_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, kept, False)
    return grouped_TGX.masked_fill(dropped_TG.unsqueeze(-1), float("-inf")).flatten(1)


def _largest(values_TE: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, values) of the `count` largest, descending; equal values in ascending index order."""
    more = min(count + 1, values_TE.shape[1])
    values, ids = values_TE.topk(more, dim=-1)
    # topk leaves the order of equal values open, and which of them it takes at the end.
    tied = (values[:, 1:] == values[:, :-1]).any(-1).nonzero().squeeze(1)
    if tied.numel():
        values[tied], ids[tied] = (x[:, :more] for x in values_TE[tied].sort(dim=-1, descending=True, stable=True))
    return ids[:, :count], values[:, :count]


def _slot_rows(order_M: torch.Tensor, num_slots: int) -> torch.Tensor:
    """The row at which each slot lies in expert order: the inverse permutation."""
    rows = torch.arange(order_M.shape[0], device=order_M.device)
    return order_M.new_empty(num_slots + 1).scatter_(0, order_M, rows)[:num_slots]


def _token_rows(x_TC: torch.Tensor, order_M: torch.Tensor, k: int) -> torch.Tensor:
    """The row of the token that each slot belongs to; padding takes the last token's."""
    return x_TC.index_select(0, (order_M // k).clamp_(max=max(0, x_TC.shape[0] - 1)))


def _sum_slots(y_MC: torch.Tensor, rows_Tk: torch.Tensor, weights_Tk: torch.Tensor | None) -> torch.Tensor:
    """Sum over k of (weights times) the given rows, without writing the [T, k, C] intermediate."""
    if rows_Tk.numel() == 0:
        return y_MC.new_zeros(rows_Tk.shape[0], y_MC.shape[1])
    return torch.nn.functional.embedding_bag(rows_Tk, y_MC, mode="sum", per_sample_weights=weights_Tk)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: torch.Tensor, order_M: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(order_M)
        ctx.shape = (x_TC.shape[0], k)
        return _token_rows(x_TC, order_M, k)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad_MC,), (order_M,) = grads, ctx.saved_tensors
        wide_MC = grad_MC.to(torch.promote_types(grad_MC.dtype, torch.float32)).contiguous()
        rows_Tk = _slot_rows(order_M, ctx.shape[0] * ctx.shape[1]).view(ctx.shape)
        return _sum_slots(wide_MC, rows_Tk, None).to(grad_MC.dtype), None, None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_MC: torch.Tensor, order_M: torch.Tensor, weights_Tk: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y_MC, order_M, weights_Tk)
        wide = torch.promote_types(torch.promote_types(y_MC.dtype, weights_Tk.dtype), torch.float32)
        rows_Tk = _slot_rows(order_M, weights_Tk.numel()).view(weights_Tk.shape)
        return _sum_slots(y_MC.to(wide), rows_Tk, weights_Tk.to(wide)).to(y_MC.dtype)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        y_MC, order_M, weights_Tk = ctx.saved_tensors
        wide = torch.promote_types(torch.promote_types(y_MC.dtype, weights_Tk.dtype), torch.float32)
        grad_MC = _token_rows(grads[0].to(wide), order_M, weights_Tk.shape[1])
        # One more slot than there are: where padding goes, with weight zero.
        weights = torch.cat((weights_Tk.to(wide).reshape(-1), weights_Tk.new_zeros(1, dtype=wide)))
        grad_weights = torch.empty_like(weights)
        grad_weights[order_M] = torch.linalg.vecdot(grad_MC, y_MC.to(wide))
        grad_MC.mul_(weights[order_M].unsqueeze(1))
        return grad_MC.to(y_MC.dtype), None, grad_weights[:-1].view(weights_Tk.shape).to(weights_Tk.dtype)
