"""Whole processes: replicas killed, drained and started again under load, and thousands of clients that leave."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet_processes import Process, Told, ask_all, body_of, command, free_port, is_right
from live_fleet import CHAT, STREAM, Asked, Scripted, chunk, piece, scripted, wait_for

PROMPTS = [f"def function_{n}(value):\n    return value" for n in range(64)]
TOKENS = 160
ABORTS = 3000


class Load:
    """All calls through one address at the same time."""

    def __init__(self, url: str, bodies: list[dict[str, Any]]) -> None:
        self.told = [Told() for _ in bodies]
        self._thread = threading.Thread(target=lambda: asyncio.run(ask_all(url, bodies, self.told)), daemon=True)
        self._thread.start()

    def wait_until_begun(self, count: int) -> None:
        """So many have got tokens, and not all have ended."""
        wait_for(lambda: sum(bool(told.tokens) for told in self.told) >= count, 120)

    def end(self) -> list[Told]:
        """What all were told."""
        self._thread.join(240)
        assert not self._thread.is_alive()
        return self.told


def metric(router: Process, name: str) -> float:
    """Of /metrics."""
    for line in httpx.get(f"{router.url}/metrics", timeout=60).text.splitlines():
        label, _, value = line.rpartition(" ")
        if label == f"openk3_router_{name}":
            return float(value)
    return 0.0


def state(router: Process, url: str, name: str) -> bool:
    """Whether the replica is in that state."""
    return metric(router, f'replica_state{{replica="{url}",state="{name}"}}') == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_restarted_and_drained_under_load(tiny_run: Path) -> None:
    """kill -9: streams that had begun end with an error, all others are whole and right; the restarted replica is taken
    back; SIGTERM loses nothing at all.
    """
    name = tiny_run.name
    serve = ("serve", str(tiny_run), "--cache-gib", "0.1", "--device", "cpu", "--port")
    ports = free_port(), free_port()
    with command(*serve, str(ports[0])) as first, command(*serve, str(ports[1])) as second:
        bodies = [body_of(name, prompt, TOKENS) for prompt in PROMPTS]
        truth = Load(second.url, bodies).end()
        assert all(one.end == "whole" for one in truth)
        long = [n for n, one in enumerate(truth) if len(one.tokens) >= TOKENS // 2]  # others end by themselves
        assert len(long) >= 16
        bodies, truth = [bodies[n] for n in long], [truth[n] for n in long]
        with command("route", "--port", "0", "--replicas", first.url, second.url) as router:
            wait_for(lambda: state(router, first.url, "healthy") and state(router, second.url, "healthy"))

            load = Load(router.url, bodies)
            load.wait_until_begun(len(bodies) * 2 // 3)  # some of them in each
            first.kill()
            told = load.end()
            assert all(is_right(one, its) for one, its in zip(told, truth)), told
            ends = [one.end for one in told]
            assert set(ends) <= {"whole", "replica_lost"} and ends.count("whole") >= len(bodies) // 4, ends
            assert all(one.tokens for one in told)
            print(f"killed: {ends.count('whole')} of {len(ends)} whole, {ends.count('replica_lost')} cut cleanly")
            assert metric(router, "cut_total") == ends.count("replica_lost")
            retried = metric(router, 'retries_total{reason="broken"}')
            print(f"{retried:.0f} asked again before their first token")
            assert retried + ends.count("replica_lost") > 0, "none was under way in the one that was killed"

            wait_for(lambda: state(router, first.url, "failed"))
            told = Load(router.url, bodies).end()
            assert all(one.end == "whole" and is_right(one, its) for one, its in zip(told, truth)), told

            with command(*serve, str(ports[0])) as again:
                wait_for(lambda: state(router, again.url, "healthy"), 60)
                before = metric(router, f'replica_requests_total{{replica="{again.url}"}}')
                load = Load(router.url, bodies)
                load.wait_until_begun(8)
                assert metric(router, f'replica_requests_total{{replica="{again.url}"}}') > before
                assert again.end() == 0
                told = load.end()
                assert all(one.end == "whole" and is_right(one, its) for one, its in zip(told, truth)), told
            assert router.end() == 0
            assert "Traceback" not in "".join(router.log)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_stays_flat_while_thousands_leave() -> None:
    """Clients that leave while they wait and in the middle of a stream: nothing is left of them."""

    async def half(own: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + piece(chunk("one")))
        await own.until_gone(asked)

    async def leave(count: int, url: str) -> None:
        port = int(url.rpartition(":")[2])
        text = '{"messages": [{"role": "user", "content": "' + "x" * 5000 + '"}], "stream": true}'
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
        )

        async def one(number: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{head}\r\n\r\n{text}".encode())
            await writer.drain()
            if number % 2:
                await reader.readuntil(b"one")
            writer.close()

        for start in range(0, count, 50):
            await asyncio.gather(*(one(number) for number in range(start, start + 50)))

    with scripted(half) as [replica], command("route", "--port", "0", "--replicas", replica.url) as router:
        wait_for(lambda: state(router, replica.url, "healthy"))

        def settled() -> int:
            wait_for(lambda: metric(router, "calls_open") == 0, 60)
            assert metric(router, f'replica_open{{replica="{replica.url}"}}') == 0
            return router.resident_bytes()

        asyncio.run(leave(1000, router.url))
        before = settled()
        asyncio.run(leave(ABORTS, router.url))
        grown = settled() - before
        print(f"{ABORTS} clients left: {grown / 2**20:+.1f} MiB")
        assert grown < 8 * 2**20
        wait_for(lambda: metric(router, "left_total") == 1000 + ABORTS)
        assert metric(router, f'replica_broken_total{{replica="{replica.url}"}}') == 0
        assert "Traceback" not in "".join(router.log)
