"""RMSNorm as a module: the learned weight around ops.norm.rms_norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openk3.ops.norm import rms_norm


class RMSNorm(nn.Module):
    """Normalise in at least float32, cast back, then times weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)
