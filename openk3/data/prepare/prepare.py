"""prepare(config): read in chunks, sift each in a process of its own, remove duplicates, write shards and a report."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from openk3.config.json_file import read_json
from openk3.config.prepare import DOMAINS, MIB, PrepareConfig
from openk3.data.documents import DataError
from openk3.data.prepare import journal
from openk3.data.prepare.chunk import EXAMPLES
from openk3.data.prepare.duplicates import Duplicates, find_duplicates
from openk3.data.prepare.inputs import Entry, list_inputs, require_outside, require_unchanged
from openk3.data.prepare.items import Fault, Item, Place
from openk3.data.prepare.quality import open_quality, quality_file
from openk3.data.prepare.readers import Reader
from openk3.data.prepare.report import REPORTS, build_report, write_report
from openk3.data.prepare.rules import NAMES
from openk3.data.prepare.shards import plan_shards
from openk3.data.prepare.workers import make_shard, result_of, sift_chunk, worker_pool
from openk3.data.shard import INDEX, vocabulary_digest
from openk3.inputs.tokenizer import Tokenizer
from openk3.runtime.run_folder import write_atomic, write_json

CHUNK_BYTES, CHUNK_ITEMS = 8 * MIB, 1 << 14
TOKEN_SHARD_MIB = 32  # of text, for shards of token ids: they are held in memory as they are made
Progress = Callable[[str, float, str], object]  # (stage, share done, a few words)


class StrictError(DataError):
    """Damaged input, where --strict asks to stop at it."""


def prepare(
    config: PrepareConfig, *, restart: bool = False, progress: Progress = lambda stage, share, note: None
) -> dict[str, Any]:
    """Make `config.out`: DOMAIN/DOMAIN-00000.shard folders, index.json, report.json, report.txt and report.html.

    Goes on where an earlier call was stopped, wherever that was; one that had finished is left as it is. Returns the
    report. Raises DataError for what the user can mend, and OSError where a file cannot be written.
    """
    unknown = [name for name in config.skip_rules if name not in NAMES]
    if unknown:
        raise DataError(f"--skip-rules: no rule {unknown[0]!r}; they are {', '.join(NAMES)}")
    out = Path(os.path.expanduser(config.out))
    entries, faults = list_inputs(config.inputs, str(out))
    plan = journal.make_plan(config, entries, _quality_digest(config.quality))
    if config.tokenizer:  # what is wrong with it is said before the work
        plan["vocabulary"] = vocabulary_digest(Tokenizer.load(config.tokenizer))
    _require_free(out, plan, restart)
    require_outside(config.inputs, out)
    if restart or journal.finished(out) is None or (out / journal.FOLDER).is_dir():
        with journal.work_in(out) as work:  # from here on no other process changes the folder
            if restart:
                _clear(out)
            _require_free(out, plan, restart)
            if journal.finished(out) is None:
                work.open(plan)
                report = _Preparation(config, work, entries, faults, progress).run()
                _deliver(work, plan, report)
            shutil.rmtree(out / journal.FOLDER, ignore_errors=True)
    return read_json(out / REPORTS[0])


def _require_free(out: Path, plan: dict[str, Any], restart: bool) -> None:
    """The folder is new, empty or ours, and not finished with another task. Raises DataError."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; --out names a folder")
    if not out.is_dir() or not os.listdir(out):
        return
    done = journal.finished(out)
    is_other = done is not None and not isinstance(done.get("plan"), dict)
    if is_other or (done is None and not (out / journal.FOLDER).is_dir()):
        raise DataError(f"{out}: holds other files and is left alone; choose an empty or new folder")
    if done is not None and done.get("plan") != plan and not restart:
        raise DataError(f"{out}: holds data prepared otherwise; name another --out, or write over it with --restart")


def _quality_digest(name: str) -> str:
    if open_quality(name) is None:
        return ""
    return hashlib.blake2b(quality_file(name).read_bytes(), digest_size=16).hexdigest()


