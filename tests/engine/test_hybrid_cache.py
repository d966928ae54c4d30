"""HybridCache: requests start where their prefix was computed, leave what others may use, and give everything back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from page_runner import PageRunner, small_cache

from openk3.config.serve import CacheConfig, PageShape
from openk3.engine.block_pool import NoRoom, PoolError
from openk3.engine.hybrid_cache import HybridCache, RequestTooLarge
from openk3.engine.prefix_keys import ImageSpan, image_digest

PROMPT = list(range(100, 130))


def idle_and_empty(runner: PageRunner) -> bool:
    """Whether nobody holds a page, and forgetting all prefixes frees every page."""
    held = runner.cache.pool.num_held
    runner.cache.new_weights("another")
    runner.check()
    return held == 0 and runner.cache.pool.num_free == runner.cache.config.num_pages


def test_2800_shared_tokens_are_a_hit_at_2560() -> None:
    """The worked example: 2,560 = 5 * 512, inside the first page of 6,144 tokens, which is copied so far."""
    shape = PageShape(page_tokens=6144, hash_tokens=512, layers_per_page=24, kda_groups=3, row_bytes=6144 * 1152)
    runner = PageRunner(HybridCache(CacheConfig(shape, num_pages=32)))
    shared = list(range(2800))
    first = runner.start([*shared, *[1] * 4000], turn_ends=[2800])
    assert first.cache.hit_tokens == 0 and runner.cache.checkpoints.next_stop(first.cache, 6800) == 2560
    runner.run(first)
    second = runner.start([*shared, *[2] * 300])
    assert second.cache.hit_tokens == 2560
    plan = second.cache.plan
    assert plan is not None and plan.zero_states == ()
    assert plan.latent_copies == ((first.cache.pages[0], second.cache.pages[0], 2560),)
    assert [copy.target for copy in plan.state_copies] == second.cache.states and len(plan.state_copies) == 3
    assert set(second.cache.pages) | set(second.cache.states) & set(plan.held) == set(second.cache.pages)
    runner.run(second)
    runner.run(first)
    runner.release(first, second)
    assert idle_and_empty(runner)


def test_whole_pages_are_shared_and_the_partial_page_is_copied() -> None:
    """20 tokens: two pages of eight in place, four rows copied; each goes on without disturbing the other."""
    runner = PageRunner(small_cache())
    a = runner.run(runner.start(PROMPT[:20], turn_ends=[20]))
    b = runner.start([*PROMPT[:20], 1, 2, 3])
    assert b.cache.hit_tokens == 20 and b.cache.pages[:2] == a.cache.pages[:2] and b.cache.pages[2] != a.cache.pages[2]
    assert b.cache.plan is not None and b.cache.plan.latent_copies[0][2] == 4
    runner.append(a, [7, 8, 9, 10, 11])
    runner.run(a)
    runner.run(b)
    runner.read(a)
    runner.release(b, a)
    assert idle_and_empty(runner)


def test_one_token_is_always_left_to_compute() -> None:
    """The same prompt again starts at the last boundary before its end; `most_hit` leaves more."""
    runner = PageRunner(small_cache())
    runner.release(runner.run(runner.start(PROMPT[:16])))
    again = runner.start(PROMPT[:16])
    assert again.cache.hit_tokens == 14
    none = runner.cache.start(runner.cache.name(PROMPT[:16]), most_hit=0)
    assert none.hit_tokens == 0 and none.plan is not None and none.plan.zero_states == tuple(none.states)
    assert (runner.cache.asked_tokens, runner.cache.hit_tokens) == (48, 14)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8, 9, 30])
def test_s04_chunks_end_where_checkpoints_are_taken(chunk: int) -> None:
    """S04: whatever the budget, state and latents are carried on, and the same places can be hit afterwards."""
    runner = PageRunner(small_cache(checkpoint_pages=1))
    a = runner.start(PROMPT, turn_ends=[11, 21])
    stops = []
    while a.cache.num_computed < len(PROMPT):
        if runner.step(a, min(len(PROMPT), a.cache.num_computed + chunk)):
            stops.append(a.cache.num_computed)
        runner.land(a)
    assert {10, 20, 28, 30} <= set(stops) <= {8, 10, 16, 20, 24, 28, 30}
    assert chunk > 3 or len(stops) == 7  # no chunk reaches over two of them
    runner.release(a)
    hits = []
    for end in (9, 11, 17, 21, 25, 29, 30):
        one = runner.start([*PROMPT[:end], 1, 2])
        hits.append(one.cache.hit_tokens)
        runner.read(one) if one.cache.plan is None else runner.land(one)
        runner.read(one)
        runner.release(one)
    # Those at 8, 16 and 24 were given up for the next ones, or never taken; 28 and 30 belong to the prompt's end.
    assert hits == [0, 10, 10, 20, 20, 28, 30]


def test_no_pass_ends_for_a_checkpoint_that_saves_little() -> None:
    """With 10 tokens at least: the first stop and the one ten tokens behind it, and whatever lies at a pass's end."""
    runner = PageRunner(small_cache(checkpoint_pages=1))
    a = runner.start(PROMPT, turn_ends=[11, 21])
    stop = runner.cache.checkpoints.next_stop
    assert [stop(a.cache, n, 10) for n in (9, 10, 15, 30)] == [9, 10, 10, 10]
    runner.step(a, 10)
    runner.land(a)
    assert a.cache.kept == 10 and [stop(a.cache, n, 10) for n in (19, 20, 30)] == [19, 20, 20]
    runner.step(a, 20)
    runner.land(a)
    assert [stop(a.cache, n, 10) for n in (28, 29, 30)] == [28, 29, 30] and stop(a.cache, 29) == 28
    runner.run(a)
    b = runner.start([*PROMPT, 1])
    assert b.cache.hit_tokens == 30  # not cut for, but the pass ended there
    assert [stop(b.cache, n, 10) for n in (31,)] == [31]


