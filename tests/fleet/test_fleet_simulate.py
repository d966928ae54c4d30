"""The simulator against what can be reckoned by hand: queues, single requests, caches, deaths; and what it keeps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.config.fleet import CostClass, FleetConfig
from openk3.config.serve import CacheConfig
from openk3.fleet.baselines import POLICIES, make_chooser
from openk3.fleet.outcomes import Outcome, bars, quantile, summary, table
from openk3.fleet.pass_costs import K3_RECKONED, PassCosts, read_costs
from openk3.fleet.simulate import Death, Simulation, simulated
from openk3.fleet.simulated_replica import ReplicaShape, SimulatedReplica, Visit
from openk3.fleet.trace import Entry, TraceError, ceiling
from openk3.fleet.trace_mix import BURST, CHAT, CODING, Mix, make_trace
from openk3.recipes import tiny

COSTS = PassCosts(pass_s=0.01, token_s=1e-4, pair_s=1e-8, row_s=2e-9, load_s=1e-6, request_s=0.002, parse_s=1e-6)
SHAPE = ReplicaShape(capacity=100_000, step_tokens=512, block=16, page=384, state=64)
SMALL = Mix(
    seconds=120,
    coding_sessions=4,
    coding_prefix=6_000,
    coding_new=100,
    coding_answer=20,
    coding_pause=10,
    chats_per_second=1.0,
    chat_new=60,
    chat_answer=10,
    bursts=2,
    burst_requests=3,
    burst_tokens=15_000,
    burst_answer=10,
    system_tokens=200,
)
CONFIG = FleetConfig((CostClass("short", 500, 2_000), CostClass("long", 4_000, 8_000), CostClass("huge", 0, 20_000)))


def one(at: float, session: str, prompt: int, answer: int = 1, turn: int = 0, history: int = 0) -> Entry:
    """A request without a system prompt."""
    return Entry(at, session, turn, "any", "", 0, history, prompt - history, answer)


def fleet(
    entries: Sequence[Entry],
    policy: str = "round-robin",
    count: int = 1,
    shape: ReplicaShape = SHAPE,
    costs: PassCosts = COSTS,
    deaths: Sequence[Death] = (),
) -> Simulation:
    """A simulation that has not run."""
    replicas = {f"r{number}": SimulatedReplica(shape, costs) for number in range(count)}
    chooser = make_chooser(policy, CONFIG, list(replicas), seed=1)
    return Simulation(entries, chooser, replicas, deaths=deaths)


def alone_s(cached: int, prompt: int, loaded: int = 0) -> float:
    """Time to first token of a request that has a replica for itself."""
    return COSTS.prefill_s(cached, prompt, SHAPE.num_passes(prompt, cached), loaded)


def by_session(outcomes: Sequence[Outcome]) -> dict[tuple[str, int], Outcome]:
    """Outcomes of traces whose sessions are told apart."""
    return {(outcome.entry.session, outcome.entry.turn): outcome for outcome in outcomes}


def test_requests_one_after_the_other_take_what_the_costs_say() -> None:
    """Time to first token, to the last, and what is cached for the second turn: exactly."""
    entries = [one(0, "a", 1000, 5), one(10, "a", 1200, 1, 1, 1000), one(20, "b", 100)]
    found = by_session(fleet(entries).run())
    first, second, other = found["a", 0], found["a", 1], found["b", 0]
    assert first.ttft == pytest.approx(alone_s(0, 1000))
    decoding = sum(COSTS.pass_s + COSTS.decode_s(1000 + n) for n in range(4))
    assert first.first is not None and first.ended == pytest.approx(first.first + decoding)
    assert (first.cached, second.cached, other.cached) == (0, 1000 // 16 * 16, 0)
    assert second.ttft == pytest.approx(alone_s(992, 1200))
    assert other.ttft == pytest.approx(alone_s(0, 100))


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_a_queue_of_equal_requests_waits_as_the_formula_says(load: float) -> None:
    """M/D/1: one at a time, Poisson arrivals, mean wait = load * service / (2 (1 - load))."""
    costs, draws, at, entries = PassCosts(0.01, 1e-4, 0, 0), random.Random(7), 0.0, []
    service = 0.01 + 96 * 1e-4
    for number in range(20_000):
        at += draws.expovariate(load / service)
        entries.append(one(at, str(number), 96))
    shape = ReplicaShape(capacity=1000, step_tokens=512, max_requests=1, block=16, page=384, state=0)
    outcomes = fleet(entries, shape=shape, costs=costs).run()
    waits = [outcome.ttft - service for outcome in outcomes if outcome.ttft is not None]
    assert sum(waits) / len(waits) == pytest.approx(load * service / (2 * (1 - load)), rel=0.06)
    assert min(waits) > -1e-9


def test_decoding_in_one_go_is_decoding_pass_by_pass() -> None:
    """Answers that overlap: the same ends as with a driver that cuts every run of passes after its first."""
    draws = random.Random(3)
    entries = [one(draws.uniform(0, 3), str(n), draws.randint(5, 900), draws.randint(1, 60)) for n in range(40)]
    entries.sort(key=lambda entry: entry.at)
    whole = by_session(fleet(entries, count=2).run())
    slow = fleet(entries, count=2)
    for replica in slow.replicas.values():
        begin = replica.begin

        def begin_one(now: float, begin=begin, replica=replica) -> None:
            begin(now)
            if replica.busy_until is not None:
                replica._cut(now)

        replica.begin = begin_one  # type: ignore[method-assign]
    single = by_session(slow.run())
    for key, outcome in whole.items():
        assert outcome.ended == pytest.approx(single[key].ended) and outcome.first == pytest.approx(single[key].first)


def test_no_prompt_delays_another_by_its_length() -> None:
    """While a long prompt is read, a short one has its first token after a few passes, as in the engine."""
    found = by_session(fleet([one(0, "long", 50_000), one(0.001, "short", 300)]).run())
    long, short = found["long", 0], found["short", 0]
    assert short.first is not None and long.first is not None and short.first < long.first / 20


def test_the_least_recently_used_session_is_evicted() -> None:
    """Room for two sessions and their states: the third one costs the first its prefix."""
    shape = ReplicaShape(capacity=3_300, step_tokens=512, block=16, page=384, state=64)
    turns = [one(0, "a", 1000), one(5, "b", 1000), one(10, "c", 1000), one(15, "d", 1000)]
    again = [one(20, "b", 1100, 1, 1, 1000), one(25, "a", 1100, 1, 1, 1000)]
    found = by_session(fleet(turns + again, shape=shape).run())
    assert (found["b", 1].cached, found["a", 1].cached) == (992, 0)


def test_an_outer_tier_keeps_what_is_evicted_and_takes_time() -> None:
    """The same requests with one: the first session is brought back, at the price of loading."""
    shape = ReplicaShape(capacity=1_300, step_tokens=512, block=16, page=384, state=64, outer=5_000)
    entries = [one(0, "a", 1000), one(5, "b", 1000), one(10, "a", 1100, 1, 1, 1000)]
    again = by_session(fleet(entries, shape=shape).run())["a", 1]
    assert again.cached == 992 and again.ttft == pytest.approx(alone_s(992, 1100, loaded=992))
    assert again.ttft - alone_s(992, 1100) == pytest.approx(992e-6)


def test_system_prompts_are_shared_between_sessions() -> None:
    """The second session starts behind it."""
    entries = [Entry(at, name, 0, "chat", "s", 160, 0, 40, 1) for at, name in ((0.0, "a"), (5.0, "b"))]
    assert [outcome.cached for outcome in fleet(entries).run()] == [0, 160]


def test_a_request_too_large_for_a_replica_is_refused() -> None:
    """And its session goes on."""
    found = by_session(fleet([one(0, "a", 200_000), one(1, "a", 50, 1, 1)]).run())
    assert (found["a", 0].fate, found["a", 1].fate) == ("refused", "done")


def test_a_dead_replica_loses_answers_and_prefixes_and_nothing_else() -> None:
    """Without a first token a request is tried elsewhere; in the middle of its answer it fails; its cache is gone."""
    entries = [
        one(0, "a", 1000, 1),
        one(10, "a", 1100, 50_000, 1, 1000),
        one(10.5, "b", 400, 1),
        one(11, "c", 40_000, 1),
        one(40, "a", 1200, 1, 2, 1000),
    ]
    where = by_session(fleet(entries, "affinity+budgets", 2).run())
    deaths = [Death(where["a", 1].replica or "", 11.5, 20.0)]
    again = fleet(entries, "affinity+budgets", 2, deaths=deaths)
    found = by_session(again.run())
    assert found["a", 1].cached == 992 and found["a", 1].fate == "failed" and found["a", 1].ended == 11.5
    assert found["a", 2].fate == "done" and found["a", 2].cached == 0
    assert found["b", 0].fate == found["c", 0].fate == "done"
    alone = fleet([one(0, "a", 100), one(1, "b", 5000)], deaths=[Death("r0", 1.01)]).run()
    assert Counter(outcome.fate for outcome in alone) == {"done": 1, "refused": 1}


def test_a_request_before_its_first_token_moves() -> None:
    """The replica that reads its prompt dies: two tries, and an answer."""
    entries = [one(0, "a", 20_000, 3)]
    first = fleet(entries, "affinity", 2).run()[0]
    moved = fleet(entries, "affinity", 2, deaths=[Death(first.replica or "", 0.5)]).run()[0]
    assert (moved.fate, moved.tries) == ("done", 2) and moved.replica != first.replica
    assert moved.ttft == pytest.approx(0.5 + alone_s(0, 20_000))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once_and_every_run_is_the_same(policy: str) -> None:
    """With a replica that dies and comes back, in the middle of everything."""
    entries = make_trace(SMALL, seed=2)
    deaths = [Death("r1", 30.0, 60.0)]
    runs = [fleet(entries, policy, 3, deaths=deaths) for _ in range(2)]
    outcomes = runs[0].run()
    assert Counter(outcome.entry for outcome in outcomes) == Counter(entries)
    assert {outcome.fate for outcome in outcomes} <= {"done", "failed", "refused"}
    assert outcomes == runs[1].run()
    for outcome in outcomes:
        assert outcome.ended is not None and outcome.entry.at <= outcome.sent <= outcome.ended
        assert outcome.fate != "done" or (outcome.first is not None and outcome.sent < outcome.first <= outcome.ended)
        assert 0 <= outcome.cached < outcome.prompt
    for replica in runs[0].replicas.values():
        assert not replica.running and not replica.waiting and replica.cache.held == 0
        assert 0 <= replica.cache.num_idle <= SHAPE.capacity


def test_affinity_finds_prefixes_that_chance_does_not() -> None:
    """Agents' hit rate comes close to the ceiling of the trace, and their first tokens come earlier."""
    entries = make_trace(SMALL, seed=4)
    rows = {policy: simulated(fleet(entries, policy, 4)) for policy in ("random", "affinity")}
    best = ceiling([entry for entry in entries if entry.kind == CODING])
    chance, affine = (rows[policy]["kinds"][CODING] for policy in ("random", "affinity"))
    assert affine["hit_rate"] > best - 0.05 > chance["hit_rate"] + 0.1
    assert affine["ttft_s"]["p50"] < chance["ttft_s"]["p50"] / 2
    assert all(1.0 <= row["imbalance"] <= 4.0 for row in rows.values())


