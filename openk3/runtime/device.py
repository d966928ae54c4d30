"""Where this process computes: device, number format, seeds, and its rank among torchrun's processes."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

# Dense bfloat16 products with float32 sums, FLOP/s, by a part of the GPU's name; the first that fits.
_PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class DeviceError(ValueError):
    """A device or number format that this machine does not have; the message says what there is."""


@dataclass(frozen=True)
class Rank:
    """This process among those that torchrun started; alone: rank 0 of 1."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Rank:
        """Read RANK, LOCAL_RANK and WORLD_SIZE. Raises DeviceError if they are not numbers that fit."""
        env = os.environ if env is None else env
        try:
            rank, local, world = (
                int(env.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
            )
        except ValueError as error:
            raise DeviceError(f"RANK, LOCAL_RANK, WORLD_SIZE: {error}; start ranks with torchrun") from None
        if not 0 <= rank < world or local < 0:
            raise DeviceError(f"RANK {rank}, LOCAL_RANK {local} and WORLD_SIZE {world} do not fit together")
        return cls(rank, local, world)

    @property
    def is_first(self) -> bool:
        """Whether this process writes logs and metrics."""
        return self.rank == 0


def pick_device(name: str = "auto", rank: Rank | None = None) -> torch.device:
    """The device called "auto" (a GPU if there is one), "cpu", "cuda" (this rank's GPU) or "cuda:1" and the like.

    Raises DeviceError if it does not exist here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"device: {name!r} is not a device that can train or run a K3; use 'auto', 'cpu' or 'cuda'")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index if device.index is not None else (rank or Rank()).local_rank
        if index >= count:
            raise DeviceError(f"device: {name!r} asks for GPU {index}, this machine has {count}; use 'cpu'")
        return torch.device("cuda", index)
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format called "auto" (bfloat16 on a GPU, float32 elsewhere), "float32", "bfloat16" or "float64"."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise DeviceError(f"dtype: {name!r} is not supported; use 'auto', {', '.join(map(repr, DTYPES))}")
    return DTYPES[name]


def peak_flops(device: torch.device) -> float | None:
    """What a GPU's data sheet promises of dense bfloat16 products, in FLOP/s; None for a CPU or an unknown GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
