"""Router: the policy with a clock, a network and callers; who waits for a replica is woken here."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING

import httpx

from openk3.config.fleet import FleetConfig, ProxyConfig
from openk3.config.http import ServerConfig
from openk3.fleet.lanes import Lanes
from openk3.fleet.metrics import RouterMetrics
from openk3.fleet.policy import Policy
from openk3.fleet.ticket import Features, Outcome, Reject, Ticket
from openk3.serve.errors import ApiError
from openk3.serve.gate import Gate
from openk3.serve.keys import Keys

if TYPE_CHECKING:
    from openk3.fleet.flight import Flight

_REASONS = {
    "no_replica": "no replica takes calls now; try again",
    "queue_full": "too many calls of this size wait; try again",
    "waited_too_long": "no replica had room in time; try again",
    "tries_used_up": "several replicas failed on this call; try again",
}


class Router:
    """Everything here runs in one event loop."""

    def __init__(self, config: ServerConfig, fleet: FleetConfig, proxy: ProxyConfig, keys: Keys) -> None:
        self.config, self.proxy, self.keys = config, proxy, keys
        self.gate = Gate(config, keys)
        self.policy = Policy(fleet)
        self.metrics = RouterMetrics()
        self.flights: set[Flight] = set()
        self.early: defaultdict[str, set[asyncio.Timeout]] = defaultdict(
            set
        )  # calls that have sent nothing, by replica
        self.num_held = 0  # bytes of bodies under way
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._alarm: asyncio.TimerHandle | None = None

    # What a server asks (serve/server.py)
    is_healthy = True
    is_lost = False

    @property
    def thread(self) -> Router:
        """Where a server of a model has the engine's thread."""
        return self

    def cancel_all(self) -> None:
        """Every call ends now, with a last event."""
        for flight in list(self.flights):
            flight.halt()

    def start(self) -> None:
        """Connections are made from here on."""
        self.lanes = Lanes()
        self.client = httpx.AsyncClient(trust_env=False, follow_redirects=False)  # for questions of the router's own

    async def stop(self) -> None:
        """Close them."""
        if self._alarm is not None:
            self._alarm.cancel()
        await self.lanes.sweep(everything=True)
        await self.client.aclose()

    def abandon(self, name: str) -> None:
        """A replica answers no checks: calls that wait for its first byte are sent elsewhere."""
        now = asyncio.get_running_loop().time()
        for limit in self.early.pop(name, ()):
            limit.reschedule(now)

    async def place(self, features: Features) -> Ticket:
        """A ticket, which may have to wait. Raises ApiError 503."""
        now = asyncio.get_running_loop().time()
        got = self.policy.choose(features, now)
        self._arm(now)
        if isinstance(got, Reject):
            raise refusal(got)
        return got

    async def again(self, ticket: Ticket, outcome: Outcome, pause: float) -> None:
        """Another replica for a call that has got nothing from its own. Raises ApiError 503."""
        now = asyncio.get_running_loop().time()
        got = self.policy.retry(ticket, now, outcome, pause)
        self.wake()
        if isinstance(got, Reject):
            raise refusal(got)
        self.metrics.retries[outcome] += 1

    async def wait(self, ticket: Ticket) -> str:
        """Until it has a replica. Raises ApiError 503."""
        if ticket.replica is None and ticket.rejected is None:
            loop = asyncio.get_running_loop()
            began = loop.time()
            self._waiting[ticket] = loop.create_future()
            try:
                await self._waiting[ticket]
            finally:
                self._waiting.pop(ticket, None)
                self.metrics.waited_seconds += loop.time() - began
        if ticket.rejected is not None:
            raise refusal(ticket.rejected)
        assert ticket.replica is not None
        return ticket.replica

    def started(self, ticket: Ticket) -> None:
        """The first token came."""
        self.policy.started(ticket, asyncio.get_running_loop().time())

    def end(self, ticket: Ticket, outcome: Outcome) -> None:
        """A call is over, whether it ran or waited."""
        self._tell(self.policy.finished(ticket, asyncio.get_running_loop().time(), outcome))

    def wake(self) -> None:
        """Something has changed, or it is time: whoever has a replica now goes on."""
        self._tell(self.policy.tick(asyncio.get_running_loop().time()))

    def _tell(self, news: list[Ticket]) -> None:
        for ticket in news:
            future = self._waiting.get(ticket)
            if future is not None and not future.done():
                future.set_result(None)
        self._arm(asyncio.get_running_loop().time())

    def _arm(self, now: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        at = self.policy.wake_at(now)
        self._alarm = None if at is None else asyncio.get_running_loop().call_at(max(at, now), self.wake)


def refusal(why: Reject) -> ApiError:
    """503, with the time to wait."""
    return ApiError(503, _REASONS[why.reason], code=why.reason, retry_after=why.retry_after)
