"""HostMemory: entries in CPU memory under a limit, the longest unused given up first, those in use never.

Every byte is counted from the moment that room is reserved for it until the last user of its entry lets go, so the
limit holds whatever readers and writers are under way.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False)
class Entry:
    """A header and a payload in memory. `clean`: nothing is lost with it, since it is elsewhere or cannot be."""

    name: bytes  # empty: nobody finds it, it belongs to who pinned it
    kind: str
    data: Tensor  # uint8
    pins: int = 0
    clean: bool = False

    @property
    def view(self) -> memoryview:
        """All of its bytes, to be read and written."""
        return self.data.numpy().data


class HostMemory:
    """Entries by name, of `limit_bytes` in all. Any thread may call anything."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.lock = threading.RLock()
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # longest unused first
        self._leaving: dict[Entry, None] = {}  # pinned, and found by nobody
        self._reserved = 0
        self._pinned = self._spare = self._dirty = 0  # bytes of what is found by name: in use; clean and not; not clean

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def pinned_bytes(self) -> int:
        """Of entries in use, and what is reserved."""
        with self.lock:
            return self._reserved + self._pinned + sum(entry.data.nbytes for entry in self._leaving)

    @property
    def dirty_bytes(self) -> int:
        """Of entries that would be lost."""
        return self._dirty

    def reserve(self, num_bytes: int) -> bool:
        """Make room by giving up clean entries that nobody uses; if that is too little, nothing happens: false."""
        with self.lock:
            if self.used_bytes + num_bytes - self._spare > self.limit_bytes:
                return False
            for entry in list(self._entries.values()) if self.used_bytes + num_bytes > self.limit_bytes else ():
                if entry.clean and not entry.pins:
                    self._drop(entry)
                    if self.used_bytes + num_bytes <= self.limit_bytes:
                        break
            self.used_bytes += num_bytes
            self._reserved += num_bytes
            return True

    def cancel(self, num_bytes: int) -> None:
        """Give back room that was reserved."""
        with self.lock:
            self.used_bytes -= num_bytes
            self._reserved -= num_bytes

    def insert(self, entry: Entry) -> Entry:
        """Put an entry where room was reserved for it; if its name is there already, that entry has its pins."""
        with self.lock:
            self._reserved -= entry.data.nbytes
            if not entry.name:
                self._leaving[entry] = None
                return entry
            known = self._entries.get(entry.name)
            if known is not None:
                self.used_bytes -= entry.data.nbytes
                self._pin(known, entry.pins)
                return known
            self._entries[entry.name] = entry
            self._count(entry, 1)
            return entry

    def find(self, name: bytes, *, pins: int = 0) -> Entry | None:
        """The entry of this name, counted as just used and pinned so often."""
        with self.lock:
            entry = self._entries.get(name)
            if entry is not None:
                self._pin(entry, pins)
                self._entries.move_to_end(name)
            return entry

    def has(self, names: Iterable[bytes]) -> list[bool]:
        """Which names are there."""
        with self.lock:
            return [name in self._entries for name in names]

    def pin(self, entries: Iterable[Entry]) -> None:
        """One more user of each."""
        with self.lock:
            for entry in entries:
                self._pin(entry, 1)

    def unpin(self, entries: Iterable[Entry]) -> None:
        """One user less of each; the last one of an entry that nobody finds frees its memory."""
        with self.lock:
            for entry in entries:
                assert entry.pins > 0, "an entry was let go once too often"
                self._pin(entry, -1)
                if entry in self._leaving and not entry.pins:
                    del self._leaving[entry]
                    self.used_bytes -= entry.data.nbytes

    def remove(self, names: Iterable[bytes]) -> None:
        """Let nobody find these entries; those in use stay until they are let go."""
        with self.lock:
            for name in names:
                if name in self._entries:
                    self._drop(self._entries[name])

    def mark_clean(self, entry: Entry) -> None:
        """Nothing is lost with this entry any more."""
        with self.lock:
            if entry not in self._leaving:
                self._count(entry, -1)
                entry.clean = True
                self._count(entry, 1)

    def dirty(self) -> Iterator[Entry]:
        """Entries that would be lost and that nobody uses, the longest unused first; as they are when it is asked."""
        with self.lock:
            return iter([entry for entry in self._entries.values() if not entry.clean and not entry.pins])

    def check(self) -> None:
        """Assert that every byte is counted once, and that the limit holds."""
        with self.lock:
            _check_memory(self)

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.name]
        self._count(entry, -1)
        if entry.pins:
            self._leaving[entry] = None
        else:
            self.used_bytes -= entry.data.nbytes

    def _pin(self, entry: Entry, change: int) -> None:
        if entry in self._leaving:
            entry.pins += change
            return
        self._count(entry, -1)
        entry.pins += change
        self._count(entry, 1)

    def _count(self, entry: Entry, sign: int) -> None:
        num_bytes = sign * entry.data.nbytes
        if not entry.clean:
            self._dirty += num_bytes
        if entry.pins:
            self._pinned += num_bytes
        elif entry.clean:
            self._spare += num_bytes


def _check_memory(memory: HostMemory) -> None:
    kept = memory._entries.values()
    held = [*kept, *memory._leaving]
    assert len(set(held)) == len(held), "an entry is there twice"
    assert memory.used_bytes == memory._reserved + sum(entry.data.nbytes for entry in held), "bytes are miscounted"
    assert 0 <= memory._reserved <= memory.used_bytes <= memory.limit_bytes, "more memory than allowed"
    pinned, dirty, spare = (
        sum(entry.data.nbytes for entry in kept if entry.pins),
        sum(entry.data.nbytes for entry in kept if not entry.clean),
        sum(entry.data.nbytes for entry in kept if entry.clean and not entry.pins),
    )
    assert (pinned, dirty, spare) == (memory._pinned, memory._dirty, memory._spare), "states are miscounted"
    assert all(entry.pins > 0 for entry in memory._leaving), "memory that nobody can free"
    assert all(entry.pins >= 0 for entry in held), "let go once too often"
    assert all(entry.name == name for name, entry in memory._entries.items()), "an entry under another name"
