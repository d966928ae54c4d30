"""`openk3 route --ray`: two servers as actors of a real cluster on this machine, one of them killed and replaced."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fleet_processes import ROOT, Process, command
from live_fleet import wait_for

SERVED = re.compile(r"(http://[\d.]+:\d+) is served by process (\d+)")


def served(router: Process) -> dict[str, int]:
    """Addresses and processes of all servers that were ever started, by the router's log."""
    return {url: int(pid) for url, pid in SERVED.findall("".join(router.log))}


def healthy(router: Process) -> set[str]:
    """Addresses that the router sends calls to."""
    text = httpx.get(f"{router.url}/metrics", timeout=60).text
    return set(re.findall(r'replica_state\{replica="(\S+)",state="healthy"\} 1', text))


def family(pid: int) -> set[int]:
    """A process and all below it."""
    found = {pid}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it has just ended
            continue
        if int(text.rpartition(")")[2].split()[1]) in found:
            found |= family(int(stat.parent.name)) if int(stat.parent.name) not in found else set()
    return found


def listening(pids: set[int]) -> list[str]:
    """Addresses on which these processes listen, as the kernel writes them."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_servers_are_actors(tiny_run: Path) -> None:
    """They answer, nothing listens beyond the loopback interface, a killed one is replaced, nothing is left behind."""
    words = ("route", str(tiny_run), "--ray", "local", "--num-replicas", "2", "--port", "0")
    body = {"model": tiny_run.name, "prompt": "def f(", "max_tokens": 5, "temperature": 0}
    with command(*words, "--serve-flags=--cache-gib 0.05") as router:
        wait_for(lambda: len(healthy(router)) == 2, 60)
        first = served(router)
        assert set(first) == healthy(router)
        before = httpx.post(f"{router.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        processes = family(router.popen.pid)
        assert set(first.values()) <= processes and len(processes) > 4
        addresses = listening(processes)
        assert len(addresses) > 4  # the router, both servers, Ray's own
        local = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
        assert set(addresses) <= set(local), addresses

        lost = next(iter(first))
        os.kill(first[lost], signal.SIGKILL)
        wait_for(lambda: len(served(router)) == 3 and len(healthy(router)) == 2, 120)
        assert lost not in healthy(router)
        for number in range(8):  # of both
            again = {**body, "user": str(number)}
            response = httpx.post(f"{router.url}/v1/completions", json=again, timeout=60)
            assert response.json()["choices"][0]["text"] == before
        assert router.end() == 0
        for pid in {*processes, *served(router).values()}:
            wait_for(lambda one=pid: not Path(f"/proc/{one}/exe").exists(), 60)
        assert "Traceback" not in "".join(router.log), router.log


@pytest.mark.slow
def test_a_server_that_cannot_start_ends_the_command(tiny_run: Path) -> None:
    """In one line, with the server's own reason."""
    words = ["route", str(tiny_run), "--ray", "local", "--port", "0", "--serve-flags=--cache-gib -1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "openk3", *words], env=env, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 2 and "--cache-gib: must be positive" in result.stderr.splitlines()[-1], result.stderr
    assert "Traceback" not in result.stderr
