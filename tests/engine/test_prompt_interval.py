"""Prompts that gather over several passes: when they have their turn, and that answers stay what they are."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from checked_engine import engine, greedy, verify
from engine_model import prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.config.model import ConfigError
from openk3.config.serve import EngineConfig
from openk3.engine.shares import Shares


@dataclass(eq=False)
class Waiting:
    """What shares see of a job."""

    num_left: int
    rank: tuple[int, int] = (0, 0)
    last_served: int = 0
    num_drafts: int = 0
    request: Any = field(default_factory=lambda: SimpleNamespace(priority=0))


def divide(shares: Shares, budget: int, jobs: Any) -> dict[Any, int]:
    """Of stand-ins."""
    return shares.divide(budget, jobs)


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_prompts_have_every_nth_pass(interval: int) -> None:
    """While something decodes, and all passes once nothing does; decoding jobs have all of them."""
    shares, decoding = Shares(interval), Waiting(1)
    for _ in range(3):
        new = Waiting(10)
        turns = [divide(shares, 16, [decoding, new]) for _ in range(interval)]
        assert [turn.get(new, 0) for turn in turns] == [0] * (interval - 1) + [10]
        assert all(turn[decoding] == 1 for turn in turns)
    long = Waiting(1000)
    assert [divide(shares, 16, [long]) for _ in range(3)] == [{long: 16}] * 3


def test_prompts_that_fill_a_pass_do_not_wait() -> None:
    """There is nothing to gather for: 15 tokens are what a decoding job leaves of 16."""
    shares, decoding = Shares(9), Waiting(1)
    first, second = Waiting(8, rank=(0, 1)), Waiting(7, rank=(0, 2))
    assert divide(shares, 16, [decoding, first]) == {decoding: 1}
    assert divide(shares, 16, [decoding, first, second]) == {decoding: 1, first: 8, second: 7}


def test_the_rest_of_a_prompt_follows_at_once() -> None:
    """Also where its first piece ended early, with new prompts beside it; then they gather again."""
    shares, decoding, long, other = Shares(3), Waiting(1), Waiting(12), Waiting(4, rank=(0, 1))
    turns = [divide(shares, 16, [decoding, long]) for _ in range(3)]
    assert [turn.get(long, 0) for turn in turns] == [0, 0, 12]
    long.num_left = 5  # a checkpoint has cut it short
    assert divide(shares, 16, [decoding, long, other]) == {decoding: 1, long: 5, other: 4}
    long.num_left = other.num_left = 1
    new = Waiting(3, rank=(0, 2))
    turns = [divide(shares, 16, [decoding, long, other, new]) for _ in range(3)]
    assert [turn.get(new, 0) for turn in turns] == [0, 0, 3]


@settings(max_examples=60, deadline=None)
@given(
    interval=st.integers(1, 6),
    budget=st.integers(4, 20),
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_bounds_hold(interval: int, budget: int, lengths: list[int], cuts: list[int]) -> None:
    """What the module states, N times as long; every `interval` passes one has prompts, while there are any."""
    shares, decoding = Shares(interval), Waiting(1)
    jobs = [Waiting(length, rank=(0, n + 1)) for n, length in enumerate(lengths)]
    gathered, passes, pieces = 0, 0, 0
    while any(job.num_left > 1 for job in jobs):
        left = [job for job in jobs if job.num_left > 1]
        shared = divide(shares, budget, [decoding, *left])
        assert shared[decoding] == 1 and sum(shared.values()) <= budget
        had = [job for job in left if job in shared]
        gathered = 0 if had else gathered + 1
        assert gathered < interval
        passes += 1
        for job in had:
            job.num_left -= min(shared[job], cuts[pieces % len(cuts)])
            pieces += 1
    assert passes <= interval * (-(-4 * sum(lengths) // (3 * (budget // 4))) + 1 + pieces)


@pytest.mark.parametrize("interval", [2, 4, 16])
def test_answers_stay_right(interval: int) -> None:
    """Requests that come one after another: answers of plain passes, and prompts in fewer of the passes."""
    mixed = []
    for every in (1, interval):
        one = engine(60, step_tokens=60, prompt_interval=every)
        streams, count = [one.submit(greedy(prompt(7, 1), 30))], 0
        for _ in range(60):
            if one.scheduler.step in (3, 5, 6, 9):
                streams.append(one.submit(greedy(prompt(5 + one.scheduler.step, one.scheduler.step), 6)))
            before = sum(stream.job.num_computed for stream in streams)
            one.step()
            count += sum(stream.job.num_computed for stream in streams) - before > len(streams)
        for stream in streams:
            verify(stream.result(), stream.job)
        mixed.append(count)
    assert mixed[1] < mixed[0]


@pytest.mark.parametrize("interval", [-1, True, 1.5])
def test_no_number(interval: Any) -> None:
    """A clear refusal."""
    one = engine(30).scheduler.config
    with pytest.raises(ConfigError, match="prompt_interval"):
        EngineConfig(one.cache, prompt_interval=interval)


def test_what_is_left_open_follows_from_the_device() -> None:
    """Few and long passes with prompts beside graphs; what was asked for stays."""
    cache = engine(30).scheduler.config.cache
    found = [
        EngineConfig(cache).on(gpu=gpu, graphs=graphs) for gpu, graphs in ((False, False), (True, False), (True, True))
    ]
    assert [(each.step_tokens, each.prompt_interval) for each in found] == [(2048, 1), (16384, 1), (16384, 32)]
    assert [each.cache.cut_tokens for each in found] == [0, 1024, 1024]
    asked = EngineConfig(dataclasses.replace(cache, cut_tokens=5), step_tokens=7, prompt_interval=3)
    assert asked.on(gpu=True, graphs=True) == asked.on(gpu=False, graphs=False) == asked
