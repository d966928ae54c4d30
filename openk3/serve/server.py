"""DrainingServer: uvicorn that first lets answers end when it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Generator
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from openk3.config.http import ServerConfig
from openk3.serve.gate import Gate
from openk3.serve.idle import IdleConnections, quiet_accept
from openk3.serve.supervisor import Supervisor

LOG = logging.getLogger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Worker(Protocol):
    """Who does the work of the calls."""

    @property
    def is_healthy(self) -> bool:
        """Whether it gets on."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether it has given up."""
        ...

    def cancel_all(self) -> None:
        """End every call, with a last event."""
        ...


class Served(Protocol):
    """What is behind the application: a model's service, or a router."""

    @property
    def config(self) -> ServerConfig:
        """Where it listens, and how long it drains."""
        ...

    @property
    def gate(self) -> Gate:
        """Counts the calls under way."""
        ...

    @property
    def thread(self) -> Worker:
        """The engine's."""
        ...


class DrainingServer(uvicorn.Server):
    """The first SIGTERM or Ctrl-C: /health says 503, new calls are refused with 503, those under way go on.

    When they have ended, or after `drain_seconds`, the server stops; at a second signal it stops at once, and what runs
    is cancelled. It also stops when the engine has given up, and `failed` says so.
    """

    def __init__(self, app: ASGIApp, service: Served, supervisor: Supervisor | None = None) -> None:
        config = service.config
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=5,
                timeout_keep_alive=15,
                lifespan="on",
                ws="none",
                backlog=1024,
            )
        )
        self._service, self._supervisor = service, supervisor or Supervisor({})
        self._idle = IdleConnections()
        self._drain_until: float | None = None
        self.failed = False

    @property
    def port(self) -> int:
        """Where it listens, once it does; of use where the port asked for was 0."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    def drain(self) -> None:
        """Take no more calls, and stop when the last one has ended; from any thread."""
        if self._drain_until is None:
            seconds, count = self._service.config.drain_seconds, self._service.gate.num_open
            LOG.info("shutting down: %d calls have up to %g s to end", count, seconds)
            self._supervisor.stopping(f"{count} calls have up to {seconds:g} s to end")
            self._service.gate.is_draining = True
            self._drain_until = time.monotonic() + seconds

    async def startup(self, sockets: list | None = None) -> None:
        """Listen."""
        asyncio.get_running_loop().set_exception_handler(quiet_accept())
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second: whether to stop now."""
        self._supervisor.ready()
        if counter % 10 == 0:
            connections: Any = self.server_state.connections
            self._idle.sweep(connections, time.monotonic())
        if self._service.thread.is_healthy:
            self._supervisor.beat()
        if self._service.thread.is_lost:
            LOG.critical("the engine has given up; the server stops")
            self.failed = self.should_exit = True
        if self._drain_until is not None:
            is_over = self._service.gate.num_open == 0
            if is_over or time.monotonic() > self._drain_until:
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list | None = None) -> None:
        """What still runs is cancelled first, so that its clients get a last event."""
        self._service.gate.is_draining = True
        self._service.thread.cancel_all()
        await asyncio.sleep(0.05)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal arrived."""
        if self._drain_until is not None:
            self.should_exit = True
        self.drain()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals are ours while the server runs, and are not raised again behind it: a drained server ends with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
