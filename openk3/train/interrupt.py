"""StopSignals: Ctrl-C or SIGTERM asks the loop to stop after the step; a second Ctrl-C stops at once."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any, Self

log = logging.getLogger(__name__)


class StopSignals:
    """While entered, `requested` is the name of the first SIGINT or SIGTERM received, else an empty string.

    Outside the main thread, where Python allows no signal handlers, nothing is caught.
    """

    def __init__(self) -> None:
        self.requested = ""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = self.requested or signal.Signals(number).name
        log.info("%s: stopping after this step and saving; Ctrl-C again stops at once", self.requested)