class _Preparation:
    """The three stages, each of which skips what the journal says is done."""

    def __init__(
        self,
        config: PrepareConfig,
        work: journal.Work,
        entries: Sequence[Entry],
        faults: Sequence[Fault],
        progress: Progress,
    ) -> None:
        self.config, self.work, self.progress = config, work, progress
        self.faults, self.reader = list(faults), Reader(entries, config)
        self.seconds: dict[str, float] = {}
        self.read = self.kept = 0
        self.shown: Counter[str] = Counter()

    def run(self) -> dict[str, Any]:
        """All stages; returns the report."""
        if self.config.strict and any(fault.reason in ("truncated", "damaged") for fault in self.faults):
            raise StrictError(_said(self.faults[0]))
        with worker_pool(self.config, self.work.release) as pool:
            with self._timed("read"):
                self._sift(pool)
            chunks = [self.work.chunks / line["file"] for line in self.work.of("chunk")]
            with self._timed("duplicates"):
                found = self._duplicates(chunks)
            with self._timed("shards"):
                lines = self._write(pool, chunks, found.of < 0)
        self.progress("report", 1.0, "")
        return build_report(
            self.config, self.work, (self.reader.entries, self.faults), (chunks, found), (lines, self.seconds)
        )

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[stage] = round(time.perf_counter() - began, 2)

    def _sift(self, pool: ProcessPoolExecutor) -> None:
        """Chunks that the journal does not have, in order, with a bounded number under way."""
        done = self.work.of("chunk")
        for line in done:
            self.read, self.kept = self.read + line["read"], self.kept + line["kept"]
            self.shown.update({reason: len(examples) for reason, examples in line["examples"].items()})
        if done and done[-1]["is_last"]:
            return
        start = Place(*done[-1]["end"]) if done else Place()
        number = len(done)
        waiting: deque[Future[dict[str, Any]]] = deque()
        for items, end, is_last in chunked(self.reader, start):
            self._check(items)
            path = self.work.chunks / f"{number:06}.safetensors"
            waiting.append(pool.submit(sift_chunk, items, str(path), list(end), is_last))
            number += 1
            if len(waiting) > 2 * self.config.workers:
                self._finish(waiting.popleft())
        while waiting:
            self._finish(waiting.popleft())
        require_unchanged(self.reader.entries)

    def _finish(self, result: Future[dict[str, Any]]) -> None:
        line = result_of(result)
        for reason, examples in line["examples"].items():  # a few of each reason in all
            room = EXAMPLES - self.shown[reason]
            line["examples"][reason] = examples[: max(room, 0)]
            self.shown[reason] += len(examples)
        line["examples"] = {reason: examples for reason, examples in line["examples"].items() if examples}
        self.work.add({"kind": "chunk", **line})
        self.read, self.kept = self.read + line["read"], self.kept + line["kept"]
        share = self.reader.consumed / max(self.reader.total, 1)
        self.progress("read", share, f"{self.read:,} records, {self.kept:,} kept")

    def _check(self, items: Sequence[Item | Fault]) -> None:
        for item in items:
            if self.config.strict and isinstance(item, Fault):
                raise StrictError(_said(item))

    def _duplicates(self, chunks: Sequence[Path]) -> Duplicates:
        path = self.work.path / "duplicates.safetensors"
        done = self.work.of("duplicates")
        if not done or not path.is_file() or journal.digest_of(path) != done[-1].get("digest"):
            scratch = self.work.path / "signatures.bin"
            found = find_duplicates(
                chunks, self.config.similarity, scratch, lambda share: self.progress("duplicates", share, "")
            )
            data = save({"of": found.of, "similarity": found.similarity})
            write_atomic(path, lambda temporary: temporary.write_bytes(data))
            self.work.add({"kind": "duplicates", "digest": journal.digest_of(path)})
        return Duplicates(**load_file(path))

    def _write(self, pool: ProcessPoolExecutor, chunks: Sequence[Path], stays: np.ndarray) -> list[dict[str, Any]]:
        most = min(self.config.shard_mib, TOKEN_SHARD_MIB if self.config.tokenizer else self.config.shard_mib) * MIB
        jobs = plan_shards(chunks, stays, most)
        done = {line["path"]: line["shard"] for line in self.work.of("shard") if self._is_there(line["path"])}
        todo = deque(job for job in jobs if f"{job.domain}/{job.name}" not in done)
        waiting: deque[Future[dict[str, Any]]] = deque()
        mask = np.packbits(stays)
        written = sum(line["bytes"] for line in done.values())
        total = max(sum(job.bytes for job in jobs), 1)
        while todo or waiting:
            while todo and len(waiting) < self.config.workers:
                job = todo.popleft()
                waiting.append(pool.submit(make_shard, job, chunks, mask, self.work.shards, self.config.tokenizer))
            line = result_of(waiting.popleft())
            self.work.add({"kind": "shard", "path": line["path"], "shard": line})
            done[line["path"]] = line
            written += line["bytes"]
            self.progress("shards", written / total, line["path"])
        # In the journal's order of names, so that an index does not tell which shards are of an earlier call.
        return [dict(sorted(done[f"{job.domain}/{job.name}"].items())) for job in jobs]

    def _is_there(self, shard: str) -> bool:
        """Whether a shard lies where it was made, or where an earlier call has put it."""
        return any((folder / shard).is_dir() for folder in (self.work.shards, self.work.out))


def chunked(reader: Reader, start: Place) -> Iterator[tuple[list[Item | Fault], Place, bool]]:
    """(records, the place behind them, whether they are the last) of everything from `start` on."""
    items: list[Item | Fault] = []
    size, end = 0, start
    for item, place in reader.read(start):
        items.append(item)
        size += len(item.payload) if isinstance(item, Item) else 0
        end = place
        if size >= CHUNK_BYTES or len(items) >= CHUNK_ITEMS:
            yield items, end, False
            items, size = [], 0
    yield items, end, True


def _said(fault: Fault) -> str:
    return f"{fault.where}: {fault.reason.replace('_', ' ')}{f' ({fault.detail})' if fault.detail else ''}"


def _deliver(work: journal.Work, plan: dict[str, Any], report: dict[str, Any]) -> None:
    """Put the finished shards into the folder, the index last: without it the folder is not finished."""
    for domain in report["domains"]:
        source = work.shards / domain
        if source.is_dir():  # else a call that was stopped here has done it
            os.replace(source, work.out / domain)
    write_report(work.out, report)
    index = {"plan": plan, **{name: report[name] for name in ("documents", "bytes", "domains", "shards")}}
    write_json(work.out / INDEX, index)


def _clear(out: Path) -> None:
    """Remove what an earlier preparation wrote, the index first; the work folder stays, for its lock is held."""
    (out / INDEX).unlink(missing_ok=True)
    for folder in (out / name for name in DOMAINS):
        if folder.is_dir():
            shutil.rmtree(folder)
    for name in REPORTS:
        (out / name).unlink(missing_ok=True)
    for path in (out / journal.FOLDER).iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
