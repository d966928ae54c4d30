"""BlockPool: one pool of equal pages for MLA latents and KDA states, with reference counts and LRU eviction.

A page is free, held (somebody counts on it), or idle: its content is cached and nobody holds it. Only idle pages are
evicted, the longest idle first. Pages are numbers here; a runner owns the tensors that they index.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class NoRoom(Exception):
    """Too few pages are free or idle now; something must be released first."""


class PoolError(RuntimeError):
    """A page was used against its rules: a fault of the engine, never of a request."""


class PageKind(Enum):
    """What a page that is not free holds."""

    LATENTS = "latents"
    STATE = "state"


@dataclass
class _Page:
    kind: PageKind | None = None
    refs: int = 0
    cached: bool = False
    sealed: bool = False


class BlockPool:
    """Pages 0 .. num_pages - 1.

    `on_evict(page)` belongs to the prefix cache: it must `uncache` the page, and all that is useless without it.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None] | None = None) -> None:
        self.on_evict: Callable[[int], None] = on_evict or self.uncache
        self.num_evicted = 0
        self._pages = [_Page() for _ in range(num_pages)]
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is used first
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first

    @property
    def num_free(self) -> int:
        """Pages without content."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Cached pages that nobody holds."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free ones, and idle ones that are evicted for it."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        """Pages with at least one holder."""
        return len(self._pages) - self.num_available

    def refs(self, page: int) -> int:
        """Holders of a page."""
        return self._pages[page].refs

    def kind(self, page: int) -> PageKind | None:
        """What a page holds; None when it is free."""
        return self._pages[page].kind

    def is_cached(self, page: int) -> bool:
        """Whether the prefix cache can lead to the page."""
        return self._pages[page].cached

    def is_sealed(self, page: int) -> bool:
        """Whether the page may only be read."""
        return self._pages[page].sealed

    def allocate(self, kinds: Sequence[PageKind], pins: Sequence[int] = ()) -> list[int]:
        """Take a page of each kind for one holder, and count the holder on `pins` too; all of it or nothing.

        Pins come first, so that a page which is about to be used is never evicted to make room. Idle pages are evicted
        only once there is room for everything. Raises NoRoom, and then no page has changed hands.
        """
        self.pin(pins)
        room = self.num_available
        if len(kinds) > room:
            self.unpin(pins)
            raise NoRoom(f"{len(kinds)} more pages are needed, {room} can be had")
        while len(self._free) < len(kinds):
            self._evict()
        pages = [self._free.pop() for _ in kinds]
        for page, kind in zip(pages, kinds):
            self._pages[page] = _Page(kind, refs=1)
        return pages

    def pin(self, pages: Iterable[int]) -> None:
        """Count one more holder on each page. Raises PoolError on a free page: its content is gone."""
        for page in pages:
            entry = self._pages[page]
            if entry.kind is None:
                raise PoolError(f"page {page}: pinned, but it is free")
            entry.refs += 1
            self._idle.pop(page, None)

    def unpin(self, pages: Sequence[int]) -> None:
        """Count one holder less on each page, the last page first: of a prefix, the end is evicted before its start.

        A page without holders becomes idle if it is cached, and free if not.
        """
        for page in reversed(pages):
            entry = self._pages[page]
            if entry.refs == 0:
                raise PoolError(f"page {page}: unpinned, but nobody holds it")
            entry.refs -= 1
            if entry.refs == 0:
                self._let_go(page)

    def cache(self, page: int) -> None:
        """The prefix cache leads to this page from now on. Raises PoolError unless somebody holds it."""
        if self._pages[page].refs == 0:
            raise PoolError(f"page {page}: cached, but nobody holds it")
        self._pages[page].cached = True

    def uncache(self, page: int) -> None:
        """The prefix cache no longer leads to this page; without holders it is free at once."""
        entry = self._pages[page]
        entry.cached = False
        if entry.kind is not None and entry.refs == 0:
            self._let_go(page)

    def touch(self, page: int) -> None:
        """Count an idle page as just used."""
        if page in self._idle:
            self._idle.move_to_end(page)

    def seal(self, page: int) -> None:
        """Nothing may be written to this page until it is free again: a full page of latents, or a checkpoint."""
        if self._pages[page].refs == 0:
            raise PoolError(f"page {page}: sealed, but nobody holds it")
        self._pages[page].sealed = True

    def require_writable(self, pages: Iterable[int]) -> None:
        """Raise PoolError unless each page is held and not sealed; asked before a plan names it as a target."""
        for page in pages:
            if self._pages[page].refs == 0 or self._pages[page].sealed:
                raise PoolError(f"page {page}: about to be written, but it is {self._state(page)}")

    def check(self) -> None:
        """Assert every invariant: each page is in exactly one of free, idle and held, and says so itself."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & self._idle.keys(), "a page is both free and idle"
        for page, entry in enumerate(self._pages):
            assert entry.refs >= 0, f"page {page}: {entry.refs} holders"
            assert (page in free) == (entry.kind is None), f"page {page}: its kind and the free list differ"
            assert (page in self._idle) == (entry.cached and entry.refs == 0), f"page {page}: idle list is wrong"
            assert entry.kind is not None or entry == _Page(), f"page {page}: free, with content"
            assert entry.kind is None or entry.cached or entry.refs, f"page {page}: lost"
        assert self.num_held == sum(entry.refs > 0 for entry in self._pages), "held pages are miscounted"

    def _state(self, page: int) -> str:
        return "sealed" if self._pages[page].sealed else "free" if self._pages[page].kind is None else "not held"

    def _let_go(self, page: int) -> None:
        self._idle.pop(page, None)
        if self._pages[page].cached:
            self._idle[page] = None
        else:
            self._pages[page] = _Page()
            self._free.append(page)

    def _evict(self) -> None:
        page = next(iter(self._idle))
        self.on_evict(page)
        if self._pages[page].kind is not None:
            raise PoolError(f"page {page}: evicted, but its owner kept it")
        self.num_evicted += 1
