"""Two computations side by side: on a CPU one after the other, with their gradients."""

from __future__ import annotations

import torch

from openk3.ops.overlap import side_by_side


def test_both_results_and_gradients() -> None:
    """What each gives, in order."""
    x = torch.arange(3.0, requires_grad=True)
    first, second = side_by_side(x, lambda: 2 * x, lambda: x * x)
    assert torch.equal(first, 2 * x) and torch.equal(second, x * x)
    (gradient,) = torch.autograd.grad((first + second).sum(), x)
    assert torch.equal(gradient, 2 + 2 * x)
