"""OuterTier: CPU memory behind the pages, and a store behind that, for evicted prefixes and swapped requests.

Written back, never through: what leaves the pages is copied into CPU memory at once; the longest unused of it goes to
the store when more than half of the memory would be lost otherwise, and the rest when the tier is closed. Whole pages
of latents are entries of their own, shared by all prefixes that begin with them; a checkpoint is one entry with the
states of all groups and the latents of its partial page, and nobody starts from it without all the pages before it.

Copies are made by the thread that steps the engine; EntryIO reads, writes and checks beside it. What cannot be kept is
lost: time, never a wrong answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from openk3.config.model import ModelConfig
from openk3.config.outer_tier import TierConfig
from openk3.config.serve import EngineConfig
from openk3.engine.boundary import PAGE, TAIL
from openk3.engine.costs import Costs
from openk3.engine.disk_store import DiskStore
from openk3.engine.entry_format import HEADER_BYTES, EntryFormat, layout_digest
from openk3.engine.entry_io import EntryIO, IOCounts
from openk3.engine.host_memory import Entry, HostMemory
from openk3.engine.page_memory import PageMemory
from openk3.engine.page_plans import CopyPlan
from openk3.engine.page_transfer import PageTransfer
from openk3.engine.store import Store, StoreError


@dataclass
class TierStats(IOCounts):
    """How a tier is doing; counts are of entries since its start."""

    memory_bytes: int = 0  # in use now
    pinned_bytes: int = 0  # of those, by requests, readers and writers
    num_entries: int = 0  # in memory now
    num_kept: int = 0  # evicted from the pages
    num_lost: int = 0  # of those, for which there was no room
    num_swapped: int = 0  # states of preempted requests
    num_loaded: int = 0  # put back into pages


def open_tier(
    config: EngineConfig, memory: PageMemory, model: ModelConfig, store: Store | None = None
) -> OuterTier | None:
    """The tier that an engine's configuration asks for. Raises StoreError if its folder cannot be used."""
    if config.tier is None:
        return None
    if config.tier.folder is not None:
        if store is not None:
            raise StoreError("folder: a tier has one store; leave the folder out where another one is given")
        store = DiskStore(config.tier.folder, config.tier.disk_bytes)
    names = EntryFormat(layout_digest(memory.shape, model, str(memory.dtype)), config.tier.secret)
    return OuterTier(config.tier, PageTransfer(memory, model), names, Costs(config.tier, config.step_tokens), store)


class OuterTier:
    """An `Outside` for the pages of one engine. It closes its store."""

    def __init__(
        self, config: TierConfig, transfer: PageTransfer, names: EntryFormat, costs: Costs, store: Store | None = None
    ) -> None:
        self.config, self.format, self.transfer, self.costs = config, names, transfer, costs
        self.memory = HostMemory(config.memory_bytes)
        self.io = EntryIO(self.memory, store, names, costs, config.io_threads)
        self.wait = False  # for the writer, where there is no room; when the tier is about to be closed
        self._kept = TierStats()

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
        self._kept.num_swapped += entry is not None
        return entry

    def forget(self, keys: Sequence[bytes]) -> None:
        """See Outside; in the store it takes a moment."""
        self.io.remove([self.format.name(kind, key) for key in keys for kind in (PAGE, TAIL)])

    def pin(self, entries: Iterable[Entry]) -> None:
        """See Outside."""
        self.memory.pin(entries)

    def unpin(self, entries: Iterable[Entry]) -> None:
        """See Outside."""
        self.memory.unpin(entries)

    def load(self, plan: CopyPlan) -> None:
        """Put what a plan brings from outside into its pages."""
        if plan.entries:
            start = time.perf_counter()
            moved = self.transfer.load(plan, HEADER_BYTES)
            self.costs.copies.add(moved, time.perf_counter() - start)
            self._kept.num_loaded += len(plan.entries)

    def stats(self) -> TierStats:
        """Now."""
        kept = self._kept
        kept.memory_bytes, kept.pinned_bytes = self.memory.used_bytes, self.memory.pinned_bytes
        kept.num_entries = len(self.memory)
        return TierStats(**asdict(kept) | asdict(self.io.counts))

    def close(self, *, write: bool = True) -> None:
        """Write what would be lost to the store, and stop; `write=False` leaves that out."""
        if write and self.io.store is not None:
            for entry in self.memory.dirty():
                self.io.write(entry)
        self.io.close(write=write)

    def check(self) -> None:
        """Assert every invariant of the memory."""
        self.memory.check()

    def _keep(self, kind: str, key: bytes, size: int, copy: Callable[[Tensor], None]) -> None:
        name = self.format.name(kind, key)
        if self.memory.find(name) is not None:
            return
        entry = self._copied(kind, name, size, copy)
        self._kept.num_kept += 1
        self._kept.num_lost += entry is None
        if self.io.store is not None and self.memory.dirty_bytes * 2 > self.memory.limit_bytes:
            for other in self.memory.dirty():
                self.io.write(other)
                if self.memory.dirty_bytes * 2 <= self.memory.limit_bytes:
                    break

    def _copied(self, kind: str, name: bytes, size: int, copy: Callable[[Tensor], None]) -> Entry | None:
        """A new entry; one without a name is pinned. None if there is no room."""
        if not self._reserve(HEADER_BYTES + size):
            return None
        start = time.perf_counter()
        data = self.transfer.buffer(HEADER_BYTES + size)
        copy(data[HEADER_BYTES:])
        self.costs.copies.add(size, time.perf_counter() - start)
        clean = self.io.store is None or not name
        return self.memory.insert(Entry(name, kind, data, pins=0 if name else 1, clean=clean))

    def _reserve(self, num_bytes: int) -> bool:
        if self.memory.reserve(num_bytes):
            return True
        if not self.wait:
            return False
        for entry in self.memory.dirty():
            self.io.write(entry)
        self.io.finish_writing()
        return self.memory.reserve(num_bytes)
