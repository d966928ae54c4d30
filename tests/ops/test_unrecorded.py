"""apply: the same values with and without gradients, and nothing kept where none are recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from openk3.ops.unrecorded import apply


class _Square(Function):
    """x^2, with everything that a forward pass tells its ctx."""

    seen: list[object] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable()
        ctx.note = x
        _Square.seen.append(getattr(ctx, "note", None))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0] * ctx.saved_tensors[0]


def test_with_and_without_gradients() -> None:
    """Recorded as ever where gradients are on; where they are off the value alone, and the ctx forgets."""
    x = torch.tensor([3.0, -2.0], requires_grad=True)
    y = apply(_Square, x)
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [6.0, -4.0] and _Square.seen[-1] is not None
    with torch.no_grad():
        z = apply(_Square, x)
    assert z.tolist() == y.tolist() and not z.requires_grad and _Square.seen[-1] is None
