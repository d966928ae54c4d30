"""One tiny trained run for all tests of commands; who changes it copies it first."""

from __future__ import annotations

from pathlib import Path

import pytest

import openk3
from openk3.cli import main


@pytest.fixture(scope="session")
def small_text() -> Path:
    """A folder with some 80 kB of Python."""
    return Path(openk3.__file__).parent / "config"


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, small_text: Path) -> Path:
    """A run of two steps, made by the command itself."""
    run = tmp_path_factory.mktemp("runs") / "tiny"
    assert main(["pretrain", "tiny", "--data", str(small_text), "--out", str(run), "--steps", "2"]) == 0
    return run
