"""Prefetch: brings what waiting requests need from outside into CPU memory, while others compute.

A request whose prefix is on its way is parked: it costs nothing, and nobody waits for it. It goes on when everything is
there, when it turns out that it cannot be had, or when `wait_seconds` are over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from openk3.engine.boundary import PAGE, TAIL, Boundary, Inside, find_boundary, inside, pages_for_swapped
from openk3.engine.entry_format import HEADER_BYTES
from openk3.engine.entry_io import Wanted
from openk3.engine.host_memory import Entry
from openk3.engine.hybrid_cache import HybridCache
from openk3.engine.job import Job
from openk3.engine.outer_tier import OuterTier
from openk3.engine.outside import Staged
from openk3.engine.prefix_keys import HashChain
from openk3.engine.scheduler import name_again

MOST_TRIES = 3  # after entries that turned out to be missing or damaged
GRACE_SECONDS = 0.002  # that a step waits for answers of the store, so that most requests need not wait for the next
ASK_SECONDS = 2.0  # that a store may take to say what it has
MOST_RENEWALS = 2  # after evictions while a job waits for room


@dataclass(frozen=True)
class Question:
    """What one job needs: keys of its tokens as they are now, how much of it may come from a cache, what it swapped."""

    chain: HashChain
    keys: tuple[bytes, ...]
    most_tokens: int
    here: Inside
    swapped: Staged | None


@dataclass
class _Parts:
    """Entries of one try: those that are there, and those on their way, by place; the tail's place is None."""

    boundary: Boundary
    entries: dict[int | None, Entry] = field(default_factory=dict)
    coming: dict[int | None, Future[Entry | None]] = field(default_factory=dict)


