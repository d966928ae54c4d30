"""Bounds of packed sequences."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from op_checks import Watch

from openk3.ops.sequences import Memory, bounds_on, integers, remember_integers, sequence_bounds, shown


def test_bounds() -> None:
    """As given, with empty sequences; none given is one sequence; no sequence for no tokens."""
    assert sequence_bounds(torch.tensor([0, 3, 3, 7], dtype=torch.int32), 7) == (0, 3, 3, 7)
    assert sequence_bounds(None, 7) == (0, 7)
    assert sequence_bounds(torch.tensor([0]), 0) == (0,)


@pytest.mark.parametrize("bounds", [[0, 6], [0, 8], [1, 7], [0, 5, 4, 7]])
def test_bounds_that_do_not_fit(bounds: list[int]) -> None:
    """Too short, too long, late and falling bounds, with what was given."""
    words = f"cu_seqlens: integers that must rise from 0 to the number of tokens, 7; got {bounds}"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        sequence_bounds(torch.tensor(bounds), 7)


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (torch.tensor([]), r"torch.float32 \[0\]"),
        (torch.tensor([0.0, 7.0]), r"torch.float32 \[2\]"),
        (torch.tensor([False, True]), r"torch.bool \[2\]"),
        (torch.tensor([[0, 7]]), r"torch.int64 \[1, 2\]"),
        (torch.tensor(7), r"torch.int64 \[\]"),
        ([0, 7], "list"),
        (np.array([0, 7]), "ndarray"),
    ],
)
def test_bounds_that_are_no_integers_in_a_tensor(given: Any, got: str) -> None:
    """Empty, fractional and nested bounds, and ones that are no tensor."""
    with pytest.raises(ValueError, match=f"^cu_seqlens: expected integers in a tensor .*, got {got}$"):
        sequence_bounds(given, 7)


def test_many_bounds_are_not_all_shown() -> None:
    """The first and the last four of more than eight."""
    assert shown(range(8)) == "[0, 1, 2, 3, 4, 5, 6, 7]"
    assert shown(range(100)) == "[0, 1, 2, 3, ..., 96, 97, 98, 99] (100 values)"
    with pytest.raises(ValueError, match=r"got \[0, 1, 2, 3, \.\.\., 96, 97, 98, 99\] \(100 values\)$"):
        sequence_bounds(torch.arange(100), 7)


def test_memory_of_bounds() -> None:
    """A tensor is read once; again after any write, through a view too; another tensor in its place is another one."""
    memory, x = Memory(), torch.tensor([0, 3, 7])
    with Watch() as watch:
        assert memory.integers(x) == memory.integers(x) == (0, 3, 7)
    assert sum(watch.calls.values()) == 0 and len(memory) == 1
    x[1:].add_(1)
    assert memory.integers(x) == (0, 4, 8)
    for n in range(100):
        assert memory.integers(torch.tensor([n, n + 1])) == (n, n + 1)
    assert len(memory) < 20
    with torch.inference_mode():
        y = torch.tensor([0, 2])
        assert memory.integers(y) == (0, 2)
        y[1] = 5
        assert memory.integers(y) == (0, 5)


def test_bounds_on_a_device_are_made_once() -> None:
    """Equal bounds are one int32 tensor for all layers."""
    device = torch.device("cpu")
    assert bounds_on((0, 3, 3), device) is bounds_on((0, 3, 3), device)
    assert bounds_on((0, 3, 3), device).dtype == torch.int32 and bounds_on((0, 3, 3), device).tolist() == [0, 3, 3]


def test_values_that_are_known_are_not_read() -> None:
    """What is remembered is answered, until the tensor is written to."""
    memory, x = Memory(), torch.tensor([0, 3, 7])
    memory.remember(x, (0, 4, 7))
    assert memory.integers(x) == (0, 4, 7)
    x.add_(1)
    assert memory.integers(x) == (1, 4, 8)
    remember_integers(x, [5])  # a tensor on the CPU is read, whatever was said of it
    assert integers(x) == (1, 4, 8)
