"""Each consistency rule of the hybrid cache has a story that ends well, and ends badly once the rule is broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from page_runner import PageRunner, small_cache

from openk3.engine import hybrid_cache
from openk3.engine.block_pool import BlockPool, NoRoom, PoolError
from openk3.engine.checkpoints import Checkpoints
from openk3.engine.hybrid_cache import HybridCache
from openk3.engine.page_plans import CopyPlan, RequestCache
from openk3.engine.prefix_cache import Hit, PrefixCache, _Checkpoint
from openk3.engine.prefix_keys import HashChain

PROMPT = list(range(100, 130))
BROKEN = (AssertionError, PoolError, KeyError, NoRoom)
Patch = pytest.MonkeyPatch
allocate, uncache, original_start = BlockPool.allocate, BlockPool.uncache, HybridCache.start


def full_pool_hit() -> None:
    """A hit whose pages are the longest idle ones, in a pool that must evict for what comes with it."""
    runner = PageRunner(small_cache(num_pages=9))
    runner.release(runner.run(runner.start(PROMPT[:11])))
    runner.release(runner.run(runner.start([1] * 7)))
    assert (runner.cache.pool.num_free, runner.cache.pool.num_idle) == (2, 7)  # one more is needed
    hit = runner.start([*PROMPT[:11], 3])
    assert hit.cache.hit_tokens == 10
    runner.run(hit)


def allocate_before_pinning(patch: Patch) -> None:
    """Hits are pinned after the pages that come with them were taken."""

    def broken(pool: BlockPool, kinds: Sequence[Any], pins: Sequence[int] = ()) -> list[int]:
        pages = allocate(pool, kinds)
        pool.pin(pins)
        return pages

    patch.setattr(BlockPool, "allocate", broken)


def reserved_but_not_computed() -> None:
    """A second request arrives while the first one's pass has not run."""
    runner = PageRunner(small_cache(groups=0))
    a = runner.start(PROMPT[:12])
    runner.cache.reserve(a.cache, 12)
    b = runner.start(PROMPT[:12])
    runner.land(b)
    runner.read(b)
    assert b.cache.hit_tokens == 0


def publish_when_reserved(patch: Patch) -> None:
    """Blocks are entered as soon as there is room for them."""
    reserve = HybridCache.reserve

    def broken(cache: HybridCache, request: RequestCache, num_tokens: int) -> None:
        reserve(cache, request, num_tokens)
        before, request.num_computed = request.num_computed, num_tokens
        hybrid_cache._publish(cache, request, 0)
        request.num_computed = before

    patch.setattr(HybridCache, "reserve", broken)


def checkpoint_under_way() -> None:
    """S03: a checkpoint is planned, its copies have not been made, and somebody asks for the prefix."""
    runner = PageRunner(small_cache(checkpoint_pages=0))
    a = runner.start(PROMPT[:10])
    assert runner.step(a, 10) is not None
    b = runner.start([*PROMPT[:10], 1])
    runner.land(b)
    runner.read(b)
    runner.release(a)
    c = runner.start([*PROMPT[:10], 2])
    runner.land(c)
    runner.read(c)


def enter_when_planned(patch: Patch) -> None:
    """A checkpoint is entered with its plan, not when its copies have landed."""
    plan = Checkpoints.plan

    def broken(points: Checkpoints, request: RequestCache) -> CopyPlan | None:
        made = plan(points, request)
        if made is not None:
            points.enter(request, made)
        return made

    patch.setattr(Checkpoints, "plan", broken)


def one_group_is_evicted() -> None:
    """Both groups' states are idle, and one page has to go."""
    runner = PageRunner(small_cache(num_pages=10, checkpoint_pages=0))
    runner.release(runner.run(runner.start(PROMPT[:9])))
    taken = []
    while runner.cache.pool.num_evicted == 0:
        taken += allocate(runner.cache.pool, [hybrid_cache.PageKind.STATE])
    runner.cache.pool.unpin(taken)
    runner.check()
    hit = runner.start([*PROMPT[:9], 1])
    runner.land(hit)
    runner.read(hit)


