"""Say in one line that a model cannot fit into this machine, before anything is allocated."""

from __future__ import annotations

import torch

from openk3.commands.errors import UserError
from openk3.config.model import ModelConfig
from openk3.model.accounting import account
from openk3.runtime.memory import total_memory

GIB = 2**30
# Training holds float32 weights, their gradients and one momentum for each; AdamW's second moment comes on top.
TRAINING_BYTES = 12


def require_memory(what: str, config: ModelConfig, bytes_per_parameter: int, device: torch.device) -> None:
    """Raise UserError if `bytes_per_parameter` for every parameter of `config` is more than the device has at all."""
    total = total_memory(device)
    needed = bytes_per_parameter * account(config).in_memory
    if total is not None and needed > total:
        raise UserError(
            f"{what}: needs at least {needed / GIB:,.0f} GiB at {bytes_per_parameter} bytes per parameter, and this "
            f"{'GPU' if device.type == 'cuda' else 'machine'} has {total / GIB:,.0f} GiB; `openk3 plan` counts a model"
        )
