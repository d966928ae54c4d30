"""Costs: whether keeping or bringing a state is quicker than computing it again, by what was measured so far.

The rule. A preempted request's state is swapped if copying it out and back takes less time than computing the tokens
that it would lose: 2 * bytes / copy rate < tokens lost * seconds per token. A prefix is brought back if copying what
lies in CPU memory, and reading what lies behind it, take less time than computing the tokens gained.

Rates are sums of bytes (or tokens) over sums of seconds, in which older measurements fade. Seconds per token come from
passes that were at least a quarter full, as recomputing is; before the first of those, from any. While nothing is known
about a side, moving is taken to be quicker. That a token behind a long prefix costs more than others is left out, so
the rule errs towards computing.
"""

from __future__ import annotations

from openk3.config.outer_tier import TierConfig

FADING = 0.9  # of all that was measured before, with each new measurement


class Rate:
    """Amounts per second."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """One measurement."""
        self._amount = FADING * self._amount + amount
        self._seconds = FADING * self._seconds + seconds

    def seconds(self, amount: float) -> float:
        """For so much; 0 while nothing was measured."""
        return amount * self._seconds / self._amount if self._amount else 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._amount > 0


class Costs:
    """Measured rates of one engine, and the decisions that follow."""

    def __init__(self, config: TierConfig, step_tokens: int) -> None:
        self._config, self._step_tokens = config, step_tokens
        self.copies = Rate()  # bytes between pages and CPU memory
        self.reads = Rate()  # bytes from the store, checked
        self._full_passes, self._any_passes = Rate(), Rate()

    def passed(self, num_tokens: int, seconds: float) -> None:
        """A pass of so many tokens took so long."""
        self._any_passes.add(num_tokens, seconds)
        if num_tokens * 4 >= self._step_tokens:
            self._full_passes.add(num_tokens, seconds)

    def swap_pays(self, num_bytes: int, num_lost: int) -> bool:
        """Whether to copy a state out and back, rather than to compute `num_lost` tokens again."""
        if self._config.swap != "auto":
            return self._config.swap == "always"
        return self._pays(self.copies.seconds(2 * num_bytes), num_lost)

    def load_pays(self, num_bytes: int, num_read: int, num_gained: int) -> bool:
        """Whether to bring a prefix of `num_bytes`, `num_read` of them from the store, that saves so many tokens."""
        if self._config.load != "auto":
            return True
        return self._pays(self.copies.seconds(num_bytes) + self.reads.seconds(num_read), num_gained)

    def _pays(self, seconds: float, num_tokens: int) -> bool:
        passes = self._full_passes if self._full_passes.is_known else self._any_passes
        return not passes.is_known or seconds < passes.seconds(num_tokens)
