"""Connections that bring no request are ended in time; those that do are not; a full machine is logged once."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import httpx
import pytest
from live_server import Live
from waiting import wait_for

from openk3.serve.idle import QUIET_SECONDS, IdleConnections, quiet_accept


class Wire:
    """A connection and its transport."""

    def __init__(self) -> None:
        self.cycle: Any = None
        self.transport, self.is_open = self, True

    def close(self) -> None:
        """As a transport does."""
        self.is_open = False


class Cycle:
    """A request."""

    def __init__(self, *, is_over: bool) -> None:
        self.response_complete = is_over


def test_only_connections_without_requests_are_ended() -> None:
    """Silent from the beginning, or behind an answer; neither one that works nor one that is used again."""
    idle, wires = IdleConnections(30.0), [Wire() for _ in range(5)]
    silent, working, done, busy, late = wires
    working.cycle, done.cycle = Cycle(is_over=False), Cycle(is_over=True)
    for second in range(30):
        busy.cycle = Cycle(is_over=True)  # one short call a second
        idle.sweep(wires[: 5 if second >= 10 else 4], float(second))
    assert all(one.is_open for one in wires)
    idle.sweep(wires, 30.0)
    assert [one.is_open for one in wires] == [False, True, False, True, True]
    idle.sweep([working, late], 39.0)
    assert late.is_open
    idle.sweep([working, late], 40.0)
    assert working.is_open and not late.is_open


def test_a_live_server_ends_half_a_head(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a connection without a byte."""
    monkeypatch.setattr(live.server, "_idle", IdleConnections(0.0))
    for data in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost: loc"):
        with socket.create_connection(("127.0.0.1", live.server.port), timeout=60) as connection:
            connection.sendall(data)
            assert connection.recv(100) == b""
    wait_for(lambda: not live.server.server_state.connections)
    monkeypatch.undo()
    assert httpx.get(f"{live.url}/health", timeout=60).status_code == 200


def test_a_full_machine_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """Everything else as ever."""
    now = 100.0
    handle, loop = quiet_accept(lambda: now), asyncio.new_event_loop()
    full = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")}
    try:
        with caplog.at_level(logging.ERROR):
            for _ in range(1000):
                handle(loop, full)
            assert len(caplog.records) == 1 and "Too many open files" in caplog.text
            now += QUIET_SECONDS
            handle(loop, full)
            handle(loop, {"message": "something else"})
            handle(loop, {"message": "something else"})
        assert [one.name for one in caplog.records][1:] == ["openk3.serve.idle", "asyncio", "asyncio"]
    finally:
        loop.close()
