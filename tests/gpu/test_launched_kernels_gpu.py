"""What runs on this GPU is what the suite compiles and checks without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched_kernels import PARTS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("gluon", ["1", "0"])
@pytest.mark.parametrize("part", PARTS)
def test_what_runs_is_what_is_checked(part: str, gluon: str) -> None:
    """Every variant that real sizes launch, with and without Gluon's kernels, is one of its module's `compile_cases`,
    and none spills."""
    command = [sys.executable, str(Path(__file__).parent / "launched_kernels.py"), part]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=os.environ | {"OPENK3_GLUON": gluon}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    variants = json.loads(result.stdout.splitlines()[-1])
    assert variants
    spilled = [f"{v['kernel']}: {v['spills']} bytes, {v['variant']}" for v in variants if v["spills"]]
    unknown = [f"{v['kernel']}: {v['variant']}" for v in variants if not v["checked"]]
    assert not spilled and not unknown, "\n".join(["spilled:", *spilled, "in no compile_cases:", *unknown])
