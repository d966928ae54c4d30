"""Replica: whether a server may be sent requests, from its health checks, what became of requests, and its owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from openk3.config.fleet import FleetConfig

State = Literal["new", "healthy", "draining", "failed"]


@dataclass
class Replica:
    """One server as a router sees it.

    Checks move it between healthy and failed only after several in a row (hysteresis). Requests that it breaks open
    its circuit: nothing is sent for a time that doubles with each opening, then a single request is tried.
    """

    name: str
    config: FleetConfig
    weight: float = 1.0
    is_up: bool = False  # by its checks
    is_held: bool = False  # its owner wants no more requests sent
    is_leaving: bool = False  # likewise, and it is forgotten when those under way have ended
    says_draining: bool = False
    life: int = 0  # goes up whenever what was cached may be gone
    num_open: int = 0  # requests under way
    num_sent: int = 0
    num_broken: int = 0
    num_opened: int = 0  # times that the circuit opened in all
    was_seen: bool = False
    closed_until: float = 0.0  # no requests before
    _row: int = 0  # checks in a row that contradict is_up
    _broken_row: int = 0
    _openings: int = 0  # without a success between them
    _is_tried: bool = False  # the circuit is half open and its one request is under way

    @property
    def state(self) -> State:
        """For people and metrics."""
        if not self.is_up:
            return "failed" if self.was_seen else "new"
        return "draining" if self.is_held or self.is_leaving or self.says_draining else "healthy"

    @property
    def is_wanted(self) -> bool:
        """Whether it takes part, now or as soon as its circuit closes."""
        return self.state == "healthy"

    def may_take(self, now: float) -> bool:
        """Whether a request may be sent now."""
        if not self.is_wanted or now < self.closed_until:
            return False
        return not (self._openings and self._is_tried)

    def checked(self, is_good: bool, *, is_draining: bool = False) -> bool:
        """A health check ended; whether the state changed. The first good one of a new replica counts at once."""
        before = self.state
        self.says_draining = is_draining
        if is_good == self.is_up:
            self._row = 0
        else:
            self._row += 1
            need = self.config.fail_after if self.is_up else self.config.recover_after if self.was_seen else 1
            if self._row >= need:
                self._turn(is_good)
        return self.state != before

    def _turn(self, is_up: bool) -> None:
        self.is_up, self.was_seen, self._row = is_up, True, 0
        if not is_up:
            self.life += 1
        else:
            self._broken_row = self._openings = 0
            self._is_tried, self.closed_until = False, 0.0

    def took(self) -> bool:
        """A request is sent; whether it is the one that tries a half-open circuit."""
        self.num_open += 1
        self.num_sent += 1
        self._is_tried = self._openings > 0
        return self._is_tried

    def answered(self) -> None:
        """The first byte of an answer came: whatever was wrong is over."""
        self._broken_row = self._openings = 0
        self._is_tried = False

    def broke(self, now: float) -> None:
        """A request failed by the replica's fault: no connection, no answer in time, an answer cut short."""
        self.num_broken += 1
        self._broken_row += 1
        if self._broken_row >= self.config.break_after or self._is_tried:
            wait = self.config.backoff_seconds * 2 ** min(self._openings, 30)
            self.closed_until = now + min(wait, self.config.most_backoff_seconds)
            self._openings += 1
            self.num_opened += 1
            self.life += 1
            self._broken_row = 0
        self._is_tried = False

    def refused(self, now: float, seconds: float) -> None:
        """It said that it is full or on its way out, and for how long."""
        self._is_tried = False
        self.closed_until = max(self.closed_until, now + min(seconds, self.config.most_backoff_seconds))

    def ended(self, *, was_trial: bool) -> None:
        """A request is over, one way or another."""
        self.num_open -= 1
        self._is_tried = self._is_tried and not was_trial
