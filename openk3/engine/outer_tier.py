"""OuterTier: CPU memory behind the pages, and a store behind that, for evicted prefixes and swapped requests.

Written back, never through: what leaves the pages is copied into CPU memory at once; the longest unused of it goes to
the store when more than half of the memory would be lost otherwise, and the rest when the tier is closed. Whole pages
of latents are entries of their own, shared by all prefixes that begin with them; a checkpoint is one entry with the
states of all groups and the latents of its partial page, and nobody starts from it without all the pages before it.

Copies are made by the thread that steps the engine; reading, writing and checking by threads of the tier. Every entry
is checked when it comes from the store. What cannot be kept or does not check out is lost: time, never a wrong answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from openk3.config.model import ModelConfig
from openk3.config.outer_tier import TierConfig
from openk3.config.serve import EngineConfig
from openk3.engine.boundary import PAGE, TAIL
from openk3.engine.costs import Costs
from openk3.engine.disk_store import DiskStore
from openk3.engine.entry_format import HEADER_BYTES, EntryFormat, layout_digest
from openk3.engine.host_memory import Entry, HostMemory
from openk3.engine.page_memory import PageMemory
from openk3.engine.page_plans import CopyPlan
from openk3.engine.page_transfer import PageTransfer
from openk3.engine.store import Store, StoreError

LOG = logging.getLogger(__name__)
SILENT_SECONDS = 30.0  # for which a store that did not answer is left alone


@dataclass
class TierStats:
    """How the tier is doing; counts are of entries since its start."""

    memory_bytes: int = 0  # in use now
    pinned_bytes: int = 0  # of those, by requests, readers and writers
    num_entries: int = 0  # in memory now
    num_kept: int = 0  # evicted from the pages
    num_lost: int = 0  # of those, for which there was no room
    num_swapped: int = 0  # states of preempted requests
    num_loaded: int = 0  # put back into pages
    num_read: int = 0  # from the store
    num_written: int = 0  # to the store
    num_corrupt: int = 0  # read, and not what they should be
    num_failed: int = 0  # reads and writes that raised or were refused


class Wanted(NamedTuple):
    """An entry to be read: what it is, and how long."""

    kind: str
    name: bytes
    num_bytes: int


def open_tier(
    config: EngineConfig, memory: PageMemory, model: ModelConfig, store: Store | None = None
) -> OuterTier | None:
    """The tier that an engine's configuration asks for. Raises StoreError if its folder cannot be used."""
    if config.tier is None:
        return None
    names = EntryFormat(layout_digest(memory.shape, model, str(memory.dtype)), config.tier.secret)
    costs = Costs(config.tier, config.step_tokens)
    return OuterTier(config.tier, PageTransfer(memory, model), names, costs, store)


