"""Where requests go: to their prefix, to the primary, to the secondary when that is lost; and when they wait for it."""

from __future__ import annotations

import pytest

from openk3.config.fleet import CostClass, FleetConfig
from openk3.config.model import ConfigError
from openk3.fleet.policy import Policy
from openk3.fleet.ticket import Features, Reject, Ticket

LONG = 400_000  # the usual prefix of an agent that writes code (report section 5.4.3)
NAMES = [f"r{number}" for number in range(4)]


def policy_of(names: list[str] = NAMES, **fields: object) -> Policy:
    """All healthy."""
    policy = Policy(FleetConfig(**fields))  # pyrefly: ignore
    for name in names:
        policy.add(name, is_up=True)
    return policy


def ask(policy: Policy, key: str = "s", tokens: int = 1000, now: float = 0.0) -> Ticket:
    """A request that is not refused."""
    got = policy.choose(Features(key.encode(), "", tokens, 100), now)
    assert isinstance(got, Ticket)
    return got


def run(policy: Policy, key: str = "s", tokens: int = 1000, now: float = 0.0) -> Ticket:
    """One that runs at once and ends well; tells where."""
    ticket = ask(policy, key, tokens, now)
    where, ticket.excluded = ticket.replica, set()
    assert where is not None
    policy.finished(ticket, now)
    ticket.replica = where
    return ticket


def owners(policy: Policy, key: str = "s") -> list[str]:
    """In the ring's order."""
    return list(policy.placement.ring.owners(key.encode()))


def test_sessions_stay_and_prefixes_count_as_cached() -> None:
    """The first turn computes everything, the next ones what is new; the class follows what is left to compute."""
    policy = policy_of()
    first, second = owners(policy)[:2]
    one = run(policy, tokens=LONG)
    two = run(policy, tokens=LONG + 4000, now=9.0)
    assert (one.replica, one.place, one.num_uncached, one.kind) == (first, "primary", LONG, 2)
    assert (two.replica, two.place, two.num_uncached, two.kind) == (first, "home", 4000, 0)
    late = run(policy, tokens=LONG + 8000, now=9.0 + policy.config.session_seconds + 1)
    assert (late.replica, late.num_uncached) == (first, LONG + 8000)
    assert second != first


def test_a_lost_primary_is_replaced_by_the_secondary() -> None:
    """It computes the prefix again; a long one then stays there, a short one goes back as soon as it can."""
    policy = policy_of()
    first, second = owners(policy)[:2]
    run(policy, tokens=LONG)
    for _ in range(3):
        policy.replicas[first].checked(False)
    moved = run(policy, tokens=LONG + 4000)
    assert (moved.replica, moved.place, moved.num_uncached, moved.kind) == (second, "secondary", LONG + 4000, 2)
    for _ in range(2):
        policy.replicas[first].checked(True)
    stays = run(policy, tokens=LONG + 8000)
    assert (stays.replica, stays.place, stays.num_uncached) == (second, "home", 4000)
    policy = policy_of()
    policy.hold(first, True)
    assert run(policy).replica == second
    policy.hold(first, False)
    assert run(policy).replica == first


def test_a_restarted_replica_has_forgotten() -> None:
    """What it had cached before it failed is not counted on."""
    policy = policy_of(["r0"])
    run(policy, tokens=LONG)
    for good in (False, False, False, True, True):
        policy.replicas["r0"].checked(good)
    assert run(policy, tokens=LONG + 1).num_uncached == LONG + 1


def test_short_ones_spill_to_the_least_loaded_and_long_prefixes_wait() -> None:
    """A prefix worth its class is waited for; then the request counts as one of the class that it costs elsewhere, and
    goes to its prefix if there is room in that class, or is computed again.
    """
    classes = (CostClass("short", 8192, 9000), CostClass("huge", 0, 9000))
    policy = policy_of(classes=classes)
    first = owners(policy)[0]
    run(policy, tokens=LONG)
    ask(policy, "s", LONG + 8000)  # its budget is used up
    busy = next(name for name in owners(policy)[1:])
    filler = next(f"f{n}" for n in range(99) if owners(policy, f"f{n}")[0] == busy)
    ask(policy, filler, 500)
    other = next(f"k{n}" for n in range(99) if owners(policy, f"k{n}")[0] == first)
    spilt = ask(policy, other, 2000)
    assert spilt.replica not in (first, busy, None) and spilt.place in ("secondary", "other")
    waits = ask(policy, "s", LONG + 4000, now=1.0)
    assert waits.replica is None and waits.kind == 0
    also = ask(policy, "s", LONG + 7000, now=2.0)
    assert policy.tick(10.9) == [] and policy.wake_at(10.9) == 11.0
    assert policy.tick(11.0) == [waits] and also.replica is None
    assert (waits.replica, waits.kind, waits.num_uncached) == (first, 1, 4000)
    assert policy.tick(12.0) == [also]
    assert also.replica not in (first, None) and also.kind == 1 and also.num_uncached == LONG + 7000


def test_one_that_waits_runs_when_its_prefix_is_free() -> None:
    """Before its patience ends."""
    policy = policy_of(classes=(CostClass("short", 8192, 9000), CostClass("huge", 0, 2 * LONG)))
    first = run(policy, tokens=LONG)
    running = ask(policy, "s", LONG + 8000)
    waits = ask(policy, "s", LONG + 4000)
    assert policy.finished(running, 1.0) == [waits]
    assert waits.replica == first.replica and waits.kind == 0


def test_without_affinity_the_least_loaded_answers_and_without_budgets_nothing_waits() -> None:
    """For comparison."""
    policy = policy_of(is_affine=False)
    assert {ask(policy, "s").replica for _ in range(4)} == set(NAMES)
    policy = policy_of(["r0"], is_budgeted=False)
    assert all(ask(policy, "s", LONG * 5).replica == "r0" for _ in range(2000))


