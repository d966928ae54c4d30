"""What the tests of the operations share: golden vectors, and the sizes of all tensors that a computation makes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FOLDER = Path(__file__).resolve().parent.parent / "golden" / "ops"
# What golden/README.md allows a float32 operation; float64 results are stored rounded to float32.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 2e-6}, torch.float64: {"rtol": 1e-6, "atol": 1e-6}}
DTYPES = tuple(TOLERANCE)


@cache
def _stored(name: str) -> dict[str, Tensor]:
    return load_file(FOLDER / f"{name}.safetensors")


def golden_input(key: str, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of a stored input, in `dtype` if one is given."""
    value = _stored("inputs")[key].clone()
    return value if dtype is None else value.to(dtype)


def golden_output(key: str) -> Tensor:
    """The stored result of an operation."""
    return _stored("expected")[key]


def assert_golden(got: Tensor, key: str) -> None:
    """`got` equals the stored result within what its dtype allows."""
    torch.testing.assert_close(got, golden_output(key).to(got.dtype), **TOLERANCE[got.dtype])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    """A standard normal tensor."""
    value = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return value.requires_grad_(grad)


class Watch(TorchDispatchMode):
    """Records, while active, how often each torch operation ran and how many values its largest result had."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.numel())
        return result
