"""Worker processes: each sifts whole chunks and writes whole shards, and ends with the process that reads."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from openk3.config.prepare import PrepareConfig
from openk3.data.documents import DataError
from openk3.data.prepare.chunk import Sieve, write_chunk
from openk3.data.prepare.duplicates import read_arrays
from openk3.data.prepare.items import Fault, Item
from openk3.data.prepare.shards import Job, write_job

_PR_SET_PDEATHSIG = 1
_sieve: Sieve | None = None  # of this worker


@contextmanager
def worker_pool(config: PrepareConfig, release: Callable[[], None]) -> Iterator[ProcessPoolExecutor]:
    """Processes that are there at once, forked before anything starts a thread; at the end they are waited for.

    `release` gives up what a worker inherits of the task's lock.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    pool = ProcessPoolExecutor(config.workers, multiprocessing.get_context("fork"), _begin, (config, release))
    try:
        pool.submit(int).result()
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(config: PrepareConfig, release: Callable[[], None]) -> None:
    """A worker's start: Ctrl-C is for the process that reads, which takes its workers along whatever ends it."""
    global _sieve
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    release()
    _sieve = Sieve(config)


def result_of(future: Future[dict[str, Any]]) -> dict[str, Any]:
    """What a worker returned. Raises what it raised, and DataError if it was killed."""
    try:
        return future.result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process was ended from outside, perhaps for want of memory; run the same command again,"
            " with fewer --workers if it helps: it goes on where it stopped"
        ) from None


def sift_chunk(items: list[Item | Fault], path: str, end: list[int], is_last: bool) -> dict[str, Any]:
    """In a worker: sift, write the chunk's file; returns the journal's line."""
    assert _sieve is not None
    outcome = _sieve.sift(items)
    digest = write_chunk(Path(path), outcome.kept, _sieve.config.num_hashes)
    return {
        "file": Path(path).name,
        "digest": digest,
        "end": end,
        "is_last": is_last,
        "read": outcome.read,
        "bytes_read": outcome.bytes_read,
        "kept": len(outcome.kept),
        "drops": dict(outcome.drops),
        "faults": dict(outcome.faults),
        "notes": dict(outcome.notes),
        "examples": outcome.examples,
    }


def make_shard(job: Job, chunks: Sequence[Path], mask: np.ndarray, folder: Path, tokenizer: str) -> dict[str, Any]:
    """In a worker: write one shard; `mask` has one bit for every document, set if it stays."""
    total = sum(len(sizes) for sizes in read_arrays(chunks, "size"))
    return write_job(job, chunks, np.unpackbits(mask, count=total).astype(bool), folder, tokenizer)
