"""What a simulation can ask where a request goes: the router's policy with or without its parts, or blind choice."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Protocol

from openk3.config.fleet import FleetConfig
from openk3.fleet.policy import Policy
from openk3.fleet.ticket import Features, Outcome, Reject, Ticket
from openk3.fleet.trace import TraceError

POLICIES = ("random", "round-robin", "least-loaded", "affinity", "affinity+budgets")


class Chooser(Protocol):
    """The part of `Policy` that a request and a health check meet."""

    def choose(self, features: Features, now: float) -> Ticket | Reject:
        """A request arrives."""
        ...

    def started(self, ticket: Ticket, now: float) -> None:
        """Its first token came."""
        ...

    def finished(self, ticket: Ticket, now: float, outcome: Outcome) -> list[Ticket]:
        """It is over; others that may go on now, or are refused."""
        ...

    def retry(self, ticket: Ticket, now: float) -> Ticket | Reject:
        """Its replica died before the first token."""
        ...

    def tick(self, now: float) -> list[Ticket]:
        """Time has passed."""
        ...

    def wake_at(self, now: float) -> float | None:
        """When to call `tick` at the latest."""
        ...

    def checked(self, name: str, is_good: bool, now: float) -> list[Ticket]:
        """A replica's health check ended."""
        ...


class Routed:
    """The router's own policy."""

    def __init__(self, config: FleetConfig, names: Sequence[str]) -> None:
        self.policy = Policy(config)
        for name in names:
            self.policy.add(name, is_up=True)
        self.choose, self.started, self.retry = self.policy.choose, self.policy.started, self.policy.retry
        self.finished, self.tick, self.wake_at = self.policy.finished, self.policy.tick, self.policy.wake_at

    def checked(self, name: str, is_good: bool, now: float) -> list[Ticket]:
        """A replica's health check ended."""
        self.policy.replicas[name].checked(is_good)
        return self.policy.tick(now)


class Blind:
    """Any replica that is up: by chance, or in turn."""

    def __init__(self, names: Sequence[str], seed: int | None, tries: int = 3) -> None:
        self._names, self._tries = list(names), tries
        self._draws = None if seed is None else random.Random(seed)
        self._down = set[str]()
        self._count = 0

    def choose(self, features: Features, now: float) -> Ticket | Reject:
        """Never waits."""
        return self._place(Ticket(features, now, self._count))

    def started(self, ticket: Ticket, now: float) -> None:
        """Nothing is remembered."""

    def finished(self, ticket: Ticket, now: float, outcome: Outcome) -> list[Ticket]:
        """Nobody waits."""
        return []

    def retry(self, ticket: Ticket, now: float) -> Ticket | Reject:
        """Another one, as often as the router would."""
        assert ticket.replica is not None
        ticket.excluded.add(ticket.replica)
        return Reject("tries_used_up", 1.0) if len(ticket.excluded) >= self._tries else self._place(ticket)

    def tick(self, now: float) -> list[Ticket]:
        """Nobody waits."""
        return []

    def wake_at(self, now: float) -> float | None:
        """Never."""
        return None

    def checked(self, name: str, is_good: bool, now: float) -> list[Ticket]:
        """The first bad check counts."""
        (self._down.discard if is_good else self._down.add)(name)
        return []

    def _place(self, ticket: Ticket) -> Ticket | Reject:
        names = [name for name in self._names if name not in self._down | ticket.excluded]
        if not names:
            return Reject("no_replica", 2.0)
        ticket.replica = names[self._count % len(names)] if self._draws is None else self._draws.choice(names)
        self._count += 1
        return ticket


def make_chooser(name: str, config: FleetConfig, replicas: Sequence[str], seed: int = 0) -> Chooser:
    """One of POLICIES; `config` is the router's. Raises TraceError for another name."""
    if name in ("random", "round-robin"):
        return Blind(replicas, seed if name == "random" else None, config.tries)
    if name not in POLICIES:
        raise TraceError(f"policy {name}: no such policy; there are {', '.join(POLICIES)}")
    is_affine, is_budgeted = "affinity" in name, "budgets" in name
    return Routed(dataclasses.replace(config, is_affine=is_affine, is_budgeted=is_budgeted), replicas)
