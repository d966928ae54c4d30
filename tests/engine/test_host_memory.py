"""HostMemory: never more than its limit, never an entry in use given up, every byte counted once."""

from __future__ import annotations

import threading

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from openk3.engine.host_memory import Entry, HostMemory

LIMIT = 100


class MemoryMachine(RuleBasedStateMachine):
    """Reserve, insert, cancel, find, pin, unpin, remove, clean, in any order, beside a list of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = HostMemory(LIMIT)
        self.reserved: list[int] = []
        self.held: list[Entry] = []

    @rule(size=st.integers(0, 60))
    def reserve(self, size: int) -> None:
        """Only what clean entries that nobody uses can make room for."""
        stay = {*self.held, *(entry for entry in self.memory._entries.values() if not entry.clean)}
        fixed = sum(self.reserved) + sum(entry.data.nbytes for entry in stay)
        room = self.memory.reserve(size)
        assert room == (fixed + size <= LIMIT)
        if room:
            self.reserved.append(size)

    @precondition(lambda self: self.reserved)
    @rule(name=st.binary(max_size=1), pins=st.integers(0, 2), clean=st.booleans())
    def insert(self, name: bytes, pins: int, clean: bool) -> None:
        """A named one, or one that belongs to whoever pinned it."""
        pins = pins if name else max(1, pins)
        known = self.memory.find(name)
        entry = Entry(name, "page", torch.zeros(self.reserved.pop(), dtype=torch.uint8), pins, clean)
        got = self.memory.insert(entry)
        assert got is (known or entry)
        self.held += [got] * pins

    @precondition(lambda self: self.reserved)
    @rule()
    def cancel(self) -> None:
        """What was reserved."""
        self.memory.cancel(self.reserved.pop())

    @rule(name=st.binary(min_size=1, max_size=1), pins=st.integers(0, 1))
    def find(self, name: bytes, pins: int) -> None:
        """By name; used last from now on."""
        entry = self.memory.find(name, pins=pins)
        assert (entry is not None) == self.memory.has([name])[0]
        if entry is not None:
            assert list(self.memory._entries)[-1] == name
            self.held += [entry] * pins

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=st.booleans())
    def pin_and_unpin(self, data: st.DataObject, more: bool) -> None:
        """One user more or less."""
        entry = data.draw(st.sampled_from(self.held))
        if more:
            self.memory.pin([entry])
            self.held.append(entry)
        else:
            self.memory.unpin([entry])
            self.held.remove(entry)

    @rule(names=st.lists(st.binary(min_size=1, max_size=1), max_size=3))
    def remove(self, names: list[bytes]) -> None:
        """Nobody finds them."""
        self.memory.remove(names)
        assert not any(self.memory.has(names))

    @rule()
    def clean_one(self) -> None:
        """The longest unused that would be lost."""
        for entry in self.memory.dirty():
            self.memory.mark_clean(entry)
            break

    @invariant()
    def bytes_are_counted(self) -> None:
        """By the memory and by who uses it."""
        self.memory.check()
        used = sum(self.reserved) + sum(entry.data.nbytes for entry in set(self.held))
        assert self.memory.pinned_bytes == used
        for entry in set(self.held):
            assert entry.pins == self.held.count(entry)

    def teardown(self) -> None:
        """Everything is let go."""
        self.memory.unpin(self.held)
        for size in self.reserved:
            self.memory.cancel(size)
        self.memory.remove(list(self.memory._entries))
        self.memory.check()
        assert self.memory.used_bytes == 0


MemoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMemoryMachine = MemoryMachine.TestCase


def test_the_longest_unused_goes_first() -> None:
    """Of clean ones that nobody uses."""
    memory = HostMemory(40)
    for name in b"abcd":
        assert memory.reserve(10)
        memory.insert(Entry(bytes([name]), "page", torch.zeros(10, dtype=torch.uint8), clean=name != ord("b")))
    a = memory.find(b"a", pins=1)
    assert a is not None and memory.reserve(10) and memory.has([b"a", b"b", b"c", b"d"]) == [True, True, False, True]
    assert not memory.reserve(11) and memory.has([b"d"]) == [True]
    assert memory.dirty_bytes == 10 and memory.pinned_bytes == 20 and len(memory) == 3


def test_threads_do_not_miscount() -> None:
    """Four of them at once."""
    memory = HostMemory(64)

    def work(number: int) -> None:
        for turn in range(300):
            name = bytes([(number + turn) % 9 + 1])
            entry = memory.find(name, pins=1)
            if entry is None and memory.reserve(8):
                entry = memory.insert(Entry(name, "page", torch.zeros(8, dtype=torch.uint8), 1, clean=True))
            if entry is not None:
                memory.check()
                memory.unpin([entry])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memory.check()
    assert memory.pinned_bytes == 0