def test_a_place_where_two_prompts_part_gets_a_checkpoint() -> None:
    """The second request finds latents only, and leaves the state for the third."""
    runner = PageRunner(small_cache(checkpoint_pages=0))
    hits = []
    for own in range(3):
        request = runner.start([*PROMPT[:13], *[own] * 9])
        hits.append(request.cache.hit_tokens)
        runner.release(runner.run(request))
    assert hits == [0, 0, 12]


def test_an_answer_leaves_its_last_boundary() -> None:
    """The next turn of the conversation starts there; boundaries before it are given up, the prompt's is kept."""
    runner = PageRunner(small_cache())
    a = runner.run(runner.start(PROMPT[:7]))
    for token in range(12):
        runner.append(a, [token])
        runner.run(a)
    runner.release(a)
    assert runner.start([*a.tokens, 5, 5]).cache.hit_tokens == 18
    assert runner.start([*a.tokens[:17], 5, 5]).cache.hit_tokens == 6


def test_a_checkpoint_that_others_used_is_not_given_up() -> None:
    """Passing, but hit once."""
    runner = PageRunner(small_cache())
    a = runner.run(runner.start(PROMPT[:7]))
    runner.append(a, PROMPT[7:11])
    runner.run(a)
    b = runner.start([*PROMPT[:10], 1])
    assert b.cache.hit_tokens == 10
    runner.release(b)
    runner.append(a, PROMPT[11:15])
    runner.run(a)
    assert runner.start([*PROMPT[:10], 2]).cache.hit_tokens == 10


@pytest.mark.parametrize("accepted", range(5))
def test_d01_rejected_drafts_leave_nothing(accepted: int) -> None:
    """D01: rows behind the accepted tokens are never read, entered or sealed, also across a page's end."""
    runner = PageRunner(small_cache())
    a = runner.run(runner.start(PROMPT[:7]))
    runner.append(a, PROMPT[7 : 8 + accepted])
    while a.cache.num_computed < len(a.tokens):
        runner.step(a, len(a.tokens), drafts=4)
        runner.land(a)
    b = runner.start([*PROMPT[: 8 + accepted], 9])
    assert b.cache.hit_tokens == (8 + accepted) // 2 * 2
    runner.append(a, [1, 2, 3])
    runner.run(a)
    runner.run(b)