class TierFetch:
    """A `Fetch` from one tier. `poll` and `close` are called by the thread that steps the engine."""

    def __init__(self, tier: OuterTier, question: Question, num_evicted: int) -> None:
        self.question, self.num_evicted = question, num_evicted
        self._tier = tier
        self._asked = time.monotonic()
        self._deadline = self._asked + tier.config.wait_seconds
        self._generation = tier.io.generation
        self._bad: set[bytes] = set()
        self._tries = 0
        self._parts: _Parts | None = None
        self.search: Future[Boundary | None] | None = None
        self._staged: Staged | None = None
        self.is_over = False
        shape = tier.transfer.shape
        if question.most_tokens // shape.hash_tokens * shape.hash_tokens > question.here.num_tokens or question.swapped:
            self._ask()
        else:
            self._end()

    @property
    def staged(self) -> Staged | None:
        """None too if prefixes were forgotten meanwhile: these may be among them."""
        return self._staged if self._generation == self._tier.io.generation else None

    def poll(self) -> bool:
        """Go on as far as possible without waiting; true once there is nothing left to wait for."""
        if not self.is_over and time.monotonic() > self._deadline:
            self._end()
        if self.search is not None:
            if self.search.done():
                search, self.search = self.search, None
                self._begin(search.result())
            elif time.monotonic() > self._asked + ASK_SECONDS:
                self._tier.io.was_silent()
                self._end()
        if self._parts is not None and not self.is_over:
            self._collect(self._parts)
        return self.is_over

    def close(self) -> None:
        """Let go of everything; what is still on its way is let go when it comes."""
        self._end()

    def _end(self) -> None:
        """There is nothing to wait for, and nothing to start from."""
        self.is_over, self._staged = True, None
        if self.search is not None:
            self.search.cancel()
            self.search = None
        if self._parts is not None:
            parts, self._parts = self._parts, None
            self._tier.unpin(parts.entries.values())
            for future in parts.coming.values():
                future.add_done_callback(self._let_go)

    def _let_go(self, future: Future[Entry | None]) -> None:
        if not future.cancelled() and future.exception() is None:
            entry = future.result()
            if entry is not None:
                self._tier.unpin([entry])

    def _ask(self) -> None:
        """Look for the longest boundary: at once in memory, in another thread where a store has to be asked."""
        self._tries += 1
        self._asked = time.monotonic()
        if self._tier.io.is_asked():
            self.search = self._tier.io.askers.submit(self._find)
        else:
            self._begin(self._find())

    def _find(self) -> Boundary | None:
        """In a thread of the tier: the pages may change meanwhile, what is in `question` does not."""
        question, transfer, shape = self.question, self._tier.transfer, self._tier.transfer.shape
        swapped, keys = question.swapped, question.keys
        if swapped is not None and question.here.num_tokens < swapped.num_tokens <= question.most_tokens:
            found = pages_for_swapped(shape, keys, swapped.num_tokens, question.here, self._has)
            if found is not None:
                return found
        room = self._tier.memory.limit_bytes - transfer.tail_bytes(shape.page_tokens - 1) - HEADER_BYTES
        most = room // (HEADER_BYTES + transfer.page_bytes()) * shape.page_tokens  # all of it is in memory at once
        return find_boundary(shape, keys, min(question.most_tokens, most), question.here, self._has)

    def _has(self, kind: str, keys: Sequence[bytes]) -> list[bool]:
        names = [self._tier.format.name(kind, key) for key in keys]
        return [found and name not in self._bad for found, name in zip(self._tier.io.has(names), names)]

    def _begin(self, boundary: Boundary | None) -> None:
        """Pin what is in memory and send for the rest, if the whole is worth it."""
        if boundary is None or self.is_over:
            self._end()
            return
        self._parts = parts = _Parts(boundary)
        wanted = self._wanted(boundary)
        for place, one in wanted.items():
            entry = self._tier.memory.find(one.name, pins=1)
            if entry is not None:
                parts.entries[place] = entry
        missing = {place: one for place, one in wanted.items() if place not in parts.entries}
        num_bytes, num_read = (sum(one.num_bytes for one in group.values()) for group in (wanted, missing))
        if not self._tier.costs.load_pays(num_bytes, num_read, boundary.num_tokens - self.question.here.num_tokens):
            self._end()
            return
        for place, one in missing.items():
            parts.coming[place] = self._tier.io.read(one, self._tier.transfer.buffer)

    def _wanted(self, boundary: Boundary) -> dict[int | None, Wanted]:
        """What has to be brought, the end first: of the store's files, the first page is then the one used last."""
        transfer, keys, shape = self._tier.transfer, self.question.keys, self._tier.transfer.shape
        wanted = dict[int | None, Wanted]()
        if boundary.tail and not self._is_swapped(boundary):
            name = self._tier.format.name(TAIL, keys[boundary.num_tokens // shape.hash_tokens - 1])
            size = HEADER_BYTES + transfer.tail_bytes(boundary.num_tokens % shape.page_tokens)
            wanted[None] = Wanted(TAIL, name, size)
        for place in reversed(boundary.pages):
            name = self._tier.format.name(PAGE, keys[(place + 1) * shape.blocks_per_page - 1])
            wanted[place] = Wanted(PAGE, name, HEADER_BYTES + transfer.page_bytes())
        return wanted

    def _is_swapped(self, boundary: Boundary) -> bool:
        swapped = self.question.swapped
        return boundary.tail and swapped is not None and boundary.num_tokens == swapped.num_tokens

    def _collect(self, parts: _Parts) -> None:
        for place, future in [(place, future) for place, future in parts.coming.items() if future.done()]:
            del parts.coming[place]
            entry = future.result()
            if entry is None:
                self._try_again(parts)
                return
            parts.entries[place] = entry
        if parts.coming:
            return
        pages = {place: entry for place, entry in parts.entries.items() if place is not None}
        swapped = self.question.swapped
        tail = swapped.tail if swapped and self._is_swapped(parts.boundary) else parts.entries.get(None)
        self._staged = Staged(self.question.chain, parts.boundary.num_tokens, pages, tail)
        self.is_over = True

    def _try_again(self, parts: _Parts) -> None:
        """An entry could not be had: look for another boundary, without those that were not there."""
        wanted = self._wanted(parts.boundary)
        self._bad |= {one.name for place, one in wanted.items() if place not in parts.entries | parts.coming}
        self._end()
        if self._tries < MOST_TRIES:
            self.is_over = False
            self._ask()


class Prefetcher:
    """Looks after the fetches of waiting jobs, before each step."""

    def __init__(self, tier: OuterTier, books: HybridCache) -> None:
        self._tier, self._books = tier, books
        self._renewals: dict[Job, int] = {}

    def look(self, waiting: Sequence[Job]) -> None:
        """Begin and continue; a job whose fetch is not over is parked. Only those that could start are looked at."""
        first = waiting[: self._books.config.max_requests]
        self._renewals = {job: count for job in first if (count := self._renewals.get(job, 0))}
        fetches = {job: self._current(job) for job in first}
        searches = {fetch: fetch.search for fetch in fetches.values() if not fetch.poll() and fetch.search is not None}
        if searches:  # most answers take less than a step does
            wait(searches.values(), GRACE_SECONDS)
            for fetch in searches:
                fetch.poll()
        for job, fetch in fetches.items():
            if job.request.ready is None:
                job.parked = not fetch.is_over
            else:
                job.parked |= not fetch.is_over

    def _current(self, job: Job) -> TierFetch:
        """The job's fetch, begun if there is none, and begun anew if it is of no use any more."""
        name_again(self._books, job)
        if job.fetch is None:
            job.fetch = self._fetch(job)
        assert isinstance(job.fetch, TierFetch)
        if job.fetch.is_over and self._is_outdated(job, job.fetch):
            job.fetch.close()
            self._renewals[job] = self._renewals.get(job, 0) + 1
            job.fetch = self._fetch(job)
        return job.fetch

    def _fetch(self, job: Job) -> TierFetch:
        most = min(job.most_hit, job.num_tokens - 1)
        here = inside(self._books.prefixes, job.chain.keys, most)
        question = Question(job.chain, tuple(job.chain.keys), most, here, job.swapped)
        return TierFetch(self._tier, question, self._books.pool.num_evicted)

    def _is_outdated(self, job: Job, fetch: TierFetch) -> bool:
        """Whether its tokens have other names now, or pages on which it counted may have gone."""
        if fetch.question.chain is not job.chain:
            return True
        evicted = self._books.pool.num_evicted != fetch.num_evicted
        return evicted and self._renewals.get(job, 0) < MOST_RENEWALS
