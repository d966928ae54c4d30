"""Policy: which replica answers a request, or whether it waits or is refused; without I/O, clock or chance."""

from __future__ import annotations

from collections import Counter

from openk3.config.fleet import FleetConfig
from openk3.fleet.admission import Budgets
from openk3.fleet.placement import Placement
from openk3.fleet.replicas import Replica
from openk3.fleet.sessions import Home
from openk3.fleet.ticket import Features, Outcome, Place, Reject, Ticket
from openk3.fleet.waiting import WaitingRoom


class Policy:
    """The decisions of one router.

    A request prefers the replica that holds its session's prefix, else the session's primary on the ring, else its
    secondary (report section 5.4.3). Where that one's budget is used up, it goes to the replica with the least work, if
    that leaves it in its class. A prefix too long for that is waited for; after `patience_seconds` the request counts
    as one of the class that it costs elsewhere, and goes to its prefix if that class has room there, or is computed
    again elsewhere. Whoever waits keeps those behind it in turn from the replicas that it could take, so none is
    overtaken for ever; none waits longer than its class allows.
    """

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.budgets = Budgets(config.used_classes)
        self.placement = Placement(config, self.budgets)
        self.waiting = WaitingRoom(config, self.placement)
        self.places: Counter[tuple[str, Place]] = Counter()  # of placed requests with a session, by class
        self._count = 0

    @property
    def replicas(self) -> dict[str, Replica]:
        """By name."""
        return self.placement.replicas

    def add(self, name: str, *, weight: float = 1.0, is_up: bool = False) -> Replica:
        """A replica joins, comes back before it was gone, or changes its weight; it waits for its first good check."""
        return self.placement.add(name, weight=weight, is_up=is_up)

    def remove(self, name: str) -> None:
        """It gets nothing more, and is forgotten when what is under way has ended."""
        self.placement.remove(name)

    def hold(self, name: str, is_held: bool) -> None:
        """Its owner drains it: nothing more is sent, its sessions go to their secondaries; or takes it back."""
        self.replicas[name].is_held = is_held

    def choose(self, features: Features, now: float) -> Ticket | Reject:
        """A request arrives. A ticket without a replica waits: `finished` or `tick` will return it."""
        self._count += 1
        ticket = Ticket(features, now, self._count)
        return self._enter(ticket, now)

    def started(self, ticket: Ticket, now: float) -> None:
        """The first token came: its replica has computed the prompt."""
        if ticket.replica is not None:
            replica, features = self.replicas[ticket.replica], ticket.features
            replica.answered()
            self.placement.sessions.note(features.key, Home(replica.name, replica.life, features.num_prompt, now))

    def finished(self, ticket: Ticket, now: float, outcome: Outcome = "ok", pause: float = 1.0) -> list[Ticket]:
        """A request is over, or gives up waiting. Returns those that now have a replica, or are refused.

        "broken": by its replica's fault; "refused": the replica takes none for `pause` seconds; "left": nobody waits
        for the answer any more.
        """
        self._end(ticket, now, outcome, pause)
        return self.tick(now)

    def retry(self, ticket: Ticket, now: float, outcome: Outcome = "broken", pause: float = 1.0) -> Ticket | Reject:
        """Its replica failed or refused it before the first token: another one, ahead of its tenant's others."""
        if ticket.replica is not None:
            ticket.excluded.add(ticket.replica)
        self._end(ticket, now, outcome, pause)
        if len(ticket.excluded) >= self.config.tries:
            return Reject("tries_used_up", pause)
        return self._enter(ticket, now)

    def tick(self, now: float) -> list[Ticket]:
        """Time has passed, or something changed. Returns waiting tickets that now have a replica, or are refused."""
        self.waiting.look(now)
        for kind in range(len(self.budgets.classes)):
            self._pump(kind, now)
        news, self.waiting.news = self.waiting.news, []
        return news

    def wake_at(self, now: float) -> float | None:
        """When `tick` has something to do at the latest, if nothing else happens; None: never."""
        return self.waiting.wake_at(now)

    def _enter(self, ticket: Ticket, now: float) -> Ticket | Reject:
        if not self.placement.has_hope(ticket):
            return Reject("no_replica", 2.0)
        ticket.cost = self.placement.cost(ticket, self.placement.wanted(ticket, now), now)
        ticket.kind = self.budgets.class_of(ticket.cost)
        is_full = self.waiting.is_full(ticket.kind) and not ticket.excluded
        self.waiting.enter(ticket, is_first=bool(ticket.excluded))
        self._pump(ticket.kind, now)
        if ticket.replica is not None:
            self.waiting.news.remove(ticket)
        elif is_full:
            self.waiting.leave(ticket)
            return Reject("queue_full", 5.0)
        return ticket

    def _pump(self, kind: int, now: float) -> None:
        """Send what has room, in turn. A replica that one waits for is not given to those behind it."""
        blocked: set[str] = set()
        is_open = [name for name, one in self.replicas.items() if one.may_take(now)]
        for ticket in self.waiting.queues[kind].in_turn():
            if blocked.issuperset(is_open):
                return
            wanted = self.placement.wanted(ticket, now)
            needs = kind if wanted is None else self.budgets.class_of(self.placement.cost(ticket, wanted, now))
            if needs > kind:
                self.waiting.move(ticket, needs)  # the replica that had its prefix is gone
                continue
            takers = [] if wanted is None else [wanted]
            if not self._send(ticket, takers, blocked, now):
                takers += self.placement.others(ticket, wanted, now)
                if not self._send(ticket, takers, blocked, now):
                    blocked.update(takers)

    def _send(self, ticket: Ticket, takers: list[str], blocked: set[str], now: float) -> bool:
        for name in takers:
            replica, cost = self.replicas[name], self.placement.cost(ticket, name, now)
            if name in blocked or not replica.may_take(now):
                continue
            if self.budgets.has_room(name, replica.weight, ticket.kind, cost):
                ticket.place = self.placement.place(ticket, name, now)
                if ticket.features.key:
                    self.places[self.budgets.classes[ticket.kind].name, ticket.place] += 1
                self.waiting.queues[ticket.kind].charge(ticket, cost)
                self.waiting.leave(ticket)
                self.budgets.take(name, ticket.kind, cost)
                ticket.replica, ticket.cost, ticket.is_trial = name, cost, replica.took()
                self.waiting.news.append(ticket)
                return True
        return False

    def _end(self, ticket: Ticket, now: float, outcome: Outcome, pause: float) -> None:
        if ticket.waits:
            self.waiting.leave(ticket)
        if ticket.replica is None:
            return
        replica = self.replicas[ticket.replica]
        self.budgets.give(replica.name, ticket.kind, ticket.cost)
        if outcome == "ok":
            self.started(ticket, now)
        elif outcome == "broken":
            replica.broke(now)
        elif outcome == "refused":
            replica.refused(now, pause)
        replica.ended(was_trial=ticket.is_trial)
        ticket.replica = None
        self.placement.forget(replica)
