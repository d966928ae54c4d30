"""Placement: the replicas, the ring and the sessions' places, and from them where a request should go."""

from __future__ import annotations

from openk3.config.fleet import FleetConfig
from openk3.fleet.admission import Budgets
from openk3.fleet.replicas import Replica
from openk3.fleet.ring import Ring
from openk3.fleet.sessions import Sessions
from openk3.fleet.ticket import Place, Ticket


class Placement:
    """Knows all replicas. Says what a request costs where, which one it should go to, and which others would do."""

    def __init__(self, config: FleetConfig, budgets: Budgets) -> None:
        self.config, self.budgets = config, budgets
        self.replicas: dict[str, Replica] = {}
        self.ring = Ring(config.ring_points)
        self.sessions = Sessions(config.sessions, config.session_seconds)

    def add(self, name: str, *, weight: float = 1.0, is_up: bool = False) -> Replica:
        """A replica joins, comes back before it was gone, or changes its weight; it waits for its first check."""
        replica = self.replicas.setdefault(name, Replica(name, self.config, weight))
        replica.weight, replica.is_leaving = weight, False
        if is_up:
            replica.checked(True)
        self.ring.add(name, weight)
        return replica

    def remove(self, name: str) -> None:
        """It gets nothing more, and is forgotten when what is under way has ended."""
        replica = self.replicas.get(name)
        if replica is not None:
            replica.is_leaving = True
            self.ring.remove(name)
            self.forget(replica)

    def forget(self, replica: Replica) -> None:
        """Drop one that leaves once nothing is under way there."""
        if replica.is_leaving and replica.num_open == 0:
            del self.replicas[replica.name]

    def wanted(self, ticket: Ticket, now: float) -> str | None:
        """The replica that it should go to, whether that has room or not; None: any."""
        key = ticket.features.key
        if not key or not self.config.is_affine:
            return None
        first = next((name for name in self.ring.owners(key) if self.is_open(ticket, name, now)), None)
        home = self.sessions.find(key, now)
        if first is None or home is None or home.replica == first or not self.is_open(ticket, home.replica, now):
            return first
        here, there = (self.budgets.class_of(self.cost(ticket, name, now)) for name in (home.replica, first))
        return home.replica if here < there else first

    def cost(self, ticket: Ticket, name: str | None, now: float) -> int:
        """Tokens that a request costs a replica: what of its prompt is not known to be cached there, and its answer.

        Without a name, one that has nothing of it.
        """
        features, cached = ticket.features, 0
        home = self.sessions.find(features.key, now) if name is not None else None
        if home is not None and name in self.replicas and (home.replica, home.life) == (name, self.replicas[name].life):
            cached = min(home.num_tokens, features.num_prompt - 1)
        return max(1, features.num_prompt - cached + features.num_answer)

    def is_open(self, ticket: Ticket, name: str, now: float) -> bool:
        """Whether the request may be sent there now, budgets apart."""
        return name not in ticket.excluded and name in self.replicas and self.replicas[name].may_take(now)

    def has_hope(self, ticket: Ticket) -> bool:
        """Whether there is a replica that may take it now or soon."""
        return any(one.is_wanted and one.name not in ticket.excluded for one in self.replicas.values())

    def others(self, ticket: Ticket, wanted: str | None, now: float) -> list[str]:
        """Replicas that it may go to without leaving its class, the one with the least work first."""
        rows = [
            (self.budgets.used(name) / one.weight, one.num_sent / one.weight, name)
            for name, one in self.replicas.items()
            if name != wanted
            and self.is_open(ticket, name, now)
            and self.budgets.class_of(self.cost(ticket, name, now)) <= ticket.kind
        ]
        return [name for _, _, name in sorted(rows)]

    def place(self, ticket: Ticket, name: str, now: float) -> Place:
        """What the replica is to the request's session."""
        if self.cost(ticket, name, now) < self.cost(ticket, None, now):
            return "home"
        owners = self.ring.owners(ticket.features.key)
        if name == next(owners, None):
            return "primary"
        return "secondary" if name == next(owners, None) else "other"