def test_drafts_stop_at_the_last_boundary_that_wants_a_checkpoint() -> None:
    """Also where the tokens are not known yet; the one before it would be given up at once."""
    runner = PageRunner(small_cache())
    a = runner.run(runner.start(PROMPT[:7]))
    runner.append(a, [1])
    assert runner.cache.checkpoints.next_stop(a.cache, 9) == 8 and runner.cache.checkpoints.next_stop(a.cache, 13) == 12
    runner.run(a)
    runner.append(a, [1])
    assert runner.cache.checkpoints.next_stop(a.cache, 11) == 10


def test_s03_preempted_in_any_place_it_starts_from_what_was_computed() -> None:
    """S03: mid-prompt, mid-answer, before its first plan landed, and in the step that reaches a checkpoint."""
    for place in range(len(PROMPT)):
        for carried_out in (False, True):
            runner = PageRunner(small_cache(num_pages=24))
            a = runner.start(PROMPT, turn_ends=[11])
            while a.cache.num_computed < place:
                runner.land(a)
                runner.step(a, place)
            unfinished = a.cache.plan is not None and a.cache.plan.key is not None
            if carried_out:
                runner.carry_out(a)  # the copies were made, but the step was cancelled
            computed = a.cache.num_computed
            runner.release(a)
            other = runner.start([*PROMPT, 1])
            assert other.cache.hit_tokens <= computed - unfinished
            again = runner.again(a)
            runner.run(again)
            runner.run(other)
            runner.release(again, other)
            assert idle_and_empty(runner)


def test_s03_an_unlanded_checkpoint_cannot_be_found() -> None:
    """S03: neither while its copies run, nor after its request is gone."""
    runner = PageRunner(small_cache())
    a = runner.start(PROMPT[:12])
    while a.cache.num_computed < 12:
        runner.land(a)
        plan = runner.step(a, 12)
    assert plan is not None and plan.key is not None
    before = runner.start([*PROMPT[:12], 1])
    assert before.cache.hit_tokens == 10
    runner.release(a)
    assert runner.start([*PROMPT[:12], 1]).cache.hit_tokens == 10


def test_a_pass_waits_for_the_checkpoint_before_it() -> None:
    """It would overwrite the state that is to be copied."""
    runner = PageRunner(small_cache())
    a = runner.start(PROMPT[:12])
    runner.step(a, 8)
    for act in (lambda: runner.cache.reserve(a.cache, 9), lambda: runner.cache.computed(a.cache, 9)):
        with pytest.raises(PoolError):
            act()
    runner.land(a)
    runner.run(a)


def test_s05_images_are_part_of_the_prefix() -> None:
    """S05: another image hits up to its first placeholder at most, the same one hits behind it."""
    runner = PageRunner(small_cache())
    tokens = [*PROMPT[:7], *[9] * 6, *PROMPT[:9]]
    spans = [[ImageSpan(7, 6, image_digest(pixels, (1, 4, 6)))] for pixels in (b"red", b"green")]
    runner.release(runner.run(runner.start(tokens, images=spans[0], turn_ends=[6, 13])))
    other = runner.start(tokens, images=spans[1])
    assert other.cache.hit_tokens == 6
    same = runner.start(tokens, images=spans[0])
    assert same.cache.hit_tokens == 20
    runner.run(same)
    runner.run(other)


def test_tenants_do_not_share() -> None:
    """Nor can one tell from its hits what another has asked."""
    runner = PageRunner(small_cache())
    runner.release(runner.run(runner.start(PROMPT, tenant="a")))
    assert runner.start(PROMPT, tenant="b").cache.hit_tokens == 0
    assert runner.start(PROMPT, tenant="a").cache.hit_tokens == 28


