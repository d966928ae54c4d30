"""The learning rate: warm-up, cosine and WSD, at their corners and in between."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from openk3.config.train import OptimConfig
from openk3.optim.schedule import learning_rate

COSINE = OptimConfig(lr=1.0, min_lr=0.1)
WSD = OptimConfig(lr=1.0, min_lr=0.1, schedule="wsd", decay_fraction=0.2)


def test_warmup_is_one_percent_and_linear() -> None:
    """1000 steps: ten of warm-up, the tenth at the peak."""
    assert [learning_rate(step, 1000, COSINE) for step in range(10)] == [(step + 1) / 10 for step in range(10)]
    assert learning_rate(10, 1000, COSINE) == 1.0


def test_cosine_has_its_mean_in_the_middle_and_ends_at_the_minimum() -> None:
    """Half way between the peak's step and the last the rate is the mean of both ends."""
    middle = (10 + 999) / 2
    below, above = learning_rate(math.floor(middle), 1000, COSINE), learning_rate(math.ceil(middle), 1000, COSINE)
    assert above < 0.55 < below and below - above < 0.002
    assert math.isclose(learning_rate(999, 1000, COSINE), 0.1)
    assert math.isclose(learning_rate(5000, 1000, COSINE), 0.1)


def test_wsd_stays_then_falls_linearly() -> None:
    """The last fifth falls in a straight line."""
    assert learning_rate(799, 1000, WSD) == 1.0
    assert math.isclose(learning_rate(899, 1000, WSD), 0.55)
    assert math.isclose(learning_rate(999, 1000, WSD), 0.1)


@given(st.integers(1, 400), st.sampled_from([COSINE, WSD]), st.floats(0, 0.5))
def test_rises_then_falls_inside_its_bounds(total: int, config: OptimConfig, warmup: float) -> None:
    """Any length: positive, at most the peak, and never rising again once it fell."""
    config = OptimConfig(lr=1.0, min_lr=0.1, schedule=config.schedule, warmup_fraction=warmup)
    rates = [learning_rate(step, total, config) for step in range(total)]
    top = rates.index(max(rates))
    assert all(0 < rate <= 1.0 for rate in rates)
    assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)
