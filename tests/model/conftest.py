"""Every test of the model draws the same numbers in every run."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Seed the global generator before each test."""
    torch.manual_seed(0)
