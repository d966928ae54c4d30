"""WaitingRoom: the queues of all classes, and who has waited in them for too long."""

from __future__ import annotations

from openk3.config.fleet import FleetConfig
from openk3.fleet.admission import FairQueue
from openk3.fleet.placement import Placement
from openk3.fleet.ticket import Reject, Ticket


class WaitingRoom:
    """Holds what waits; `news` are those that do not any more, until somebody fetches them."""

    def __init__(self, config: FleetConfig, placement: Placement) -> None:
        self.config, self._placement = config, placement
        self._budgets = placement.budgets
        self.queues = [FairQueue() for _ in config.used_classes]
        self.news: list[Ticket] = []
        self._look_at = float("inf")

    def is_full(self, kind: int) -> bool:
        """Whether a class has as many waiting as it may have."""
        return len(self.queues[kind]) >= self._budgets.classes[kind].queue

    def enter(self, ticket: Ticket, *, is_first: bool) -> None:
        """A request waits in its class."""
        self.queues[ticket.kind].push(ticket, is_first=is_first)
        ticket.waits = True
        self._look_at = min(self._look_at, self._deadline(ticket))

    def leave(self, ticket: Ticket) -> None:
        """It does not any more."""
        self.queues[ticket.kind].remove(ticket)
        ticket.waits = False

    def move(self, ticket: Ticket, kind: int) -> None:
        """It waits in another class from now on."""
        if kind != ticket.kind:
            self.queues[ticket.kind].remove(ticket)
            ticket.kind = kind
            self.queues[kind].push(ticket)
            self._look_at = min(self._look_at, self._deadline(ticket))

    def wake_at(self, now: float) -> float | None:
        """When `tick` has something to do at the latest, if nothing else happens; None: never."""
        if self.news:
            return now
        if not any(self.queues):
            return None
        return min(
            [self._look_at, *(one.closed_until for one in self._placement.replicas.values() if one.closed_until > now)]
        )

    def look(self, now: float) -> None:
        """At everybody who waits: for too long, for nothing, or for a prefix long enough; if it is time to."""
        if now < self._look_at and any(one.is_wanted for one in self._placement.replicas.values()):
            return
        for ticket in [ticket for queue in self.queues for ticket in queue]:
            if now >= ticket.arrived + self.config.longest_wait(ticket.kind):
                self._refuse(ticket, Reject("waited_too_long", 5.0))
            elif not self._placement.has_hope(ticket):
                self._refuse(ticket, Reject("no_replica", 2.0))
            elif not ticket.may_move and now >= ticket.arrived + self.config.patience_seconds:
                ticket.may_move = True
                self.move(ticket, max(ticket.kind, self._budgets.class_of(self._placement.cost(ticket, None, now))))
        self._look_at = min((self._deadline(one) for queue in self.queues for one in queue), default=float("inf"))

    def _deadline(self, ticket: Ticket) -> float:
        """The same sums as in `look`: at that time there is something to do, to the last bit."""
        end = ticket.arrived + self.config.longest_wait(ticket.kind)
        return end if ticket.may_move else min(ticket.arrived + self.config.patience_seconds, end)

    def _refuse(self, ticket: Ticket, why: Reject) -> None:
        self.leave(ticket)
        ticket.rejected = why
        self.news.append(ticket)
