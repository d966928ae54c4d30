"""Scheduler: who runs, who waits and for how long, by the bounds that it states."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from named_engine import NamedEngine
from page_runner import small_cache

from openk3.engine.job import Job, Status


def engine(num_pages: int = 400, step_tokens: int = 8, patience: int = 20, **limits: int) -> NamedEngine:
    """Pages of eight tokens; prompts leave checkpoints at their ends only."""
    return NamedEngine(small_cache(num_pages, **{"checkpoint_pages": 0, **limits}), step_tokens, patience)


def tokens(seed: int, length: int) -> list[int]:
    """A prompt that nobody else has."""
    return [100 + seed] * length


def counts(one: NamedEngine) -> dict[Job, int]:
    """Tokens of each job in the last pass."""
    return {work.job: work.num_tokens for work in one.works}


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 128, 299, 300])
def test_s04_any_budget_and_no_phases(budget: int) -> None:
    """S04: a prompt of 300 tokens in pieces of any size beside jobs that decode; all pages come back."""
    one = engine(step_tokens=budget)
    others = [one.submit(tokens(n, 3), answer=12) for n in range(2)]
    while not all(job.num_answer for job in others):
        one.step()
    long = one.submit(tokens(9, 300), answer=5)
    one.run(long, *others)
    assert long.num_answer == 5 and [job.num_answer for job in others] == [12, 12]
    assert one.idle()


def test_s06_a_long_prompt_does_not_hold_up_a_short_one() -> None:
    """S06: a prompt that takes the whole budget for 200 steps; a short request has its token in two steps."""
    one = engine(step_tokens=16, num_pages=440)
    hog = one.submit(tokens(0, 16 * 200))
    for _ in range(5):
        one.step()
    assert hog.num_computed == 5 * 16
    short = one.submit(tokens(1, 12))
    assert one.run(short) <= 2
    assert counts(one)[hog] >= 4
    flow = [one.submit(tokens(2 + n, 8)) for n in range(6)]
    assert one.run(*flow) <= -(-4 * 48 // (3 * 16)) + 1 + 6
    assert one.run(hog) <= 200 and one.idle()


def test_s06_short_requests_do_not_starve_a_long_one() -> None:
    """S06, the other way round: two new short prompts in every step leave the first in rank a quarter."""
    one = engine(step_tokens=16)
    long = one.submit(tokens(0, 200))
    for n in range(70):
        for k in range(2):
            one.submit(tokens(1 + 2 * n + k, 16))
        one.step()
        if long.status is Status.FINISHED:
            break
    assert long.status is Status.FINISHED and one.scheduler.step <= 200 // 4 + 3


def test_s06_a_parked_request_starts_when_it_is_ready() -> None:
    """S06: it costs nothing while it is parked, blocks nobody, and is not forgotten behind a long prompt."""
    one = engine(step_tokens=16)
    parked = one.submit(tokens(0, 8))
    parked.parked = True
    hog = one.submit(tokens(1, 1000))
    for _ in range(10):
        assert {work.job for work in one.step()} == {hog}
    parked.parked = False
    assert one.run(parked) <= 2


def test_s06_a_request_without_room_blocks_nobody_and_is_not_forgotten() -> None:
    """S06: small ones pass the one that does not fit, for as long as patience lasts; then it is the next."""
    one = engine(num_pages=24, step_tokens=64, patience=10)
    holder = one.submit(tokens(0, 90), answer=60)  # 12 pages and 2 states, 19 at the end
    one.step()
    big = one.submit(tokens(1, 120))
    passed = []
    for n in range(40):
        small = one.submit(tokens(2 + n, 4), answer=2)
        one.step()
        passed.append(small)
    started = [small for small in passed if one.first_token.get(small, 99) < one.first_token.get(big, 99)]
    assert 8 <= len(started) <= 12 and big.status is Status.WAITING
    assert big.blocked_since == 2 and holder.status is Status.RUNNING
    one.run(big, holder, *passed)
    later = [one.first_token[small] for small in passed if small not in started]
    assert one.first_token[big] <= min(later) + 3 and one.idle()  # they are shorter, once it has started


def test_the_last_in_rank_is_preempted_and_computes_again() -> None:
    """S03: room for one and a half requests; the first is never disturbed, both answers are complete."""
    one = engine(num_pages=12, step_tokens=64)
    first, second = (one.submit(tokens(n, 24), answer=40) for n in range(2))
    steps = one.run(first)
    assert steps == 41 and one.scheduler.num_preempted >= 1  # a checkpoint before the prompt's end is one pass more
    one.run(second)
    assert second.num_answer == 40 and one.idle()


def test_priority_goes_first_and_takes_the_place_of_others() -> None:
    """Of waiting ones the higher starts first; without room a lower one gives way, an equal one does not."""
    one = engine(num_pages=12, step_tokens=64, patience=1000)
    low = one.submit(tokens(0, 40), answer=20)
    one.step()
    equal, high = one.submit(tokens(1, 40), answer=20), one.submit(tokens(2, 40), answer=20, priority=1)
    one.step()
    assert [low.status, equal.status, high.status] == [Status.WAITING, Status.WAITING, Status.RUNNING]
    assert one.scheduler.num_preempted == 1
    one.run(low, equal, high)
    assert sorted((low, equal, high), key=one.first_token.__getitem__) == [high, low, equal] and one.idle()


def test_full_house_gives_way_to_a_higher_priority() -> None:
    """Also when it is requests that there are too many of, not pages."""
    one = engine(max_requests=2, patience=1000)
    lows = [one.submit(tokens(n, 4), answer=30) for n in range(2)]
    one.step()
    high, other = one.submit(tokens(3, 4), priority=1), one.submit(tokens(4, 4))
    one.step()
    assert [job.status for job in lows] == [Status.RUNNING, Status.WAITING] and other.status is Status.WAITING
    one.run(high, other, *lows)
    assert one.first_token[high] == 3 and one.idle()  # two passes: a checkpoint lies before the end


@pytest.mark.parametrize("patience", [0, 5, 30])
def test_only_those_who_come_soon_enough_overtake(patience: int) -> None:
    """A level of priority is worth `patience` steps, so a flow of urgent requests starves nobody."""
    one = engine(max_requests=1, step_tokens=8, patience=patience)
    one.submit(tokens(0, 4), answer=3)
    one.step()
    low = one.submit(tokens(1, 4))
    urgent = []
    for n in range(60):
        urgent.append(one.submit(tokens(2 + n, 4), priority=1))
        one.step()
    one.run(low)
    before = [job for job in urgent if one.first_token.get(job, 1000) < one.first_token[low]]
    assert len(before) <= patience + 1 and (patience == 0) == (not before)
    one.run(*urgent)
    assert one.idle()


@pytest.mark.parametrize("lengths", [(1, 1), (1, 5), (5, 3), (7, 1)])
def test_a_job_without_room_does_not_hold_up_those_before_it(lengths: tuple[int, int]) -> None:
    """One token a pass, two jobs that need a page each, and none is left: the second cannot have one, and the first,
    which can take the second's, has its turn all the same."""
    one = engine(7, 1)
    jobs = [one.submit(tokens(n, length), answer=20) for n, length in enumerate(lengths)]
    assert one.run(*jobs, most=200) < 200
    assert one.scheduler.num_preempted >= 1 and one.idle()


