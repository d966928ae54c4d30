"""EngineThread: the one thread that steps the engine, and the way of its news into the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from openk3.engine.engine import Engine
from openk3.engine.request import Finish, Request
from openk3.engine.stats import Stats
from openk3.engine.stream import IDLE_SECONDS, Update
from openk3.serve.health import Health, Restarts
from openk3.serve.mail import Mail, News, Ticket

LOG = logging.getLogger(__name__)
PAUSE_SECONDS = 1.0  # between two tries to make an engine
NEXT_SECONDS = 60.0  # that a request waits for the engine that follows a failed one


class EngineDown(RuntimeError):
    """There is no engine that could take the request."""


class EngineLost(RuntimeError):
    """The engine failed while the request was in it; the request is not at fault and may be sent again."""


class EngineThread:
    """Steps the engine while there is work. Errors of a request stay with it (see Loop).

    An error that escapes a step is a fault of the engine's books: its requests end with EngineLost, and a new engine
    takes its place. After too many in a row it gives up (see Restarts), and `is_healthy` is false for good.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self._engine: Engine | None = make_engine()
        self.config = self._engine.config
        self._lock = threading.Lock()  # of the engine's place and the tickets
        self._ready = threading.Event()  # unset while there is no engine yet
        self._ready.set()
        self._tickets: dict[Ticket, None] = {}
        self._wake = threading.Event()
        self._stopping = self._has_given_up = False
        self._mail = Mail()
        self.health = Health()
        self.restarts = Restarts()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to step; news go to `loop`."""
        self._mail.loop = loop
        self._thread.start()

    def submit(self, request: Request, sink: Callable[[News], None]) -> Ticket:
        """Take a request, from any thread but the engine's; waits while a failed engine is being replaced.

        Raises what Engine.submit raises, and EngineDown.
        """
        self._ready.wait(NEXT_SECONDS)
        engine, ticket = self._engine, Ticket(sink)
        if engine is None or self._stopping:
            raise EngineDown("the engine has stopped")
        with self._lock:
            self._tickets[ticket] = None
        try:
            ticket.stream = engine.submit(request, lambda update: self._heard(ticket, update))
            if engine is not self._engine:
                raise EngineDown("the engine was restarted meanwhile")
        except BaseException:
            with self._lock:
                self._tickets.pop(ticket, None)
            del engine  # the error's frames would keep it
            raise
        self._wake.set()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request that has not ended, from any thread."""
        stream = ticket.stream
        if stream is not None and stream.finish is None:
            stream.cancel()
            self._wake.set()

    def cancel_all(self) -> None:
        """End every request."""
        with self._lock:
            tickets = list(self._tickets)
        for ticket in tickets:
            self.cancel(ticket)

    def stop(self, timeout: float = 60.0) -> None:
        """Cancel what is left and end the thread."""
        self.cancel_all()
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._tickets)

    @property
    def is_healthy(self) -> bool:
        """Whether an engine is there whose passes do not all fail."""
        return self._engine is not None and not self.is_lost and self.health.is_good

    @property
    def is_lost(self) -> bool:
        """Whether it has given up; not while a failed engine is being replaced."""
        return self._has_given_up or not self._thread.is_alive()

    def stats(self) -> Stats | None:
        """Of the engine that is there now."""
        return None if (engine := self._engine) is None else engine.stats()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._engine is not None and not self._engine.is_idle:
                if not self._step(self._engine):
                    self._next()
            if self._stopping and self._engine is not None:
                self._engine.close()  # cached prefixes go to the store, if there is one
            if self._stopping or self._engine is None:
                return

    def _step(self, engine: Engine) -> bool:
        """One step; whether the engine lives on. No name outlives it here: the next engine needs the memory."""
        self.health.begin()
        try:
            updates = engine.step()
            if not self.health.end(engine.stats()) and not updates:
                time.sleep(IDLE_SECONDS)  # all requests are parked
        except Exception as error:  # whatever a step lets out, others must live on
            self._give_up(engine, error)
            return False
        return True

    def _give_up(self, engine: Engine, error: Exception) -> None:
        """An engine has failed: tell its requests, and keep nothing of it."""
        told = "".join(traceback.format_exception(error))  # a log that keeps frames would keep the engine
        LOG.critical("the engine failed and is replaced; its requests end with an error\n%s", told)
        self._ready.clear()
        with self._lock:
            self._engine = None
            tickets, self._tickets = list(self._tickets), {}
        lost = Finish("error", EngineLost(f"the engine failed ({type(error).__name__}) and was restarted"))
        for ticket in tickets:
            ticket.leave()
            self._mail.post(ticket, (None, lost))
        traceback.clear_frames(error.__traceback__)
        with suppress(Exception):  # its books are broken
            engine.close(write=False)

    def _next(self) -> None:
        """Another engine, or none after too many in a row."""
        while self._engine is None and self.restarts.allow():
            try:
                self._engine = self._make_engine()
            except Exception:  # no memory, say, while a thread that submits has still to let the old one go
                LOG.critical("no new engine could be made", exc_info=True)
                time.sleep(PAUSE_SECONDS)
        self.health = Health()
        self._has_given_up = self._engine is None
        self._ready.set()

    def _heard(self, ticket: Ticket, update: Update) -> None:
        """Called by the engine, inside a step or in the thread that cancels."""
        with self._lock:
            if ticket not in self._tickets:
                return
            if update.finish is not None:
                del self._tickets[ticket]
        self._mail.post(ticket, (update, None))
