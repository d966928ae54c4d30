"""The learning rate of each step: linear warm-up, then cosine (or stay and fall) to a fixed minimum."""

from __future__ import annotations

import math

from openk3.config.train import OptimConfig


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """Rate of step `step` (0-based) of `total_steps` (report sections 3.2, 3.3).

    The warm-up ends at the peak, the last step is at `min_lr`, and steps beyond the last stay there.
    """
    warmup = math.ceil(config.warmup_fraction * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    last = max(total_steps - 1, warmup + 1)
    if config.schedule == "wsd":
        decay = max(1, math.ceil(config.decay_fraction * total_steps))
        fall = min(max((step - (last - decay)) / decay, 0.0), 1.0)
    else:
        fall = 0.5 * (1 - math.cos(math.pi * min((step - warmup) / (last - warmup), 1.0)))
    return config.lr + (config.min_lr - config.lr) * fall
