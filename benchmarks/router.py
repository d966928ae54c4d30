"""What `openk3 route` adds to a call: time to the first and last byte, calls a second, and its own CPU time."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from openk3.commands.conditions import conditions  # noqa: E402
from openk3.runtime.run_folder import write_json  # noqa: E402

PATH = "/v1/chat/completions"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"word"},"finish_reason":null}]}\n\n'


@dataclass
class Row:
    """One kind of call, sent straight to the replica and through the router."""

    work: str
    clients: int
    body_bytes: int
    num_events: int
    calls: int
    direct_ms_p50: float
    direct_ms_p99: float
    routed_ms_p50: float
    routed_ms_p99: float
    direct_calls_per_second: float
    routed_calls_per_second: float
    router_cpu_ms: float  # of a call


async def replica(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers at once, as many events as the body asks for; keeps its connections."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            size = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(size.group(1))) if size else b""
            if head.startswith(b"GET"):
                writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n{"status": "ok"}')
            else:
                count = re.search(rb'"max_tokens": (\d+)', body)
                piece = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
                writer.write(HEAD)
                for _ in range(int(count.group(1)) if count else 1):
                    writer.write(piece)
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve() -> None:
    """Until killed."""
    server = await asyncio.start_server(replica, "127.0.0.1", 0, limit=2**26)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> float:
    """Seconds of one call on a kept connection."""
    began = time.perf_counter()
    head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(f"{head}\r\n\r\n".encode() + body)
    await writer.drain()
    status = await reader.readuntil(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 200"), status
    await reader.readuntil(b"\r\n0\r\n\r\n")
    return time.perf_counter() - began


async def measure(port: int, clients: int, calls: int, body: bytes) -> tuple[list[float], float]:
    """(seconds of each call, calls a second)."""
    seconds: list[float] = []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**26)
        for _ in range(calls // clients):
            seconds.append(await call(reader, writer, body))
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return sorted(seconds), len(seconds) / (time.perf_counter() - began)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def row(work: str, ports: tuple[int, int], pid: int, *, clients: int, calls: int, size: int, events: int) -> Row:
    """Direct first, then routed."""
    content = "word " * (size // 5)
    message = {"messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": events}
    body = json.dumps(message).encode()
    asyncio.run(measure(ports[1], clients, clients * 4, body))
    direct, direct_rate = asyncio.run(measure(ports[0], clients, calls, body))
    before = cpu_seconds(pid)
    routed, routed_rate = asyncio.run(measure(ports[1], clients, calls, body))
    spent = (cpu_seconds(pid) - before) / len(routed) * 1000

    def at(values: list[float], share: float) -> float:
        return round(values[min(len(values) - 1, int(share * len(values)))] * 1000, 3)

    return Row(
        *(work, clients, len(body), events, len(routed)),
        *(at(direct, 0.5), at(direct, 0.99), at(routed, 0.5), at(routed, 0.99)),
        *(round(direct_rate, 1), round(routed_rate, 1), round(spent, 3)),
    )


def main() -> None:
    """Print the rows; write them with --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--serve", action="store_true", help="be the replica")
    flags = parser.parse_args()
    if flags.serve:
        asyncio.run(serve())
        return
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    own = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    assert own.stdout is not None
    port = int(own.stdout.readline())
    words = [sys.executable, "-m", "openk3", "route", "--port", "0", "--replicas", f"http://127.0.0.1:{port}"]
    router = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert router.stderr is not None
        found = re.search(r":(\d+)/v1", router.stderr.readline())
        assert found
        subprocess.Popen(["cat"], stdin=router.stderr, stdout=subprocess.DEVNULL)
        ports = port, int(found.group(1))
        time.sleep(3)
        rows = [
            row("one short call at a time", ports, router.pid, clients=1, calls=flags.calls, size=1000, events=1),
            row("32 short calls at a time", ports, router.pid, clients=32, calls=flags.calls * 2, size=1000, events=1),
            row("200 events", ports, router.pid, clients=8, calls=flags.calls // 5, size=1000, events=200),
            row("400K tokens", ports, router.pid, clients=1, calls=flags.calls // 10, size=1_600_000, events=1),
        ]
    finally:
        router.kill()
        own.kill()
    for one in rows:
        print(one)
    if flags.out:
        write_json(flags.out, conditions("router") | {"rows": [asdict(one) for one in rows]})


if __name__ == "__main__":
    main()
