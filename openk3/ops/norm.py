"""RMSNorm, the head-wise gated RMSNorm behind KDA, and the L2 norm of queries and keys.

Each is one autograd step with a short backward pass: on a CPU a norm costs memory traffic, and the generic graph of
square, mean, root and products reads and writes the activations three times as often.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import pick
from openk3.ops.unrecorded import apply

P = ParamSpec("P")
R = TypeVar("R")

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_MOST_WIDTH = 16384  # a row lies in the registers of one program of the kernels
L2_EPS = 1e-6  # of the L2 norm of queries and keys, inside the root; kernels take it from here


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 where it already is (any shape)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def at_full_precision(run: Callable[P, R]) -> Callable[P, R]:
    """`run` outside of torch.autocast, which would have matrix products round what is to stay in at least float32."""

    @wraps(run)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return run(*args, **kwargs)
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return run(*args, **kwargs)

    return outside


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension to unit mean square, cast back to x.dtype, then multiply by weight.

    x [..., D], weight [D] -> [..., D] in the promoted dtype of both; the normalisation is in at least float32.
    """
    if _by_kernels(x, weight):
        from openk3.ops.norm_fused import fused_rms_norm

        return fused_rms_norm(x, weight, eps)
    return apply(_RmsNorm, x, weight, eps)


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of o times weight times sigmoid(gate), all in at least float32, then one cast to gate.dtype.

    o and gate [..., V], weight [V] -> [..., V] (report §2.1, output gate of KDA).
    """
    if _by_kernels(o, gate, weight):
        from openk3.ops.norm_fused import fused_gated_rms_norm

        return fused_gated_rms_norm(o, gate, weight, eps)
    return apply(_GatedRmsNorm, o, gate, weight, eps)


def l2_norm(x: Tensor, eps: float = L2_EPS, *, scale: float = 1.0) -> Tensor:
    """scale * x / sqrt(sum x^2 + eps) over the last dimension, in at least float32 (eps inside the root)."""
    return apply(_L2Norm, x, eps, scale)


def _by_kernels(x: Tensor, *others: Tensor) -> bool:
    return pick("norm", x, obstacle=_obstacle(x, others)) == "triton"


def _obstacle(x: Tensor, others: tuple[Tensor, ...]) -> str | None:
    """Why the kernels cannot take rows and what goes with them, or None."""
    width = x.shape[-1]
    if not 0 < width <= _MOST_WIDTH or x.numel() >= width << 30:
        return f"rows to norm are {list(x.shape)}, not 1 to {_MOST_WIDTH} wide and fewer than 2^30"
    if any(y.dtype not in _NARROW or y.device != x.device for y in others):
        return "a weight or gate has more than 32 bits or lies on another device"
    return None


def _sum_of_squares(wide: Tensor) -> Tensor:
    """Over the last dimension, kept: one pass and no temporary of x's size."""
    return torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()


def _inverse_rms(wide: Tensor, eps: float) -> Tensor:
    return _sum_of_squares(wide).div_(wide.shape[-1]).add_(eps).rsqrt_()


def _row_sum(x: Tensor) -> Tensor:
    """Sum over all dimensions but the last."""
    return x.reshape(-1, x.shape[-1]).sum(0)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = at_least_float32(x)
        inverse = _inverse_rms(wide, eps)
        ctx.save_for_backward(x, weight, inverse)
        normal = wide * inverse
        return normal.mul_(weight) if normal.dtype == x.dtype == weight.dtype else normal.to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        d_y, wide_weight = at_least_float32(grads[0]), weight.to(inverse.dtype)
        normal = at_least_float32(x) * inverse
        product = d_y * normal
        d_weight = _row_sum(product).to(weight.dtype)
        along = (product @ wide_weight).div_(x.shape[-1]).unsqueeze(-1)
        d_x = (d_y * wide_weight).addcmul_(normal, along, value=-1).mul_(inverse)
        return d_x.to(x.dtype), d_weight, None


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = at_least_float32(o)
        inverse = _inverse_rms(wide, eps)
        ctx.save_for_backward(o, gate, weight, inverse)
        normal = (wide * inverse).mul_(weight)
        return normal.mul_(torch.sigmoid(at_least_float32(gate))).to(gate.dtype)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        o, gate, weight, inverse = ctx.saved_tensors
        wide_weight = weight.to(inverse.dtype)
        opened = torch.sigmoid(at_least_float32(gate))
        normal = at_least_float32(o) * inverse
        d_scaled = at_least_float32(grads[0]) * opened
        product = d_scaled * normal
        d_weight = _row_sum(product).to(weight.dtype)
        along = (product @ wide_weight).div_(o.shape[-1]).unsqueeze(-1)
        d_o = d_scaled.mul_(wide_weight).addcmul_(normal, along, value=-1).mul_(inverse)
        d_gate = product.mul_(wide_weight).mul_(opened.neg_().add_(1))
        return d_o.to(o.dtype), d_gate.to(gate.dtype), d_weight, None


class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, scale: float) -> Tensor:
        wide = at_least_float32(x)
        inverse = _sum_of_squares(wide).add_(eps).rsqrt_().mul_(scale)
        y = wide * inverse
        ctx.save_for_backward(y, inverse)
        ctx.scale, ctx.dtype = scale, x.dtype
        return y

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, inverse = ctx.saved_tensors
        along = (grads[0] * y).sum(-1, keepdim=True).mul_(-(ctx.scale**-2))
        return torch.addcmul(grads[0], y, along).mul_(inverse).to(ctx.dtype), None, None
