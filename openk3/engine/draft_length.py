"""DraftLength: how many guesses are worth their time, from how many were right and how long passes took.

The model, for a pass with N requests that decode, of which request i has k_i guesses, and R other tokens:

- it takes a + b (N + sum of k_i) + c R seconds, and d more if there are any guesses (what is accepted is replayed);
  guessing takes e + f n for each step with n guesses (one step for all where they cost no passes). All six are fitted
  to measured times, by least squares of the relative error, so that long passes and moments in which the machine was
  busy do not weigh more; an observation counts half after HALF_LIFE others;
- a guess of request i is right with probability p_i if those before it were, so k guesses bring 1 + p + ... + p^k
  tokens; p_i is the share that was right so far, recent ones counting more, drawn towards the share of all requests
  while there are few.

Chosen are the k_i that give most tokens per second. They take one more guess where its chance p^k is worth its time at
that rate, and one more step where all of its guesses together are. If the gain over no guesses is below MARGIN, there
are none. To know the times, the first passes have all guesses, none, one each and none in turn, and later every
PROBE-th has none; to notice a change, whoever has none is tried with one guess in the pass after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

HALF_LIFE = 64.0
MARGIN = 1.02
PROBE = 32
LEARNING = 16  # first passes
PRIOR = 4.0  # guesses of all requests that count beside a request's own
FADE, FADE_ALL = 0.95, 0.998  # of older guesses for each new one: of a request, of all


class Fit:
    """y = sum of coefficients times x, fitted to what was seen by its relative error; no coefficient is negative."""

    def __init__(self, size: int) -> None:
        self._xx, self._xy = np.zeros((size, size)), np.zeros(size)  # weighted sums
        self._found: list[float] | None = None
        self._num_seen = 0

    def see(self, x: Sequence[float], y: float) -> None:
        """One more observation, y > 0; the older count less. Later on, coefficients follow at every fourth."""
        fade, row = 0.5 ** (1 / HALF_LIFE), np.array(x, dtype=np.float64) / max(y, 1e-9)
        self._xx, self._xy = fade * self._xx + np.outer(row, row), fade * self._xy + row
        self._num_seen += 1
        if self._num_seen <= LEARNING or self._num_seen % 4 == 0:
            self._found = None

    @property
    def coefficients(self) -> list[float]:
        """One for each x; 0 for one that was never seen, or that the others explain."""
        if self._found is None:
            found, used = np.zeros(len(self._xy)), np.flatnonzero(self._xx.diagonal() > 0)
            while used.size:
                xx = self._xx[np.ix_(used, used)]
                solved = np.linalg.solve(xx + np.diag(1e-9 * xx.diagonal()), self._xy[used])
                if (solved >= 0).all():
                    found[used] = solved
                    break
                used = np.delete(used, int(solved.argmin()))
            self._found = found.tolist()
        return self._found

    def at(self, *x: float) -> float:
        """The expected y."""
        return sum(a * b for a, b in zip(self.coefficients, x))


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
        self.passes, self.guessing = Fit(4), Fit(2)
        self.all = Record()
        self._step = 0

    def rates(self, records: Sequence[Record]) -> list[float]:
        """Chances that a guess is right, by request."""
        prior = self.all.rate(0.6)
        return [min(0.999, record.rate(prior)) for record in records]

    def choose(self, rates: Sequence[float], limits: Sequence[int], num_other: int = 0) -> list[int]:
        """Guesses for each decoding request, at most its limit; `num_other` tokens of the pass are of other kinds."""
        most = [min(limit, self.most_drafts) for limit in limits]
        none, one = [0] * len(most), [min(1, limit) for limit in most]
        if not any(most):
            return none
        self._step += 1
        if self._step <= LEARNING:
            return (none, most, none, one)[self._step % 4]
        if self._step % PROBE == 0:
            return none
        counts = self._best(rates, most, num_other)
        return list(map(max, counts, one)) if self._step % PROBE == 1 else counts

    def passed(self, num_decoding: int, num_drafts: int, num_other: int, seconds: float) -> None:
        """A pass took so long: requests that decode, guesses of all of them, other tokens."""
        self.passes.see((1, num_decoding + num_drafts, num_other, num_drafts > 0), seconds)

    def guessed(self, num_drafts: int, num_steps: int, seconds: float) -> None:
        """Guessing took so long, all steps together."""
        self.guessing.see((1, num_drafts / num_steps), seconds / num_steps)

    def seconds(self, counts: Sequence[int], num_other: int = 0) -> float:
        """Expected time of a pass with these guesses, guessing included."""
        start, each = self.guessing.coefficients
        num_drafts, depth = sum(counts), max(counts, default=0)
        steps = depth if self.one_by_one else min(1, depth)
        passing = self.passes.at(1, len(counts) + num_drafts, num_other, num_drafts > 0)
        return passing + start * steps + each * num_drafts

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
        start, each = self.guessing.coefficients
        least = speed * (self.passes.coefficients[1] + each)
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
