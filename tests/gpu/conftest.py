"""Tests that need an NVIDIA GPU, run by `pytest tests/gpu -m gpu`; the errors they measure are printed at the end."""

from __future__ import annotations

import pytest
import torch

MEASURED: list[tuple[str, str, dict[str, float]]] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    """A run of these tests without a GPU ends at once, with one line and the exit code of a wrong call."""
    wanted = any(item.get_closest_marker("gpu") for item in session.items)
    if wanted and not session.config.option.collectonly and not torch.cuda.is_available():
        pytest.exit("tests marked gpu need an NVIDIA GPU, and torch sees none here", returncode=2)


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    """The GPU."""
    return torch.device("cuda")


@pytest.fixture
def measured() -> list[tuple[str, str, dict[str, float]]]:
    """Takes (implementation, case, errors by tensor) for the table at the end."""
    return MEASURED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Errors of every case, and the largest of each tensor and implementation."""
    largest: dict[str, dict[str, float]] = {}
    for who, case, errors in MEASURED:
        terminalreporter.write_line(f"{who:<5} {case:<60} {row(errors)}")
        for name, error in errors.items():
            of = largest.setdefault(who, {})
            of[name] = max(error, of.get(name, 0.0))
    for who, errors in largest.items():
        terminalreporter.write_line(f"{who:<5} {'largest':<60} {row(errors)}")


def row(errors: dict[str, float]) -> str:
    """Errors in units of 1e-4."""
    return " ".join(f"{name} {error * 1e4:.3g}" for name, error in errors.items())
