"""Lanes: connections to replicas, each for one call at a time, kept for the next one."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque

import httpx

LOG = logging.getLogger(__name__)
IDLE_SECONDS = 5.0  # less than a replica keeps a connection, so that none is used as it closes
MOST_IDLE = 256  # of one replica


class Lanes:
    """A pool whose work does not grow with its size: httpx's own looks at every connection for every call.

    A lane is a transport with room for one connection.
    """

    def __init__(self) -> None:
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._idle: defaultdict[str, deque[tuple[float, httpx.AsyncHTTPTransport]]] = defaultdict(deque)

    def take(self, replica: str) -> httpx.AsyncHTTPTransport:
        """The one that was used last, whose connection is the likeliest to be there, or a new one."""
        if self._idle[replica]:
            return self._idle[replica].pop()[1]
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_SECONDS)
        return httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=limits)

    async def give(self, replica: str, lane: httpx.AsyncHTTPTransport) -> None:
        """A call is over, and its response closed."""
        is_clean = _is_clean(lane)
        if not is_clean:
            LOG.warning("%s sent more than its answer; the connection is not used again", replica)
        if is_clean and len(self._idle[replica]) < MOST_IDLE:
            self._idle[replica].append((time.monotonic(), lane))
        else:
            await lane.aclose()

    async def sweep(self, *, everything: bool = False) -> None:
        """Close what has been idle for long."""
        oldest = float("inf") if everything else time.monotonic() - IDLE_SECONDS
        for replica, lanes in list(self._idle.items()):
            while lanes and lanes[0][0] <= oldest:
                await lanes.popleft()[1].aclose()
            if not lanes:
                del self._idle[replica]


def _is_clean(lane: httpx.AsyncHTTPTransport) -> bool:
    """Whether nothing was read behind an answer: the next call, maybe another client's, would get it as its own.

    Neither library says so by a public name; where the private ones are not found, no connection is used twice.
    """
    for connection in getattr(getattr(lane, "_pool", None), "connections", (None,)):
        state = getattr(getattr(connection, "_connection", None), "_h11_state", None)
        if state is None or state.trailing_data[0]:
            return False
    return True
