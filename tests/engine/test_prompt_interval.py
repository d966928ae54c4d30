"""Prompts that gather over several passes: when they have their turn, and that answers stay what they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from checked_engine import engine, greedy, verify
from engine_model import prompt

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


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_prompts_have_every_nth_pass(interval: int) -> None:
    """While something decodes, and all passes once nothing does; decoding jobs have all of them."""
    shares, decoding, long = Shares(interval), Waiting(1), Waiting(1000)
    turns = [shares.divide(16, [decoding, long]) for _ in range(2 * interval)]
    assert [long in turn for turn in turns] == [n % interval == interval - 1 for n in range(2 * interval)]
    assert all(turn[decoding] == 1 for turn in turns)
    assert all(turn.get(long, 15) == 15 for turn in turns)
    alone = [shares.divide(16, [long]) for _ in range(3)]
    assert alone == [{long: 16}] * 3


def test_answers_stay_right() -> None:
    """Requests that come one after another: answers of plain passes, and prompts in fewer of the passes."""
    mixed = []
    for interval in (1, 4):
        one = engine(60, step_tokens=16)
        one.scheduler._shares = Shares(interval)
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


@pytest.mark.parametrize("interval", [0, -1, True, 1.5])
def test_no_number(interval: Any) -> None:
    """A clear refusal."""
    one = engine(30).scheduler.config
    with pytest.raises(ConfigError, match="prompt_interval"):
        EngineConfig(one.cache, prompt_interval=interval)
