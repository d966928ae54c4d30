"""NamedOutside: memory outside the pages for a PageRunner, whose entries hold names of prefixes as its pages do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openk3.engine.boundary import PAGE, TAIL, find_boundary, inside, pages_for_swapped
from openk3.engine.outside import Staged
from openk3.engine.prefix_keys import HashChain

if TYPE_CHECKING:
    from page_runner import PageRunner


@dataclass(eq=False)
class NamedEntry:
    """Names of rows, and of the state of each group."""

    rows: list[int]
    states: list[tuple[int, int]]


class NamedFetch:
    """What is there at once."""

    def __init__(self, outside: NamedOutside, staged: Staged | None) -> None:
        self._outside, self.staged = outside, staged
        self._pinned = [] if staged is None else list(staged.pages.values())
        outside.pin(self._pinned)

    def close(self) -> None:
        """Let go of the pages; a swapped tail belongs to its job."""
        self._outside.unpin(self._pinned)
        self.staged, self._pinned = None, []


class NamedOutside:
    """Keeps everything until it is told to lose it; counts who holds what."""

    def __init__(self, runner: PageRunner) -> None:
        self.runner = runner
        self.entries: dict[tuple[str, bytes], NamedEntry] = {}
        self.pins = Counter[NamedEntry]()
        self.swaps = True
        self.num_swapped = 0
        runner.outside = runner.cache.prefixes.outside = self

    def page_evicted(self, key: bytes, page: int) -> None:
        """Rows as they are now."""
        self.entries[PAGE, key] = NamedEntry(list(self.runner.rows[page]), [])

    def checkpoint_evicted(self, key: bytes, states: Sequence[int], page: int, num_rows: int) -> None:
        """States and rows as they are now."""
        self.entries[TAIL, key] = self._tail(states, page, num_rows)

    def swap_out(self, states: Sequence[int], page: int | None, num_rows: int, num_lost: int) -> NamedEntry | None:
        """If that is wanted at present."""
        assert num_lost > 0 and (page is None) == (num_rows == 0)
        if not self.swaps:
            return None
        entry = self._tail(states, page, num_rows)
        self.pins[entry] += 1
        self.num_swapped += 1
        return entry

    def forget(self, keys: Sequence[bytes]) -> None:
        """At once."""
        for key in keys:
            self.entries.pop((PAGE, key), None)
            self.entries.pop((TAIL, key), None)

    def pin(self, entries: Iterable[NamedEntry]) -> None:
        """Count."""
        self.pins.update(entries)

    def unpin(self, entries: Iterable[NamedEntry]) -> None:
        """Count."""
        for entry in entries:
            assert self.pins[entry] > 0
            self.pins[entry] -= 1

    def stage(self, chain: HashChain, most_tokens: int, swapped: Staged | None = None) -> Staged | None:
        """The longest boundary, with a swapped state first, as an engine's tier finds it."""
        shape, keys = self.runner.shape, tuple(chain.keys)
        here = inside(self.runner.cache.prefixes, keys, most_tokens)
        found = None
        if swapped is not None and swapped.chain is chain and here.num_tokens < swapped.num_tokens <= most_tokens:
            found = pages_for_swapped(shape, keys, swapped.num_tokens, here, self._has)
        if found is not None:
            assert swapped is not None
            tail = swapped.tail
        else:
            found = find_boundary(shape, keys, most_tokens, here, self._has)
            if found is None:
                return None
            assert found.num_tokens > here.num_tokens
            key = keys[found.num_tokens // shape.hash_tokens - 1]
            tail = self.entries[TAIL, key] if found.tail else None
        ends = {j: keys[(j + 1) * shape.blocks_per_page - 1] for j in found.pages}
        return Staged(chain, found.num_tokens, {j: self.entries[PAGE, key] for j, key in ends.items()}, tail)

    def idle(self) -> bool:
        """Whether nobody holds an entry."""
        return not any(self.pins.values())

    def _has(self, kind: str, keys: Sequence[bytes]) -> list[bool]:
        return [(kind, key) in self.entries for key in keys]

    def _tail(self, states: Sequence[int], page: int | None, num_rows: int) -> NamedEntry:
        rows = [] if page is None else self.runner.rows[page][:num_rows]
        return NamedEntry(rows, [self.runner.states[state] for state in states])