def test_s06_a_request_that_can_never_fit_is_refused_at_once() -> None:
    """S06: it does not wait in front of small ones, which still run; the largest that fits does run."""
    runner = PageRunner(small_cache(num_pages=6, max_tokens=100))
    assert runner.cache.largest_request == 32
    with pytest.raises(RequestTooLarge, match="33 tokens do not fit; there is room for 32"):
        runner.start([1] * 33)
    for n in range(5):
        runner.release(runner.run(runner.start([n] * 5)))
    runner.release(runner.run(runner.start([7] * 32)))
    assert idle_and_empty(runner)


def test_s06_alone_a_request_never_waits_for_what_it_would_reuse() -> None:
    """S06: five pages; checkpoint, partial page and what it needs itself are six, so it starts from nothing."""
    runner = PageRunner(small_cache(num_pages=5))
    runner.release(runner.run(runner.start(PROMPT[:6])))
    again = runner.start([*PROMPT[:6], *range(16)])
    assert again.cache.hit_tokens == 0
    runner.run(again)


def test_beside_others_a_request_waits_for_room_to_reuse() -> None:
    """Three pages of the hit are idle, two are free, three are needed: from nothing it would fit, and start slowly."""
    runner = PageRunner(small_cache(num_pages=8))
    runner.release(runner.run(runner.start(PROMPT[:6])))
    other = runner.start([1])
    with pytest.raises(NoRoom):
        runner.start([*PROMPT[:6], 1])
    runner.release(other)
    assert runner.start([*PROMPT[:6], 1]).cache.hit_tokens == 6


def test_a_prompt_that_ends_at_a_boundary_keeps_its_checkpoint() -> None:
    """Also when the answer has gone on, and for the same prompt again the one before it."""
    runner = PageRunner(small_cache())
    a = runner.run(runner.start(PROMPT[:8]))
    runner.append(a, [1, 2, 3, 4])
    runner.run(a)
    assert runner.start([*PROMPT[:8], 5]).cache.hit_tokens == 8
    assert runner.start(PROMPT[:8]).cache.hit_tokens == 6


def test_no_pass_stops_for_a_checkpoint_that_is_there() -> None:
    """A prompt that must be computed anew runs through."""
    runner = PageRunner(small_cache())
    runner.release(runner.run(runner.start(PROMPT[:21])))
    anew = runner.cache.start(runner.cache.name(PROMPT[:21]), most_hit=0)
    assert [runner.cache.checkpoints.next_stop(anew, n) for n in (7, 8, 19, 21)] == [7, 8, 16, 16]
    anew.num_computed = 16
    assert runner.cache.checkpoints.next_stop(anew, 21) == 21


def test_a_reservation_never_hands_out_what_is_sealed() -> None:
    """Neither a state nor latents."""
    for pages in ("states", "pages"):
        runner = PageRunner(small_cache())
        request = runner.start(PROMPT[:5]).cache
        runner.cache.pool.seal(getattr(request, pages)[0])
        with pytest.raises(PoolError, match="about to be written, but it is sealed"):
            runner.cache.reserve(request, 5)


def test_without_room_a_start_or_a_reservation_changes_nothing() -> None:
    """They succeed once something has been released."""
    runner = PageRunner(small_cache(num_pages=7))
    a = runner.run(runner.start(PROMPT[:22], turn_ends=[8]))
    held = runner.cache.pool.num_held
    with pytest.raises(NoRoom):
        runner.start([*PROMPT[:8], 1])
    with pytest.raises(NoRoom):
        runner.cache.reserve(a.cache, 22 + 8 * 4)
    runner.check()
    assert runner.cache.pool.num_held == held and runner.cache.asked_tokens == 22
    runner.release(a)
    runner.run(runner.start([*PROMPT[:8], 1]))


def test_no_more_requests_than_allowed() -> None:
    """The next one waits."""
    runner = PageRunner(small_cache(max_requests=1))
    a = runner.start([1])
    with pytest.raises(NoRoom, match="1 requests hold pages"):
        runner.start([1])
    runner.release(a)
    runner.start([1])


