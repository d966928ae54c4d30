"""`openk3 route`: what it refuses, how flags become limits, and a whole life from the greeting to SIGTERM."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from openk3.cli import main
from openk3.commands import flags
from openk3.commands.route import fleet_config, proxy_config, raise_file_limit, replica_list, server_config
from openk3.config.fleet import CLASSES

ROOT = Path(__file__).resolve().parent.parent.parent


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command line is refused with."""
    assert main(["route", "--port", "0", *arguments]) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists, keys, numbers; a router that the network reaches needs keys."""
    monkeypatch.delenv("OPENK3_API_KEYS", raising=False)
    one = ("--replicas", "http://127.0.0.1:1")
    bad = tmp_path / "fleet.txt"
    bad.write_text("http://a:1\nhttp://a:1\n")
    assert "give one of --replicas URL" in refused(capsys)
    assert "give one of --replicas URL" in refused(capsys, *one, "--ray", "local")
    assert "--replicas: a replica is http://HOST:PORT, got '127.0.0.1:1'" in refused(
        capsys, "--replicas", "127.0.0.1:1"
    )
    assert f"{bad}:2: http://a:1 is there twice" in refused(capsys, "--replicas-file", str(bad))
    assert "No such file" in refused(capsys, "--replicas-file", str(tmp_path / "none"))
    assert "RUN goes with --ray" in refused(capsys, str(tmp_path), *one)
    assert "OPENK3_API_KEYS, or --open" in refused(capsys, *one, "--host", "0.0.0.0")
    assert "most_tokens must rise" in refused(capsys, *one, "--class-tokens", "9", "9", "10")
    assert "silence_seconds: must be positive" in refused(capsys, *one, "--silence-seconds", "0")
    assert "--num-replicas: at least 1" in refused(capsys, "--ray", "local", "--num-replicas", "0")


def test_flags_become_limits() -> None:
    """The defaults are the configuration's own."""
    plain = flags.parse("route", ["--replicas", "http://a:1/", "http://a:1"])
    assert fleet_config(plain).classes == CLASSES
    with replica_list(plain) as listed:
        assert [one.url for one in listed.changed() or []] == ["http://a:1"] and listed.changed() is None
    words = [
        "--class-tokens",
        "1",
        "2",
        "3",
        "--class-budgets",
        "4",
        "5",
        "6",
        "7",
        "--class-seconds",
        "8",
        "9",
        "10",
        "11",
    ]
    given = flags.parse("route", [*words, "--patience-seconds", "3", "--max-body-mib", "2", "--answer-seconds", "5"])
    rows = [(one.most_tokens, one.replica_tokens, one.queue_seconds) for one in fleet_config(given).classes]
    assert rows == [(1, 4, 8), (2, 5, 9), (3, 6, 10), (0, 7, 11)] and fleet_config(given).patience_seconds == 3
    assert server_config(given).max_body_bytes == 2 * 2**20 and proxy_config(given).answer_seconds == 5


def test_files_are_allowed_as_calls_need_them(caplog: pytest.LogCaptureFixture) -> None:
    """Up to what the system allows; more is only asked for, and said."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1100, before[1]))
        raise_file_limit(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1224, before[1])
        raise_file_limit(50)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1224, before[1])
        raise_file_limit(2**40)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1] and "open files" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_router_lives_and_drains(tmp_path: Path) -> None:
    """It starts without any replica, needs no torch, asks for its keys, and ends with 0."""
    file = tmp_path / "fleet.txt"
    file.write_text("http://127.0.0.1:9\n")
    code = "import sys; from openk3.cli import main; end = main(sys.argv[1:]); sys.exit('torch' in sys.modules or end)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENK3_API_KEYS": "ann:sk-0123456789abcdef"}
    words = ["route", "--port", "0", "--replicas-file", str(file)]
    process = subprocess.Popen([sys.executable, "-c", code, *words], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.match(r"router at (http://127.0.0.1:\d+)/v1$", line)
        assert found, line + process.stderr.read()
        assert "1 API key;" in process.stderr.readline()
        url, headers = found.group(1), {"authorization": "Bearer sk-0123456789abcdef"}
        assert httpx.get(f"{url}/health", timeout=60).json() == {"status": "no_replica"}
        assert httpx.get(f"{url}/metrics", timeout=60).status_code == 401
        assert "openk3_router_replica_state" in httpx.get(f"{url}/metrics", headers=headers, timeout=60).text
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        log = process.stderr.read()
        assert "sk-0123" not in log and "Traceback" not in log
    finally:
        process.kill()
        process.wait()
