"""Answer: what one replica says to a call, read so far that it can be taken back as long as nothing of it is sent."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

import httpx

from openk3.fleet.events import Splitter, is_lost_cause, is_preface, is_pulse
from openk3.fleet.router import Router
from openk3.fleet.ticket import Features
from openk3.serve.errors import ApiError

Headers = list[tuple[bytes, bytes]]
HOP = (
    *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"),
    *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
)
# To a replica the router is the client: it has checked Host, Origin and the body's length by itself.
NOT_SENT = {*HOP, b"host", b"origin", b"content-length", b"expect", b"accept-encoding"}
NOT_RETURNED = {*HOP, b"date", b"server"}


@dataclass(frozen=True)
class Call:
    """What a client asked."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    is_stream: bool
    features: Features


class Broken(Exception):
    """A replica failed on this call."""

    def __init__(self, why: str, *, was_sent: bool = True) -> None:
        super().__init__(why)
        self.was_sent = was_sent


class Refused(Exception):
    """A replica takes no calls for a while; its answer is kept, in case that no other one takes this one."""

    def __init__(self, answer: Answer, *, pause: float, was_begun: bool = False) -> None:
        super().__init__(f"status {answer.status}")
        self.answer, self.pause, self.was_begun = answer, pause, was_begun


class Answer:
    """`begin` asks and reads until something can be sent on; then `begun` has to be sent, and what `rest` yields."""

    def __init__(self, router: Router, call: Call, replica: str) -> None:
        self._router, self._call, self._replica = router, call, replica
        self._lane = router.lanes.take(replica)
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._splitter = Splitter(router.proxy.event_bytes)
        self.status, self.headers = 0, []
        self.is_stream = False
        self.is_complete = False  # all of it is in `begun`
        self.begun: list[bytes] = []

    async def begin(self, pulse: Callable[[Answer, bytes], Awaitable[None]]) -> None:
        """Until the answer is whole, or too long to be held back, or its first token came; pulses go on at once.

        Raises Broken, also when the replica answers no checks any more or trickles for too long, and Refused.
        """
        early = self._router.early[self._replica]
        limit = asyncio.timeout(None if self._call.is_stream else self._router.proxy.answer_seconds)
        early.add(limit)
        try:
            with faults():
                async with limit:
                    request = self._request()
                    self._response = response = await self._lane.handle_async_request(request)
                    response.request = request
                    self._chunks = chunks = response.aiter_raw()
                    self.status = response.status_code
                    if not 200 <= self.status < 600:
                        raise Broken(f"status {self.status}")
                    self.is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
                    self.headers = returned(response, is_stream=self.is_stream)
                    await (self._begin_stream(chunks, pulse) if self.is_stream else self._begin_whole(chunks))
        except TimeoutError:
            raise Broken("no answer in time, or to checks") from None
        finally:
            early.discard(limit)

    async def rest(self) -> AsyncGenerator[list[bytes]]:
        """Whole events of a stream, or pieces of a long answer. Raises Broken."""
        assert self._chunks is not None
        with faults():
            async for data in self._chunks:
                yield self._splitter.add(data) if self.is_stream else [data]
        yield [self._splitter.rest()]

    async def close(self) -> None:
        """Stop reading; a replica that still writes is told by its closed connection."""
        if self._response is None:
            await self._lane.aclose()
            return
        await self._response.aclose()
        await self._router.lanes.give(self._replica, self._lane)

    def as_error(self) -> ApiError:
        """For a client whose stream was begun for another replica."""
        error = _error(b"".join(self.begun))
        message = str(error.get("message") or "the replica failed on this call")
        return ApiError(self.status, message, code=_code(error))

    def _request(self) -> httpx.Request:
        call, times = self._call, self._router.proxy
        if any(part in (b".", b"..") for part in unquote_to_bytes(call.path).split(b"/")):
            raise ApiError(404, "no such route; /openapi.json lists them")
        headers = end_to_end(call.headers, NOT_SENT)
        target = call.path.encode("latin-1") + (b"?" + call.query if call.query else b"")
        read = times.silence_seconds if call.is_stream else times.answer_seconds
        limits = {"connect": times.connect_seconds, "read": read, "write": times.silence_seconds, "pool": None}
        extensions = {"timeout": limits, "target": target}  # as it came: nothing is quoted anew, or of bounded length
        return httpx.Request(call.method, self._replica, headers=headers, content=call.body, extensions=extensions)

    async def _begin_whole(self, chunks: AsyncIterator[bytes]) -> None:
        size = 0
        async for data in chunks:
            self.begun.append(data)
            size += len(data)
            if size > self._router.proxy.hold_bytes:
                return
        self.is_complete = True
        if self.status in (502, 504):
            raise Broken(f"status {self.status}")
        code = _code(_error(b"".join(self.begun))) if self.status in (500, 503) else None
        was_begun = self.status == 500 and code == "engine_failed"
        if self.status == 503 or was_begun:
            raise Refused(self, pause=5.0 if code in ("draining", "engine_down") else 0.5, was_begun=was_begun)

    async def _begin_stream(
        self, chunks: AsyncIterator[bytes], pulse: Callable[[Answer, bytes], Awaitable[None]]
    ) -> None:
        size = 0
        async for data in chunks:
            events = self._splitter.add(data)
            while events:
                one = events.pop(0)
                if is_pulse(one):
                    await pulse(self, one)
                    continue
                if is_lost_cause(one):
                    raise Refused(self, pause=0.5, was_begun=True)
                self.begun.append(one)
                size += len(one)
                if not is_preface(one) or size > self._router.proxy.event_bytes:
                    self.begun += events
                    return


@contextmanager
def faults() -> Generator[None]:
    """Errors of the network are the replica's, but for headers of the client's that are none."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        if is_own_lack(error):
            raise ApiError(503, "the router is full; try again", code="overloaded", retry_after=1) from None
        raise Broken(f"no connection ({error})", was_sent=False) from None
    except httpx.LocalProtocolError as error:
        raise ApiError(400, f"headers: cannot be passed on ({error})", param="headers") from None
    except httpx.HTTPError as error:
        raise Broken(f"{type(error).__name__} {error}") from None


def is_own_lack(error: BaseException | None) -> bool:
    """Whether no connection was made because this process, or its machine, has no more files or memory for one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            return True
        error = error.__cause__ or error.__context__
    return False


def returned(response: httpx.Response, *, is_stream: bool = False) -> Headers:
    """Headers as the client gets them. A stream's length is not the replica's to say: it may get another end."""
    rows = [(name.lower(), value) for name, value in response.headers.raw]
    return end_to_end(rows, {*NOT_RETURNED, b"content-length"} if is_stream else NOT_RETURNED)


def end_to_end(headers: Headers, dropped: set[bytes]) -> Headers:
    """Without those dropped, and without those that `Connection` names (RFC 9110, section 7.6.1)."""
    named = b",".join(value for name, value in headers if name == b"connection").lower().split(b",")
    dropped = dropped.union(name.strip() for name in named)
    return [pair for pair in headers if pair[0] not in dropped]


def _error(body: bytes) -> dict[str, Any]:
    try:
        error = json.loads(body).get("error")
    except (ValueError, RecursionError, AttributeError):
        return {}
    return error if isinstance(error, dict) else {}


def _code(error: dict[str, Any]) -> str | None:
    code = error.get("code")
    return code if isinstance(code, str) else None
