"""Several linear maps of one input: what they hand back to it is added up inside the products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from openk3.ops.few.linear import linear, takes
from openk3.ops.unrecorded import apply

FEW = 256  # tokens: as many as decode at once; more keep the launches of several products busy
_EVEN = 8  # columns that begin at a multiple of 16 bytes
NARROW = 128  # columns of a map: fewer leave a product waiting for x


def joint_linear(x_TD: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """x W^T [T, O] for each weight W [O, D], all of x's dtype.

    As separate `F.linear` calls, but the gradient of x is made in one place, each product adding to it, where autograd
    would write every one of them and then add them up. Under torch.autocast they are separate calls. For few tokens
    and without gradients, weights that lie one behind the other in memory are one product, whose parts are returned;
    so are, on a GPU, those of maps of at most NARROW columns.
    Raises what `F.linear` raises for shapes and dtypes that do not fit.
    """
    if len(x_TD) <= FEW and not torch.is_grad_enabled() and (whole := as_one(weights)) is not None:
        uneven = len(whole) % _EVEN and x_TD.is_cuda and not takes(x_TD, x_TD.shape[-1])
        made_TO = evenly(x_TD, whole) if uneven else linear(x_TD, whole)
        return made_TO.split([len(weight) for weight in weights], -1)
    if torch.is_autocast_enabled(x_TD.device.type) or len(weights) == 1:
        return tuple(F.linear(x_TD, weight) for weight in weights)
    return apply(_JointLinear, False, x_TD, *weights)


def evenly(x_TD: Tensor, weight_OD: Tensor) -> Tensor:
    """x W^T [T, O] in rows that begin where a library's fast kernels write: with any other width it takes slow ones."""
    rows = len(weight_OD)
    out_TO = x_TD.new_empty(len(x_TD), -(-rows // _EVEN) * _EVEN)[:, :rows]
    return torch.mm(x_TD, weight_OD.T, out=out_TO)


def joint_linear_beside(x_TD: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`joint_linear`, and behind its results x itself for one other operation that reads it.

    What that one hands back must be a tensor that nobody else has: the products add to it in its place. Under
    torch.autocast x is returned as it is.
    """
    if torch.is_autocast_enabled(x_TD.device.type):
        return *joint_linear(x_TD, weights), x_TD
    return apply(_JointLinear, True, x_TD, *weights)


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
    def forward(ctx: Any, beside: bool, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        ctx.beside = beside
        outs: list[Tensor] = [x] * len(weights)
        for part in _parts_of(x, weights):
            made = F.linear(x, _stacked([weights[i] for i in part]))
            for i, out in zip(part, made.split(_widths(part, weights), -1)):
                outs[i] = out
        return (*outs, x) if beside else tuple(outs)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wanted, *needed = ctx.needs_input_grad[1:]
        d_x = grads[-1] if ctx.beside else None
        d_weights: list[Tensor | None] = [None] * len(weights)
        for part in _parts_of(x, weights):
            widths = _widths(part, weights)
            grad = _joined([grads[i] for i in part], widths)
            if grad is None:
                continue
            if any(needed[i] and grads[i] is not None for i in part):
                for i, d_weight in zip(part, (grad.T @ x).split(widths)):
                    d_weights[i] = d_weight if needed[i] and grads[i] is not None else None
            if wanted:
                weight = _stacked([weights[i] for i in part])
                d_x = grad @ weight if d_x is None else d_x.addmm_(grad, weight)
        return None, d_x, *d_weights


def _parts_of(x: Tensor, weights: Sequence[Tensor]) -> list[list[int]]:
    """Which maps are one product each: every one alone, but on a GPU narrow ones of x's format together at the end."""
    alike = [i for i, weight in enumerate(weights) if len(weight) <= NARROW and weight.dtype == x.dtype]
    together = alike if len(alike) > 1 and _joins_narrow(x.device) else []
    return [[i] for i in range(len(weights)) if i not in together] + [together] * bool(together)


def _joins_narrow(device: torch.device) -> bool:
    """Whether narrow maps gain by one product: on a GPU each of them takes about as long as all, which read x once."""
    return device.type == "cuda"


def _widths(part: Sequence[int], weights: Sequence[Tensor]) -> list[int]:
    """Columns of each map, and for several those that let rows begin at a multiple of 16 bytes."""
    widths = [len(weights[i]) for i in part]
    return widths if len(part) == 1 else [*widths, -sum(widths) % 8]


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    """Weights below each other, then zeros."""
    if len(weights) == 1:
        return weights[0]
    zeros = weights[0].new_zeros(-sum(map(len, weights)) % 8, weights[0].shape[1])
    return torch.cat((*weights, zeros))


def _joined(grads: Sequence[Tensor | None], widths: Sequence[int]) -> Tensor | None:
    """Gradients of maps beside each other, zeros where there is none; None if there is no gradient at all."""
    given = next((grad for grad in grads if grad is not None), None)
    if given is None or len(grads) == 1:
        return given
    found = [
        given.new_zeros(len(given), width) if grad is None else grad for grad, width in zip((*grads, None), widths)
    ]
    return torch.cat(found, -1)
