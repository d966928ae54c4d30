"""Say in one line that a model cannot fit into this machine, before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import torch

from openk3.commands.errors import UserError
from openk3.config.model import ModelConfig
from openk3.model.accounting import account

GIB = 2**30
# Training holds float32 weights, their gradients and one momentum for each; AdamW's second moment comes on top.
TRAINING_BYTES = 12


def total_memory(device: torch.device) -> int | None:
    """Bytes of the device's memory, for a CPU within the container's limit; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    table, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if not table.is_file():
        return None
    total = int(next(line for line in table.read_text().splitlines() if line.startswith("MemTotal")).split()[1]) * 1024
    text = limit.read_text().strip() if limit.is_file() else "max"
    return total if text == "max" else min(total, int(text))


def require_memory(what: str, config: ModelConfig, bytes_per_parameter: int, device: torch.device) -> None:
    """Raise UserError if `bytes_per_parameter` for every parameter of `config` is more than the device has at all."""
    total = total_memory(device)
    needed = bytes_per_parameter * account(config).in_memory
    if total is not None and needed > total:
        raise UserError(
            f"{what}: needs at least {needed / GIB:,.0f} GiB at {bytes_per_parameter} bytes per parameter, and this "
            f"{'GPU' if device.type == 'cuda' else 'machine'} has {total / GIB:,.0f} GiB; `openk3 plan` counts a model"
        )
