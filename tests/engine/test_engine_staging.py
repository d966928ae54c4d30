"""Staging: what lies outside is used if it is the request's own, whole and reaches further; states leave whole."""

from __future__ import annotations

from typing import Any

from named_outside import NamedOutside
from page_runner import PageRunner, small_cache

from openk3.engine.block_pool import PageKind
from openk3.engine.outside import Staged
from openk3.engine.staging import extend, swap_out

PROMPT = list(range(100, 130))


def runner(**options: Any) -> tuple[PageRunner, NamedOutside]:
    """A prefix of 29 tokens that lies outside and nowhere else, with checkpoints at 16, 24 and 28 tokens."""
    made = PageRunner(small_cache(**options))
    outside = NamedOutside(made)
    made.release(made.run(made.start(PROMPT[:29], turn_ends=[16, 24])))
    evict(made)
    return made, outside


def evict(made: PageRunner) -> None:
    """All idle pages."""
    pool = made.cache.pool
    pool.unpin(pool.allocate([PageKind.STATE] * pool.num_available))
    made.check()


def staged(made: PageRunner, tokens: list[int]) -> Staged:
    """For a prompt that goes on behind it."""
    assert made.outside is not None
    found = made.outside.stage(made.cache.name(tokens), len(tokens) - 1)
    assert found is not None
    return found


def test_the_longest_boundary_is_used() -> None:
    """Whole pages become cached ones when they have landed, the state is private, and entries are let go."""
    made, outside = runner()
    one = made.start([*PROMPT[:29], 1])
    plan = one.cache.plan
    assert plan is not None and one.cache.hit_tokens == 28 and len(plan.page_loads) == 3 and plan.tail_load is not None
    assert plan.tail_load.num_rows == 4 and not outside.idle()
    two = made.start([*PROMPT[:29], 2])
    assert two.cache.plan is not None and len(two.cache.plan.page_loads) == 3, "nothing has landed yet"
    made.land(one)
    made.read(one)
    three = made.start([*PROMPT[:29], 3])
    assert three.cache.plan is not None and not three.cache.plan.page_loads and three.cache.plan.tail_load is not None
    assert three.cache.pages[:3] == one.cache.pages[:3]
    made.release(two)
    for driven in (one, three):
        made.release(made.run(driven))
    assert outside.idle()


def test_what_cannot_be_used_is_not() -> None:
    """Of another chain, beyond what may come from a cache, not further than what is here, with a page missing."""
    made, _ = runner()
    cache, tokens = made.cache, [*PROMPT[:29], 1]
    found = staged(made, tokens)
    hit = cache.prefixes.lookup(found.chain.keys, 29)
    assert extend(cache.prefixes, found.chain, hit, found, 29).num_tokens == 28
    assert extend(cache.prefixes, cache.name(tokens), hit, found, 29) is hit
    assert extend(cache.prefixes, found.chain, hit, found, 27) is hit
    assert extend(cache.prefixes, found.chain, hit, None, 29) is hit
    without = {place: entry for place, entry in found.pages.items() if place != 1}
    assert extend(cache.prefixes, found.chain, hit, Staged(found.chain, 28, without, found.tail), 29) is hit
    assert extend(cache.prefixes, found.chain, hit, Staged(found.chain, 28, found.pages), 29) is hit, (
        "no state anywhere"
    )
    made.outside = None
    made.run(made.start(tokens))
    hit = cache.prefixes.lookup(found.chain.keys, 29)
    assert hit.num_tokens == 28 and extend(cache.prefixes, found.chain, hit, found, 29) is hit


def test_alone_without_room() -> None:
    """A request that fits only without what it would bring starts from nothing, and nothing stays pinned."""
    made, outside = runner(num_pages=8)
    one = made.start([*PROMPT[:29], 1])
    assert one.cache.hit_tokens == 28 and len(one.cache.pages) == 4
    made.release(one)
    assert outside.idle() and made.cache.pool.num_held == 0


def test_a_state_leaves_only_whole() -> None:
    """Not before its first copies or those of a checkpoint, not of other weights, not if nothing would be lost."""
    made, outside = runner(checkpoint_pages=0)
    one = made.start([1, 2, 3, 4, 5, 6, 7])
    assert swap_out(made.cache, one.cache) is None, "not even zeroed"
    made.run(one, 5)
    kept = swap_out(made.cache, one.cache)
    assert kept is not None and kept.num_tokens == 5 and len(kept.tail.rows) == 5 and kept.chain is one.cache.chain
    outside.unpin([kept.tail])
    assert made.step(one, 6) is not None and swap_out(made.cache, one.cache) is None, "a checkpoint is on its way"
    made.land(one)
    assert swap_out(made.cache, one.cache) is None, "the checkpoint is there"
    made.run(one)
    made.cache.new_weights("1")
    assert swap_out(made.cache, one.cache) is None, "a mixture of weights"
    made.cache.prefixes.outside = None
    assert swap_out(made.cache, one.cache) is None and outside.num_swapped == 1
    made.release(one)


def test_a_swapped_state_goes_on_where_it_was() -> None:
    """Its pages still here, all of them outside, one of them lost: then it computes from the longest boundary."""
    for case, start in (("here", 27), ("outside", 27), ("lost", 0)):
        made, outside = runner(num_pages=40, checkpoint_pages=0)
        one = made.run(made.start([7, *PROMPT[:29]]), 27)
        made.swap_out(one)
        assert one.swapped is not None
        made.release(one)
        if case != "here":
            evict(made)
        if case == "lost":
            outside.entries = {
                key: entry for key, entry in outside.entries.items() if entry.states or entry.rows[0] % 2
            }
            outside.entries.clear()
        again = made.again(one)
        assert again.cache.hit_tokens == start and outside.idle() == (start == 0)
        made.release(made.run(again))
        assert outside.idle()
