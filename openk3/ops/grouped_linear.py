"""One matrix per expert over rows sorted by expert; experts without rows cost nothing."""

from __future__ import annotations

import torch


def grouped_linear(x_MC: torch.Tensor, weight_EOC: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """Rows of x, sorted by expert, times their expert's weight -> [M, O]."""
    outputs = [
        rows @ weight_EOC[e].T for e, rows in enumerate(torch.split(x_MC, counts_E.tolist())) if rows.shape[0] > 0
    ]
    if not outputs:
        return x_MC.new_zeros(0, weight_EOC.shape[1]) + 0 * weight_EOC.sum()
    return torch.cat(outputs)
