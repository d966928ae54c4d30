"""What runs on this GPU is what the suite compiles and checks without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("gluon", ["1", "0"])
def test_what_runs_is_what_is_checked(gluon: str) -> None:
    """Every variant that real sizes launch, with and without Gluon's kernels, is one of its module's `compile_cases`,
    and none spills."""
    command = [sys.executable, str(Path(__file__).parent / "launched_kernels.py")]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=os.environ | {"OPENK3_GLUON": gluon}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    variants = json.loads(result.stdout.splitlines()[-1])
    assert len({v["kernel"] for v in variants}) >= 10
    assert [(v["kernel"], v["spills"]) for v in variants if v["spills"]] == []
    assert [(v["kernel"], v["variant"]) for v in variants if not v["checked"]] == []