def test_budgets_hold_back_the_largest_alone() -> None:
    """Bursts wait at the router, or are refused after its longest wait; chats hardly do."""
    row = simulated(fleet(make_trace(SMALL, seed=4), "affinity+budgets", 2))
    chats, bursts = row["kinds"][CHAT], row["kinds"][BURST]
    assert bursts["router_wait_s"]["p99"] > chats["router_wait_s"]["p90"]
    assert chats["refused"] == 0


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(0, 3), st.integers(1, 700), st.integers(1, 30)), max_size=12),
    st.integers(700, 3000),
    st.sampled_from(POLICIES),
)
def test_any_trace_ends_with_nothing_held(drawn: list[tuple[float, int, int, int]], capacity: int, policy: str) -> None:
    """Small memory, sessions that come again, answers of all lengths."""
    entries, turns = list[Entry](), Counter[str]()
    for at, session, new, answer in sorted(drawn):
        name = str(session)
        entries.append(Entry(at, name, turns[name], "any", "s", 20, 30 * turns[name], new, answer))
        turns[name] += 1
    shape = ReplicaShape(capacity=capacity, step_tokens=64, max_requests=3, block=16, page=384, state=32, patience=4)
    simulation = fleet(entries, policy, 2, shape=shape, deaths=[Death("r0", 1.0, 1.5)])
    outcomes = simulation.run()
    assert Counter(outcome.entry for outcome in outcomes) == Counter(entries)
    assert all(replica.cache.held == 0 for replica in simulation.replicas.values())


