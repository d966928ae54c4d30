"""Waiting for what a test wants to see, with a limit that no slow machine reaches."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_SECONDS = 60.0


def wait_for(condition: Callable[[], object], what: str = "") -> None:
    """Return as soon as `condition()` is true. Raises AssertionError if it is not within LIMIT_SECONDS."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_SECONDS:g} s: {what or condition}"
        time.sleep(0.005)
