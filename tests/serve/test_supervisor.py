"""What systemd is told, over a real socket: ready, alive, stopping; and nothing where nobody listens."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import Live

from openk3.serve.server import DrainingServer
from openk3.serve.supervisor import Supervisor


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A supervisor's socket; its path is short enough for one."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(Path(folder) / "notify"))
        ear.settimeout(30)
        yield ear


def heard(ear: socket.socket) -> list[str]:
    """All messages that have been sent."""
    ear.setblocking(False)
    messages = []
    while True:
        try:
            messages.append(ear.recv(4096).decode())
        except BlockingIOError:
            return messages


def test_ready_is_told_once_and_beats_at_a_third_of_the_patience(listener: socket.socket) -> None:
    """The clock is the test's."""
    supervisor = Supervisor({"NOTIFY_SOCKET": listener.getsockname(), "WATCHDOG_USEC": "60000000"})
    supervisor.ready()
    supervisor.ready()
    for now in (5.0, 24.9, 25.0, 30.0, 45.1):
        supervisor.beat(now)
    supervisor.stopping("3 calls")
    assert heard(listener) == [
        "READY=1\nSTATUS=taking calls",
        *["WATCHDOG=1"] * 3,
        "STOPPING=1\nSTATUS=3 calls",
    ]


def test_an_abstract_socket_is_found() -> None:
    """An @ stands for the zero byte."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(f"\0openk3-test-{os.getpid()}")
        Supervisor({"NOTIFY_SOCKET": f"@openk3-test-{os.getpid()}"}).ready()
        assert heard(ear) == ["READY=1\nSTATUS=taking calls"]


def test_a_watchdog_of_another_process_is_not_ours(listener: socket.socket) -> None:
    """WATCHDOG_PID names whom it is for; without WATCHDOG_USEC nobody waits for beats."""
    address = listener.getsockname()
    other = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000", "WATCHDOG_PID": str(os.getpid() + 1)}
    Supervisor(other).beat()
    Supervisor({"NOTIFY_SOCKET": address}).beat()
    assert heard(listener) == []
    Supervisor(other | {"WATCHDOG_PID": str(os.getpid())}).beat()
    assert heard(listener) == ["WATCHDOG=1"]


def test_nobody_who_listens_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is sent without a socket; one that is gone is logged."""
    Supervisor({}).ready()
    assert not caplog.records
    Supervisor({"NOTIFY_SOCKET": "/tmp/openk3-no-such-socket"}).ready()
    assert "cannot be told" in caplog.text


def test_a_server_tells_that_it_is_ready_and_well_until_its_engine_is_not(
    live: Live, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A beat at every tick that is due, none while the engine does nothing but fail, and STOPPING when it drains."""
    environment = {"NOTIFY_SOCKET": listener.getsockname(), "WATCHDOG_USEC": "0"}
    server = DrainingServer(live.server.config.app, live.service, Supervisor(environment))
    asyncio.run(server.on_tick(0))
    asyncio.run(server.on_tick(1))
    monkeypatch.setattr(live.service.thread.health, "_failed_passes", 5)
    asyncio.run(server.on_tick(2))
    monkeypatch.undo()
    assert heard(listener) == ["READY=1\nSTATUS=taking calls", "WATCHDOG=1", "WATCHDOG=1"]
    server.drain()
    live.service.gate.is_draining = False
    assert heard(listener) == ["STOPPING=1\nSTATUS=0 calls have up to 60 s to end"]


def test_a_supervisor_that_reads_nothing_holds_nobody_up(
    listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    """Its socket fills; the server goes on, and says so in its log. A patience that is no number is none."""
    supervisor = Supervisor({"NOTIFY_SOCKET": str(listener.getsockname()), "WATCHDOG_USEC": "²"})
    while not caplog.records:
        supervisor.stopping("x" * 4000)
    supervisor.beat(0.0)
    assert "cannot be told" in caplog.text and "WATCHDOG" not in caplog.text