def test_the_shape_of_an_engine() -> None:
    """Memory, blocks and states of a real configuration."""
    cache = CacheConfig.of(tiny.model(), 1 << 26, value_bytes=4, max_requests=7)
    shape = ReplicaShape.of(cache, 512, 9)
    assert shape.capacity == cache.num_pages * cache.pages.page_tokens
    assert (shape.step_tokens, shape.patience, shape.max_requests) == (512, 9, 7)
    assert (shape.block, shape.state) == (cache.pages.hash_tokens, cache.pages.kda_groups * cache.pages.page_tokens)


def test_a_long_request_of_the_released_model_costs_what_its_arithmetic_says() -> None:
    """Reckoned: minutes for a million tokens, half a second for 4,000 behind 400,000; the quadratic part dominates."""
    million, turn = (
        K3_RECKONED.prefill_s(cached, prompt, ReplicaShape().num_passes(prompt, cached))
        for cached, prompt in ((0, 10**6), (400_000, 404_000))
    )
    assert 100 < million < 300 and 0.3 < turn < 1.0
    assert K3_RECKONED.prompt_s(0, 10**6) > 4 * 10**6 * K3_RECKONED.token_s


def test_a_prompt_stops_where_pages_and_its_last_block_end() -> None:
    """As the engine's checkpoints ask for: 384, 512 + 384, ..., the last whole block, the rest."""
    assert SHAPE.next_stop(1000, 0, 512) == 384 and SHAPE.next_stop(1000, 384, 896) == 768
    assert SHAPE.next_stop(1000, 768, 1000) == 992 and SHAPE.next_stop(1000, 992, 1000) == 1000
    assert SHAPE.num_passes(1000, 0) == 4 and SHAPE.num_passes(1000, 992) == 1 and SHAPE.num_passes(16, 0) == 1
    wide = ReplicaShape(step_tokens=100, block=16, page=10**6)
    assert wide.num_passes(1000, 0) == 11


