"""DiskStore: entries as files of one folder, as many as its limit allows, across restarts and between processes.

A file appears whole or not at all: it is written under a temporary name and renamed. Nothing is flushed to the disk
for that, since after a power failure a torn file fails its checksum. Names of files are hexadecimal digests. A file's
modification time is that of its last use; the longest unused ones go first when the folder is full.

Several processes may share a folder. Each one counts what it writes itself and looks at the whole folder after every
sixteenth of the limit, so that N of them exceed it by N sixteenths at most.
"""

from __future__ import annotations

import itertools
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from openk3.engine.store import StoreError

LOG = logging.getLogger(__name__)
PAUSE_SECONDS = 30.0  # without writing, after a write has failed
STALE_SECONDS = 3600.0  # after which a temporary file has lost its writer


class _File(NamedTuple):
    used_ns: int
    size: int
    path: str


class DiskStore:
    """A Store in `folder`, which is made if need be, for its owner alone. Raises StoreError if it cannot be used."""

    def __init__(self, folder: str, capacity_bytes: int) -> None:
        self.folder = os.path.abspath(folder)
        self.capacity_bytes = capacity_bytes
        self.num_failed = 0
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._paused_until = 0.0
        _open_folder(self.folder)
        self.used_bytes = self._written = 0
        with self._lock:
            self._look_around()

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Which of these files exist."""
        return [os.path.exists(self.path(name)) for name in names]

    def get(self, name: bytes, out: memoryview) -> bool:
        """Read a file into `out`. Whatever else has its name is no entry, and is removed."""
        try:
            file = os.open(self.path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            info = os.fstat(file)
            whole = stat.S_ISREG(info.st_mode) and info.st_size == len(out) and _fill(file, out)
            with suppress(OSError):  # of a folder that can only be read
                os.utime(file)
        except OSError:  # the device fails
            return False
        finally:
            os.close(file)
        if not whole:
            self.remove([name])
        return whole

    def put(self, name: bytes, entry: memoryview) -> bool:
        """Write a file, unless it is there already, the last write has failed a moment ago, or it can never fit."""
        path = self.path(name)
        with suppress(OSError):
            os.utime(path)
            return True
        with self._lock:
            if len(entry) > self.capacity_bytes or time.monotonic() < self._paused_until:
                return False
            self._make_room(len(entry))
        try:
            self._write(path, entry)
        except OSError as error:
            LOG.warning("%s: not written, no more for %.0f s: %s", self.folder, PAUSE_SECONDS, error)
            with self._lock:
                self.num_failed += 1
                self._paused_until = time.monotonic() + PAUSE_SECONDS
            return False
        with self._lock:
            self.used_bytes += len(entry)
            self._written += len(entry)
        return True

    def remove(self, names: Sequence[bytes]) -> None:
        """Delete files."""
        for name in names:
            with suppress(OSError):
                size = os.stat(self.path(name)).st_size
                os.unlink(self.path(name))
                with self._lock:
                    self.used_bytes -= size

    def close(self) -> None:
        """Nothing is open."""

    def path(self, name: bytes) -> str:
        """Where an entry's file is."""
        return os.path.join(self.folder, name.hex()[:2], name.hex())

    def _write(self, path: str, entry: memoryview) -> None:
        parent, file_name = os.path.split(path)
        os.makedirs(parent, mode=0o700, exist_ok=True)
        temporary = os.path.join(parent, f".{file_name}.{os.getpid()}.{next(self._numbers)}.tmp")
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(file, "wb", buffering=0) as target:
                done = 0
                while done < len(entry):
                    done += target.write(entry[done:])
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _make_room(self, num_bytes: int) -> None:
        if self._written > self.capacity_bytes // 16:
            self._look_around()
        if self.used_bytes + num_bytes > self.capacity_bytes:
            self._look_around(num_bytes)

    def _look_around(self, num_bytes: int = 0) -> None:
        """Count the folder anew, delete what lost its writer, and the longest unused until there is room."""
        files = sorted(self._files())
        self.used_bytes, self._written = sum(file.size for file in files), 0
        if self.used_bytes + num_bytes <= self.capacity_bytes:
            return
        most = self.capacity_bytes - max(num_bytes, self.capacity_bytes // 16)  # not for one entry at a time
        for file in files:
            if self.used_bytes <= most:
                break
            with suppress(FileNotFoundError):  # another process was faster
                try:
                    os.unlink(file.path)
                except PermissionError:  # only to be read
                    continue
            self.used_bytes -= file.size

    def _files(self) -> Iterator[_File]:
        with suppress(OSError), os.scandir(self.folder) as parents:
            for parent in [entry.path for entry in parents if len(entry.name) == 2 and entry.is_dir()]:
                with suppress(OSError), os.scandir(parent) as entries:
                    for entry in entries:
                        yield from _look_at(entry)


def _look_at(entry: os.DirEntry[str]) -> Iterator[_File]:
    with suppress(OSError):
        info = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(info.st_mode):
            return
        if entry.name.endswith(".tmp") and time.time() - info.st_mtime > STALE_SECONDS:
            os.unlink(entry.path)
            return
        yield _File(info.st_mtime_ns, info.st_size, entry.path)


def _open_folder(folder: str) -> None:
    """Prefixes of all users lie there: nobody else may look, and nobody else may put anything in."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        info = os.stat(folder)
    except OSError as error:
        raise StoreError(f"folder: {folder} cannot be used: {error.strerror or error}") from error
    if not stat.S_ISDIR(info.st_mode):
        raise StoreError(f"folder: {folder} is no folder")
    if info.st_uid != os.geteuid():
        raise StoreError(f"folder: {folder} belongs to another user; name a folder of your own")
    if info.st_mode & 0o077:
        raise StoreError(f"folder: {folder} is open to others (mode {info.st_mode & 0o777:o}); chmod 700 it")


def _fill(file: int, out: memoryview) -> bool:
    done = 0
    while done < len(out):
        count = os.readv(file, [out[done:]])
        if not count:
            return False
        done += count
    return True
