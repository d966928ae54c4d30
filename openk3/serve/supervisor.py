"""Supervisor: systemd's notification socket, told when the server is ready, alive and stopping."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping

LOG = logging.getLogger(__name__)


class Supervisor:
    """Who started the server, if it listens: NOTIFY_SOCKET names its socket, WATCHDOG_USEC how long it is patient.

    A message that cannot be sent is logged; the server does not end for it.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        patience = environ.get("WATCHDOG_USEC", "")
        is_meant = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._every = int(patience) / 3e6 if patience.isdecimal() and is_meant else float("inf")  # seconds
        self._next_beat = float("-inf")
        self._is_ready = False

    def ready(self) -> None:
        """Calls are taken from now on; told once."""
        if not self._is_ready:
            self._is_ready = True
            self._send("READY=1\nSTATUS=taking calls")

    def stopping(self, why: str) -> None:
        """The end has begun, and may take a while."""
        self._send(f"STOPPING=1\nSTATUS={why}")

    def beat(self, now: float | None = None) -> None:
        """Alive and well at `now` (monotonic seconds); sent three times within the supervisor's patience."""
        now = time.monotonic() if now is None else now
        if self._every < float("inf") and now >= self._next_beat:
            self._next_beat = now + self._every
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as way:
                way.setblocking(False)  # one that reads nothing holds nobody up
                way.sendto(message.encode(), self._address)
        except OSError as error:
            LOG.warning("the supervisor cannot be told %r: %s", message, error)
