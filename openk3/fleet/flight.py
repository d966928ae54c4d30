"""Flight: one call on its way through the router, from replica to replica until the first token, then to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from openk3.fleet.answer import Answer, Broken, Call, Headers, Refused
from openk3.fleet.events import LastWord
from openk3.fleet.router import Router
from openk3.fleet.ticket import Outcome, Ticket
from openk3.serve.errors import ApiError
from openk3.serve.sse import wait_until_gone

LOG = logging.getLogger(__name__)
GONE = 499  # in metrics and logs: the client went away
LOST = ApiError(503, "the server that wrote this answer was lost; ask again", code="replica_lost", retry_after=1)
SHUT = ApiError(503, "the router is shutting down; ask another one", code="draining", retry_after=5)


class TooSlow(Exception):
    """The client does not take what is sent."""


class Outlet:
    """The client's side: one head, then a body, each piece within a time."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._send, self._seconds = send, seconds
        self.status = 0  # of the head, once it is sent

    async def head(self, status: int, headers: Headers) -> None:
        """Once: that of another replica for the same stream is not sent."""
        if not self.status:
            self.status = status
            await self._out({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, data: bytes, *, more: bool = True) -> None:
        """Returns when the client's connection has room for the next piece. Raises TooSlow."""
        await self._out({"type": "http.response.body", "body": data, "more_body": more})

    async def _out(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            raise TooSlow from None


class Flight(Response):
    """An ASGI response that asks replicas while it is sent. `on_end` is told the status, whatever happens."""

    def __init__(
        self, router: Router, call: Call, render: Callable[[str, ApiError], Response], on_end: Callable[[int], None]
    ) -> None:
        self._router, self._call, self._render, self._on_end = router, call, render, on_end
        self._ticket: Ticket | None = None
        self._outcome: Outcome = "left"
        self._status = GONE
        self._has_content = False  # something of an answer was sent: no other replica can be asked
        self._word = LastWord(call.path)
        self._halted = asyncio.Event()

    def halt(self) -> None:
        """End with an error, now."""
        self._halted.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this response."""
        self._plain = (scope, receive, send)
        self._out = Outlet(send, self._router.config.write_seconds)
        work, gone, halted = (
            asyncio.create_task(job) for job in (self._work(), wait_until_gone(receive), self._halted.wait())
        )
        self._router.flights.add(self)
        try:
            await asyncio.wait((work, gone, halted), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and halted.done():
                work.cancel()
                await asyncio.wait((work,))
                await self._fail(SHUT)
            elif work.done():
                work.result()
            else:
                self._status, self._outcome = GONE, "left"
        except TooSlow:
            self._status, self._outcome = GONE, "left"
            LOG.info("%s: the client takes nothing", self._call.path)
        except Exception:  # a fault of ours, told and logged by who called
            self._status = 500
            raise
        finally:
            for task in (work, gone, halted):
                task.cancel()
            await asyncio.gather(work, gone, halted, return_exceptions=True)
            self._router.flights.discard(self)
            if self._ticket is not None:
                self._router.end(self._ticket, self._outcome)
            self._on_end(self._status)

    async def _work(self) -> None:
        """Ask replicas until one answers or no more may be asked."""
        deaths, refused = 0, None
        try:
            self._ticket = await self._router.place(self._call.features)
            while True:
                replica = await self._router.wait(self._ticket)
                try:
                    await self._ask(replica)
                    return
                except Broken as error:
                    LOG.warning("%s broke %s: %s", replica, self._call.path, error)
                    deaths += error.was_sent
                    if self._has_content or deaths >= self._router.proxy.deaths:
                        self._outcome = "broken"
                        self._router.metrics.num_cut += self._has_content
                        raise LOST from None
                    await self._router.again(self._ticket, "broken", 1.0)
                except Refused as error:
                    LOG.info("%s refused %s: %s", replica, self._call.path, error)
                    deaths += error.was_begun
                    refused = None if error.was_begun else error.answer
                    if deaths >= self._router.proxy.deaths:
                        raise LOST from None
                    await self._router.again(self._ticket, "refused", error.pause)
        except ApiError as error:
            if refused is not None and not self._out.status:
                await self._pass_on(refused)  # its own word is more exact
            else:
                await self._fail(error)

    async def _ask(self, replica: str) -> None:
        """One replica. Raises Broken, also in the middle of an answer, or Refused."""
        answer = Answer(self._router, self._call, replica)
        try:
            await answer.begin(self._pulse)
            if self._out.status and not answer.is_stream:
                self._answered(answer.status)
                await self._fail(answer.as_error())
                return
            self._answered(answer.status)
            await self._pass_on(answer)
        finally:
            await answer.close()

    async def _pass_on(self, answer: Answer) -> None:
        self._status = answer.status
        self._has_content = True
        await self._out.head(answer.status, answer.headers)
        await self._pieces(answer.begun, more=not answer.is_complete)
        if not answer.is_complete:
            async with aclosing(answer.rest()) as rest:
                async for pieces in rest:
                    await self._pieces(pieces)
            await self._out.body(b"", more=False)

    async def _pieces(self, pieces: list[bytes], *, more: bool = True) -> None:
        for one in pieces:
            self._word.follow(one)
        if pieces or not more:
            await self._out.body(b"".join(pieces), more=more)

    async def _pulse(self, answer: Answer, data: bytes) -> None:
        """A comment keeps a client's connection alive, and takes nothing from another replica's answer."""
        await self._out.head(answer.status, answer.headers)
        await self._out.body(data)

    def _answered(self, status: int) -> None:
        """The replica works; its prefix is cached if the call was a good one."""
        if self._ticket is None or self._ticket.replica is None:
            return
        if status < 300:
            self._router.started(self._ticket)
            self._outcome = "ok"
        else:
            self._router.policy.replicas[self._ticket.replica].answered()

    async def _fail(self, error: ApiError) -> None:
        """An answer that is an error, or the last event of a stream that has begun."""
        self._status = error.status
        if not self._out.status:
            await self._render(self._call.path, error)(*self._plain)
        elif self._call.is_stream:
            await self._out.body(self._word.error(error), more=False)
        # else a long answer is cut: the server closes its connection, and the client sees that bytes are missing
