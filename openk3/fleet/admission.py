"""Budgets and FairQueue: how many tokens of each class may be under way, and who is next of those that wait."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from openk3.config.fleet import CostClass

if TYPE_CHECKING:
    from openk3.fleet.ticket import Ticket

IDLE_TENANTS = 4096  # that are remembered before half are dropped, who were given the least first


class Budgets:
    """Tokens under way by replica and class.

    A class only counts its own, so no class can keep another one out. A request that is larger than its class's budget
    runs when nothing else of the class does, so none has to wait for ever.
    """

    def __init__(self, classes: tuple[CostClass, ...]) -> None:
        self.classes = classes
        self._used: Counter[tuple[str, int]] = Counter()
        self._fleet = [0] * len(classes)

    def class_of(self, cost: int) -> int:
        """Index of the first class that takes such a cost."""
        last = len(self.classes) - 1
        return next((i for i, one in enumerate(self.classes[:-1]) if cost <= one.most_tokens), last)

    def has_room(self, replica: str, weight: float, kind: int, cost: int) -> bool:
        """Whether so much more may be under way there."""
        used, fleet, limits = self._used[replica, kind], self._fleet[kind], self.classes[kind]
        if used and used + cost > limits.replica_tokens * weight:
            return False
        return not (limits.fleet_tokens and fleet and fleet + cost > limits.fleet_tokens)

    def take(self, replica: str, kind: int, cost: int) -> None:
        """A request is sent."""
        self._used[replica, kind] += cost
        self._fleet[kind] += cost

    def give(self, replica: str, kind: int, cost: int) -> None:
        """It is over."""
        self._fleet[kind] -= cost
        self._used[replica, kind] -= cost
        if not self._used[replica, kind]:
            del self._used[replica, kind]

    def used(self, replica: str, kind: int | None = None) -> int:
        """Tokens under way in a replica, of one class or of all."""
        kinds = range(len(self.classes)) if kind is None else (kind,)
        return sum(self._used[replica, one] for one in kinds)


@dataclass
class _Tenant:
    served: float = 0.0  # tokens, from where it was let in among the others
    waiting: deque[Ticket] = field(default_factory=deque)


class FairQueue:
    """What waits in one class. Each tenant's requests keep their order; among tenants the one goes first that has been
    given the fewest tokens, counted from when it began to wait.

    So of two tenants that wait all the time, neither is ahead of the other by more than one request's tokens.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._floor = 0.0  # what the tenant that was last served had before
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Ticket]:
        """In no particular order; not while something is added or removed."""
        return (ticket for tenant in self._tenants.values() for ticket in tenant.waiting)

    def push(self, ticket: Ticket, *, is_first: bool = False) -> None:
        """A request waits, behind its tenant's others or, when it has waited before, in front of them."""
        tenant = self._tenants.get(ticket.features.tenant)
        if tenant is None:
            self._forget_idle()
            tenant = self._tenants[ticket.features.tenant] = _Tenant(self._floor)
        if not tenant.waiting:
            tenant.served = max(tenant.served, self._floor)
        if is_first:
            tenant.waiting.appendleft(ticket)
        else:
            tenant.waiting.append(ticket)
        self._len += 1

    def remove(self, ticket: Ticket) -> None:
        """It goes on, or gives up. Raises ValueError if it does not wait."""
        self._tenants[ticket.features.tenant].waiting.remove(ticket)
        self._len -= 1

    def charge(self, ticket: Ticket, tokens: int) -> None:
        """Its tenant was given so many."""
        tenant = self._tenants[ticket.features.tenant]
        self._floor = max(self._floor, tenant.served)
        tenant.served += tokens

    def in_turn(self) -> Iterator[Ticket]:
        """The order in which they would be served if each had room; a ticket may be removed while it is the last seen.

        Those seen before it have to stay in the queue or be removed as they come.
        """
        if not self._len:
            return
        lists = {name: list(tenant.waiting) for name, tenant in self._tenants.items() if tenant.waiting}
        heap = [(self._tenants[name].served, row[0].number, name, 0) for name, row in lists.items()]
        heapq.heapify(heap)
        while heap:
            served, _, name, index = heapq.heappop(heap)
            ticket = lists[name][index]
            yield ticket
            if index + 1 < len(lists[name]):
                heapq.heappush(heap, (served + ticket.cost, lists[name][index + 1].number, name, index + 1))

    def _forget_idle(self) -> None:
        if len(self._tenants) >= IDLE_TENANTS:
            ahead = sorted((one.served, name) for name, one in self._tenants.items() if not one.waiting)
            first_kept = len(ahead) - IDLE_TENANTS // 2
            for index, (served, name) in enumerate(ahead):
                if index < first_kept or served <= self._floor:  # who is owed nothing
                    del self._tenants[name]
