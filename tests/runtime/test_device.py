"""Device, number format, seeds and rank."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from openk3.runtime.device import DeviceError, Rank, pick_device, pick_dtype, seed_everything


def test_rank_from_the_environment() -> None:
    """torchrun's variables; alone without them; nonsense is refused."""
    assert Rank.from_env({}) == Rank(0, 0, 1) and Rank.from_env({}).is_first
    rank = Rank.from_env({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"})
    assert rank == Rank(5, 1, 8) and not rank.is_first
    with pytest.raises(DeviceError, match="start ranks with torchrun"):
        Rank.from_env({"RANK": "first"})
    with pytest.raises(DeviceError, match="do not fit"):
        Rank.from_env({"RANK": "2", "WORLD_SIZE": "2"})


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto takes a GPU only where there is one; each rank takes its own; what is missing is named."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    with pytest.raises(DeviceError, match="asks for GPU 0, this machine has 0; use 'cpu'"):
        pick_device("cuda")
    for name in ("gpu", "meta", "mps", "xla", "", "cpu:x"):
        with pytest.raises(DeviceError, match=f"'{name}' is not a device"):
            pick_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert pick_device("auto", Rank(6, 2, 8)) == torch.device("cuda", 2) and pick_device("cuda:3").index == 3
    with pytest.raises(DeviceError, match="asks for GPU 4, this machine has 4"):
        pick_device("cuda:4")


def test_dtype() -> None:
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert pick_dtype("auto", torch.device("cuda", 0)) == torch.bfloat16
    assert pick_dtype("float64", torch.device("cpu")) == torch.float64
    with pytest.raises(DeviceError, match="dtype: 'int8' is not supported"):
        pick_dtype("int8", torch.device("cpu"))


def test_seeds() -> None:
    """All three generators restart, whatever the seed's size."""
    draws = []
    for seed in (2**40 + 3, 2**40 + 3, 7):
        seed_everything(seed)
        draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert draws[0] == draws[1] and all(a != b for a, b in zip(draws[1], draws[2]))
