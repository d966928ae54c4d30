"""IdleConnections: ends connections that bring no request, and says once in a while that there are too many."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

LOG = logging.getLogger(__name__)
HEAD_SECONDS = 30.0  # for a whole head to arrive; behind an answer uvicorn itself waits for less, if nothing comes
QUIET_SECONDS = 10.0


class Connection(Protocol):
    """uvicorn's, as far as it is looked at: `cycle` is the newest request, None before the first one."""

    cycle: Any
    transport: Any


class IdleConnections:
    """A connection is a file, and uvicorn waits for a first request, or for the rest of a head, without end."""

    def __init__(self, seconds: float = HEAD_SECONDS) -> None:
        self._seconds = seconds
        self._since: dict[Connection, tuple[Any, float]] = {}

    def sweep(self, connections: Iterable[Connection], now: float) -> None:
        """Close those on which no request has been under way or begun for so long; `now` is monotonic seconds."""
        idle = dict[Connection, tuple[Any, float]]()
        for one in list(connections):
            if one.cycle is None or one.cycle.response_complete:
                cycle, since = self._since.get(one, (one.cycle, now))
                idle[one] = (one.cycle, since if cycle is one.cycle else now)
                if now - idle[one][1] >= self._seconds:
                    one.transport.close()
        self._since = idle


def quiet_accept(clock: Callable[[], float] = time.monotonic) -> Callable[[asyncio.AbstractEventLoop, dict], None]:
    """A loop's exception handler. Without files, asyncio reports up to a thousand times a second that it cannot accept
    connections; that is logged once in QUIET_SECONDS, everything else as ever.
    """
    told_at = float("-inf")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal told_at
        if "socket.accept()" not in str(context.get("message")):
            loop.default_exception_handler(context)
        elif clock() - told_at >= QUIET_SECONDS:
            told_at = clock()
            LOG.error("no more connections can be taken: %s", context.get("exception"))

    return handle
