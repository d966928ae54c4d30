"""Health: whether an engine's steps come to an end and its passes to something."""

from __future__ import annotations

import time

from openk3.engine.stats import Stats

FAILED_PASSES = 5  # in a row, without one token: the device is taken for broken
STALL_SECONDS = 300.0  # in one step: likewise
MAX_RESTARTS = 3  # in a row, each within RESTART_SECONDS of the one before
RESTART_SECONDS = 60.0


class Health:
    """Told of every step by the thread that steps, read by others."""

    def __init__(self) -> None:
        self._failed_passes = 0  # in a row
        self._seen = (0, 0)  # failed passes and computed tokens
        self._began: float | None = None

    @property
    def is_good(self) -> bool:
        """No step stalls, and passes do not all fail."""
        began = self._began
        stalls = began is not None and time.monotonic() - began > STALL_SECONDS
        return self._failed_passes < FAILED_PASSES and not stalls

    def begin(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def end(self, stats: Stats) -> bool:
        """A step is over; whether it computed anything."""
        failed, computed = self._seen
        if stats.num_computed > computed:
            self._failed_passes = 0
        else:
            self._failed_passes += stats.num_failed_passes - failed
        self._seen = (stats.num_failed_passes, stats.num_computed)
        self._began = None
        return stats.num_computed > computed


class Restarts:
    """Counts how often in a row an engine was replaced: one that fails at once will fail again."""

    def __init__(self) -> None:
        self.count = 0  # of all that were allowed
        self._row, self._last = 0, float("-inf")

    def allow(self) -> bool:
        """Whether another one is worth a try."""
        now = time.monotonic()
        self._row = self._row + 1 if now - self._last < RESTART_SECONDS else 1
        self._last = now
        self.count += self._row <= MAX_RESTARTS
        return self._row <= MAX_RESTARTS
