"""AdamW for what is not a matrix inside a layer: embedding, head, router, convolution taps, norms and other vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.config.train import OptimConfig


@dataclass
class Moments:
    """One weight with its running mean gradient and mean squared gradient, and how many steps they have seen."""

    name: str
    weight: Tensor
    decay: float
    mean: Tensor
    square: Tensor
    count: Tensor

    @classmethod
    def of(cls, name: str, weight: Tensor, decay: float) -> Moments:
        """Zero moments."""
        count = torch.zeros((), dtype=torch.int64)
        return cls(name, weight, decay, torch.zeros_like(weight), torch.zeros_like(weight), count)


@torch.no_grad()
def adamw_step(moments: Moments, gradient: Tensor, lr: float, config: OptimConfig) -> None:
    """W <- (1 - lr * decay) W - lr * m' / (sqrt(v') + eps), with m' and v' corrected for their start at zero."""
    gradient = gradient.to(moments.mean.dtype)
    moments.count += 1
    count = int(moments.count)
    moments.mean.lerp_(gradient, 1 - config.beta1)
    moments.square.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
    scale = (moments.square / (1 - config.beta2**count)).sqrt_().add_(config.eps)
    moments.weight.mul_(1 - lr * moments.decay)
    moments.weight.addcdiv_(moments.mean, scale, value=-lr / (1 - config.beta1**count))