def test_a_retry_goes_elsewhere_and_gives_up_at_last() -> None:
    """The circuit opens after three broken requests, closes by time, and one request tries it."""
    policy = policy_of(tries=3)
    order = owners(policy)
    ticket = ask(policy)
    assert ticket.replica == order[0]
    again = policy.retry(ticket, 0.0)
    assert again is ticket and ticket.replica == order[1] and ticket.place == "secondary"
    assert policy.retry(ticket, 0.0) is ticket and ticket.replica == order[2]
    end = policy.retry(ticket, 0.0)
    assert isinstance(end, Reject) and end.reason == "tries_used_up"
    for _ in range(2):
        policy.finished(ask(policy), 0.0, "broken")
    assert policy.replicas[order[0]].state == "healthy" and ask(policy).replica == order[1]
    trial, beside = ask(policy, now=1.0), ask(policy, now=1.0)
    assert (trial.replica, trial.is_trial, beside.replica) == (order[0], True, order[1])
    policy.finished(trial, 1.0, "broken")
    assert ask(policy, now=2.9).replica == order[1]  # twice as long
    policy.finished(ask(policy, now=3.0), 3.0)
    assert [ask(policy, now=3.0).replica for _ in range(2)] == [order[0]] * 2


def test_a_trial_that_nobody_waits_for_frees_the_circuit() -> None:
    """Its client went away: neither good nor bad news; the next one tries."""
    policy = policy_of(["r0"], break_after=1)
    policy.finished(ask(policy), 0.0, "broken")
    trial = ask(policy, now=1.0)
    assert ask(policy, now=1.0).replica is None
    [next_one] = policy.finished(trial, 1.1, "left")
    assert next_one.is_trial


def test_a_refusal_pauses_a_replica() -> None:
    """As long as it said, at most as long as a broken one; then whoever waits is sent."""
    policy = policy_of(["r0", "r1"])
    ticket = ask(policy)
    first = ticket.replica
    assert policy.retry(ticket, 0.0, "refused", 5.0) is ticket and ticket.replica != first
    assert ask(policy, now=4.9).replica != first and ask(policy, now=5.0).replica == first
    single = policy_of(["r0"])
    single.finished(ask(single), 0.0, "refused", 2.0)
    waits = ask(single)
    assert waits.replica is None and single.wake_at(0.0) == 2.0 and single.tick(2.0) == [waits]


def test_replicas_come_and_go() -> None:
    """A new one is sent nothing before its first check; one that leaves ends what it has."""
    policy = policy_of([])
    assert policy.choose(Features(b"s", "", 1, 1), 0.0) == Reject("no_replica", 2.0)
    policy.add("r0")
    assert policy.replicas["r0"].state == "new" and isinstance(policy.choose(Features(b"", "", 1, 1), 0.0), Reject)
    policy.replicas["r0"].checked(True)
    ticket = ask(policy)
    policy.remove("r0")
    assert policy.replicas["r0"].state == "draining" and isinstance(policy.choose(Features(b"", "", 1, 1), 0.0), Reject)
    policy.finished(ticket, 1.0)
    assert policy.replicas == {}
    policy.add("r0", is_up=True)
    ticket = ask(policy)
    policy.remove("r0")
    policy.add("r0")
    policy.finished(ticket, 1.0)
    assert policy.replicas["r0"].state == "healthy"


def test_checks_have_hysteresis() -> None:
    """One bad check is chance, three are not; two good ones bring it back. Draining counts at once."""
    replica = policy_of(["r0"]).replicas["r0"]
    assert [replica.checked(good) for good in (False, False, True, False, False)] == [False] * 5
    assert replica.checked(False) and replica.state == "failed" and not replica.may_take(0.0)
    assert not replica.checked(True) and replica.checked(True) and replica.state == "healthy"
    assert replica.checked(True, is_draining=True) and replica.state == "draining" and not replica.may_take(0.0)


def test_time_is_compared_as_it_is_announced() -> None:
    """Whoever sleeps until the announced time finds something to do, whatever rounding does."""
    for number in range(200):
        arrived = 0.1 + number / 7
        policy = policy_of(["r0"], classes=(CostClass("all", 0, 100, queue_seconds=60.3),), patience_seconds=10.7)
        ask(policy)
        waits = ask(policy, now=arrived)
        last = 0.0
        while waits.rejected is None:
            at = policy.wake_at(last)
            assert at is not None and at > last
            policy.tick(at)
            last = at
        assert last == arrived + 60.3 and policy.wake_at(last) is None


def test_those_that_wait_learn_that_all_replicas_are_lost() -> None:
    """At once, not when their time is over."""
    policy = policy_of(["r0"], classes=(CostClass("all", 0, 100),))
    ask(policy)
    waits = ask(policy)
    for _ in range(3):
        policy.replicas["r0"].checked(False)
    assert policy.tick(0.1) == [waits] and waits.rejected == Reject("no_replica", 2.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"tries": 0},
        {"queue_seconds": -1.0},
        {"classes": ()},
        {"classes": (CostClass("a", 5, 5),)},
        {"classes": (CostClass("a", 5, 5), CostClass("b", 5, 5), CostClass("c", 0, 5))},
        {"classes": (CostClass("a", 5, 5), CostClass("a", 0, 5))},
        {"classes": (CostClass("a", 0, 0),)},
    ],
)
def test_bad_configurations_are_named(fields: dict) -> None:
    """In one line."""
    with pytest.raises(ConfigError, match="tries|queue_seconds|classes"):
        FleetConfig(**fields)
