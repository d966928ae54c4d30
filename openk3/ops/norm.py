"""RMSNorm, the head-wise gated RMSNorm behind KDA, and the L2 norm of queries and keys."""

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 where it already is (any shape)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension to unit mean square, cast back to x.dtype, then multiply by weight.

    x [..., D], weight [D] -> [..., D] in the promoted dtype of both.
    """
    wide = at_least_float32(x)
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normal.to(x.dtype) * weight


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of o times weight times sigmoid(gate), all in at least float32, then one cast to gate.dtype.

    o and gate [..., V], weight [V] -> [..., V].
    """
    wide = at_least_float32(o)
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normal * weight * torch.sigmoid(at_least_float32(gate))).to(gate.dtype)


def l2_norm(x: Tensor, eps: float = 1e-6, *, scale: float = 1.0) -> Tensor:
    """scale * x / sqrt(sum x^2 + eps) over the last dimension, in at least float32 (eps inside the root)."""
    wide = at_least_float32(x)
    return wide * (torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps) * scale)
