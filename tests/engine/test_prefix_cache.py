"""PrefixCache: the longest boundary that latents and every group's state share, and what goes when a page goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from openk3.config.serve import PageShape
from openk3.engine.block_pool import BlockPool, PageKind
from openk3.engine.prefix_cache import Hit, PrefixCache
from openk3.engine.prefix_keys import HashChain, Salt

KEYS = HashChain(Salt("", "0"), 2, range(24)).keys  # twelve blocks, three to a page


class Fixture:
    """A pool of 20 pages and its cache, with pages of six tokens and two KDA groups."""

    def __init__(self, groups: int = 2) -> None:
        shape = PageShape(page_tokens=6, hash_tokens=2, layers_per_page=1, kda_groups=groups, row_bytes=1)
        self.groups, self.pool = groups, BlockPool(20)
        self.cache = PrefixCache(self.pool, shape)

    def latents(self, first: int, end: int) -> int:
        """Enter a page with blocks first .. end - 1 and let it go."""
        (page,) = self.pool.allocate([PageKind.LATENTS])
        self.cache.add_latents(page, KEYS[first:end])
        self.pool.unpin([page])
        return page

    def checkpoint(self, end: int, kept: bool = True) -> list[int]:
        """Enter states after `end` blocks and let them go."""
        pages = self.pool.allocate([PageKind.STATE] * self.groups)
        assert self.cache.add_checkpoint(KEYS[end - 1], pages, kept=kept)
        self.pool.unpin(pages)
        return pages

    def evict(self, page: int) -> None:
        """Take pages until this one has gone; it must be the longest idle one."""
        others = [p for p in self.pool._idle if p != page]
        self.pool.pin(others)
        self.pool.unpin(self.pool.allocate([PageKind.STATE] * (self.pool.num_free + 1)))
        self.pool.unpin(others)
        assert self.pool.kind(page) is None
        self.check()

    def check(self) -> None:
        """Both sides."""
        self.pool.check()
        self.cache.check()


def test_nothing_is_found_in_an_empty_cache() -> None:
    """Nor without keys."""
    cache = Fixture().cache
    assert cache.lookup(KEYS, 24) == cache.lookup([], 24) == Hit()


def test_the_longest_boundary_with_latents_and_states() -> None:
    """Latents reach to block 8 (two pages and two blocks); states decide where a request starts."""
    f = Fixture()
    pages = [f.latents(0, 3), f.latents(3, 6), f.latents(6, 8)]
    assert f.cache.lookup(KEYS, 24) == Hit(shared_tokens=16)
    early = f.checkpoint(2)
    assert f.cache.lookup(KEYS, 24) == Hit(4, 16, (), pages[0], tuple(early))
    middle = f.checkpoint(6)
    hit = f.cache.lookup(KEYS, 24)
    assert hit == Hit(12, 16, tuple(pages[:2]), None, tuple(middle))
    assert hit.pages == (*pages[:2], *middle) and hit.sources == tuple(middle)
    late = f.checkpoint(7)
    hit = f.cache.lookup(KEYS, 24)
    assert hit == Hit(14, 16, tuple(pages[:2]), pages[2], tuple(late))
    assert hit.sources == (pages[2], *late)
    f.check()


@pytest.mark.parametrize(("most", "found"), [(24, 14), (14, 14), (13, 12), (12, 12), (11, 4), (3, 0), (0, 0), (-1, 0)])
def test_no_more_than_asked_for(most: int, found: int) -> None:
    """The limit is in tokens and cuts at a boundary."""
    f = Fixture()
    for first, end in ((0, 3), (3, 6), (6, 8)):
        f.latents(first, end)
    for end in (2, 6, 7):
        f.checkpoint(end)
    assert f.cache.lookup(KEYS, most).num_tokens == found


def test_a_gap_ends_the_prefix() -> None:
    """Later pages do not help without the one before them."""
    f = Fixture()
    pages = [f.latents(0, 3), f.latents(3, 6), f.latents(6, 9)]
    f.checkpoint(9)
    f.checkpoint(1)
    assert f.cache.lookup(KEYS, 24).num_tokens == 18
    f.evict(pages[1])
    assert (f.cache.lookup(KEYS, 24).num_tokens, f.cache.lookup(KEYS, 24).shared_tokens) == (2, 6)


def test_a_page_is_entered_again_as_it_fills() -> None:
    """Its rows serve every boundary in it; a twin that reaches no further is not entered, one that does is."""
    f = Fixture()
    (page,) = f.pool.allocate([PageKind.LATENTS])
    assert not f.cache.add_latents(page, [])
    assert f.cache.add_latents(page, KEYS[:1]) and f.cache.add_latents(page, KEYS[:2])
    (twin,) = f.pool.allocate([PageKind.LATENTS])
    assert not f.cache.add_latents(twin, KEYS[:2]) and not f.pool.is_cached(twin)
    assert f.cache.add_latents(twin, KEYS[:3])
    f.pool.unpin([page, twin])
    f.checkpoint(1)
    f.checkpoint(3)
    assert f.cache.lookup(KEYS, 24).full_pages == (twin,)
    assert f.cache.lookup(KEYS, 2).partial_page == page
    f.evict(page)
    assert f.cache.lookup(KEYS, 2).partial_page == twin


@pytest.mark.parametrize("group", [0, 1])
def test_losing_one_group_loses_its_siblings(group: int) -> None:
    """A state of some layers only is no state."""
    f = Fixture()
    f.latents(0, 3)
    f.checkpoint(1)
    pages = f.checkpoint(3)
    f.evict(pages[group])
    assert [f.pool.kind(page) for page in pages] == [None, None]
    assert not f.cache.has_checkpoint(KEYS[2]) and f.cache.lookup(KEYS, 24).num_tokens == 2


def test_a_pinned_sibling_goes_when_its_holder_does() -> None:
    """It can no longer be found, but is read to the end."""
    f = Fixture()
    f.latents(0, 3)
    pages = f.checkpoint(3)
    f.pool.pin([pages[0]])
    f.evict(pages[1])
    assert f.pool.refs(pages[0]) == 1 and f.pool.is_sealed(pages[0]) and not f.pool.is_cached(pages[0])
    f.pool.unpin([pages[0]])
    assert f.pool.kind(pages[0]) is None


def test_states_go_with_the_last_latents() -> None:
    """Without them no request can start there."""
    f = Fixture()
    page = f.latents(0, 3)
    states = f.checkpoint(2)
    f.evict(page)
    assert [f.pool.kind(p) for p in states] == [None, None]


def test_passing_checkpoints_are_recycled_and_kept_ones_are_not() -> None:
    """`keep` turns one into the other."""
    f = Fixture()
    f.latents(0, 3)
    passing, kept, used = f.checkpoint(1, kept=False), f.checkpoint(2), f.checkpoint(3, kept=False)
    f.cache.keep(KEYS[2])
    for key in KEYS:
        f.cache.recycle(key)
    assert [f.pool.kind(pages[0]) for pages in (passing, kept, used)] == [None, PageKind.STATE, PageKind.STATE]
    f.check()


def test_kept_checkpoints_count_as_just_used() -> None:
    """They are evicted last."""
    f = Fixture()
    page = f.latents(0, 3)
    old, new = f.checkpoint(1), f.checkpoint(2)
    f.cache.keep(KEYS[0])
    assert list(f.pool._idle) == [page, *reversed(new), *old]


def test_a_checkpoint_must_be_whole_and_have_latents() -> None:
    """One page per group; a second one at the same place is not entered."""
    f = Fixture()
    f.latents(0, 3)
    pages = f.pool.allocate([PageKind.STATE] * 2)
    for key, some in ((KEYS[0], pages[:1]), (KEYS[5], pages)):
        with pytest.raises(ValueError, match="checkpoint: "):
            f.cache.add_checkpoint(key, some, kept=True)
    assert f.cache.add_checkpoint(KEYS[0], pages, kept=True)
    assert not f.cache.add_checkpoint(KEYS[0], f.pool.allocate([PageKind.STATE] * 2), kept=True)


def test_without_kda_layers_latents_alone_decide() -> None:
    """Nothing else is remembered."""
    f = Fixture(groups=0)
    pages = [f.latents(0, 3), f.latents(3, 5)]
    assert f.cache.lookup(KEYS, 24) == Hit(10, 10, (pages[0],), pages[1], ())


def test_clear_forgets_everything() -> None:
    """Idle pages are free, held ones stay with their holder."""
    f = Fixture()
    page = f.latents(0, 3)
    f.checkpoint(1)
    f.pool.pin([page])
    f.cache.clear()
    f.check()
    assert f.cache.lookup(KEYS, 24) == Hit() and (f.pool.num_free, f.pool.num_held) == (19, 1)


DAMAGES: list[Callable[[PrefixCache, BlockPool, Sequence[int]], object]] = [
    lambda cache, pool, states: cache._holders.pop(KEYS[1]),
    lambda cache, pool, states: cache._keys_of.clear(),
    lambda cache, pool, states: cache._key_of.pop(states[0]),
    lambda cache, pool, states: setattr(cache._checkpoints[KEYS[2]], "pages", (states[0],)),
    lambda cache, pool, states: cache._checkpoints.pop(KEYS[2]),
    lambda cache, pool, states: setattr(pool._pages[states[0]], "sealed", False),
    lambda cache, pool, states: setattr(pool._pages[states[0]], "kind", PageKind.LATENTS),
    lambda cache, pool, states: pool.uncache(states[0]),
    lambda cache, pool, states: (cache._keys_of.clear(), cache._holders.clear()),
    lambda cache, pool, states: (cache._key_of.clear(), cache._checkpoints.clear()),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_check_sees_damage(damage: Callable[[PrefixCache, BlockPool, Sequence[int]], object]) -> None:
    """A page and a checkpoint; then one thing is wrong."""
    f = Fixture()
    f.latents(0, 3)
    states = f.checkpoint(3)
    f.check()
    damage(f.cache, f.pool, states)
    with pytest.raises(AssertionError):
        f.check()
