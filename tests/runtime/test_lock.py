"""Locks: one holder at a time, in this process or another, and none left after a kill."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openk3.runtime.lock import try_lock


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_one_holder_at_a_time(kind: str, tmp_path: Path) -> None:
    """The second is refused, also in the same process, until the first lets go."""
    path = tmp_path
    if kind == "file":
        path = tmp_path / "a"
        path.write_text("x")
    release = try_lock(path)
    assert release is not None and try_lock(path) is None
    release()
    again = try_lock(path)
    assert again is not None
    again()
    with pytest.raises(FileNotFoundError):
        try_lock(tmp_path / "missing")


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    """The lock is the process's own: SIGKILL ends it."""
    code = (
        "import sys, time; from pathlib import Path; from openk3.runtime.lock import try_lock;"
        "release = try_lock(Path(sys.argv[1])); print(release is not None, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=environment, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "True\n"
        assert try_lock(tmp_path) is None
        other.send_signal(signal.SIGKILL)
        other.wait()
    release = try_lock(tmp_path)
    assert release is not None
    release()


def test_a_file_system_without_locks_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then everyone may write, as without this module; any other error is raised."""

    def no_locks(handle: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert try_lock(tmp_path) is not None

    def broken(handle: int, kind: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match="Input/output"):
        try_lock(tmp_path)
