"""Counting margins for Quantile Balancing: plain Python, the definition and the kernel agree on every count."""

from __future__ import annotations

import math

import pytest
import torch
from op_checks import random

from openk3.ops.margins import count_margins
from openk3.ops.margins_fused import count_margins_by_kernel


def by_hand(counts: torch.Tensor, scores: torch.Tensor, threshold: torch.Tensor, low: float, width: float) -> None:
    """One expert and token after the other."""
    for row, alpha in zip(scores, threshold):
        for expert, score in enumerate(row):
            place = int(float((alpha - score - low) / width))
            counts[expert, min(max(place, 0), counts.shape[1] - 1)] += 1


@pytest.mark.parametrize(("T", "E", "bins"), [(0, 3, 7), (1, 1, 1), (19, 140, 50), (70, 5, 1000)])
def test_counts(T: int, E: int, bins: int) -> None:
    """Added to what was there; margins beyond the range go to the first and the last bin."""
    scores, threshold = random(T, E).sigmoid().float(), random(T, seed=1).float()
    low, width = -0.5, 1.3 / bins
    start = torch.arange(E * bins).view(E, bins)
    want, kernel, definition = start.clone(), start.clone(), start.clone()
    by_hand(want, scores, threshold, torch.tensor(low), torch.tensor(width))
    range_2 = torch.tensor([low, width], dtype=torch.float64)
    count_margins(definition, scores, threshold, range_2)
    count_margins_by_kernel(kernel, scores, threshold, range_2)
    assert torch.equal(definition, want) and torch.equal(kernel, want)


def test_no_margin_leads_outside_of_memory() -> None:
    """NaN and infinities are counted somewhere in their expert's row."""
    scores = torch.tensor([[0.5, math.nan, math.inf, -math.inf]])
    counts = torch.zeros(4, 10, dtype=torch.int64)
    count_margins_by_kernel(counts, scores, torch.zeros(1), torch.tensor([-1.0, 0.2], dtype=torch.float64))
    assert (counts.sum(1) == 1).all() and (counts >= 0).all()


def test_counts_of_another_format_are_refused() -> None:
    """The kernel adds 64-bit integers."""
    with pytest.raises(ValueError, match="counts must be contiguous int64, got torch.int32"):
        count_margins_by_kernel(
            torch.zeros(2, 4, dtype=torch.int32), torch.zeros(1, 2), torch.zeros(1), torch.ones(2).double()
        )
