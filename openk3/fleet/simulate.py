"""A fleet in simulated time: a trace, a router's policy (the router's own code), replicas, and their deaths.

Events are handled in the order of their time, those of one time in the order of their making, so a run is the same
every time. What a network takes is not in it. A replica that dies loses its cache; requests without a first token are
tried elsewhere as the policy says, others have failed. The policy hears of it from those, and from health checks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from openk3.fleet.baselines import Chooser
from openk3.fleet.outcomes import Outcome, summary
from openk3.fleet.simulated_replica import SimulatedReplica, Visit
from openk3.fleet.ticket import Features, Reject, Ticket
from openk3.fleet.ticket import Outcome as Verdict
from openk3.fleet.trace import Entry, TraceError

MOMENT = 1e-3  # seconds
_OUTCOMES: dict[str, Verdict] = {"done": "ok", "failed": "broken", "refused": "left"}  # what the router is told


@dataclass(frozen=True)
class Death:
    """A replica is gone from `at` to `back`, where it starts with an empty cache."""

    replica: str
    at: float
    back: float = float("inf")

    def __post_init__(self) -> None:
        if not 0 <= self.at < self.back:
            raise TraceError(f"death of {self.replica}: must come before it is back, got {self.at:g} to {self.back:g}")


@dataclass
class _Asked:
    """A request that the router has, or a replica."""

    outcome: Outcome
    ticket: Ticket
    visit: Visit | None = None  # at ticket.replica


class _Events:
    """What happens when, in the order of time, then of making."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap, self._number = list[tuple[float, int, Callable[[], None]]](), count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def at(self, time: float, do: Callable[[], None]) -> None:
        """What is late happens now."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._number), do))

    def step(self) -> None:
        """Let the next one happen."""
        self.now, _, do = heapq.heappop(self._heap)
        do()


class _Alarm:
    """Rings at the earliest of the times that it was set to."""

    def __init__(self, events: _Events, ring: Callable[[], None]) -> None:
        self._events, self._ring = events, ring
        self._time: float | None = None

    def set(self, time: float | None) -> None:
        """None: no need. A time that is reached already is a moment away, as for any clock that moves."""
        time = None if time is None else max(time, self._events.now + MOMENT)
        if time is not None and (self._time is None or time < self._time):
            self._time = time
            self._events.at(time, lambda: self._rings(time))

    def _rings(self, time: float) -> None:
        if self._time == time:
            self._time = None
        self._ring()


class _Machines:
    """The replicas, whose passes end when their time is up; `passed` hears what came of each."""

    def __init__(
        self,
        replicas: Mapping[str, SimulatedReplica],
        events: _Events,
        passed: Callable[[list[Visit], list[Visit]], None],
    ) -> None:
        self.replicas, self.dead = dict(replicas), set[str]()
        self._events, self._passed = events, passed
        self._versions = dict.fromkeys(replicas, 0)  # what was planned before is void

    def go_on(self, name: str) -> None:
        """Start what there is room for, and come back when it is done."""
        replica = self.replicas[name]
        replica.begin(self._events.now)
        self._versions[name] += 1
        if replica.busy_until is not None:
            version = self._versions[name]
            self._events.at(replica.busy_until, lambda: self._end(name, version))

    def die(self, name: str) -> None:
        """With all that it had."""
        self.dead.add(name)
        self._versions[name] += 1
        self.replicas[name].die()

    def _end(self, name: str, version: int) -> None:
        if version == self._versions[name]:
            self._passed(*self.replicas[name].finish())
            self.go_on(name)


class Simulation:
    """One run. `check_s` is the time between two health checks of a replica."""

    def __init__(
        self,
        entries: Sequence[Entry],
        chooser: Chooser,
        replicas: Mapping[str, SimulatedReplica],
        *,
        deaths: Sequence[Death] = (),
        check_s: float = 2.0,
    ) -> None:
        for death in deaths:
            if death.replica not in replicas:
                raise TraceError(f"death of {death.replica}: no such replica; there are {', '.join(replicas)}")
        self.chooser, self.outcomes = chooser, list[Outcome]()
        self._check_s, self._events = check_s, _Events()
        self._machines = _Machines(replicas, self._events, self._passed)
        self._asked = dict[int, _Asked]()  # by id of the ticket
        self._at_replica = dict[Visit, _Asked]()
        self._sessions = dict[str, list[Entry]]()
        self._alarm = _Alarm(self._events, lambda: self._released(chooser.tick(self.now)))
        for entry in entries:
            self._sessions.setdefault(entry.session, []).append(entry)
        for turns in self._sessions.values():
            turns.reverse()
            self._next_turn(turns[-1].session)
        for death in deaths:
            self._events.at(death.at, lambda death=death: self._die(death))
        self._num_entries = len(entries)

    @property
    def replicas(self) -> dict[str, SimulatedReplica]:
        """By name."""
        return self._machines.replicas

    @property
    def now(self) -> float:
        """Seconds since the trace began."""
        return self._events.now

    def run(self, progress: Callable[[int], None] | None = None) -> list[Outcome]:
        """Until every request has ended; `progress` hears how many have, now and then."""
        told = 0
        while self._events and len(self.outcomes) < self._num_entries:
            self._events.step()
            self._alarm.set(self.chooser.wake_at(self.now))
            if progress is not None and len(self.outcomes) >= told + 200:
                told = len(self.outcomes)
                progress(told)
        if len(self.outcomes) != self._num_entries or self._asked:
            raise RuntimeError(f"{self._num_entries - len(self.outcomes)} requests never ended")
        return self.outcomes

    def _next_turn(self, session: str) -> None:
        turns = self._sessions[session]
        if turns:
            entry = turns.pop()
            self._events.at(entry.at, lambda: self._send(entry))

    def _send(self, entry: Entry) -> None:
        outcome = Outcome(entry, self.now, prompt=entry.prompt_tokens)
        features = Features(entry.session.encode(), "", entry.prompt_tokens, entry.answer_tokens)
        self._placed(outcome, self.chooser.choose(features, self.now))

    def _placed(self, outcome: Outcome, got: Ticket | Reject) -> None:
        """The router has decided something about a request."""
        if isinstance(got, Reject):
            self._end(outcome, "refused")
            return
        asked = self._asked[id(got)] = _Asked(outcome, got)
        if got.replica is not None:
            self._forward(asked)

    def _forward(self, asked: _Asked) -> None:
        name, outcome = asked.ticket.replica, asked.outcome
        assert name is not None
        outcome.tries += 1
        if name in self._machines.dead:
            self._retry(asked)
            return
        replica = self.replicas[name]
        outcome.replica, outcome.routed = name, self.now if outcome.routed is None else outcome.routed
        if not replica.fits(outcome.entry):
            self._finished(asked, "refused")
            return
        asked.visit = Visit(outcome.entry)
        self._at_replica[asked.visit] = asked
        door_s = replica.costs.door_s(outcome.entry.prompt_tokens)
        self._events.at(self.now + door_s, lambda visit=asked.visit: self._arrive(name, visit))

    def _arrive(self, name: str, visit: Visit) -> None:
        if visit in self._at_replica and self._at_replica[visit].visit is visit:  # else its replica has died
            self.replicas[name].add(visit, self.now)
            self._machines.go_on(name)

    def _passed(self, firsts: list[Visit], over: list[Visit]) -> None:
        for visit in firsts:
            asked = self._at_replica[visit]
            assert visit.held is not None
            asked.outcome.first, asked.outcome.cached = self.now, visit.held.num_cached
            self.chooser.started(asked.ticket, self.now)
        for visit in over:
            asked = self._at_replica.pop(visit)
            asked.outcome.answered = visit.num_answered
            self._finished(asked, "done")

    def _finished(self, asked: _Asked, fate: str) -> None:
        del self._asked[id(asked.ticket)]
        self._end(asked.outcome, fate)
        self._released(self.chooser.finished(asked.ticket, self.now, _OUTCOMES[fate]))

    def _released(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            asked = self._asked[id(ticket)]
            if ticket.rejected is not None:
                del self._asked[id(ticket)]
                self._end(asked.outcome, "refused")
            else:
                self._forward(asked)

    def _end(self, outcome: Outcome, fate: str) -> None:
        outcome.ended, outcome.fate = self.now, fate
        self.outcomes.append(outcome)
        self._next_turn(outcome.entry.session)

    def _die(self, death: Death) -> None:
        name = death.replica
        self._machines.die(name)
        lost = [visit for visit, asked in self._at_replica.items() if asked.ticket.replica == name]
        for visit in lost:
            asked = self._at_replica.pop(visit)
            if asked.outcome.first is None:
                self._retry(asked)
            else:
                self._finished(asked, "failed")
        self._events.at(self.now + self._check_s, lambda: self._check(name))
        if death.back < float("inf"):
            self._events.at(death.back, lambda: self._machines.dead.discard(name))

    def _retry(self, asked: _Asked) -> None:
        del self._asked[id(asked.ticket)]
        asked.visit = None
        self._placed(asked.outcome, self.chooser.retry(asked.ticket, self.now))

    def _check(self, name: str) -> None:
        """A health check of a replica that was dead once; goes on, since it may be back."""
        self._released(self.chooser.checked(name, name not in self._machines.dead, self.now))
        self._events.at(self.now + self._check_s, lambda: self._check(name))


def simulated(simulation: Simulation, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Run it; the summary of what became of the requests, and how evenly the replicas were busy."""
    outcomes = simulation.run(progress)
    busy = {name: replica.busy_s for name, replica in simulation.replicas.items()}
    mean = sum(busy.values()) / len(busy)
    return summary(outcomes) | {
        "busy_share": {name: seconds / simulation.now if simulation.now else 0.0 for name, seconds in busy.items()},
        "imbalance": max(busy.values()) / mean if mean else 1.0,  # 1: all alike; number of replicas: one does it all
        "passes": sum(replica.num_passes for replica in simulation.replicas.values()),
    }
