"""Costs: the stated rule, with measured rates; what is not known yet counts as quick to move."""

from __future__ import annotations

from typing import Any

import pytest

from openk3.config.outer_tier import TierConfig
from openk3.engine.costs import FADING, Costs, Rate


def costs(**options: Any) -> Costs:
    """Of an engine with 100 tokens in a pass: 1,000 bytes a second between pages and memory, 10 tokens a second."""
    made = Costs(TierConfig(1, **options), 100)
    made.copies.add(1000, 1.0)
    made.reads.add(100, 1.0)
    made.passed(50, 5.0)
    return made


@pytest.mark.parametrize(("num_lost", "pays"), [(0, False), (20, False), (21, True), (500, True)])
def test_swapping_pays_when_copying_twice_is_quicker(num_lost: int, pays: bool) -> None:
    """1,000 bytes out and back are two seconds, which is 20 tokens."""
    assert costs().swap_pays(1000, num_lost) is pays
    assert costs(swap="always").swap_pays(1000, num_lost) and not costs(swap="never").swap_pays(1000, num_lost)


@pytest.mark.parametrize(
    ("num_read", "num_gained", "pays"), [(0, 10, False), (0, 11, True), (100, 20, False), (100, 21, True)]
)
def test_loading_pays_when_copying_and_reading_are_quicker(num_read: int, num_gained: int, pays: bool) -> None:
    """1,000 bytes are a second, and 100 from the store one more."""
    assert costs().load_pays(1000, num_read, num_gained) is pays
    assert costs(load="always").load_pays(1000, num_read, num_gained)


def test_what_is_not_known() -> None:
    """Nothing measured: move. Passes that are nearly empty count only while there are no others."""
    made = Costs(TierConfig(1), 100)
    assert made.swap_pays(10**9, 1) and made.load_pays(10**9, 10**9, 1)
    made.copies.add(1000, 1.0)
    made.passed(1, 1.0)
    assert made.swap_pays(1000, 3) and not made.swap_pays(1000, 2)
    made.passed(25, 0.25)
    made.passed(1, 1.0)
    assert made.swap_pays(1000, 201) and not made.swap_pays(1000, 199)


def test_older_measurements_fade() -> None:
    """Sums of both sides, so that a short measurement counts little."""
    rate = Rate()
    assert rate.seconds(5) == 0.0 and not rate.is_known
    rate.add(10, 1.0)
    rate.add(1, 1.0)
    assert rate.is_known and rate.seconds(1) == pytest.approx((FADING + 1) / (10 * FADING + 1))
