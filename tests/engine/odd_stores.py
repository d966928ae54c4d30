"""Stores for tests: in memory, slow, failing, lying; each keeps the contract of Store or breaks it on purpose."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class DictStore:
    """In memory, for as many engines as share it."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}
        self.num_closed = 0

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """By name."""
        return [name in self.entries for name in names]

    def get(self, name: bytes, out: memoryview) -> bool:
        """Of the same size only."""
        entry = self.entries.get(name)
        if entry is None or len(entry) != len(out):
            return False
        out[:] = entry
        return True

    def put(self, name: bytes, entry: memoryview) -> bool:
        """A copy."""
        self.entries.setdefault(name, bytes(entry))
        return True

    def remove(self, names: Sequence[bytes]) -> None:
        """At once."""
        for name in names:
            self.entries.pop(name, None)

    def close(self) -> None:
        """Counted."""
        self.num_closed += 1


class SlowStore(DictStore):
    """Answers only while its gates are open."""

    def __init__(self) -> None:
        super().__init__()
        self.has_gate, self.get_gate = threading.Event(), threading.Event()
        self.open()

    def open(self) -> None:
        """Both gates."""
        self.has_gate.set()
        self.get_gate.set()

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """After a while."""
        self.has_gate.wait(300)
        return super().has(names)

    def get(self, name: bytes, out: memoryview) -> bool:
        """After a while."""
        self.get_gate.wait(300)
        return super().get(name, out)


class BadStore(DictStore):
    """Raises in the calls that are named, and says of everything that it is there."""

    def __init__(self, *failing: str) -> None:
        super().__init__()
        self.failing = failing

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Everything."""
        self._fail("has")
        return [True] * len(names)

    def get(self, name: bytes, out: memoryview) -> bool:
        """Perhaps."""
        self._fail("get")
        return super().get(name, out)

    def put(self, name: bytes, entry: memoryview) -> bool:
        """Perhaps."""
        self._fail("put")
        return super().put(name, entry)

    def remove(self, names: Sequence[bytes]) -> None:
        """Perhaps."""
        self._fail("remove")
        super().remove(names)

    def _fail(self, call: str) -> None:
        if call in self.failing:
            raise ConnectionError(f"{call}: the network is down")
