"""A live router on loopback, and replicas that do byte for byte what a test wants."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from openk3.config.fleet import FleetConfig, ProxyConfig
from openk3.config.http import ServerConfig
from openk3.fleet.app import make_app
from openk3.fleet.replica_list import FixedList, Listed, ReplicaList
from openk3.fleet.router import Router
from openk3.serve.keys import Keys
from openk3.serve.server import DrainingServer

CHAT = "/v1/chat/completions"
QUICK = ProxyConfig(check_every_seconds=0.05, connect_seconds=5)


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What it returns, once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)
    return found


@dataclass
class LiveRouter:
    """A running router."""

    router: Router
    server: DrainingServer

    @property
    def url(self) -> str:
        """http://127.0.0.1:PORT."""
        return f"http://127.0.0.1:{self.server.port}"

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """A POST of JSON."""
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """A GET."""
        return httpx.get(self.url + path, timeout=60, **options)

    def abandon(self, body: Any, is_there: Callable[[], Any]) -> None:
        """A call whose client goes away once it `is_there`."""
        data = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=60) as connection:
            connection.sendall("\r\n".join((*head, f"content-length: {len(data)}", "", "")).encode() + data)
            wait_for(is_there)

    def metric(self, name: str) -> float:
        """Of /metrics, by name and labels."""
        lines = self.get("/metrics").text.splitlines()
        return float(
            next(line.rsplit(" ", 1)[1] for line in lines if line.rsplit(" ", 1)[0] == f"openk3_router_{name}")
        )

    def wait_until_idle(self) -> None:
        """Every book is back to zero."""
        policy = self.router.policy

        def is_idle() -> bool:
            used = sum(policy.budgets.used(name) + one.num_open for name, one in policy.replicas.items())
            waiting = sum(len(queue) for queue in policy.waiting.queues)
            return not (used or waiting or self.router.gate.num_open or self.router.flights or self.router._waiting)

        wait_for(is_idle)
        assert not any(self.router.early.values())


@contextmanager
def live_router(
    replicas: Sequence[str] | ReplicaList,
    *,
    fleet: FleetConfig | None = None,
    proxy: ProxyConfig = QUICK,
    keys: Keys | None = None,
    **config: Any,
) -> Generator[LiveRouter]:
    """Start on a free port, stop afterwards."""
    settings = ServerConfig(**{"model_name": "fleet", "port": 0, **config})
    router = Router(settings, fleet or FleetConfig(), proxy, keys or Keys())
    listed = FixedList([Listed(url) for url in replicas]) if isinstance(replicas, Sequence) else replicas
    server = DrainingServer(make_app(router, listed), router)
    runner = threading.Thread(target=server.run, daemon=True)
    runner.start()
    wait_for(lambda: server.started or not runner.is_alive())
    assert runner.is_alive()
    try:
        yield LiveRouter(router, server)
    finally:
        server.should_exit = True
        runner.join(30)
        assert not runner.is_alive()


@dataclass
class Asked:
    """A request as it arrived at a scripted replica."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader


Act = Callable[["Scripted", Asked, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Scripted:
    """An HTTP server without any framework: `act` writes bytes, and may do it wrong."""

    act: Act
    health: bytes = b'200 {"status": "ok"}'
    asked: list[Asked] = field(default_factory=list)
    num_gone: int = 0  # connections that the other side closed while `act` waited for that
    port: int = 0
    hangs: bool = False  # its health checks too

    @property
    def url(self) -> str:
        """http://127.0.0.1:PORT."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if path == "/health":
                if self.hangs:
                    await reader.read()
                status, _, text = self.health.partition(b" ")
                writer.write(b"HTTP/1.1 %s X\r\nconnection: close\r\n\r\n%s" % (status, text))
            else:
                self.asked.append(Asked(method, path, headers, body, reader))
                await self.act(self, self.asked[-1], writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def until_gone(self, asked: Asked) -> None:
        """The other side has closed the connection."""
        await asked.reader.read()
        self.num_gone += 1


@contextmanager
def scripted(*acts: Act) -> Generator[list[Scripted]]:
    """One server for each, in a thread."""
    servers = [Scripted(act) for act in acts]
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def main() -> None:
        listening = [await asyncio.start_server(one.serve, "127.0.0.1", 0) for one in servers]
        for one, listener in zip(servers, listening):
            one.port = listener.sockets[0].getsockname()[1]
        ready.set()
        await asyncio.get_running_loop().create_future()

    def run() -> None:
        asyncio.set_event_loop(loop)
        task = loop.create_task(main())
        servers_done.append(task)
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            rest = asyncio.all_tasks(loop)
            for one in rest:
                one.cancel()
            loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        loop.close()

    servers_done: list[asyncio.Task[None]] = []
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield servers
    finally:
        loop.call_soon_threadsafe(servers_done[0].cancel)
        thread.join(30)


def answer(body: bytes, status: int = 200, kind: str = "application/json", **headers: str) -> bytes:
    """A whole response."""
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = (
        f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{more}\r\n"
    )
    return head.encode() + body


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def piece(data: bytes) -> bytes:
    """A chunk of a streamed body; an empty one ends it."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def chunk(text: str | None = None, **fields: Any) -> bytes:
    """An event as OpenAI's clients read it; without text the first one, which names the role alone."""
    delta = {"role": "assistant", "content": ""} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": None, **fields}
    return b"data: " + json.dumps({"id": "chatcmpl-1", "choices": [choice]}).encode() + b"\n\n"
