"""Bounds of packed sequences."""

from __future__ import annotations

import pytest
import torch

from openk3.ops.sequences import sequence_bounds


def test_bounds() -> None:
    """As given, with empty sequences; none given is one sequence; no sequence for no tokens."""
    assert sequence_bounds(torch.tensor([0, 3, 3, 7], dtype=torch.int32), 7) == (0, 3, 3, 7)
    assert sequence_bounds(None, 7) == (0, 7)
    assert sequence_bounds(torch.tensor([0]), 0) == (0,)


@pytest.mark.parametrize("bounds", [[], [0, 6], [0, 8], [1, 7], [0, 5, 4, 7], [0.0, 7.0], [[0, 7]]])
def test_bounds_that_do_not_fit(bounds: list) -> None:
    """Empty, too short, too long, late, falling, fractional and nested bounds, and ones that are no tensor."""
    for given in (torch.tensor(bounds), bounds):
        with pytest.raises(ValueError, match="must rise from 0 to the number of tokens, 7; got"):
            sequence_bounds(given, 7)
