"""`openk3 fleet`: traces of many requests, simulated on a fleet of replicas or sent to a live one."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from tqdm import tqdm

from openk3.commands.conditions import conditions
from openk3.commands.errors import UserError
from openk3.commands.fleet_flags import FleetProbe, FleetReplay, FleetSimulate, FleetTrace
from openk3.config.fleet import FleetConfig
from openk3.fleet.baselines import make_chooser
from openk3.fleet.outcomes import bars, entry_record, summary, table
from openk3.fleet.pass_costs import K3_RECKONED, PassCosts, read_costs
from openk3.fleet.simulate import Death, Simulation, simulated
from openk3.fleet.simulated_replica import SimulatedReplica
from openk3.fleet.trace import Entry, TraceError, ceiling, read_trace, scaled, write_trace
from openk3.fleet.trace_mix import Mix, make_trace
from openk3.runtime.run_folder import write_json

MOST_REPLICAS = 4096


def run(flags: FleetTrace | FleetSimulate | FleetReplay | FleetProbe) -> None:
    """Do what is asked for. Raises UserError, TraceError, ConfigError, OSError."""
    if isinstance(flags, FleetTrace):
        trace(flags)
    elif isinstance(flags, FleetSimulate):
        simulate(flags)
    elif isinstance(flags, FleetReplay):
        replay(flags)
    else:
        probe(flags)


def trace(flags: FleetTrace) -> None:
    """Make a trace and say what is in it."""
    entries = scaled(make_trace(flags.mix, flags.seed), flags.scale_tokens, flags.scale_seconds)
    write_trace(flags.out, entries)
    print(f"{flags.out}: {describe(entries)}")


def describe(entries: Sequence[Entry]) -> str:
    """A trace in one line."""
    kinds = dict[str, int]()
    for entry in entries:
        kinds[entry.kind] = kinds.get(entry.kind, 0) + 1
    tokens = sum(entry.prompt_tokens for entry in entries)
    each = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
    return (
        f"{len(entries):,} requests ({each}) in {entries[-1].at:,.0f} s, {tokens:,} tokens of prompts,"
        f" of which at most {ceiling(entries):.1%} can be cached"
    )


def simulate(flags: FleetSimulate) -> None:
    """Every policy on the same trace."""
    if not 1 <= flags.replicas <= MOST_REPLICAS:
        raise UserError(f"--replicas: must be 1 to {MOST_REPLICAS:,}, got {flags.replicas}")
    if not flags.policies:
        raise UserError("--policies: name at least one")
    entries = make_trace(Mix(), flags.seed) if flags.trace is None else read_trace(flags.trace)
    entries = scaled(entries, flags.scale_tokens, flags.scale_seconds)
    costs = K3_RECKONED if flags.costs is None else read_costs(flags.costs)
    config, deaths = fleet_config(flags), [death(word) for word in flags.deaths]
    names = [f"r{number}" for number in range(flags.replicas)]
    rows = dict[str, dict[str, Any]]()
    for policy in flags.policies:
        replicas = {name: SimulatedReplica(flags.shape, costs) for name in names}
        chooser = make_chooser(policy, config, names, flags.seed)
        with bar(policy, len(entries)) as shown:
            rows[policy] = simulated(Simulation(entries, chooser, replicas, deaths=deaths), partial(advance, shown))
    found = conditions("fleet simulate") | {
        "trace": describe(entries),
        "ceiling": ceiling(entries),
        "replicas": flags.replicas,
        "costs": dataclasses.asdict(costs),
        "costs_from": "reckoned for the released model" if flags.costs is None else str(flags.costs),
        "shape": dataclasses.asdict(flags.shape),
        "router": dataclasses.asdict(config),
        "deaths": list(flags.deaths),
        "policies": rows,
    }
    if flags.out is not None:
        write_json(flags.out, found)
    print(json.dumps(found, indent=2) if flags.json else "\n".join(simulated_lines(found)))


def simulated_lines(found: dict[str, Any]) -> list[str]:
    """The simulation for a reader."""
    rows = found["policies"]
    lines = [f"{found['replicas']} replicas: {found['trace']}", *table(rows), *bars(rows)]
    balance = ", ".join(f"{name} {row['imbalance']:.2f}" for name, row in rows.items())
    return [*lines, f"  busiest replica over the mean: {balance}"]


def fleet_config(flags: FleetSimulate) -> FleetConfig:
    """The router's, with its classes in the trace's scale. Raises ConfigError."""
    config = scaled_budgets(FleetConfig(), flags.scale_tokens)
    given = {name: getattr(flags, name) for name in ("patience_seconds", "queue_seconds")}
    return dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})


def scaled_budgets(config: FleetConfig, scale: float) -> FleetConfig:
    """Classes and budgets that are to small requests what the defaults are to large ones."""

    def times(value: int) -> int:
        return max(1, round(value * scale)) if value else 0  # 0 is no limit

    classes = tuple(
        dataclasses.replace(
            one,
            most_tokens=times(one.most_tokens),
            replica_tokens=times(one.replica_tokens),
            fleet_tokens=times(one.fleet_tokens),
        )
        for one in config.classes
    )
    return dataclasses.replace(config, classes=classes)


def death(word: str) -> Death:
    """Of NAME:SECOND[:SECOND]. Raises UserError."""
    name, *times = word.split(":")
    try:
        return Death(name, *[float(each) for each in times])
    except TraceError:
        raise
    except (TypeError, ValueError):
        raise UserError(f"--deaths {word}: must be NAME:SECOND, or NAME:SECOND:SECOND if it comes back") from None


def replay(flags: FleetReplay) -> None:
    """Send the trace and tell what came of it."""
    require_httpx("replay")
    if not flags.urls:
        raise UserError("URL: name at least one server, http://HOST:PORT")
    from openk3.fleet.replay import Replay, replayed

    entries = scaled(read_trace(flags.trace), flags.scale_tokens, flags.scale_seconds)
    servers = {url: url for url in flags.urls}
    config = scaled_budgets(FleetConfig(), flags.scale_tokens)
    chooser = None if len(servers) == 1 else make_chooser(flags.policy, config, list(servers), flags.seed)
    live = Replay(entries, servers, chooser, key=os.environ.get("OPENK3_API_KEY"), seed=flags.seed)
    with bar("replay", len(entries)) as shown:
        outcomes = replayed(live, partial(advance, shown))
    name = flags.policy if chooser is not None else flags.urls[0]
    found = conditions("fleet replay") | {"trace": describe(entries), "policies": {name: summary(outcomes)}}
    if flags.out is not None:
        write_json(flags.out, found | {"requests": [entry_record(outcome) for outcome in outcomes]})
    print(json.dumps(found, indent=2) if flags.json else "\n".join([found["trace"], *table(found["policies"])]))


def probe(flags: FleetProbe) -> None:
    """Measure, fit, and show how well the constants say what was measured."""
    require_httpx("probe")
    from openk3.fleet import probe as probing

    if flags.rounds < 1 or not flags.lengths or min(flags.lengths) < 1:
        raise UserError("--rounds, --lengths: must be positive")
    with bar("probe", 4 + len(flags.lengths)) as shown:
        key = os.environ.get("OPENK3_API_KEY")
        lengths, shape = flags.lengths, flags.shape
        samples = probing.probe(
            flags.url, lengths, shape, key=key, rounds=flags.rounds, progress=lambda _: shown.update()
        )
    costs = probing.fit(samples)
    rows = probing.errors(costs, samples)
    if flags.out is not None:
        write_json(flags.out, conditions("fleet probe") | {"costs": dataclasses.asdict(costs), "measured": rows})
    print("\n".join(probe_lines(costs, rows)))


def probe_lines(costs: PassCosts, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Constants and their errors for a reader."""
    lines = [f"  {name:<10} {value:.3g} s" for name, value in dataclasses.asdict(costs).items()]
    lines.append(f"  {'':<44} {'measured':>10} {'fitted':>10}")
    for row in rows:
        lines.append(f"  {row['what']:<44} {row['seconds'] * 1e3:>7.1f} ms {row['fitted_s'] * 1e3:>7.1f} ms")
    return lines


def require_httpx(command: str) -> None:
    """Raise UserError where an extra of the package is missing."""
    if importlib.util.find_spec("httpx") is None:
        raise UserError(f"openk3 fleet {command} needs the package httpx; pip install 'openk3[serve]'")


def bar(name: str, total: int) -> Any:
    """Progress on stderr, with the time that is left; only for somebody who watches."""
    return tqdm(total=total, desc=name, unit="", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False)


def advance(shown: Any, count: int) -> None:
    """Show that so many are done."""
    shown.update(count - shown.n)