@settings(max_examples=15)
@given(
    budget=st.integers(2, 24),
    num_decoding=st.integers(1, 20),
    prompts=st.lists(st.integers(2, 60), min_size=1, max_size=6),
    drafts=st.sampled_from((0, 0, 3, 7)),
)
def test_bound_on_decoding(budget: int, num_decoding: int, prompts: list[int], drafts: int) -> None:
    """D jobs with one token left have it within ceil(D / (3 B // 4)) steps, whatever prompts and guesses there are."""
    one = engine(step_tokens=budget)
    one.most_drafts = drafts
    decoding = [one.submit(tokens(n, 1), answer=30) for n in range(num_decoding)]
    while not all(job.num_answer for job in decoding):
        one.step()
    jobs = [one.submit(tokens(50 + n, length)) for n, length in enumerate(prompts)]
    bound = -(-(num_decoding + len(jobs)) // (3 * budget // 4))  # the last token of a prompt is one of them
    last = dict.fromkeys(decoding, one.scheduler.step)
    while any(not job.num_answer for job in jobs) and all(job.status is Status.RUNNING for job in decoding):
        served = {work.job for work in one.step()}
        for job in decoding:
            if job in served:
                last[job] = one.scheduler.step
            assert one.scheduler.step - last[job] < bound


@settings(max_examples=15)
@given(
    budget=st.integers(1, 24),
    num_decoding=st.integers(0, 12),
    hogs=st.lists(st.integers(100, 400), min_size=1, max_size=3),
    shorts=st.lists(st.integers(2, 30), min_size=1, max_size=5),
    drafts=st.sampled_from((0, 0, 3, 7)),
)
def test_bound_on_first_tokens(budget: int, num_decoding: int, hogs: list[int], shorts: list[int], drafts: int) -> None:
    """Every short prompt is through after ceil(4 W / 3 R) + 1 steps, those that checkpoints cost and those its last
    token waits among the D that decode, drafts or not."""
    one = engine(step_tokens=budget)
    one.most_drafts = drafts
    decoding = [one.submit(tokens(n, 1), answer=300) for n in range(num_decoding)]
    while not all(job.num_answer for job in decoding):
        one.step()
    for n, length in enumerate(hogs):
        one.submit(tokens(50 + n, length))
    one.step()
    jobs = [one.submit(tokens(80 + n, length)) for n, length in enumerate(shorts)]
    begin = one.scheduler.step
    one.run(*jobs, most=4000)
    most_rest = budget / 4 if num_decoding else budget
    for job, length in zip(jobs, shorts):
        work = sum(other for other in shorts if other <= length)
        cuts = 2 * sum(other <= length for other in shorts)
        last = -(-4 * (num_decoding + len(jobs)) // (3 * budget))
        assert one.first_token[job] - begin <= -(-4 * work // (3 * most_rest)) + 1 + cuts + last


@settings(max_examples=25)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(-2, 2)), min_size=1, max_size=14),
    num_pages=st.integers(10, 30),
    budget=st.integers(1, 40),
    patience=st.integers(0, 12),
)
def test_everybody_ends(sizes: list[tuple[int, int, int]], num_pages: int, budget: int, patience: int) -> None:
    """With little memory, any priorities and any patience, every answer is complete and every page comes back."""
    one = engine(num_pages, budget, patience, checkpoint_pages=1, max_requests=4)
    jobs = []
    for n, (length, answer, priority) in enumerate(sizes):
        if length <= one.books.largest_request:
            jobs.append(one.submit(tokens(n % 4, length), answer, priority=priority))
    one.run(*jobs, most=6000)
    most = one.books.largest_request + 1
    assert [job.num_answer for job in jobs] == [min(j.request.params.max_tokens, most - j.num_prompt) for j in jobs]
    assert one.idle()
