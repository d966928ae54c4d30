"""EventStream: a pulse while nothing happens, and an end whatever the client does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from openk3.serve import sse
from openk3.serve.sse import EventStream, event


class Peer:
    """A client: takes `most` messages, then nothing more; goes away when told to."""

    def __init__(self, most: int = 1000) -> None:
        self.most, self.got, self.is_gone = most, list[dict[str, Any]](), asyncio.Event()

    async def send(self, message: Any) -> None:
        """What the server sends."""
        if len(self.got) == self.most:
            await asyncio.sleep(3600)
        self.got.append(message)

    async def receive(self) -> dict[str, str]:
        """The end of the connection."""
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        """All that was sent."""
        return b"".join(message.get("body", b"") for message in self.got)


class Source:
    """Yields numbered events, each when `may_go` is true of its number, and notes when it is closed."""

    def __init__(
        self, count: int, may_go: Callable[[int], bool] = lambda n: True, error: Exception | None = None
    ) -> None:
        self.count, self.may_go, self.error, self.is_closed = count, may_go, error, False

    async def events(self) -> AsyncGenerator[bytes]:
        """The events."""
        try:
            for n in range(self.count):
                await asyncio.sleep(0)
                while not self.may_go(n):
                    await asyncio.sleep(0.005)
                yield event({"n": n})
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True


def run(source: Source, peer: Peer, gone_after: float | None = None) -> int:
    """Send everything; how often the end was told."""
    ends = []

    async def work() -> None:
        stream = EventStream(source.events(), on_end=lambda: ends.append(1), write_seconds=0.1, headers={"x-a": "b"})
        if gone_after is not None:
            asyncio.get_running_loop().call_later(gone_after, peer.is_gone.set)
        await asyncio.wait_for(stream({"type": "http"}, peer.receive, peer.send), 60)

    asyncio.run(work())
    return len(ends)


def test_a_whole_stream() -> None:
    """Headers of events, each event as one line, and an end."""
    source, peer = Source(3), Peer()
    assert run(source, peer) == 1 and source.is_closed
    headers = dict(peer.got[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream") and headers[b"x-a"] == b"b"
    assert b"content-length" not in headers and headers[b"cache-control"] == b"no-store"
    assert peer.body == b"".join(b'data: {"n":%d}\n\n' % n for n in range(3)) and not peer.got[-1]["more_body"]


def test_events_are_one_line_each() -> None:
    """Line ends inside of texts are escaped, whatever kind they are."""
    text = "a\nb\r\u2028\u0085"
    data = event({"text": text}, "name")
    assert data.startswith(b"event: name\ndata: ") and data.endswith(b"\n\n") and data.count(b"\n") == 3
    assert b"\r" not in data and json.loads(data.split(b"data: ")[1])["text"] == text


def test_a_pulse_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments, which clients skip; no event is lost or told twice."""
    monkeypatch.setattr(sse, "PULSE_SECONDS", 0.02)
    peer = Peer()
    run(Source(2, lambda n: peer.body.count(b": still here\n\n") > n), peer)
    assert peer.body.replace(b": still here\n\n", b"") == b'data: {"n":0}\n\ndata: {"n":1}\n\n'


def test_a_client_that_takes_nothing_more() -> None:
    """The write times out; the source is closed and the end is told, once."""
    source, peer = Source(100), Peer(most=3)
    assert run(source, peer) == 1 and source.is_closed and len(peer.got) == 3


def test_a_client_that_goes_away() -> None:
    """At once, though the source would go on for hours."""
    source, peer = Source(10, lambda n: False), Peer()
    assert run(source, peer, gone_after=0.05) == 1 and source.is_closed


def test_a_source_that_fails() -> None:
    """A fault of ours: it is told upwards, after everything was given back."""
    source, peer = Source(1, error=ZeroDivisionError()), Peer()
    with pytest.raises(ZeroDivisionError):
        run(source, peer)
    assert source.is_closed and peer.body == b'data: {"n":0}\n\n'
