"""Several linear maps of one input: what they hand back to it is added up inside the products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from openk3.ops.few.linear import linear
from openk3.ops.unrecorded import apply

FEW = 256  # tokens: as many as decode at once; more keep the launches of several products busy


def joint_linear(x_TD: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """x W^T [T, O] for each weight W [O, D], all of x's dtype.

    As separate `F.linear` calls, but the gradient of x is made in one place, each product adding to it, where autograd
    would write every one of them and then add them up. Under torch.autocast they are separate calls. For few tokens
    and without gradients, weights that lie one behind the other in memory are one product, whose parts are returned.
    Raises what `F.linear` raises for shapes and dtypes that do not fit.
    """
    if len(x_TD) <= FEW and not torch.is_grad_enabled() and (whole := as_one(weights)) is not None:
        return linear(x_TD, whole).split([len(weight) for weight in weights], -1)
    if torch.is_autocast_enabled(x_TD.device.type) or len(weights) == 1:
        return tuple(F.linear(x_TD, weight) for weight in weights)
    return apply(_JointLinear, x_TD, *weights)


def as_one(weights: Sequence[Tensor]) -> Tensor | None:
    """The weights as one, if each begins where the one before it ends."""
    first, width, rows = weights[0], weights[0].shape[-1], 0
    for weight in weights:
        follows = (
            weight.data_ptr() == first.data_ptr() + rows * width * first.element_size()
            and weight.dtype == first.dtype
            and weight.shape[1:] == (width,)
            and weight.is_contiguous()
        )
        if not follows:
            return None
        rows += len(weight)
    space = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    # What lies behind the first one's memory may be another's by chance.
    return first.as_strided((rows, width), (width, 1)) if rows * width <= space else None


class _JointLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wanted, *needed = ctx.needs_input_grad
        d_x: Tensor | None = None
        d_weights: list[Tensor | None] = []
        for grad, weight, need in zip(grads, weights, needed, strict=True):
            d_weights.append(grad.T @ x if grad is not None and need else None)
            if grad is not None and wanted:
                d_x = grad @ weight if d_x is None else d_x.addmm_(grad, weight)
        return d_x, *d_weights
