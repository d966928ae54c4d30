"""replan: steps from time, and stages that never come back."""

from __future__ import annotations

import dataclasses

import pytest
from small_models import small_run

from openk3.config.train import DataConfig
from openk3.train.plan import extend, replan
from openk3.train.state import TrainState

STAGES = DataConfig(stages=((0.8, 64), (0.2, 512)), batch_tokens=512, micro_batch_tokens=512)


@pytest.fixture
def state() -> TrainState:
    """A run of two minutes."""
    return TrainState.build(small_run(minutes=2.0, data=STAGES, steps=1000))


def test_steps_fill_the_time(state: TrainState) -> None:
    """20 s in, 5 steps done, 0.5 s each: 200 more."""
    state.step, state.seconds = 5, 20.0
    replan(state, 0.5)
    assert state.total_steps == 205
    replan(state, 0.501)
    assert state.total_steps == 205
    replan(state, 1.0)
    assert state.total_steps == 105


def test_stage_that_is_over_stays_over(state: TrainState) -> None:
    """In the long windows more time never means short windows again; less time ends the run earlier."""
    state.step, state.total_steps, state.seconds = 90, 100, 60.0
    assert state.seq_len == 512
    replan(state, 0.1)
    assert state.total_steps == 112 and state.seq_len == 512
    replan(state, 20.0)
    assert state.total_steps == 93 and state.seq_len == 512


def test_out_of_time(state: TrainState) -> None:
    """The run ends with the step that used the time up; an unknown step time changes nothing."""
    state.step, state.seconds = 50, 121.0
    replan(state, 0.0)
    assert state.total_steps == 1000
    replan(state, 0.5)
    assert state.total_steps == 50


def test_config_is_untouched(state: TrainState) -> None:
    """The plan is part of the state, not of the configuration."""
    before = dataclasses.asdict(state.config)
    state.step = 5
    replan(state, 0.5)
    assert dataclasses.asdict(state.config) == before


def test_finished_run_is_extended(state: TrainState) -> None:
    """100 steps took a minute of two: another 100; an unfinished run, or one without time left, keeps its plan."""
    state.step, state.total_steps, state.seconds = 100, 100, 60.0
    extend(state)
    assert state.total_steps == 200
    state.total_steps = 150
    extend(state)
    assert state.total_steps == 150
    state.total_steps, state.seconds = 100, 120.0
    extend(state)
    assert state.total_steps == 100
