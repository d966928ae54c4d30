"""DraftLength: as many guesses as bring most tokens per second, none where they cost more than they bring."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from openk3.engine.draft_length import FADE, FADE_ALL, LEARNING, MARGIN, PROBE, DraftLength, Fit, Record


def told(
    passes: tuple[float, float],
    guessing: tuple[float, float],
    *,
    most: int = 6,
    steps: bool = True,
    replay: float = 0.0,
) -> DraftLength:
    """One that knows the times exactly: (seconds, seconds per token), and those of a replay; others cost a half."""
    length = DraftLength(most, steps)
    for n in range(1, 40):
        drafts, other = n % 3, n % 5
        took = passes[0] + passes[1] * (n + drafts + other / 2) + replay * (drafts > 0)
        length.passed(n, drafts, other, took)
        length.guessed(n * 2, 2, 2 * (guessing[0] + guessing[1] * n))
    length._step = LEARNING
    return length


def speed(length: DraftLength, rates: Sequence[float], counts: Sequence[int], other: int = 0) -> float:
    """Tokens per second."""
    return sum(sum(p**n for n in range(k + 1)) for p, k in zip(rates, counts)) / length.seconds(counts, other)


def test_times_are_found() -> None:
    """Also when a moment took ten times as long; what was never seen counts nothing, nothing is negative."""
    fit = Fit(2)
    for n in range(60):
        fit.see((1, n % 7 + 1), (0.02 + 0.001 * (n % 7 + 1)) * (10 if n % 20 == 9 else 1))
    assert fit.coefficients == pytest.approx([0.02, 0.001], rel=0.1)
    flat, falling = Fit(3), Fit(2)
    for n in range(20):
        flat.see((1, 3, 0), 0.5)
        falling.see((1, n + 1), 1 / (n + 1))
    assert flat.at(1, 3, 0) == pytest.approx(0.5) and flat.coefficients[2] == 0
    assert min(falling.coefficients) == 0 and Fit(2).at(1, 5) == 0
    old = Fit(2)
    for n in range(1000):
        old.see((1, n % 5 + 1), 1.0 * (n % 5 + 1) if n < 500 else 0.1 + 0.01 * (n % 5))
    assert old.at(1, 3) == pytest.approx(0.12, rel=0.05)
    before = old.coefficients
    old.see((1, 1), 5.0)
    assert old.coefficients == before  # not yet


def test_seconds_by_definition() -> None:
    """One step for each depth, or one for all where no pass is needed; a replay where anything was guessed."""
    length = told((0.01, 0.001), (0.002, 0.0005), replay=0.003)
    want = 0.01 + 0.001 * (3 + 5 + 5 / 2) + 0.003 + 0.002 * 3 + 0.0005 * 5
    assert length.seconds([2, 0, 3], 5) == pytest.approx(want, rel=1e-4)
    alone = told((0.01, 0.001), (0.002, 0), steps=False)
    assert alone.seconds([2, 0, 3]) == pytest.approx(0.01 + 0.008 + 0.002, rel=1e-4)
    assert length.seconds([0, 0]) == pytest.approx(0.012, rel=1e-4)


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("passes", [(0.02, 0.0005), (0.02, 0.004), (0.004, 0.004), (0.05, 0.0)])
@pytest.mark.parametrize("guessing", [(1e-9, 1e-9), (0.002, 0.0002), (0.015, 0.001)])
@pytest.mark.parametrize("replay", [0.0, 0.006])
def test_the_best_of_all_choices(
    steps: bool, passes: tuple[float, float], guessing: tuple[float, float], replay: float
) -> None:
    """Against every combination for one to three requests; nothing is chosen that gains less than the margin."""
    length, rng = told(passes, guessing, most=5, steps=steps, replay=replay), random.Random(1)
    for count in (1, 1, 2, 3, 3):
        rates = [rng.choice((0.05, 0.4, 0.7, 0.9, 0.97)) for _ in range(count)]
        limits, other = [rng.choice((5, 5, 2, 0)) for _ in range(count)], rng.choice((0, 0, 40))
        chosen = length._best(rates, limits, other)
        assert all(0 <= k <= most for k, most in zip(chosen, limits))
        every = itertools.product(*(range(most + 1) for most in limits))
        best = max(speed(length, rates, counts, other) for counts in every)
        plain = speed(length, rates, [0] * count, other)
        assert speed(length, rates, chosen, other) > 0.985 * best or (not any(chosen) and best < 1.04 * plain)
        assert not any(chosen) or speed(length, rates, chosen, other) > MARGIN * plain


def test_more_where_more_are_right_and_none_where_it_does_not_pay() -> None:
    """Per request and per batch: the better draft gets more; many requests, whose pass costs what its tokens cost, get
    fewer than one alone, and at last none."""
    length = told((0.02, 0.002), (0.001, 0.0002))
    short, long = length._best([0.5, 0.95], [6, 6], 0)
    assert 0 < short < long
    assert length._best([0.01], [6], 0) == [0]
    by_load = [sum(length._best([0.6] * n, [6] * n, 0)) / n for n in (1, 4, 16, 64, 256)]
    assert by_load == sorted(by_load, reverse=True) and by_load[0] >= 2 and by_load[-1] == 0


def test_what_was_right_counts() -> None:
    """By trials up to the first wrong guess, recent ones more; a new request begins with the rate of all."""
    length, mine = DraftLength(8, True), Record()
    for _ in range(200):
        length.all.see(2, 1, FADE_ALL)
    assert length.rates([mine]) == pytest.approx([0.5], abs=0.02)
    for _ in range(60):
        mine.see(4, 4, FADE)
    assert length.rates([mine])[0] > 0.85
    for _ in range(60):
        mine.see(1, 0, FADE)
    assert length.rates([mine])[0] < 0.15


def test_times_are_learned_and_looked_after() -> None:
    """First all, none, one, none in turn; later none in every PROBE-th pass, and in the one after it one each, where
    there is use for it."""
    length = DraftLength(5, True)
    first = [length.choose([0.5], [9]) for _ in range(LEARNING)]
    assert first == [[5], [0], [1], [0]] * (LEARNING // 4)
    assert length.choose([], []) == [] and length.choose([0.5], [0]) == [0]
    length = told((0.01, 0.01), (0.01, 0.01))
    later = [length.choose([0.1, 0.1], [4, 0]) for _ in range(LEARNING + 1, 3 * PROBE)]
    assert [n + LEARNING + 1 for n, counts in enumerate(later) if any(counts)] == [PROBE + 1, 2 * PROBE + 1]
    assert all(counts in ([0, 0], [1, 0]) for counts in later)
    length = told((0.01, 1e-9), (1e-9, 1e-9))
    later = [length.choose([0.9], [4]) for _ in range(LEARNING + 1, 3 * PROBE)]
    assert [n + LEARNING + 1 for n, counts in enumerate(later) if not any(counts)] == [PROBE, 2 * PROBE]


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8, 0.95])
@pytest.mark.parametrize(
    ("count", "per_token", "replay"), [(1, 0.001, 0), (1, 0.001, 0.01), (4, 0.001, 0.01), (16, 0.001, 0), (16, 0.01, 0)]
)
def test_in_a_world_with_noise(chance: float, count: int, per_token: float, replay: float) -> None:
    """It knows nothing at first, and times vary by a fifth: from 300 passes on, tokens per second come within 8 % of
    what the best constant number of guesses gives."""
    rng = random.Random(count)

    def run(length: DraftLength | None, constant: int) -> float:
        records, tokens, seconds = [Record() for _ in range(count)], 0, 0.0
        for step in range(900):
            limits = [6] * count
            counts = [constant] * count if length is None else length.choose(length.rates(records), limits)
            guessing = max(counts) * 0.002 + sum(counts) * 0.0002
            took = (0.02 + per_token * (count + sum(counts)) + replay * any(counts)) * rng.uniform(0.9, 1.1)
            if length is not None:
                length.passed(count, sum(counts), 0, took)
                if max(counts):
                    length.guessed(sum(counts), max(counts), guessing * rng.uniform(0.9, 1.1))
            for record, k in zip(records, counts):
                right = next((n for n in range(k) if rng.random() >= chance), k)
                tokens += (1 + right) * (step >= 300)
                for each, fade in ((record, FADE), *([(length.all, FADE_ALL)] if length else [])):
                    each.see(min(k, right + 1), right, fade)
            seconds += (took + guessing) * (step >= 300)
        return tokens / seconds

    best = max(run(None, constant) for constant in range(7))
    assert run(DraftLength(6, True), 0) > 0.92 * best
