"""`openk3 doctor` reports this machine and the backend of every operator."""

from __future__ import annotations

import pytest
import torch

from openk3.cli import main
from openk3.commands import doctor
from openk3.ops.backend import IMPLEMENTATIONS


def test_report_names_machine_packages_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    """One line each."""
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"torch           {torch.__version__}" in text
    for op in IMPLEMENTATIONS:
        assert f"  {op:<16}reference" in text


def test_forced_backend_that_does_not_exist_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment variable is the user's too."""
    monkeypatch.setenv("OPENK3_BACKEND", "abacus")
    assert main(["doctor"]) == 2
    assert "OPENK3_BACKEND=abacus" in capsys.readouterr().err


def test_missing_package_says_so() -> None:
    """Not an error: the report is what helps to mend it."""
    assert doctor.version("a-package-that-is-not-there") is None