def keep_the_siblings(patch: Patch) -> None:
    """Only the evicted page is forgotten."""

    def broken(cache: PrefixCache, page: int) -> None:
        if page not in cache._key_of:
            drop(cache, page)
            return
        key = cache._key_of.pop(page)
        rest = tuple(p for p in cache._checkpoints[key].pages if p != page)
        cache._checkpoints[key] = _Checkpoint(rest, kept=True)
        uncache(cache._pool, page)

    drop = PrefixCache._drop
    patch.setattr(PrefixCache, "_drop", broken)


def two_use_one_checkpoint() -> None:
    """The second hit comes after the first one has run on."""
    runner = PageRunner(small_cache(checkpoint_pages=0))
    runner.release(runner.run(runner.start(PROMPT[:9])))
    for own in range(2):
        hit = runner.start([*PROMPT[:9], own, own])
        assert hit.cache.hit_tokens == 8
        runner.run(hit)


def run_on_the_checkpoint(patch: Patch) -> None:
    """A hit takes the checkpoint's pages as its running state."""

    def broken(cache: HybridCache, *args: Any, **kwargs: Any) -> RequestCache:
        request = original_start(cache, *args, **kwargs)
        if request.hit_tokens:
            plan = request.plan
            assert plan is not None
            request.states = list(plan.held[-len(request.states) :])
            request.plan = dataclasses.replace(plan, state_copies=())
        return request

    patch.setattr(HybridCache, "start", broken)
    patch.setattr(HybridCache, "check", lambda cache: None)
    patch.setattr(BlockPool, "require_writable", lambda pool, pages: None)


def write_what_is_sealed(patch: Patch) -> None:
    """The same, but targets are still checked: the engine stops before a wrong answer."""
    required = BlockPool.require_writable
    run_on_the_checkpoint(patch)
    patch.setattr(BlockPool, "require_writable", required)


def part_inside_a_page() -> None:
    """Two requests part in the middle of a page, and both go on."""
    runner = PageRunner(small_cache())
    a = runner.run(runner.start(PROMPT[:12]))
    b = runner.run(runner.start([*PROMPT[:12], 1, 2, 3]))
    runner.append(a, [4, 5, 6])
    runner.run(a)
    runner.read(a)
    runner.read(b)


def share_the_partial_page(patch: Patch) -> None:
    """The page is read in place and written on."""
    lookup = PrefixCache.lookup

    def broken(cache: PrefixCache, keys: Sequence[bytes], most_tokens: int) -> Hit:
        hit = lookup(cache, keys, most_tokens)
        if hit.partial_page is None:
            return hit
        return dataclasses.replace(hit, full_pages=(*hit.full_pages, hit.partial_page), partial_page=None)

    patch.setattr(PrefixCache, "lookup", broken)
    patch.setattr(HybridCache, "check", lambda cache: None)


def evict_before_the_copies() -> None:
    """Between a hit and its copies, other requests take every page that can be had."""
    runner = PageRunner(small_cache(num_pages=12, checkpoint_pages=0))
    runner.release(runner.run(runner.start(PROMPT[:13])))
    hit = runner.start([*PROMPT[:13], 1])
    assert hit.cache.hit_tokens == 12
    hog = runner.start([2] * 40)
    runner.step(hog, 40)
    runner.land(hit)
    runner.read(hit)


def let_sources_go_at_once(patch: Patch) -> None:
    """Sources are pinned for the moment of the hit only."""

    def broken(cache: HybridCache, *args: Any, **kwargs: Any) -> RequestCache:
        request = original_start(cache, *args, **kwargs)
        assert request.plan is not None
        cache.pool.unpin(request.plan.held)
        request.plan = dataclasses.replace(request.plan, held=())
        return request

    patch.setattr(HybridCache, "start", broken)


def start_in_used_pages() -> None:
    """S03: a request is preempted and starts again where another one's state was."""
    runner = PageRunner(small_cache(num_pages=3, checkpoint_pages=0))
    for prompt in (PROMPT[:5], [1] * 5, PROMPT[:5]):
        a = runner.start(prompt)
        runner.step(a, 3)
        runner.release(a)


