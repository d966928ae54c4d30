"""DraftLength: how many guesses are worth their time, from how many were right and how long passes took.

The model, for a pass with R tokens of N requests that decode, of which request i has k_i guesses:

- it takes a + b R seconds, and guessing c + d n for each step with n guesses (one step for all where they cost no
  passes); a, b and c, d are fitted to measured times, by least squares of the relative error, so that long passes and
  moments in which the machine was busy do not weigh more; an observation counts half after HALF_LIFE others;
- a guess of request i is right with probability p_i if those before it were, so k guesses bring 1 + p + ... + p^k
  tokens; p_i is the share that was right so far, recent ones counting more, drawn towards the share of all requests
  while there are few.

Chosen are the k_i that give most tokens per second. They take one more guess where its chance p^k is worth its time at
that rate, and one more step where all of its guesses together are. If the gain over no guesses is below MARGIN, there
are none. To know both times, the first passes have all guesses and none in turn, and later every PROBE-th has none; to
notice a change, whoever has none is tried with one guess in the pass after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

HALF_LIFE = 64.0
MARGIN = 1.02
PROBE = 64
LEARNING = 8  # first passes
PRIOR = 4.0  # guesses of all requests that count beside a request's own
FADE, FADE_ALL = 0.95, 0.998  # of older guesses for each new one: of a request, of all


class Line:
    """y = intercept + slope x, fitted to what was seen by its relative error; neither is negative."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # weighted: of 1, x, y, xx, xy
        self.num_seen = 0

    def see(self, x: float, y: float) -> None:
        """One more observation, y > 0; the older count less."""
        fade, weight = 0.5 ** (1 / HALF_LIFE), max(y, 1e-9) ** -2
        self._sums = [fade * old + weight * new for old, new in zip(self._sums, (1.0, x, y, x * x, x * y))]
        self.num_seen += 1

    @property
    def line(self) -> tuple[float, float]:
        """(intercept, slope); without two different x the slope is 0."""
        weight, x, y, xx, xy = self._sums
        if not weight:
            return 0.0, 0.0
        mean_x, mean_y = x / weight, y / weight
        spread = xx / weight - mean_x**2
        slope = (xy / weight - mean_x * mean_y) / spread if spread > 1e-9 * (1 + mean_x**2) else 0.0
        slope = min(max(0.0, slope), mean_y / mean_x if mean_x else 0.0)
        return mean_y - slope * mean_x, slope

    def at(self, x: float) -> float:
        """The expected y."""
        intercept, slope = self.line
        return intercept + slope * x


@dataclass
class Record:
    """How guesses of one request, or of all, have fared: each guess up to the first wrong one is a trial."""

    right: float = 0.0
    trials: float = 0.0

    def see(self, trials: int, num_accepted: int, fade: float) -> None:
        """A pass's guesses that came to the test."""
        keep = fade**trials
        self.right, self.trials = keep * self.right + num_accepted, keep * self.trials + trials

    def rate(self, prior: float) -> float:
        """The share that was right, drawn towards a prior."""
        return (self.right + PRIOR * prior) / (self.trials + PRIOR)


class DraftLength:
    """Decides before each pass; is told afterwards. Costs tens of microseconds per request."""

    def __init__(self, most_drafts: int, one_by_one: bool) -> None:
        self.most_drafts, self.one_by_one = most_drafts, one_by_one
        self.passes, self.guessing = Line(), Line()
        self.all = Record()
        self._step = 0

    def rates(self, records: Sequence[Record]) -> list[float]:
        """Chances that a guess is right, by request."""
        prior = self.all.rate(0.6)
        return [min(0.999, record.rate(prior)) for record in records]

    def choose(self, rates: Sequence[float], limits: Sequence[int], num_other: int = 0) -> list[int]:
        """Guesses for each decoding request, at most its limit; `num_other` tokens of the pass are of other kinds."""
        most = [min(limit, self.most_drafts) for limit in limits]
        none = [0] * len(most)
        if not any(most):
            return none
        self._step += 1
        if self._step <= LEARNING:
            return most if self._step % 2 else none
        if self._step % PROBE == 0:
            return none
        counts = self._best(rates, most, num_other)
        return [max(n, min(1, limit)) for n, limit in zip(counts, most)] if self._step % PROBE == 1 else counts

    def seconds(self, counts: Sequence[int], num_other: int = 0) -> float:
        """Expected time of a pass with these guesses, guessing included."""
        start, each = self.guessing.line
        steps = max(counts, default=0) if self.one_by_one else min(1, max(counts, default=0))
        num_drafts = sum(counts)
        return self.passes.at(len(counts) + num_other + num_drafts) + start * steps + each * num_drafts

    def _best(self, rates: Sequence[float], most: Sequence[int], num_other: int) -> list[int]:
        counts = none = [0] * len(rates)
        speed = plain = len(rates) / max(1e-9, self.seconds(none, num_other))
        for _ in range(4):  # each round raises the speed, or is the last one
            better = self._worth(rates, most, speed)
            gained = sum(map(_expected, rates, better)) / max(1e-9, self.seconds(better, num_other))
            if gained <= speed * 1.0001:
                break
            counts, speed = better, gained
        return counts if speed > MARGIN * plain else none

    def _worth(self, rates: Sequence[float], most: Sequence[int], speed: float) -> list[int]:
        """Guesses whose chance is above what their time is worth at a speed, in steps that are worth theirs."""
        start, each = self.guessing.line
        least = speed * (self.passes.line[1] + each)
        counts = [_count_above(rate, least, limit) for rate, limit in zip(rates, most)]
        depth = max(counts, default=0)
        price = speed * start
        while depth and self.one_by_one and _gain(rates, counts, depth, least) < price:
            depth -= 1
            counts = [min(count, depth) for count in counts]
        if not self.one_by_one and sum(_gain(rates, counts, k, least) for k in range(1, depth + 1)) < price:
            return [0] * len(rates)
        return counts


def _expected(rate: float, count: int) -> float:
    """Tokens of a request with so many guesses: 1 + p + ... + p^k."""
    return (1 - rate ** (count + 1)) / (1 - rate)


def _count_above(rate: float, least: float, limit: int) -> int:
    """The largest k with p^k above `least`."""
    if rate <= 0 or least >= 1 or limit <= 0:
        return 0
    return limit if least <= 0 else min(limit, int(math.log(least) / math.log(rate)))


def _gain(rates: Sequence[float], counts: Sequence[int], k: int, least: float) -> float:
    """What the k-th guesses bring above their own price."""
    return sum(rate**k - least for rate, count in zip(rates, counts) if count >= k)
