"""Processes of `openk3 serve` and `openk3 route`, and many clients at once that keep what they are told."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from live_server import parse_events

ROOT = Path(__file__).resolve().parent.parent.parent
NEAR = 1e-3  # of log-probability: two tokens so near may change places where a pass has other requests in it


def free_port() -> int:
    """Of this machine; nobody has it now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Process:
    """A command that says where it listens."""

    popen: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)

    def kill(self) -> None:
        """As the kernel does when memory is short."""
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(30)

    def end(self) -> int:
        """SIGTERM, and its exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(60)

    def resident_bytes(self) -> int:
        """Memory."""
        return int(Path(f"/proc/{self.popen.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def command(*words: str, **environment: str) -> Generator[Process]:
    """Start `openk3 WORDS`, wait for its greeting, kill it at the end."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    env.pop("OPENK3_API_KEYS", None)
    popen = subprocess.Popen([sys.executable, "-m", "openk3", *words], env=env, stderr=subprocess.PIPE, text=True)
    process = Process(popen)

    def follow() -> None:
        assert popen.stderr is not None
        process.log += iter(popen.stderr.readline, "")

    try:
        assert popen.stderr is not None
        while not process.url:
            line = popen.stderr.readline()
            assert line, f"openk3 {' '.join(words)} ended: {''.join(process.log)}"
            process.log.append(line)
            found = re.search(r" at (http://127.0.0.1:\d+)/v1$", line)
            process.url = found.group(1) if found else ""
        threading.Thread(target=follow, daemon=True).start()
        yield process
    finally:
        popen.kill()
        popen.wait()


@dataclass
class Told:
    """What a client was told: tokens, how far ahead of the next best each was, and how it ended."""

    tokens: list[str] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)
    end: str = "silence"  # or "whole", an error's code, or a status


def body_of(model: str, prompt: str, num_tokens: int) -> dict[str, Any]:
    """A greedy continuation, with the two most likely tokens of each place."""
    return {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "logprobs": 2, "stream": True}


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any], told: Told) -> None:
    """Follow one stream to its end, whatever that is."""
    text = ""
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                told.end = f"status {response.status_code}"
                return
            async for piece in response.aiter_text():
                text += piece
                whole, cut, text = text.rpartition("\n\n")
                read_events(whole + cut, told)
    except httpx.HTTPError as error:
        told.end = f"cut: {error!r}"


def read_events(text: str, told: Told) -> None:
    """Events that are whole."""
    for event in parse_events(text):
        if event == "[DONE]":
            told.end = "whole" if told.end == "silence" else told.end
        elif "error" in event:
            told.end = event["error"]["code"]
        else:
            for choice in event["choices"]:
                logprobs = choice.get("logprobs") or {"tokens": [], "top_logprobs": []}
                told.tokens += logprobs["tokens"]
                for best in logprobs["top_logprobs"]:
                    first, second = (sorted(best.values(), reverse=True) + [float("-inf")])[:2]
                    told.leads.append(first - second)


def is_right(told: Told, truth: Told) -> bool:
    """Whether the tokens are the truth's, as far as they go, up to a place where two were equally good."""
    for mine, its, lead in zip(told.tokens, truth.tokens, truth.leads):
        if mine != its:
            return lead < NEAR
    return len(told.tokens) == len(truth.tokens) or told.end != "whole"


async def ask_all(url: str, bodies: list[dict[str, Any]], told: list[Told]) -> None:
    """All at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=240, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(ask(client, url, body, one) for body, one in zip(bodies, told)))