def test_costs_are_read_from_a_file(tmp_path: Path) -> None:
    """Bare or beside other things; anything else is named."""
    path = tmp_path / "costs.json"
    path.write_text('{"costs": {"pass_s": 1, "token_s": 0.5, "pair_s": 0, "row_s": 0}, "from": "a replica"}')
    assert read_costs(path) == PassCosts(1, 0.5, 0, 0)
    for text in ("[]", "{", '{"pass_s": 1}', '{"pass_s": -1, "token_s": 1, "pair_s": 0, "row_s": 0}'):
        path.write_text(text)
        with pytest.raises(TraceError, match=r"costs\.json: needs an object with pass_s"):
            read_costs(path)


def test_bad_settings_are_named() -> None:
    """Shapes, deaths and policies."""
    with pytest.raises(TraceError, match="capacity: must be positive"):
        ReplicaShape(capacity=0)
    with pytest.raises(TraceError, match="must come before it is back"):
        Death("r0", 5, 4)
    with pytest.raises(TraceError, match="death of r9: no such replica; there are r0"):
        fleet([one(0, "a", 10)], deaths=[Death("r9", 1)])
    with pytest.raises(TraceError, match="policy best: no such policy"):
        make_chooser("best", CONFIG, ["r0"])


def test_quantiles_and_tables() -> None:
    """The smallest value that enough do not exceed; tables and bars name each policy and kind."""
    assert [quantile([3.0, 1.0, 2.0, 4.0], percent) for percent in (1, 50, 75, 99, 100)] == [1.0, 2.0, 3.0, 4.0, 4.0]
    assert quantile([], 50) is None
    rows = {"in turn": summary(fleet([one(0, "a", 100), one(1, "b", 10**6)]).run())}
    lines = table(rows)
    assert "in turn" in lines[1] and lines[1].split()[2:6] == ["all", "2", "1", "0"]
    assert "any" in bars(rows)[1] and "32 ms" in bars(rows)[1]
    assert bars({"x": summary([])}) == []


def test_a_replica_that_stands_still_has_nothing_to_say() -> None:
    """Begin without requests is nothing; visits end with their answers."""
    replica = SimulatedReplica(SHAPE, COSTS)
    replica.begin(0.0)
    assert replica.busy_until is None
    visit = Visit(one(0, "a", 96, 2))
    replica.add(visit, 0.0)
    replica.begin(0.0)
    assert replica.finish() == ([visit], [])
    replica.begin(1.0)
    assert replica.finish() == ([], [visit]) and visit.is_over


def test_idle_prefixes_go_only_when_their_room_is_written() -> None:
    """A long request that has begun leaves what it will need later to those who still find something there."""
    shape = ReplicaShape(capacity=6_000, step_tokens=512, block=16, page=384, state=64)
    entries = [
        one(0, "a", 1000),
        one(10, "long", 4_500),
        one(10.01, "a", 1100, 1, 1, 1000),
        one(20, "a", 1200, 1, 2, 1100),
    ]
    found = by_session(fleet(entries, shape=shape).run())
    assert found["a", 1].cached == 992 and found["a", 1].fate == found["long", 0].fate == "done"