def leave_the_state(patch: Patch) -> None:
    """Nobody zeroes."""
    start_plan = hybrid_cache.start_plan
    patch.setattr(hybrid_cache, "start_plan", lambda *args: dataclasses.replace(start_plan(*args), zero_states=()))


def cancelled_before_its_copies() -> None:
    """S03: a hit is given back before its partial page was copied."""
    runner = PageRunner(small_cache(num_pages=12, checkpoint_pages=0))
    a = runner.run(runner.start(PROMPT[:13]))
    b = runner.start([*PROMPT[:13], 1])
    runner.cache.prefixes._drop(a.cache.pages[1])  # as long as it is there, nobody looks at b's
    runner.release(b)
    assert runner.cache.prefixes.lookup(b.cache.chain.keys, 13).shared_tokens == 8


def publish_what_has_not_landed(patch: Patch) -> None:
    """`release` enters the pages of a request whose first copies were never made."""
    release = HybridCache.release

    def broken(cache: HybridCache, request: RequestCache) -> None:
        request.started = True
        release(cache, request)

    patch.setattr(HybridCache, "release", broken)


def weights_change_under_way() -> None:
    """A request that began before the change ends after it; the old version's name comes back."""
    runner = PageRunner(small_cache())
    a = runner.run(runner.start(PROMPT), 20)
    runner.cache.new_weights("1")
    runner.cache.new_weights("0")
    runner.run(a)
    runner.release(a)
    assert runner.start([*PROMPT, 1]).cache.hit_tokens == 0


def ignore_the_epoch(patch: Patch) -> None:
    """The version's name alone decides."""

    def broken(cache: HybridCache, version: str) -> None:
        cache.weights_version = version
        cache.prefixes.clear()

    patch.setattr(HybridCache, "new_weights", broken)


def two_tenants_two_blocks() -> None:
    """The same block of tokens behind another one."""
    runner = PageRunner(small_cache(groups=0))
    runner.release(runner.run(runner.start([1, 2, 3, 4, 5, 6, 7, 8, 9])))
    other = runner.start([0, 0, 3, 4, 5, 6, 7, 8, 9])
    runner.land(other)
    runner.read(other)
    assert other.cache.hit_tokens == 0


def forget_the_chain(patch: Patch) -> None:
    """A key names its own block only."""

    def broken(chain: HashChain, token_ids: Sequence[int]) -> bytes:
        return repr((len(chain.keys), token_ids if chain.keys else 0)).encode()

    patch.setattr(HashChain, "_key", broken)


RULES: list[tuple[Callable[[], None], Callable[[Patch], None]]] = [
    (full_pool_hit, allocate_before_pinning),
    (reserved_but_not_computed, publish_when_reserved),
    (checkpoint_under_way, enter_when_planned),
    (one_group_is_evicted, keep_the_siblings),
    (two_use_one_checkpoint, run_on_the_checkpoint),
    (two_use_one_checkpoint, write_what_is_sealed),
    (part_inside_a_page, share_the_partial_page),
    (evict_before_the_copies, let_sources_go_at_once),
    (start_in_used_pages, leave_the_state),
    (cancelled_before_its_copies, publish_what_has_not_landed),
    (weights_change_under_way, ignore_the_epoch),
    (two_tenants_two_blocks, forget_the_chain),
]


@contextmanager
def broken_rule(mutate: Callable[[Patch], None]) -> Iterator[None]:
    """The rule is broken inside."""
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        yield


@pytest.mark.parametrize("story", dict.fromkeys(story for story, _ in RULES), ids=lambda story: story.__name__)
def test_the_story_ends_well(story: Callable[[], None]) -> None:
    """With every rule in place."""
    story()


@pytest.mark.parametrize(("story", "mutate"), RULES, ids=[mutate.__name__ for _, mutate in RULES])
def test_the_story_shows_the_broken_rule(story: Callable[[], None], mutate: Callable[[Patch], None]) -> None:
    """Without the rule, something is read that is not the reader's, or a check fails."""
    with broken_rule(mutate), pytest.raises(BROKEN):
        story()
