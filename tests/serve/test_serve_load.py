"""A thousand streams at once on the tiny model: none lost, none wrong, memory flat, every page given back."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from live_server import MODEL, Live, live_server, parse_events, tiny_engine, turn

from openk3.config.serve import SpeculationConfig

CLIENTS = 1000


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def answer(n: int) -> str:
    """What client n is told."""
    return f"number {n} says " + "é👋 " * (n % 17)


def question(n: int) -> str:
    """Of 10 to 700 characters."""
    return f"<c{n}> " + "what is it? " * (random.Random(n).randrange(60))


async def ask(port: int, n: int) -> tuple[str, str | None, float]:
    """(content, finish reason, seconds to the first byte of the answer's text)."""
    messages = [{"role": "user", "content": question(n)}]
    body = json.dumps({"model": MODEL, "messages": messages, "stream": True, "max_tokens": 400}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1",
        "host: 127.0.0.1",
        "connection: close",
        "content-type: application/json",
    )
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join((*head, f"content-length: {len(body)}", "", "")).encode() + body)
    data, first = b"", 0.0
    while piece := await reader.read(65536):
        data += piece
        if not first and b'"content":"n' in data:
            first = time.monotonic() - began
    writer.close()
    assert data.startswith(b"HTTP/1.1 200"), data[:200]
    events: list[Any] = parse_events(data.decode())
    assert events.pop() == "[DONE]" and all("error" not in event for event in events), events[-1]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    return text, events[-1]["choices"][0]["finish_reason"], first


async def wave(live: Live, count: int) -> list[tuple[str, str | None, float]]:
    """All clients at once."""
    return await asyncio.gather(*(ask(live.server.port, n) for n in range(count)))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_thousand_streams() -> None:
    """Three waves; after the first one memory does not grow by more than a few MiB."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with live_server(engine=lambda: tiny_engine(num_pages=3000, max_requests=64), max_open=CLIENTS + 10) as live:
        for n in range(CLIENTS):
            live.say(f"<c{n}> ", turn(answer(n)))
        sizes = []
        for _ in range(3):
            began = time.monotonic()
            results = asyncio.run(wave(live, CLIENTS))
            seconds = time.monotonic() - began
            assert [text for text, _, _ in results] == [answer(n) for n in range(CLIENTS)]
            assert {reason for _, reason, _ in results} == {"stop"}
            live.wait_until_idle()
            sizes.append(resident_bytes())
            firsts = sorted(first for _, _, first in results)
            print(f"{CLIENTS} streams in {seconds:.1f} s, first text after {firsts[CLIENTS // 2]:.1f} s (median), ")
            print(f"{firsts[-1]:.1f} s (last); {sizes[-1] / 2**20:.0f} MiB resident")
    assert sizes[2] - sizes[1] < 16 * 2**20


async def leave(port: int, n: int, seconds: float) -> None:
    """Ask, streamed or whole, and go away in the middle."""
    messages = [{"role": "user", "content": question(n)}]
    body = json.dumps({"model": MODEL, "messages": messages, "stream": n % 2 == 0, "max_tokens": 400, "n": 1 + n % 3})
    head = "POST /v1/chat/completions HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join((*head, f"content-length: {len(body)}", "", "")).encode() + body.encode())
    await asyncio.sleep(seconds)
    writer.transport.abort()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_clients_that_leave_do_no_harm_to_those_that_stay() -> None:
    """Few pages, so that requests give way to each other; half of the clients vanish at any moment; with drafts."""
    chance = random.Random(0)

    async def crowd(port: int, stay: list[int], go: list[int]) -> list[Any]:
        leavers = [leave(port, n, chance.uniform(0, 4)) for n in go]
        found = await asyncio.gather(*(ask(port, n) for n in stay), *leavers)
        return found[: len(stay)]

    speculation = SpeculationConfig("ngram", most_drafts=4)
    with live_server(engine=lambda: tiny_engine(num_pages=70, speculation=speculation)) as live:
        for n in range(80):
            live.say(f"<c{n}> ", turn(answer(n)))
        for _ in range(3):
            stay, go = list(range(0, 80, 2)), list(range(1, 80, 2))
            results = asyncio.run(crowd(live.server.port, stay, go))
            assert [text for text, _, _ in results] == [answer(n) for n in stay]
            live.wait_until_idle(30)
        stats = live.service.thread.stats()
        assert stats is not None and stats.num_preempted > 0 and live.service.thread.restarts.count == 0
        print(f"{stats.num_preempted} preempted, {stats.num_hit} of {stats.num_asked} tokens from the cache")
