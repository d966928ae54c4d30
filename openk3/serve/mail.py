"""Mail: news of requests on their way from the engine's thread into the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from openk3.engine.request import Finish
from openk3.engine.stream import Stream, Update

News = tuple[Update | None, Finish | None]  # what a step has brought, or how the engine lost the request


class Ticket:
    """One request in the engine; `sink` is called in the event loop with each of its news."""

    def __init__(self, sink: Callable[[News], None]) -> None:
        self.sink = sink
        self.stream: Stream | None = None
        self._counts = (0, 0)

    @property
    def counts(self) -> tuple[int, int]:
        """(tokens of the prompt, images expanded; those from the prefix cache, 0 before the request has started)."""
        if self.stream is not None:
            self._counts = (self.stream.job.num_prompt, self.stream.job.num_cached or 0)
        return self._counts

    def leave(self) -> None:
        """Keep nothing of an engine that is given up: its memory is needed."""
        _ = self.counts
        self.stream = None


class Mail:
    """Posted in any thread, read in that of `loop`; all news of one step wake the loop once."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._news: deque[tuple[Ticket, News]] = deque()
        self._is_due = False  # a flush that has not begun yet

    def post(self, ticket: Ticket, news: News) -> None:
        """Bring news to a ticket's sink."""
        self._news.append((ticket, news))
        if not self._is_due and self.loop is not None and not self.loop.is_closed():
            self._is_due = True
            self.loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._is_due = False  # first: what is posted from here on may have been missed
        while self._news:
            ticket, news = self._news.popleft()
            ticket.sink(news)
