"""The work folder: a plan that names the task, a journal of what is done, and files that the journal vouches for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openk3.config.json_file import JsonError, parse_json, read_json
from openk3.config.prepare import PrepareConfig
from openk3.data.documents import DataError
from openk3.data.prepare.inputs import Entry
from openk3.data.shard import INDEX
from openk3.runtime.lock import try_lock
from openk3.runtime.run_folder import write_json

VERSION = 1  # of rules, signatures and formats: a task begun by another one is not gone on with
FOLDER = ".work"


class Work:
    """The folder of one task, DIR/.work, while it is being done; `lines` is what its journal says."""

    def __init__(self, out: Path) -> None:
        self.out, self.path = out, out / FOLDER
        self.chunks, self.shards = self.path / "chunks", self.path / "shards"
        self._journal, self._plan = self.path / "journal.jsonl", self.path / "plan.json"
        self.lines: list[dict[str, Any]] = []
        self.release: Callable[[], None] = lambda: None  # the lock

    def open(self, plan: Mapping[str, Any]) -> None:
        """Begin, or go on with what was begun. Raises DataError if that is another task, saying how the two differ."""
        if self._plan.is_file():
            _require_same(_read_plan(self._plan), plan, self.out)
        elif self._journal.exists():
            raise DataError(f"{self._plan}: missing; begin again with --restart")
        else:
            write_json(self._plan, plan)
        for folder in (self.chunks, self.shards):
            folder.mkdir(exist_ok=True)
        self.lines = self._read()
        for line in self.of("chunk"):
            self._verify(line)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The journal's lines of a kind, in order."""
        return [line for line in self.lines if line["kind"] == kind]

    def add(self, line: dict[str, Any]) -> None:
        """Write one line; it counts once all of it is on disk."""
        body = json.dumps(line, ensure_ascii=True, sort_keys=True)
        with self._journal.open("a", encoding="ascii") as file:
            try:
                file.write(f"{_seal(body)} {body}\n")
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._journal)) from error
        self.lines.append(line)

    def _read(self) -> list[dict[str, Any]]:
        """The lines that are whole; a last one that a crash cut off is taken away."""
        if not self._journal.is_file():
            return []
        data = self._journal.read_bytes()
        lines, good = [], 0
        for raw in data.split(b"\n")[:-1]:
            seal, _, body = raw.partition(b" ")
            if seal.decode("ascii", "replace") != _seal(body.decode("ascii", "replace")):
                break
            lines.append(parse_json(body))
            good += len(raw) + 1
        if b"\n" in data[good:]:  # not the last line
            raise DataError(f"{self._journal}: damaged; begin again with --restart")
        if good < len(data):
            os.truncate(self._journal, good)
        return lines

    def _verify(self, line: Mapping[str, Any]) -> None:
        """A chunk's file is what the journal says. Raises DataError."""
        path = self.chunks / line["file"]
        if not path.is_file() or digest_of(path) != line["digest"]:
            raise DataError(f"{path}: missing or damaged; begin again with --restart")


@contextmanager
def work_in(out: Path) -> Iterator[Work]:
    """The work folder below `out`, for this process alone. Raises DataError if another one has it."""
    work = Work(out)
    work.path.mkdir(parents=True, exist_ok=True)
    release = try_lock(work.path)
    if release is None:
        raise DataError(f"{out}: another process is preparing data there; wait for it, or name another --out")
    work.release = release
    try:
        yield work
    finally:
        release()


def make_plan(config: PrepareConfig, entries: Sequence[Entry], quality: str) -> dict[str, Any]:
    """What names the task: the settings that decide the result, and every input file with size and time of change.

    `quality` is the digest of the quality model.
    """
    settings = {name: value for name, value in asdict(config).items() if name not in ("out", "workers", "strict")}
    digest = hashlib.blake2b(digest_size=16)
    for entry in entries:
        digest.update(repr((entry.label, entry.size, entry.changed, entry.domain)).encode())
    plan = {"version": VERSION, "settings": settings, "files": digest.hexdigest(), "quality_digest": quality}
    return json.loads(json.dumps(plan))


def _read_plan(path: Path) -> Any:
    try:
        return read_json(path)
    except JsonError as error:
        raise DataError(f"{error}; begin again with --restart") from None


def _require_same(old: Any, new: Mapping[str, Any], out: Path) -> None:
    if old == new:
        return
    before = old.get("settings", {}) if isinstance(old, dict) else {}
    changed = [name for name, value in new["settings"].items() if before.get(name) != value]
    what = f"--{changed[0].replace('_', '-')}" if changed else "state of the input files"
    if isinstance(old, dict) and not changed:
        parts = {"vocabulary": "state of the --tokenizer", "quality_digest": "state of the --quality model"}
        what = next((said for name, said in parts.items() if old.get(name) != new.get(name)), what)
    what = "version of openk3" if isinstance(old, dict) and old.get("version") != new["version"] else what
    raise DataError(f"{out}: begun with another {what}; put it back to go on, or begin again with --restart")


def finished(out: Path) -> dict[str, Any] | None:
    """The index of a finished preparation, if there is one. Raises DataError if it cannot be read."""
    if not (out / INDEX).is_file():
        return None
    try:
        index = read_json(out / INDEX)
    except JsonError as error:
        raise DataError(str(error)) from None
    return index if isinstance(index, dict) else {}


def _seal(body: str) -> str:
    return hashlib.blake2b(body.encode(), digest_size=8).hexdigest()


def digest_of(path: Path) -> str:
    """Names what is in a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
