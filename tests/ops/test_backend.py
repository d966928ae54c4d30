"""Choosing an implementation: the default, a forced one, and clear errors."""

from __future__ import annotations

import pytest
import torch

from openk3.ops import backend


def test_default_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU every operation runs its definition."""
    monkeypatch.delenv("OPENK3_BACKEND", raising=False)
    assert {backend.pick(op, torch.ones(1)) for op in backend.IMPLEMENTATIONS} == {"reference"}


def test_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment may force an implementation that exists."""
    monkeypatch.setenv("OPENK3_BACKEND", "reference")
    assert backend.pick("kda", torch.ones(1)) == "reference"


def test_errors_name_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown operation and an implementation that does not exist."""
    with pytest.raises(ValueError, match="no operation named 'kdaa'; known: kda"):
        backend.pick("kdaa", torch.ones(1))
    monkeypatch.setenv("OPENK3_BACKEND", "abacus")
    with pytest.raises(ValueError, match="OPENK3_BACKEND=abacus: kda on cpu has reference"):
        backend.pick("kda", torch.ones(1))
