"""Float32 sums of a weight's gradients over micro-batches, to which kernels of a backward pass may add by themselves.

Else a gradient is written in the weight's format, read again, and added to the sum: 12 bytes a value instead of 8, and
rounded once more.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_sums = WeakTensorKeyDictionary()


class GradientSum:
    """Where an optimizer sums the gradients of one weight: totals[name], which is missing before the first one.

    While `is_open`, a backward pass may `take` it, add to it, and return no gradient for the weight.
    """

    def __init__(self, totals: dict[str, Tensor], name: str) -> None:
        self.totals, self.name, self.is_open = totals, name, False

    @property
    def is_begun(self) -> bool:
        """Whether there is a sum to add to."""
        return self.name in self.totals

    def take(self, weight: Tensor) -> Tensor:
        """The sum, to be added to if it `is_begun`, else a new one of any values, to be written."""
        if not self.is_begun:
            self.totals[self.name] = torch.empty_like(weight, dtype=torch.float32)
        return self.totals[self.name]


def keep_sum(weight: Tensor, total: GradientSum) -> None:
    """Let backward passes find the sum of a weight's gradients."""
    _sums[weight] = total


def sum_of(weight: Tensor) -> GradientSum | None:
    """The sum of a weight's gradients, if an optimizer keeps one."""
    return _sums.get(weight)
