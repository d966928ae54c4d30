"""Fit the number of steps to the time that is left, from the measured step time."""

from __future__ import annotations

from openk3.train.state import TrainState

TOLERANCE = 0.02  # smaller corrections are left alone, so that the schedule does not flutter


def replan(state: TrainState, step_seconds: float) -> None:
    """Set `state.total_steps` so that the run ends when `config.minutes` have passed, at `step_seconds` for each step.

    A new plan never takes the length curriculum back to a stage that is over.
    """
    left = state.config.minutes * 60 - state.seconds
    if step_seconds <= 0:
        return
    total = state.step + max(0, round(left / step_seconds))
    stage_start = 0.0
    for fraction, _ in state.config.data.stages:
        if state.step / state.total_steps >= stage_start + fraction - 1e-9:
            stage_start += fraction
    if stage_start > 0:
        total = min(total, int(state.step / stage_start))
    total = max(total, state.step)
    if abs(total - state.total_steps) > TOLERANCE * state.total_steps or total == state.step:
        state.total_steps = total


def extend(state: TrainState) -> None:
    """Give a finished run that is resumed with more minutes the steps that they allow, at its own mean step time.

    The schedule is then the one of a run that was planned this long from the start: rate and windows go back.
    """
    left = state.config.minutes * 60 - state.seconds
    if state.step and state.step >= state.total_steps and left > 0:
        state.total_steps = state.step + round(left * state.step / max(state.seconds, 1e-9))
