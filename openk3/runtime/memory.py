"""How much memory a device has."""

from __future__ import annotations

from pathlib import Path

import torch


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
