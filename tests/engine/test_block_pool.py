"""BlockPool: pages are free, held or idle; idle ones go, the longest idle first, and nothing else does."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from openk3.engine.block_pool import BlockPool, NoRoom, PageKind, PoolError

LATENTS, STATE = PageKind.LATENTS, PageKind.STATE


def counts(pool: BlockPool) -> tuple[int, int, int]:
    """(free, idle, held), after a check."""
    pool.check()
    return pool.num_free, pool.num_idle, pool.num_held


def test_the_life_of_a_page() -> None:
    """Free, held by one and by two, idle, held again, forgotten, free."""
    pool = BlockPool(3)
    (page,) = pool.allocate([LATENTS])
    assert counts(pool) == (2, 0, 1) and pool.kind(page) is LATENTS and pool.refs(page) == 1
    pool.cache(page)
    pool.seal(page)
    pool.pin([page])
    pool.unpin([page])
    assert counts(pool) == (2, 0, 1)
    pool.unpin([page])
    assert counts(pool) == (2, 1, 0) and pool.is_cached(page) and pool.is_sealed(page)
    pool.pin([page])
    assert counts(pool) == (2, 0, 1)
    pool.uncache(page)
    assert counts(pool) == (2, 0, 1) and pool.is_sealed(page)
    pool.unpin([page])
    assert counts(pool) == (3, 0, 0) and pool.kind(page) is None and not pool.is_sealed(page)


def test_the_longest_idle_page_is_evicted_first_and_free_ones_before_it() -> None:
    """Of pages released together the last is the oldest; a touched page is the youngest."""
    pool = BlockPool(5)
    evicted: list[int] = []
    pool.on_evict = lambda page: (evicted.append(page), pool.uncache(page))[0]
    pages = pool.allocate([LATENTS] * 4)
    for page in pages:
        pool.cache(page)
    pool.unpin(pages)
    assert pool.allocate([STATE]) not in pages and evicted == []
    pool.touch(pages[3])
    pool.allocate([STATE, LATENTS, STATE])
    assert evicted == [pages[2], pages[1], pages[0]] and pool.num_evicted == 3
    assert counts(pool) == (0, 1, 4)


def test_pins_come_before_evictions() -> None:
    """The page that is about to be used is the oldest, and is not the one that makes room."""
    pool = BlockPool(2)
    pages = pool.allocate([LATENTS, LATENTS])
    for page in pages:
        pool.cache(page)
    pool.unpin(pages)
    oldest = pages[1]
    assert pool.allocate([STATE], pins=[oldest]) == [pages[0]]
    assert pool.refs(oldest) == 1 and pool.is_cached(oldest)
    assert counts(pool) == (0, 0, 2)


def test_without_room_nothing_changes_hands() -> None:
    """Neither pins nor evictions."""
    pool = BlockPool(3)
    (held,) = pool.allocate([LATENTS])
    (idle,) = pool.allocate([LATENTS])
    pool.cache(idle)
    pool.unpin([idle])
    with pytest.raises(NoRoom, match="2 more pages are needed, 1 can be had"):
        pool.allocate([STATE, STATE], pins=[idle, held])
    assert pool.refs(held) == 1 and pool.refs(idle) == 0 and pool.is_cached(idle) and pool.num_evicted == 0
    assert counts(pool) == (1, 1, 1)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda pool, held, idle, free: pool.pin([free]), "pinned, but it is free"),
        (lambda pool, held, idle, free: pool.unpin([free]), "unpinned, but nobody holds it"),
        (lambda pool, held, idle, free: pool.unpin([idle]), "unpinned, but nobody holds it"),
        (lambda pool, held, idle, free: pool.cache(free), "cached, but nobody holds it"),
        (lambda pool, held, idle, free: pool.seal(idle), "sealed, but nobody holds it"),
        (lambda pool, held, idle, free: pool.require_writable([held, idle]), "about to be written, but it is not held"),
        (lambda pool, held, idle, free: pool.require_writable([free]), "about to be written, but it is free"),
    ],
)
def test_a_misused_page_is_an_error(act: Callable[..., None], message: str) -> None:
    """And the pool stays whole."""
    pool = BlockPool(3)
    held, idle = pool.allocate([LATENTS, LATENTS])
    pool.cache(idle)
    pool.unpin([idle])
    with pytest.raises(PoolError, match=message):
        act(pool, held, idle, next(page for page in range(3) if pool.kind(page) is None))
    assert counts(pool) == (1, 1, 1)


def test_sealed_pages_are_not_written() -> None:
    """Until they have been free."""
    pool = BlockPool(1)
    pages = pool.allocate([STATE])
    pool.require_writable(pages)
    pool.seal(pages[0])
    with pytest.raises(PoolError, match="about to be written, but it is sealed"):
        pool.require_writable(pages)
    pool.unpin(pages)
    pool.require_writable(pool.allocate([STATE]))


def test_an_owner_that_keeps_an_evicted_page_is_found_out() -> None:
    """Eviction must give the page up."""
    pool = BlockPool(1, on_evict=lambda page: None)
    pages = pool.allocate([LATENTS])
    pool.cache(pages[0])
    pool.unpin(pages)
    with pytest.raises(PoolError, match="its owner kept it"):
        pool.allocate([LATENTS])


DAMAGES: list[Callable[[BlockPool], None]] = [
    lambda pool: pool._free.append(pool._free[0]),
    lambda pool: pool._free.append(0),
    lambda pool: pool._idle.pop(1),
    lambda pool: pool._idle.update({0: None}),
    lambda pool: setattr(pool._pages[0], "refs", -1),
    lambda pool: setattr(pool._pages[0], "refs", 0),
    lambda pool: setattr(pool._pages[1], "cached", False),
    lambda pool: setattr(pool._pages[2], "sealed", True),
    lambda pool: setattr(pool._pages[1], "kind", None),
    lambda pool: pool._free.clear(),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_check_sees_damage(damage: Callable[[BlockPool], None]) -> None:
    """Page 0 held, page 1 idle, page 2 free; then one thing is wrong."""
    pool = BlockPool(3)
    assert pool.allocate([LATENTS, LATENTS]) == [0, 1]
    pool.cache(1)
    pool.unpin([1])
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check()


def test_random_use_keeps_the_books() -> None:
    """2,000 operations against a plain count of holders."""
    rng, pool = random.Random(0), BlockPool(8)
    holders: dict[int, int] = {}
    for _ in range(2000):
        held = [page for page, count in holders.items() if count]
        what = rng.choice(("take", "pin", "unpin", "cache", "uncache"))
        if what == "take":
            try:
                for page in pool.allocate([rng.choice((LATENTS, STATE)) for _ in range(rng.randrange(3))]):
                    assert not holders.get(page)
                    holders[page] = 1
            except NoRoom:
                assert pool.num_free + pool.num_idle < 2
        elif held:
            page = rng.choice(held)
            if what == "pin":
                holders[page] += 1
                pool.pin([page])
            elif what == "unpin":
                holders[page] -= 1
                pool.unpin([page])
            else:
                pool.cache(page) if what == "cache" else pool.uncache(page)
        pool.check()
        assert all(pool.refs(page) == count for page, count in holders.items())
    assert pool.num_evicted > 20
