"""PrefixCache: which computed prefixes the pages hold, and the longest one that a new request can start from.

Latents of a prefix may end at any hash block; a KDA state exists only where a checkpoint was taken, one page in each
group of KDA layers. A request can start where both are there (report section 5.4.1). Nothing is entered before it is
computed, so whatever is found may be used. What is evicted goes to `outside`, if there is such a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openk3.config.serve import PageShape
from openk3.engine.block_pool import BlockPool, PageKind
from openk3.engine.outside import Outside


@dataclass(frozen=True)
class Hit:
    """The longest usable prefix. Pages are not pinned yet: pass `pages` to `BlockPool.allocate` as its pins."""

    num_tokens: int = 0  # where the request starts; 0: from nothing
    shared_tokens: int = 0  # how far latents alone would reach: a place worth a checkpoint
    full_pages: tuple[int, ...] = ()  # latents to read in place
    partial_page: int | None = None  # latents whose first rows are copied: more than the prefix is or will be in it
    checkpoint: tuple[int, ...] = ()  # state of each KDA group, to be copied
    missing: tuple[tuple[int, Any], ...] = ()  # (place, entry) of whole pages that lie outside; full_pages lacks them
    tail: Any | None = None  # entry with state and partial page, where they lie outside

    @property
    def sources(self) -> tuple[int, ...]:
        """Pages that are copied from, and must stay until the copies are done."""
        return self.checkpoint if self.partial_page is None else (self.partial_page, *self.checkpoint)

    @property
    def pages(self) -> tuple[int, ...]:
        """Every page of the hit."""
        return self.full_pages + self.sources


@dataclass
class _Checkpoint:
    pages: tuple[int, ...]
    kept: bool


class PrefixCache:
    """Index from keys (see HashChain) to pages of `pool`; takes over the pool's evictions."""

    def __init__(self, pool: BlockPool, shape: PageShape) -> None:
        self._pool, self.shape = pool, shape
        self._holders: dict[bytes, dict[int, None]] = {}  # pages whose rows reach to the key's end, oldest first
        self._keys_of: dict[int, tuple[bytes, ...]] = {}  # a page's complete hash blocks, from its first
        self._checkpoints: dict[bytes, _Checkpoint] = {}
        self._key_of: dict[int, bytes] = {}  # a checkpoint page's key
        self.outside: Outside | None = None
        pool.on_evict = self._evict

    def lookup(self, keys: Sequence[bytes], most_tokens: int) -> Hit:
        """The longest prefix of at most `most_tokens` tokens for which latents and every KDA group's state are there.

        Whole pages are followed first, then the hash blocks of the first page that is not whole; from there back to the
        nearest checkpoint.
        """
        size, per_page = self.shape.hash_tokens, self.shape.blocks_per_page
        last = max(0, min(len(keys), most_tokens // size))
        reach = 0
        while reach + per_page <= last and keys[reach + per_page - 1] in self._holders:
            reach += per_page
        inside = range(min(last, reach + per_page - 1), reach, -1)
        reach = next((end for end in inside if keys[end - 1] in self._holders), reach)
        end = next((end for end in range(reach, 0, -1) if self._has_state(keys[end - 1])), 0)
        if end == 0:
            return Hit(shared_tokens=reach * size)
        full = tuple(self._holder(keys[i - 1]) for i in range(per_page, end + 1, per_page))
        partial = self._holder(keys[end - 1]) if end % per_page else None
        states = self._checkpoints[keys[end - 1]].pages if self.shape.kda_groups else ()
        return Hit(end * size, reach * size, full, partial, states)

    def add_latents(self, page: int, keys: Sequence[bytes]) -> bool:
        """Enter a held page whose first len(keys) hash blocks are computed; returns whether it leads further.

        All of its keys are entered at once, or none when another page already reaches as far. A page that fills up is
        entered again with more keys.
        """
        if not keys or keys[-1] in self._holders:
            return False
        self._pool.cache(page)
        for key in keys:
            self._holders.setdefault(key, {})[page] = None
        self._keys_of[page] = tuple(keys)
        return True

    def add_checkpoint(self, key: bytes, pages: Sequence[int], *, kept: bool) -> bool:
        """Enter a held, filled state page of each KDA group; returns whether it is new.

        `kept` says that it stays after its request has gone past it. Pages are sealed: a checkpoint is only read.
        """
        if len(pages) != self.shape.kda_groups or key not in self._holders:
            raise ValueError(f"checkpoint: {len(pages)} pages for {self.shape.kda_groups} groups, or no latents there")
        if key in self._checkpoints:
            return False
        for page in pages:
            self._pool.cache(page)
            self._pool.seal(page)
            self._key_of[page] = key
        self._checkpoints[key] = _Checkpoint(tuple(pages), kept)
        return True

    def has_checkpoint(self, key: bytes) -> bool:
        """Whether every KDA group's state is there."""
        return key in self._checkpoints

    def checkpoint(self, key: bytes) -> tuple[int, ...] | None:
        """The page of each KDA group's state."""
        return self._checkpoints[key].pages if key in self._checkpoints else None

    def page_of(self, key: bytes) -> int | None:
        """A page whose latents reach to the key's end."""
        return next(iter(self._holders.get(key, ())), None)

    def keep(self, key: bytes) -> None:
        """Let a checkpoint, if it is still there, outlive its request's next one, and count it as just used."""
        if key in self._checkpoints:
            self._checkpoints[key].kept = True
            for page in self._checkpoints[key].pages:
                self._pool.touch(page)

    def recycle(self, key: bytes) -> None:
        """Give up a checkpoint that a later one replaces, unless it is to be kept."""
        if key in self._checkpoints and not self._checkpoints[key].kept:
            self._drop_checkpoint(key)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Let nobody find these prefixes any more: what was computed for them is not to be trusted."""
        for key in keys:
            for page in list(self._holders.get(key, ())):
                self._drop(page)
        if self.outside is not None:
            self.outside.forget(keys)

    def write_back(self) -> None:
        """Let `outside` have everything, as if it were evicted: the last thing before the pages are gone."""
        for page in [*self._key_of, *self._keys_of]:
            _write_back(self, page)

    def clear(self) -> None:
        """Forget everything: pages that nobody holds become free."""
        for page in [*self._key_of, *self._keys_of]:
            self._drop(page)

    def check(self) -> None:
        """Assert every invariant of the index, and that the pool agrees on what is cached."""
        _check_index(self)

    def _has_state(self, key: bytes) -> bool:
        return self.shape.kda_groups == 0 or key in self._checkpoints

    def _holder(self, key: bytes) -> int:
        return next(iter(self._holders[key]))

    def _evict(self, page: int) -> None:
        _write_back(self, page)
        self._drop(page)

    def _drop(self, page: int) -> None:
        """Forget one page, and what is useless without it: states of the other groups, checkpoints without latents."""
        if page in self._key_of:
            self._drop_checkpoint(self._key_of[page])
            return
        for key in self._keys_of.pop(page, ()):
            del self._holders[key][page]
            if not self._holders[key]:
                del self._holders[key]
                if key in self._checkpoints:
                    self._drop_checkpoint(key)
        self._pool.uncache(page)

    def _drop_checkpoint(self, key: bytes) -> None:
        for page in self._checkpoints.pop(key).pages:
            del self._key_of[page]
            self._pool.uncache(page)


def _write_back(cache: PrefixCache, page: int) -> None:
    """Offer outside what `_drop` is about to forget for good: whole pages of latents, and checkpoints.

    A checkpoint takes the rows of its partial page along, so that it needs nothing but whole pages to be of use.
    """
    outside, per_page = cache.outside, cache.shape.blocks_per_page
    if outside is None:
        return
    if page in cache._key_of:
        key = cache._key_of[page]
        source = cache._holder(key)
        _write_checkpoint(cache, key, source, cache._keys_of[source].index(key) + 1)
        return
    keys = cache._keys_of[page]
    last = [len(cache._holders[key]) == 1 for key in keys]  # no twin has them
    if len(keys) == per_page and last[-1]:
        outside.page_evicted(keys[-1], page)
    for blocks, key in enumerate(keys, 1):
        if last[blocks - 1] and key in cache._checkpoints:
            _write_checkpoint(cache, key, page, blocks)


def _write_checkpoint(cache: PrefixCache, key: bytes, page: int, blocks: int) -> None:
    """`page` has the latents of its last `blocks` hash blocks; none are needed where a page ends."""
    assert cache.outside is not None
    rows = blocks * cache.shape.hash_tokens % cache.shape.page_tokens
    cache.outside.checkpoint_evicted(key, cache._checkpoints[key].pages, page, rows)


def _check_index(cache: PrefixCache) -> None:
    pool, per_page = cache._pool, cache.shape.blocks_per_page
    holders: dict[bytes, set[int]] = {}
    for page, keys in cache._keys_of.items():
        assert pool.kind(page) is PageKind.LATENTS, f"page {page}: latents expected"
        assert 1 <= len(keys) <= per_page, f"page {page}: {len(keys)} hash blocks"
        for key in keys:
            holders.setdefault(key, set()).add(page)
    assert holders == {key: set(pages) for key, pages in cache._holders.items()}, "the two sides of the index differ"
    states = {page: key for key, point in cache._checkpoints.items() for page in point.pages}
    assert states == cache._key_of, "checkpoints and their pages differ"
    assert len(states) == len(cache._checkpoints) * cache.shape.kda_groups, "a checkpoint lacks a group"
    for page, key in states.items():
        assert pool.kind(page) is PageKind.STATE, f"page {page}: a state expected"
        assert pool.is_sealed(page), f"page {page}: a checkpoint that can be written"
        assert key in cache._holders, f"page {page}: a checkpoint without latents"
    known = cache._keys_of.keys() | cache._key_of.keys()
    for page in known:
        assert pool.is_cached(page), f"page {page}: indexed, but not cached"
    assert pool.num_idle == sum(pool.refs(page) == 0 for page in known), "an idle page is not indexed"
