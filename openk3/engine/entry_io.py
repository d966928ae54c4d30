"""EntryIO: moves entries between CPU memory and the store behind it, in threads of its own, and checks what comes back.

Whatever a store raises, refuses or answers wrongly ends here, as a miss that is counted. A store that does not answer
in time is left alone for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from openk3.engine.costs import Costs
from openk3.engine.entry_format import EntryFormat
from openk3.engine.host_memory import Entry, HostMemory
from openk3.engine.store import Store

LOG = logging.getLogger(__name__)
SILENT_SECONDS = 30.0  # for which a store that did not answer is left alone


class Wanted(NamedTuple):
    """An entry to be read: what it is, and how long, header included."""

    kind: str
    name: bytes
    num_bytes: int


@dataclass
class IOCounts:
    """Entries since the start."""

    num_read: int = 0
    num_written: int = 0
    num_corrupt: int = 0  # read, and not what they should be
    num_failed: int = 0  # questions, reads and writes that raised, were refused or took too long


class EntryIO:
    """`store` may be None: then nothing is there, and nothing is written."""

    def __init__(
        self, memory: HostMemory, store: Store | None, names: EntryFormat, costs: Costs, num_readers: int
    ) -> None:
        self.store, self.counts = store, IOCounts()
        self._memory, self._format, self._costs = memory, names, costs
        self.generation = 0  # counts what was forgotten: what was read before is not to be trusted
        self._silent_until = 0.0
        self._lock = threading.Lock()  # of counts and generation
        self.askers = ThreadPoolExecutor(1, "openk3 tier asker")  # so that a question does not wait for a large entry
        self.readers = ThreadPoolExecutor(num_readers, "openk3 tier reader")
        self.writer = ThreadPoolExecutor(1, "openk3 tier writer")  # one: what is removed stays removed

    def is_asked(self) -> bool:
        """Whether the store is worth a question: there is one, and it has not been silent lately."""
        return self.store is not None and time.monotonic() >= self._silent_until

    def was_silent(self) -> None:
        """The store has not answered in time."""
        LOG.warning("outer tier: the store does not answer; it is left alone for %.0f s", SILENT_SECONDS)
        self._count("num_failed")
        self._silent_until = time.monotonic() + SILENT_SECONDS

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Which entries lie in memory or seem to lie in the store; this may take a while, and any thread may ask."""
        found = self._memory.has(names)
        missing = [name for name, here in zip(names, found) if not here]
        if self.store is None or not missing or not self.is_asked():
            return found
        try:
            behind = dict(zip(missing, self.store.has(missing)))
        except Exception as error:  # foreign code
            self._failed("asked", error)
            return found
        return [here or behind[name] for name, here in zip(names, found)]

    def read(self, wanted: Wanted, buffer: Callable[[int], Tensor]) -> Future[Entry | None]:
        """An entry from memory or the store, pinned once for each one who asked; None if it cannot be had."""
        return self.readers.submit(self._read, wanted, buffer, self.generation)

    def write(self, entry: Entry) -> None:
        """To the store, some time; until then it stays in memory. Whatever comes of it, nobody tries again."""
        self._memory.pin([entry])
        self._memory.mark_clean(entry)
        self.writer.submit(self._write, entry)

    def remove(self, names: Sequence[bytes]) -> None:
        """From memory at once, from the store some time; nothing of it that is being read now is used."""
        with self._lock:
            self.generation += 1
        self._memory.remove(names)
        if self.store is not None:
            self.writer.submit(self._remove, names)

    def finish_writing(self) -> None:
        """Wait until everything is written that is to be."""
        self.writer.submit(int).result()

    def close(self, *, write: bool) -> None:
        """Stop all threads, and close the store; what is to be written is written first, or left out."""
        self.askers.shutdown(cancel_futures=True)
        self.readers.shutdown(cancel_futures=True)
        self.writer.shutdown(cancel_futures=not write)
        if self.store is not None:
            self.store.close()

    def _write(self, entry: Entry) -> None:
        assert self.store is not None
        try:
            self._format.seal(entry.view, entry.kind, entry.name)
            written = self.store.put(entry.name, entry.view)
            self._count("num_written" if written else "num_failed")
        except Exception as error:  # foreign code
            self._failed("written", error)
        finally:
            self._memory.unpin([entry])

    def _remove(self, names: Sequence[bytes]) -> None:
        assert self.store is not None
        try:
            self.store.remove(names)
        except Exception as error:  # foreign code
            self._failed("removed", error)

    def _read(self, wanted: Wanted, buffer: Callable[[int], Tensor], generation: int) -> Entry | None:
        entry = self._memory.find(wanted.name, pins=1)
        if entry is not None or self.store is None or not self._memory.reserve(wanted.num_bytes):
            return entry
        entry = None
        try:
            made = Entry(wanted.name, wanted.kind, buffer(wanted.num_bytes), pins=1, clean=True)
            if self._fill(made, self.store):
                with self._lock:
                    if generation == self.generation:
                        self.counts.num_read += 1
                        entry = self._memory.insert(made)
        except Exception as error:  # foreign code
            self._failed("read", error)
        if entry is None:
            self._memory.cancel(wanted.num_bytes)
        return entry

    def _fill(self, entry: Entry, store: Store) -> bool:
        start = time.perf_counter()
        if not store.get(entry.name, entry.view):
            return False
        if not self._format.is_intact(entry.view, entry.kind, entry.name):
            self._count("num_corrupt")
            LOG.warning("outer tier: an entry is damaged and is dropped: %s", entry.name.hex())
            self.writer.submit(self._remove, [entry.name])
            return False
        self._costs.reads.add(entry.data.nbytes, time.perf_counter() - start)
        return True

    def _count(self, name: str) -> None:
        with self._lock:
            setattr(self.counts, name, getattr(self.counts, name) + 1)

    def _failed(self, what: str, error: Exception) -> None:
        self._count("num_failed")
        LOG.warning("outer tier: not %s: %s: %s", what, type(error).__name__, error)
