"""Tests of the GPU, asked for on a machine without one, end at once and say why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(("options", "code"), [([], 2), (["--collect-only"], 0)])
def test_without_a_gpu_one_line_says_so(options: list[str], code: int) -> None:
    """Not an error for each test; listing them needs no GPU."""
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_optimizer_gpu.py", "-m", "gpu", "-p", "no:cacheprovider"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == code, result.stdout + result.stderr
    said = "tests marked gpu need an NVIDIA GPU, and torch sees none here"
    assert (result.stdout + result.stderr).count(said) == (code == 2)
    assert "Error" not in result.stdout + result.stderr