def test_without_room_for_a_checkpoint_the_request_goes_on() -> None:
    """It costs a later request time, and nobody anything else."""
    runner = PageRunner(small_cache(num_pages=5))
    a = runner.start(PROMPT[:20])
    runner.run(a)
    assert runner.cache.pool.num_held == 5
    runner.release(a)
    hit = runner.cache.prefixes.lookup(a.cache.chain.keys, 20)
    assert (hit.num_tokens, hit.shared_tokens) == (0, 20)


def test_new_weights_forget_everything_and_running_requests_leave_nothing() -> None:
    """Also when an old version's name comes back, and when a checkpoint was under way."""
    runner = PageRunner(small_cache())
    runner.release(runner.run(runner.start(PROMPT)))
    a, b = runner.run(runner.start(PROMPT), 29), runner.start([1] * 20)
    assert runner.step(b, 8) is not None
    for version in ("1", "0"):
        runner.cache.new_weights(version)
        runner.check()
        assert runner.cache.pool.num_idle == 0
    runner.land(b)
    runner.append(a, [1] * 8)
    runner.run(a)
    runner.run(b)
    runner.release(a, b)
    assert runner.cache.pool.num_free == runner.cache.config.num_pages
    assert runner.start(PROMPT).cache.hit_tokens == 0


def test_twins_enter_one_page_and_the_other_takes_its_place() -> None:
    """Two requests compute the same prompt at once; the first one's pages are evicted while the second runs."""
    runner = PageRunner(small_cache(num_pages=16, checkpoint_pages=0))
    a, b = runner.start(PROMPT[:15]), runner.start(PROMPT[:15])
    runner.run(a)
    runner.run(b)
    runner.release(a)
    assert runner.cache.pool.num_idle == 4  # two pages, one checkpoint
    hog = runner.start([1] * 80)
    while runner.cache.pool.num_idle:
        runner.step(hog, hog.cache.num_computed + 8)
        runner.land(hog)
    runner.release(b, hog)
    assert runner.cache.prefixes.lookup(b.cache.chain.keys, 15).shared_tokens == 14


def test_models_without_kda_layers_hit_at_any_boundary() -> None:
    """There is no state to agree with."""
    runner = PageRunner(small_cache(groups=0))
    runner.release(runner.run(runner.start(PROMPT[:21])))
    assert [runner.start([*PROMPT[:n], 1]).cache.hit_tokens for n in (1, 2, 9, 16, 21)] == [0, 2, 8, 16, 20]


MISUSE: list[tuple[Callable[[PageRunner], object], type[Exception], str]] = [
    (lambda r: r.start([]), ValueError, "at least one token"),
    (lambda r: r.start([1], turn_ends=[2]), ValueError, "every end must lie in 0..1"),
    (lambda r: (old := r.cache.name([1]), r.cache.new_weights("1"), r.cache.start(old)), ValueError, "name it again"),
    (lambda r: r.again(r.start([1])), PoolError, "two requests cannot append to one chain"),
    (lambda r: r.release(*[r.start([1])] * 2), PoolError, "released before"),
    (lambda r: r.cache.landed(r.run(r.start([1])).cache), PoolError, "no plan to land"),
    (lambda r: r.cache.computed(r.start([1]).cache, 1), PoolError, "no plan left to land"),
    (lambda r: r.cache.computed(r.run(r.start([1])).cache, 2), PoolError, "1..1 are possible"),
    (lambda r: r.cache.computed(r.run(r.start([1])).cache, 0), PoolError, "1..1 are possible"),
    (lambda r: r.cache.reserve(r.start([1]).cache, 10**7), RequestTooLarge, "more than the limit"),
]


@pytest.mark.parametrize(("act", "error", "message"), MISUSE)
def test_misuse_is_an_error(act: Callable[[PageRunner], object], error: type[Exception], message: str) -> None:
    """And every invariant still holds."""
    runner = PageRunner(small_cache())
    with pytest.raises(error, match=message):
        act(runner)
    runner.check()
