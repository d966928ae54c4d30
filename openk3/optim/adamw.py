"""AdamW for what is not a matrix inside a layer: embedding, head, router, convolution taps, norms and other vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from openk3.config.train import OptimConfig
from openk3.ops.backend import pick


@dataclass
class Moments:
    """One weight with its running mean gradient and mean squared gradient, and how many steps they have seen.

    The narrow copy, if any, is the parameter that the model computes with, where the weight is its float32 master.
    """

    name: str
    weight: Tensor
    decay: float
    mean: Tensor
    square: Tensor
    count: Tensor
    narrow: Tensor | None = None

    @classmethod
    def of(cls, name: str, weight: Tensor, decay: float, narrow: Tensor | None = None) -> Moments:
        """Zero moments."""
        count = torch.zeros((), dtype=torch.int64)
        return cls(name, weight, decay, torch.zeros_like(weight), torch.zeros_like(weight), count, narrow)


def adamw_steps(pairs: Sequence[tuple[Moments, Tensor]], lr: float, config: OptimConfig, *, clip: float = 1.0) -> None:
    """One step in place of every (moments, gradient) pair; gradients count `clip` times, narrow copies follow.

    W <- (1 - lr * decay) W - lr * m' / (sqrt(v') + eps), with m' and v' corrected for their start at zero.
    """
    adamw_ready(pairs, lr, config)(clip)


def adamw_ready(pairs: Sequence[tuple[Moments, Tensor]], lr: float, config: OptimConfig) -> Callable[[float], None]:
    """`adamw_steps` prepared: nothing has changed before it is called with `clip`."""
    if pairs and all(pick("adamw", moments.weight) == "triton" for moments, _ in pairs):
        return _kernels_ready(pairs, lr, config)
    return partial(_one_by_one, pairs, lr, config)


@torch.no_grad()
def _one_by_one(pairs: Sequence[tuple[Moments, Tensor]], lr: float, config: OptimConfig, clip: float) -> None:
    for moments, gradient in pairs:
        adamw_step(moments, gradient * clip if clip != 1 else gradient, lr, config)


@torch.no_grad()
def adamw_step(moments: Moments, gradient: Tensor, lr: float, config: OptimConfig) -> None:
    """One step of one weight: the definition."""
    gradient = gradient.to(moments.mean.dtype)
    moments.count += 1
    count = int(moments.count)
    moments.mean.lerp_(gradient, 1 - config.beta1)
    moments.square.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
    scale = (moments.square / (1 - config.beta2**count)).sqrt_().add_(config.eps)
    moments.weight.mul_(1 - lr * moments.decay)
    moments.weight.addcdiv_(moments.mean, scale, value=-lr / (1 - config.beta1**count))
    if moments.narrow is not None:
        moments.narrow.copy_(moments.weight)


def _kernels_ready(pairs: Sequence[tuple[Moments, Tensor]], lr: float, config: OptimConfig) -> Callable[[float], None]:
    """The same on a GPU in one launch."""
    from openk3.ops import optimizer_fused as fused

    weights = []
    for moments, gradient in pairs:
        count = int(moments.count) + 1
        factors = 1 - lr * moments.decay, lr / (1 - config.beta1**count), 1 / (1 - config.beta2**count)
        narrow = moments.narrow if moments.narrow is not None and moments.narrow.dtype == torch.bfloat16 else None
        tensors = gradient.to(torch.float32).contiguous(), moments.mean, moments.square, moments.weight
        weights.append(fused.AdamWeight(*tensors, narrow, factors))
    tables = fused.adamw_tables(weights)

    @torch.no_grad()
    def run(clip: float) -> None:
        fused.adamw_kernels(tables, fused.AdamRates(config.beta1, config.beta2, config.eps, clip))
        for moments, _ in pairs:
            moments.count += 1
            if moments.narrow is not None and moments.narrow.dtype != torch.bfloat16:
                moments.narrow.copy_(moments.weight)

    return run
