"""Flags that several commands have, and how one looks that may be left out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

Seed = Annotated[int, arg(help="Seed of everything random in this run.")]
_NEWEST = "(default: newest run, or pocket, the small model that comes with openk3)"
Run = Positional[
    Annotated[Path | None, arg(metavar="[RUN]", help="Run or model directory, or pocket.", help_behavior_hint=_NEWEST)]
]


def unset(metavar: str, default: str = "") -> Any:
    """How an option that may be left out looks in --help: no "None", but what happens without it."""
    return arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")
