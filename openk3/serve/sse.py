"""EventStream: server-sent events with a pulse, a bound on slow clients, and an end when the client goes away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

LOG = logging.getLogger(__name__)
PULSE_SECONDS = 15.0  # a comment, so that proxies do not take a long prompt for a dead connection


def event(data: Any, name: str | None = None) -> bytes:
    """One event; JSON has no raw line end, so one `data:` line is enough."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode(errors="backslashreplace")  # half a surrogate pair is JSON's \\udxxx


class EventStream(Response):
    """Sends what `source` yields. `on_end` runs whatever happens, after the source was closed.

    A write that the client does not take within `write_seconds` ends the stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncGenerator[bytes],
        *,
        on_end: Callable[[], None],
        write_seconds: float,
        headers: Mapping[str, str],
    ) -> None:
        more = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(headers={**headers, **more})
        del self.headers["content-length"]
        self._source, self._on_end, self._write_seconds = source, on_end, write_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this response."""
        gone = asyncio.create_task(wait_until_gone(receive))
        pump = asyncio.create_task(self._pump(send))
        try:
            await asyncio.wait((gone, pump), return_when=asyncio.FIRST_COMPLETED)
        finally:
            try:
                for task in (gone, pump):
                    task.cancel()
                    with suppress(asyncio.CancelledError, TimeoutError, OSError):
                        await task
            finally:
                await self._source.aclose()
                self._on_end()

    async def _pump(self, send: Send) -> None:
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        following = asyncio.ensure_future(anext(self._source))
        try:
            while True:
                done, _ = await asyncio.wait((following,), timeout=PULSE_SECONDS)
                data = b": still here\n\n"
                if done:
                    try:
                        data = following.result()
                    except StopAsyncIteration:
                        break
                    following = asyncio.ensure_future(anext(self._source))
                await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration, Exception):
                await following
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        async with asyncio.timeout(self._write_seconds):
            await send(message)


async def wait_until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