class OuterTier:
    """An `Outside` for the pages of one engine. It closes its store."""

    def __init__(
        self, config: TierConfig, transfer: PageTransfer, names: EntryFormat, costs: Costs, store: Store | None = None
    ) -> None:
        if config.folder is not None and store is not None:
            raise StoreError("folder: a tier has one store; leave the folder out where another one is given")
        self.config, self.format, self.transfer, self.costs = config, names, transfer, costs
        self.store = DiskStore(config.folder, config.disk_bytes) if config.folder is not None else store
        self.memory = HostMemory(config.memory_bytes)
        self._silent_until = 0.0
        self.wait = False  # for the writer, where there is no room; when a tier is about to be closed
        self.generation = 0  # counts what was forgotten: what was fetched before is not to be trusted
        self.counts = TierStats()
        self._lock = threading.Lock()  # of the two above
        self.askers = ThreadPoolExecutor(1, "openk3 tier asker")  # so that a question does not wait for a large entry
        self.readers = ThreadPoolExecutor(config.io_threads, "openk3 tier reader")
        self._writer = ThreadPoolExecutor(1, "openk3 tier writer")  # one: what is removed stays removed

    def page_evicted(self, key: bytes, page: int) -> None:
        """See Outside."""
        self._keep(PAGE, key, self.transfer.page_bytes(), lambda out_B: self.transfer.read_page(page, out_B))

    def checkpoint_evicted(self, key: bytes, states: Sequence[int], page: int, num_rows: int) -> None:
        """See Outside."""
        size = self.transfer.tail_bytes(num_rows)
        self._keep(TAIL, key, size, lambda out_B: self.transfer.read_tail(states, page, num_rows, out_B))

    def swap_out(self, states: Sequence[int], page: int | None, num_rows: int, num_lost: int) -> Entry | None:
        """See Outside; whether it pays is for `costs` to say."""
        size = self.transfer.tail_bytes(num_rows)
        if not self.costs.swap_pays(size, num_lost):
            return None
        entry = self._copied(TAIL, b"", size, lambda out_B: self.transfer.read_tail(states, page, num_rows, out_B))
        self._count("num_swapped", entry is not None)
        return entry

    def forget(self, keys: Sequence[bytes]) -> None:
        """See Outside; in the store it takes a moment."""
        names = [self.format.name(kind, key) for key in keys for kind in (PAGE, TAIL)]
        with self._lock:
            self.generation += 1
        self.memory.remove(names)
        if self.store is not None:
            self._writer.submit(self._remove, names)

    def pin(self, entries: Iterable[Entry]) -> None:
        """See Outside."""
        self.memory.pin(entries)

    def unpin(self, entries: Iterable[Entry]) -> None:
        """See Outside."""
        self.memory.unpin(entries)

    def load(self, plan: CopyPlan) -> None:
        """Put what a plan brings from outside into its pages."""
        if plan.page_loads or plan.tail_load:
            start = time.perf_counter()
            moved = self.transfer.load(plan, HEADER_BYTES)
            self.costs.copies.add(moved, time.perf_counter() - start)
            self._count("num_loaded", len(plan.entries))

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Which entries lie here or seem to lie in the store; this may take a while, and any thread may ask."""
        found = self.memory.has(names)
        missing = [name for name, here in zip(names, found) if not here]
        if self.store is None or not missing or not self.is_asked():
            return found
        try:
            behind = dict(zip(missing, self.store.has(missing)))
        except Exception as error:  # foreign code
            self._failed("asked", error)
            return found
        return [here or behind[name] for name, here in zip(names, found)]

    def is_asked(self) -> bool:
        """Whether the store is worth a question: there is one, and it has not been silent lately."""
        return self.store is not None and time.monotonic() >= self._silent_until

    def was_silent(self) -> None:
        """The store has not answered in time: nobody waits for it for a while."""
        LOG.warning("outer tier: the store does not answer; it is left alone for %.0f s", SILENT_SECONDS)
        self._count("num_failed")
        self._silent_until = time.monotonic() + SILENT_SECONDS

    def read(self, wanted: Wanted) -> Future[Entry | None]:
        """An entry from the store, pinned once for each one who asked; None if it cannot be had."""
        return self.readers.submit(self._read, wanted, self.generation)

    def stats(self) -> TierStats:
        """Now."""
        self.counts.memory_bytes, self.counts.pinned_bytes = self.memory.used_bytes, self.memory.pinned_bytes
        self.counts.num_entries = len(self.memory)
        return TierStats(**vars(self.counts))

    def close(self, *, write: bool = True) -> None:
        """Write what would be lost to the store, and stop; `write=False` stops at once."""
        if write and self.store is not None:
            for entry in self.memory.dirty():
                self._write_later(entry)
        for threads in (self.askers, self.readers):
            threads.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=not write)
        if self.store is not None:
            self.store.close()

    def check(self) -> None:
        """Assert every invariant of the memory."""
        self.memory.check()

    def _keep(self, kind: str, key: bytes, size: int, copy: Callable[[Tensor], None]) -> None:
        name = self.format.name(kind, key)
        if self.memory.find(name) is not None:
            return
        entry = self._copied(kind, name, size, copy)
        self._count("num_kept")
        self._count("num_lost", entry is None)
        if self.store is None:
            return
        for other in self.memory.dirty():
            if self.memory.dirty_bytes * 2 <= self.memory.limit_bytes:
                break
            self._write_later(other)

    def _copied(self, kind: str, name: bytes, size: int, copy: Callable[[Tensor], None]) -> Entry | None:
        """A new entry; one without a name is pinned. None if there is no room."""
        if not self._reserve(HEADER_BYTES + size):
            return None
        start = time.perf_counter()
        data = self.transfer.buffer(HEADER_BYTES + size)
        copy(data[HEADER_BYTES:])
        self.costs.copies.add(size, time.perf_counter() - start)
        entry = Entry(name, kind, data, pins=0 if name else 1, clean=self.store is None or not name)
        return self.memory.insert(entry)

    def _reserve(self, size: int) -> bool:
        if self.memory.reserve(size):
            return True
        if not self.wait:
            return False
        for entry in self.memory.dirty():
            self._write_later(entry)
        self._writer.submit(int).result()  # all before it are done
        return self.memory.reserve(size)

    def _write_later(self, entry: Entry) -> None:
        self.memory.pin([entry])
        entry.clean = True  # whatever comes of it, nobody tries again
        self._writer.submit(self._write, entry)

    def _write(self, entry: Entry) -> None:
        assert self.store is not None
        try:
            self.format.seal(entry.view, entry.kind, entry.name)
            written = self.store.put(entry.name, entry.view)
            self._count("num_written", written)
            self._count("num_failed", not written)
        except Exception as error:  # foreign code
            self._failed("written", error)
        finally:
            self.memory.unpin([entry])

    def _remove(self, names: Sequence[bytes]) -> None:
        assert self.store is not None
        try:
            self.store.remove(names)
        except Exception as error:  # foreign code
            self._failed("removed", error)

    def _read(self, wanted: Wanted, generation: int) -> Entry | None:
        entry = self.memory.find(wanted.name, pins=1)
        if entry is not None or self.store is None or not self.memory.reserve(wanted.num_bytes):
            return entry
        try:
            data = self.transfer.buffer(wanted.num_bytes)
            entry = Entry(wanted.name, wanted.kind, data, pins=1, clean=True)
            if not self._fill(entry):
                self.memory.cancel(wanted.num_bytes)
                return None
        except Exception as error:  # foreign code
            self.memory.cancel(wanted.num_bytes)
            self._failed("read", error)
            return None
        with self._lock:
            if generation == self.generation:
                self.counts.num_read += 1
                return self.memory.insert(entry)
        self.memory.cancel(wanted.num_bytes)
        return None

    def _fill(self, entry: Entry) -> bool:
        assert self.store is not None
        start = time.perf_counter()
        if not self.store.get(entry.name, entry.view):
            return False
        if not self.format.is_intact(entry.view, entry.kind, entry.name):
            self._count("num_corrupt")
            LOG.warning("an entry of the outer tier is damaged and is dropped: %s", entry.name.hex())
            self._writer.submit(self._remove, [entry.name])
            return False
        self.costs.reads.add(entry.data.nbytes, time.perf_counter() - start)
        return True

    def _count(self, name: str, count: int = 1) -> None:
        with self._lock:
            setattr(self.counts, name, getattr(self.counts, name) + count)

    def _failed(self, what: str, error: Exception) -> None:
        self._count("num_failed")
        LOG.warning("outer tier: not %s: %s: %s", what, type(error).__name__, error)
