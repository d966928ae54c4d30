"""DiskStore: whole files or none, whoever shares the folder, whatever the disk and the process do meanwhile."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from openk3.engine import disk_store
from openk3.engine.disk_store import DiskStore
from openk3.engine.store import StoreError

ROOT = Path(__file__).resolve().parent.parent.parent


def named(number: int, size: int = 1000) -> tuple[bytes, memoryview]:
    """A name, and the bytes that belong to it."""
    name = blake2b(str(number).encode(), digest_size=32).digest()
    return name, memoryview((name * (size // 32 + 1))[:size])


def get(store: DiskStore, name: bytes, size: int = 1000) -> bytes | None:
    """What the store gives."""
    out = bytearray(size)
    return bytes(out) if store.get(name, memoryview(out)) else None


def fill(store: DiskStore, *numbers: int) -> list[bool]:
    """Put entries; each one is used later than those before it."""
    done = []
    for number in numbers:
        done.append(store.put(*named(number)))
        if done[-1]:
            os.utime(store.path(named(number)[0]), ns=(0, 10**18 + number))
    return done


def there(store: DiskStore, *numbers: int) -> list[int]:
    """Those that are there, with the right bytes."""
    found = [number for number in numbers if get(store, named(number)[0]) is not None]
    for number in found:
        assert get(store, named(number)[0]) == bytes(named(number)[1])
    assert store.has([named(number)[0] for number in numbers]) == [number in found for number in numbers]
    return found


def test_what_was_put_is_got_also_after_a_restart(tmp_path: Path) -> None:
    """Owner's eyes only, names without meaning, nothing else in the folder."""
    folder = tmp_path / "tier"
    store = DiskStore(str(folder), 10_000)
    assert fill(store, 1, 2, 3) == [True] * 3 and there(store, 1, 2, 3, 4) == [1, 2, 3]
    again = DiskStore(str(folder), 10_000)
    assert there(again, 1, 2, 3, 4) == [1, 2, 3] and again.used_bytes == 3000
    assert folder.stat().st_mode & 0o777 == 0o700
    for path in folder.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
        assert set(path.name) <= set("0123456789abcdef")
    again.remove([named(2)[0], named(9)[0]])
    assert there(again, 1, 2, 3) == [1, 3] and again.used_bytes == 2000 and again.put(*named(1))
    assert again.used_bytes == 2000, "what is there is not written twice"


def test_the_longest_unused_make_room(tmp_path: Path) -> None:
    """By use, not by age; a larger entry than the limit is refused; a smaller limit holds from the start."""
    store = DiskStore(str(tmp_path / "tier"), 4000)
    fill(store, 1, 2, 3, 4)
    assert get(store, named(1)[0]) is not None  # used now
    fill(store, 5)
    assert there(store, 1, 2, 3, 4, 5) == [1, 3, 4, 5] and store.used_bytes == 4000
    assert not store.put(*named(6, 4001)) and there(store, 1, 3, 4, 5) == [1, 3, 4, 5]
    smaller = DiskStore(str(tmp_path / "tier"), 2000)
    assert smaller.used_bytes <= 2000 and len(there(smaller, 1, 3, 4, 5)) == 1


def test_damage_is_a_miss(tmp_path: Path) -> None:
    """Cut short, too long, a folder or a link in its place; a wrong size is removed."""
    store = DiskStore(str(tmp_path / "tier"), 10_000)
    fill(store, 1, 2, 3)
    short, long, link = (Path(store.path(named(number)[0])) for number in (1, 2, 3))
    short.write_bytes(short.read_bytes()[:999])
    long.write_bytes(long.read_bytes() + b"\0")
    elsewhere = tmp_path / "elsewhere"
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    assert [get(store, named(number)[0]) for number in (1, 2, 3)] == [None] * 3
    assert not short.exists() and not long.exists() and elsewhere.exists()
    os.mkdir(short)
    os.mkfifo(long)
    assert get(store, named(1)[0]) is None and short.exists()
    assert get(store, named(2)[0]) is None and not long.exists()


