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


@pytest.mark.parametrize(
    ("forced", "interpreted", "words"),
    [
        ("abacus", "0", "ERROR: OPENK3_BACKEND=abacus: kda on cpu has reference, triton"),
        ("triton", "0", "ERROR: OPENK3_BACKEND=triton: kda cannot use its kernels here: "),
    ],
)
def test_a_forced_backend_that_cannot_run_is_part_of_the_report(
    forced: str, interpreted: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment variable is the user's too: its fault stands where the choice would, and all else is there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("OPENK3_BACKEND", forced)
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"Machine", "Packages", "Backends", "Runs"} <= set(lines)
    assert next(line for line in lines if line.startswith("  kda")).split(maxsplit=1)[1].startswith(words)
    routing = next(line for line in lines if line.startswith("  routing"))  # has no kernels to be forced
    assert ("ERROR" in routing) == (forced == "abacus")


def test_the_version_of_triton_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels need it, and which one torch brought is the first question when they fail."""
    installed = doctor.version
    monkeypatch.setattr(doctor, "version", lambda package: "3.6.0" if package == "triton" else installed(package))
    assert main(["doctor"]) == 0
    assert "  triton          3.6.0" in capsys.readouterr().out.splitlines()
    monkeypatch.setattr(doctor, "version", lambda package: None)
    assert "needed only for GPU kernels (comes with CUDA builds of torch)" in dict(doctor.packages())["triton"]


def test_missing_package_says_so() -> None:
    """Not an error: the report is what helps to mend it."""
    assert doctor.version("a-package-that-is-not-there") is None
