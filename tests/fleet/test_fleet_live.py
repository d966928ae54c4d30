"""The same trace on two live replicas, through the router and without one, and in simulated time: hit rates agree."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from fleet_processes import command

from openk3.cli import main
from openk3.config.fleet import FleetConfig
from openk3.config.model import ModelConfig
from openk3.config.serve import CacheConfig
from openk3.fleet.baselines import make_chooser
from openk3.fleet.outcomes import Outcome, figures
from openk3.fleet.pass_costs import PassCosts
from openk3.fleet.replay import Replay, replayed
from openk3.fleet.simulate import Simulation
from openk3.fleet.simulated_replica import ReplicaShape, SimulatedReplica
from openk3.fleet.trace import Entry, ceiling, scaled
from openk3.fleet.trace_mix import CODING, Mix, make_trace

GIB, STEP = 0.0055, 512  # memory for about ten thousand tokens
COSTS = PassCosts(pass_s=0.01, token_s=2e-4, pair_s=3e-8, row_s=1e-7)  # of a replica on a slow core; order of size
NEAR = {"random": 0.2, "affinity": 0.12}  # of a hit rate: whose turn comes first depends on the machine


def a_trace() -> list[Entry]:
    """Six agents that fit into two replicas but not into one, and chats, in half a minute."""
    mix = Mix(
        seconds=3000,
        coding_sessions=6,
        coding_pause=250,
        coding_answer=600,
        chats_per_second=0.003,
        chat_pause=400,
        chat_answer=600,
        bursts=0,
    )
    return scaled(make_trace(mix, seed=6), tokens=1 / 200, seconds=1 / 100)


def hit_rate(outcomes: list[Outcome], kind: str = CODING) -> float:
    """In tokens."""
    return figures(outcome for outcome in outcomes if outcome.entry.kind == kind)["hit_rate"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_live_replicas_and_simulated_ones_find_as_many_prefixes(tiny_run: Path) -> None:
    """By chance, with affinity, and through the router: every request is answered, affinity finds more, both agree."""
    trace = a_trace()
    cache = CacheConfig.of(ModelConfig.from_json(tiny_run / "model"), int(GIB * 2**30), value_bytes=4)
    shape = ReplicaShape.of(cache, STEP, 256)
    rates = dict[str, tuple[float, float]]()
    for policy in ("random", "affinity", "router"):
        rule = "affinity" if policy == "router" else policy
        with contextlib.ExitStack() as stack:
            words = ("serve", str(tiny_run), "--cache-gib", str(GIB), "--step-tokens", str(STEP), "--device", "cpu")
            replicas = [stack.enter_context(command(*words, "--port", "0")) for _ in range(2)]
            servers = {f"r{number}": replica.url for number, replica in enumerate(replicas)}
            chooser = None if policy == "router" else make_chooser(rule, FleetConfig(), list(servers), seed=1)
            if policy == "router":
                router = stack.enter_context(command("route", "--replicas", *servers.values(), "--port", "0"))
                servers = {"router": router.url}
            live = replayed(Replay(trace, servers, chooser))
        assert [outcome.why for outcome in live if outcome.fate != "done"] == []
        names = ["r0", "r1"]
        fleet = {name: SimulatedReplica(shape, COSTS) for name in names}
        simulated = Simulation(trace, make_chooser(rule, FleetConfig(), names, seed=1), fleet).run()
        rates[policy] = hit_rate(live), hit_rate(simulated)
    told = json.dumps({policy: [round(rate, 3) for rate in pair] for policy, pair in rates.items()})
    print(told, ceiling([entry for entry in trace if entry.kind == CODING]))
    for policy, near in NEAR.items():
        assert abs(rates[policy][0] - rates[policy][1]) < near, told
    for which in range(2):
        assert rates["affinity"][which] > rates["random"][which] + 0.1, told
    assert rates["router"][0] > rates["random"][0] + 0.05, told


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_live_replica_is_probed(tiny_run: Path, tmp_path: Path) -> None:
    """`openk3 fleet probe` writes costs that `openk3 fleet simulate` takes; tokens take time."""
    out = tmp_path / "costs.json"
    with command("serve", str(tiny_run), "--step-tokens", "512", "--device", "cpu", "--port", "0") as replica:
        words = [
            "--shape.step-tokens",
            "512",
            "--shape.page",
            "48",
            "--shape.block",
            "16",
            "--lengths",
            "100",
            "1000",
            "3000",
            "--rounds",
            "1",
            "--out",
            str(out),
        ]
        assert main(["fleet", "probe", replica.url, *words]) == 0
    costs = json.loads(out.read_text())["costs"]
    # On a loaded machine the fit may put all of it on pairs of tokens.
    assert costs["token_s"] + costs["pair_s"] > 0 and all(value >= 0 for value in costs.values())