def test_folders_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says why: open to others, no folder, somebody else's, not to be made."""
    tmp_path.chmod(0o755)
    with pytest.raises(StoreError, match=r"folder: .* is open to others \(mode 755\); chmod 700 it"):
        DiskStore(str(tmp_path), 1000)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="folder: .* cannot be used: File exists"):
        DiskStore(str(tmp_path / "file"), 1000)
    with pytest.raises(StoreError, match="folder: .* cannot be used: Not a directory"):
        DiskStore(str(tmp_path / "file" / "tier"), 1000)
    (tmp_path / "own").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match="belongs to another user"):
        DiskStore(str(tmp_path / "own"), 1000)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device itself says that it is full: nothing is left behind, nothing is tried for a while, then again."""
    store = DiskStore(str(tmp_path / "tier"), 10_000)
    fill(store, 1)
    real = os.open

    def full(path: str, flags: int, *mode: int, **options: Any) -> int:
        file = real(path, flags, *mode, **options)
        if flags & os.O_CREAT:
            os.dup2(device := real("/dev/full", os.O_WRONLY), file)
            os.close(device)
        return file

    clock = [0.0]
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock[0])
        patch.setattr(os, "open", full)
        assert not store.put(*named(2)) and store.num_failed == 1
        patch.setattr(os, "open", real)
        assert not store.put(*named(2)), "a moment later"
        clock[0] = disk_store.PAUSE_SECONDS + 1
        assert store.put(*named(2))
    assert there(store, 1, 2) == [1, 2] and not list(tmp_path.rglob("*.tmp")) and store.used_bytes == 2000


@pytest.mark.parametrize("call", ["open", "replace", "makedirs"])
def test_a_folder_that_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """What is there is got; putting, touching, removing and making room fail quietly."""
    store = DiskStore(str(tmp_path / "tier"), 2000)
    fill(store, 1, 2)
    real = os.open

    def refuse(path: str, *arguments: Any, **options: Any) -> Any:
        if call == "open" and not arguments[0] & os.O_CREAT:
            return real(path, *arguments, **options)
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        patch.setattr(os, "utime", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only file system")))
        patch.setattr(os, "unlink", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no")))
        assert not store.put(*named(3)) and get(store, named(1)[0]) == bytes(named(1)[1])
        store.remove([named(1)[0]])
    assert there(store, 1, 2, 3) == [1, 2]


WRITER = """
import sys
sys.path[:0] = {paths!r}
from test_disk_store import fill, named
from openk3.engine.disk_store import DiskStore
store = DiskStore({folder!r}, {limit})
print("begun", flush=True)
number = {first}
while number < {last}:
    assert store.put(*named(number, {size}))
    number += 1
"""


def writer(folder: Path, first: int, last: int, size: int, limit: int) -> subprocess.Popen[str]:
    """Another process that fills the folder."""
    paths = [str(ROOT), str(ROOT / "tests/engine")]
    code = WRITER.format(paths=paths, folder=str(folder), limit=limit, first=first, last=last, size=size)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


def test_killed_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """SIGKILL at any moment: every file that has its name is whole, and what was half done is cleaned up later."""
    size, torn, turn = 4_000_000, 0, 0
    while turn < 6 or (not torn and turn < 100):
        process = writer(tmp_path / "tier", turn * 1000, turn * 1000 + 1000, size, 2**40)
        time.sleep(0.01 + 0.013 * (turn % 6))
        process.send_signal(signal.SIGKILL)
        process.wait()
        torn += len(list(tmp_path.rglob("*.tmp")))
        store = DiskStore(str(tmp_path / "tier"), 2**40)
        for path in [path for path in (tmp_path / "tier").rglob("*") if path.is_file() and path.suffix != ".tmp"]:
            name = bytes.fromhex(path.name)
            assert get(store, name, size) == (name * (size // 32 + 1))[:size]
            path.unlink()
        turn += 1
    assert torn, "no write was interrupted: the test shows nothing"
    for path in tmp_path.rglob("*.tmp"):
        os.utime(path, (0, 0))
    store = DiskStore(str(tmp_path / "tier"), 2**40)
    assert not list(tmp_path.rglob("*.tmp")) and store.used_bytes == 0


def test_two_processes_and_one_folder(tmp_path: Path) -> None:
    """Both write, one over the other's entries too; a third reads what it finds; the limit holds for all together."""
    folder, size, limit = tmp_path / "tier", 20_000, 1_000_000
    processes = [writer(folder, first, first + 300, size, limit) for first in (0, 150)]
    store, found = DiskStore(str(folder), limit), 0
    while any(process.poll() is None for process in processes):
        for number in range(0, 450, 7):
            got = get(store, named(number)[0], size)
            assert got in (None, bytes(named(number, size)[1]))
            found += got is not None
    assert [process.wait() for process in processes] == [0, 0] and found
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert total <= limit * (1 + 2 / 16) and not list(folder.rglob("*.tmp"))
    assert DiskStore(str(folder), limit).used_bytes <= limit
