"""Budgets and turns: no class waits for another, no tenant and no large request is starved, the books always add up."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.config.fleet import CostClass, FleetConfig
from openk3.fleet.policy import Policy
from openk3.fleet.ticket import Features, Reject, Ticket

CLASSES = (CostClass("short", 100, 300), CostClass("long", 1000, 1500), CostClass("huge", 0, 5000, 8000))
CONFIG = FleetConfig(CLASSES, queue_seconds=50, patience_seconds=5, break_after=2)
KINDS = {"short": 80, "long": 700, "huge": 4000}


def plain(cost: int, tenant: str = "", key: bytes = b"") -> Features:
    """A request that costs so much."""
    return Features(key, tenant, cost, 0)


class World:
    """A policy, and what became of every request; checks the books after each event."""

    def __init__(self, config: FleetConfig = CONFIG, replicas: int = 1) -> None:
        self.policy, self.now = Policy(config), 0.0
        for number in range(replicas):
            self.policy.add(f"r{number}", is_up=True)
        self.running: list[Ticket] = []
        self.waiting: list[Ticket] = []
        self.refused: list[Ticket | Reject] = []
        self.log: list[Ticket] = []  # placed, in order

    def ask(self, features: Features) -> Ticket | Reject:
        """A request arrives."""
        got = self.policy.choose(features, self.now)
        if isinstance(got, Reject):
            self.refused.append(got)
        else:
            (self.waiting if got.replica is None else self.running).append(got)
            self.log += [] if got.replica is None else [got]
        self.check()
        return got

    def take(self, news: list[Ticket]) -> None:
        """Tickets that do not wait any more."""
        for ticket in news:
            self.waiting.remove(ticket)
            assert (ticket.replica is None) == (ticket.rejected is not None)
            (self.refused if ticket.rejected else self.running).append(ticket)
            self.log += [ticket] if ticket.replica else []
        self.check()

    def finish(self, index: int, outcome: str = "ok") -> None:
        """One that runs is over."""
        if self.running:
            ticket = self.running.pop(index % len(self.running))
            self.take(self.policy.finished(ticket, self.now, outcome))  # pyrefly: ignore

    def pass_time(self, seconds: float) -> None:
        """And nothing happens."""
        self.now += seconds
        self.take(self.policy.tick(self.now))
        assert all(self.now - ticket.arrived < self.policy.config.queue_seconds for ticket in self.waiting)

    def check(self) -> None:
        """Used tokens are those of running requests, within budgets; who is first in turn has no room anywhere."""
        policy, used, count = self.policy, Counter(), Counter()
        for ticket in self.running:
            used[ticket.replica, ticket.kind] += ticket.cost
            count[ticket.replica, ticket.kind] += 1
        for (name, kind), tokens in used.items():
            assert policy.budgets.used(name, kind) == tokens
            assert tokens <= CLASSES[kind].replica_tokens or count[name, kind] == 1
        assert sum(len(queue) for queue in policy.waiting.queues) == len(self.waiting)
        for kind, queue in enumerate(policy.waiting.queues):
            for ticket in queue.in_turn():
                wanted = policy.placement.wanted(ticket, self.now)
                for name in [*([wanted] if wanted else []), *policy.placement.others(ticket, wanted, self.now)]:
                    cost = policy.placement.cost(ticket, name, self.now)
                    assert not policy.budgets.has_room(name, 1.0, kind, cost), "it has room but waits"
                break

    def drain(self) -> None:
        """Everything that runs or waits ends, one after the other."""
        for _ in range(10_000):
            if not self.running:
                break
            self.finish(0)
        self.pass_time(0.0)
        assert not self.running and not self.waiting
        assert not any(self.policy.budgets.used(name) for name in self.policy.replicas)
        assert not any(replica.num_open for replica in self.policy.replicas.values())


ASK = st.tuples(st.just("ask"), st.sampled_from(sorted(KINDS)), st.integers(0, 5), st.integers(1, 100))
EVENT = st.one_of(
    ASK,
    ASK,
    st.tuples(st.just("finish"), st.integers(0, 99), st.sampled_from(("ok", "ok", "broken", "left", "refused"))),
    st.tuples(st.just("time"), st.floats(0, 20)),
    st.tuples(st.just("check"), st.integers(0, 2), st.booleans()),
)


@settings(max_examples=80)
@given(st.lists(EVENT, max_size=60), st.integers(1, 3))
def test_books_add_up_whatever_happens(events: list[tuple], replicas: int) -> None:
    """Requests of sessions come, end well or badly, replicas fail and come back; none is lost, none waits too long."""
    world, asked = World(replicas=replicas), 0
    for what, *rest in events:
        if what == "ask":
            kind, session, percent = rest
            world.ask(plain(max(1, KINDS[kind] * percent // 100), f"t{session % 2}", f"s{session}".encode()))
            asked += 1
        elif what == "finish":
            world.finish(*rest)
        elif what == "time":
            world.pass_time(*rest)
        elif f"r{rest[0]}" in world.policy.replicas:
            for _ in range(3):
                world.policy.replicas[f"r{rest[0]}"].checked(rest[1])
            world.take(world.policy.tick(world.now))
    for replica in world.policy.replicas.values():
        for _ in range(3):
            replica.checked(True)
    world.pass_time(CONFIG.most_backoff_seconds)
    world.drain()
    assert len(world.log) + len(world.refused) == asked


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.sampled_from(sorted(KINDS)), st.integers(0, 50)), max_size=80), st.sampled_from(sorted(KINDS))
)
def test_a_class_does_not_feel_the_others(events: list[str | int], watched: str) -> None:
    """The same arrivals and ends of one class, with and without all others between them: the same ones run when."""

    def runs(*names: str) -> list[tuple[int, ...]]:
        world, seen = World(), []
        for event in events:
            if isinstance(event, int):
                own = [index for index, one in enumerate(world.running) if KINDS[watched] == one.cost]
                if own:
                    world.finish(own[event % len(own)])
            elif event in names:
                world.ask(plain(KINDS[event]))
            running = [ticket for ticket in world.running if ticket.cost == KINDS[watched]]
            waiting = [ticket for ticket in world.waiting if ticket.cost == KINDS[watched]]
            seen.append((len(running), len(waiting)))
        return seen

    assert runs(watched) == runs(*KINDS)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 100), min_size=60, max_size=60), st.integers(1, 30))
def test_tenants_share_a_class_by_tokens(costs: list[int], flood: int) -> None:
    """One tenant has asked for everything before the other comes; while both wait, neither is a request ahead."""
    world = World()
    for cost in costs[:flood]:
        world.ask(plain(cost, "first"))
    for cost in costs[flood:]:
        world.ask(plain(cost, "second"))
    for cost in costs:
        world.ask(plain(cost, "first"))
    given_before, began = Counter(), len(world.log)
    while {ticket.features.tenant for ticket in world.waiting} == {"first", "second"}:
        world.finish(0)
        for ticket in world.log[began:]:
            given_before[ticket.features.tenant] += ticket.cost
        began = len(world.log)
        assert abs(given_before["first"] - given_before["second"]) <= 2 * max(costs)
    world.drain()


def test_small_ones_do_not_overtake_for_ever() -> None:
    """A request that needs the whole budget of its class goes before every later one of its tenant."""
    world = World()
    for _ in range(10):
        world.ask(plain(30))
    large = world.ask(plain(100))
    small = [world.ask(plain(10)) for _ in range(20)]
    world.finish(0)
    assert isinstance(large, Ticket) and large.replica is None and all(one in world.waiting for one in small)
    while large in world.waiting:
        world.finish(0)
    assert world.log.index(large) == 10
    world.drain()


def test_one_larger_than_its_budget_runs_alone() -> None:
    """And the fleet's bound holds for all replicas together."""
    world = World(replicas=2)
    sizes = [plain(6000), plain(3000), plain(2000)]
    first, second, third = (world.ask(one) for one in sizes)
    assert isinstance(first, Ticket) and isinstance(second, Ticket) and isinstance(third, Ticket)
    assert first.replica and second.replica is third.replica is None  # 9,000 of 8,000
    world.finish(0)
    assert second.replica and third.replica
    world.drain()


def test_queues_are_bounded() -> None:
    """In number and in time."""
    classes = (CostClass("all", 0, 100, queue=2),)
    world = World(FleetConfig(classes, queue_seconds=50))
    got = [world.ask(plain(100)) for _ in range(4)]
    assert isinstance(got[3], Reject) and got[3].reason == "queue_full"
    assert world.policy.wake_at(world.now) == 10.0  # patience ends
    world.pass_time(49)
    assert len(world.waiting) == 2 and world.policy.wake_at(world.now) == 50
    world.pass_time(1)
    assert [ticket.rejected.reason for ticket in got[1:3]] == ["waited_too_long"] * 2  # pyrefly: ignore
    assert world.policy.wake_at(world.now) is None
    world.drain()
