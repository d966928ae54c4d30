"""A trace sent to live servers: each turn at its second or when the answer before it has ended; figures of each.

Prompts are token ids (`/v1/completions`), drawn from a generator that the session's or system prompt's name seeds, so
prompts have in common what the trace says and mean nothing. The time to first token ends with the first event that has
text, or with the end: a server holds back a token that is no whole character.

With one address, that of a router say, everything goes there. With several, a `Chooser` decides here, so a policy can
be tried without a router between.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import httpx

from openk3.fleet.baselines import Chooser
from openk3.fleet.outcomes import Outcome
from openk3.fleet.ticket import Features, Ticket
from openk3.fleet.ticket import Outcome as Verdict
from openk3.fleet.trace import Entry, TraceError

PLAIN_IDS = 256  # the tokens of single bytes come first in every vocabulary of this model's kind
LAST_PORT = 65_535
_TOO_LONG = 3600.0  # seconds without a byte


class Replay:
    """One run against `servers`, names to addresses."""

    def __init__(
        self,
        entries: Sequence[Entry],
        servers: Mapping[str, str],
        chooser: Chooser | None = None,
        *,
        key: str | None = None,
        seed: int = 0,
    ) -> None:
        if len(servers) != 1 and chooser is None:
            raise TraceError(f"{len(servers)} servers: one address, or a policy that chooses among them")
        self._servers = {name: address.rstrip("/") for name, address in servers.items()}
        self._chooser, self._seed = chooser, seed
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._sessions = dict[str, list[Entry]]()
        for entry in entries:
            self._sessions.setdefault(entry.session, []).append(entry)
        self.outcomes = list[Outcome]()
        self._began = 0.0
        self._free = dict[int, asyncio.Event]()  # by id of a waiting ticket
        self._model = ""

    async def run(self, progress: Callable[[int], None] | None = None) -> list[Outcome]:
        """Until every request has ended. Raises TraceError for servers that do not answer."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(_TOO_LONG, connect=30.0)
        async with httpx.AsyncClient(headers=self._headers, limits=limits, timeout=timeout, trust_env=False) as client:
            for address in self._servers.values():
                self._model = await model_name(client, address)
            self._began = time.monotonic()
            ticking = asyncio.create_task(self._tick())
            try:
                async with asyncio.TaskGroup() as group:
                    for turns in self._sessions.values():
                        group.create_task(self._session(client, turns, progress))
            finally:
                ticking.cancel()
        return self.outcomes

    @property
    def now(self) -> float:
        """Seconds since the trace began."""
        return time.monotonic() - self._began

    async def _session(
        self, client: httpx.AsyncClient, turns: Sequence[Entry], progress: Callable[[int], None] | None
    ) -> None:
        for entry in turns:
            await asyncio.sleep(max(0.0, entry.at - self.now))
            ids = prompt_ids(entry, self._seed)
            outcome = Outcome(entry, self.now, prompt=entry.prompt_tokens)
            await self._routed(client, outcome, ids)
            outcome.ended = self.now
            self.outcomes.append(outcome)
            if progress is not None:
                progress(len(self.outcomes))

    async def _routed(self, client: httpx.AsyncClient, outcome: Outcome, ids: list[int]) -> None:
        """Where the chooser says, again where a server is gone before its first token."""
        entry = outcome.entry
        if self._chooser is None:
            name = next(iter(self._servers))
            outcome.routed, outcome.replica = self.now, name
            outcome.fate = await self._ask(client, name, outcome, ids, None)
            return
        features = Features(entry.session.encode(), "", entry.prompt_tokens, entry.answer_tokens)
        got = self._chooser.choose(features, self.now)
        while isinstance(got, Ticket) and await self._has_replica(got):
            assert got.replica is not None
            outcome.replica = got.replica
            outcome.routed = self.now if outcome.routed is None else outcome.routed
            outcome.fate = await self._ask(client, got.replica, outcome, ids, got)
            if outcome.fate == "failed" and outcome.first is None:
                got = self._chooser.retry(got, self.now)
                continue
            verdict: Verdict = "ok" if outcome.fate == "done" else "broken" if outcome.fate == "failed" else "left"
            self._let_go(self._chooser.finished(got, self.now, verdict))
            return
        outcome.fate = "refused"

    async def _has_replica(self, ticket: Ticket) -> bool:
        """Wait until it has one; False if it is refused instead."""
        if ticket.replica is None and ticket.rejected is None:
            event = self._free[id(ticket)] = asyncio.Event()
            await event.wait()
            del self._free[id(ticket)]
        return ticket.rejected is None

    def _let_go(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            if id(ticket) in self._free:
                self._free[id(ticket)].set()

    async def _tick(self) -> None:
        """Let time pass for whoever waits."""
        while self._chooser is not None:
            await asyncio.sleep(0.05)
            time_due = self._chooser.wake_at(self.now)
            if time_due is not None and time_due <= self.now:
                self._let_go(self._chooser.tick(self.now))

    async def _ask(
        self, client: httpx.AsyncClient, name: str, outcome: Outcome, ids: list[int], ticket: Ticket | None
    ) -> str:
        """One streamed completion; its fate. A server that refuses is no failure; a stream cut short is."""
        outcome.tries += 1
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": outcome.entry.answer_tokens,
            "temperature": 0.0,
            "user": outcome.entry.session,  # a part of what routers tell sessions by
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        is_whole = False
        try:
            async with client.stream("POST", f"{self._servers[name]}/v1/completions", json=body) as response:
                if response.status_code >= 400:
                    outcome.why = refusal(response.status_code, await response.aread())
                    return "failed" if response.status_code in (500, 502, 504) else "refused"
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        return "done" if is_whole else "failed"
                    found = json.loads(data)
                    if "error" in found:
                        outcome.why = str(found["error"])[:300]
                    if found.get("choices") and outcome.first is None:
                        outcome.first = self.now
                        if ticket is not None and self._chooser is not None:
                            self._chooser.started(ticket, outcome.first)
                    is_whole |= _usage(outcome, found)
        except httpx.HTTPError as error:
            outcome.why = f"{type(error).__name__}: {error}"
            return "failed"
        outcome.why = outcome.why or "the stream ended early"
        return "failed"


def refusal(status: int, body: bytes) -> str:
    """What a server says of a request that it refuses, in one line: its status and the message of its error."""
    try:
        text = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        text = body.decode(errors="replace")
    return f"{status} {' '.join(str(text).split())[:300]}".rstrip()


async def model_name(client: httpx.AsyncClient, address: str) -> str:
    """What a server calls its model. Raises TraceError naming the address."""
    try:
        if (httpx.URL(address).port or 0) > LAST_PORT:  # httpx lets the socket find that, in a group of errors
            raise ValueError("the port is too large")
        response = await client.get(f"{address}/v1/models")
        return response.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise TraceError(f"{address}: no server that lists its models ({str(error)[:120]})") from None


def prompt_ids(entry: Entry, seed: int = 0) -> list[int]:
    """Token ids of a prompt: equal for equal names and places."""
    length = entry.history_tokens + entry.new_tokens
    system = _ids(f"{seed}/system/{entry.system}", entry.system_tokens)
    return [*system, *_ids(f"{seed}/session/{entry.session}", length)]


def _ids(name: str, count: int) -> list[int]:
    """The first `count` of a stream without end: bytes from a generator, so a prefix is a prefix."""
    if not count:
        return []
    size = 1 << max(10, (count - 1).bit_length())
    return _stream(name, size)[:count]


@lru_cache(maxsize=64)
def _stream(name: str, size: int) -> list[int]:
    """In pieces of 1,024, each with a generator of its own, so that a longer stream begins with a shorter one."""
    return [byte for piece in range(size // 1024) for byte in random.Random(f"{name}/{piece}").randbytes(1024)]


def _usage(outcome: Outcome, found: dict[str, Any]) -> bool:
    """Take the counts of the last event; whether it was that."""
    usage = found.get("usage")
    if not usage:
        return False
    outcome.prompt, outcome.answered = usage["prompt_tokens"], usage["completion_tokens"]
    outcome.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return True


def replayed(replay: Replay, progress: Callable[[int], None] | None = None) -> list[Outcome]:
    """Run it to its end."""
    return asyncio.run(replay.run(progress))
