"""Counting how far each expert was from each token, for Quantile Balancing: integers by expert and bin."""

from __future__ import annotations

import torch
from torch import Tensor

from openk3.ops.backend import pick


def count_margins(counts_EB: Tensor, scores_TE: Tensor, threshold_T: Tensor, range_2: Tensor) -> None:
    """Add one to counts[j, b] for every token i and expert j, b being the bin of alpha_i - s_ij (Appendix D).

    `range_2` (float64) is where the first bin begins and the width of all; what lies outside goes to the first or last
    bin. `counts_EB` is int64. Nothing is asked of a GPU.
    """
    if pick("margins", scores_TE) == "triton":
        from openk3.ops.margins_fused import count_margins_by_kernel

        count_margins_by_kernel(counts_EB, scores_TE, threshold_T, range_2)
        return
    experts, bins = counts_EB.shape
    low, width = range_2
    required_TE = threshold_T.unsqueeze(1) - scores_TE
    bins_TE = ((required_TE - low) / width).long().clamp_(0, bins - 1)
    bins_TE += torch.arange(experts, device=bins_TE.device) * bins
    counts_EB += torch.bincount(bins_TE.flatten(), minlength=experts * bins).view(experts, bins)
