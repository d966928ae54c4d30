"""What a measurement means nothing without: machine, commit, versions."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import openk3

PACKAGE = Path(__file__).resolve().parent.parent


def conditions(work: str, *, hardware: str | None = None, **versions: str) -> dict[str, Any]:
    """Where and when `work` is measured. `hardware` takes the place of the processor, a GPU's name say."""
    return {
        "work": work,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": commit(),
        "hardware": hardware or processor(),
        "load_average": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), "openk3": openk3.__version__, **versions},
    }


def commit() -> str | None:
    """The commit of the checkout that the package lies in, " with changes" where the package differs from it."""
    git = ["git", "-C", str(PACKAGE)]
    name = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, text=True, check=False).stdout
    return f"{name} with changes" if name and changed.strip() else name or None


def processor() -> str:
    """The processor's name and how many cores it has."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.processor())
    return f"{name}, {os.cpu_count()} cores"
