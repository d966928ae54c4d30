"""The flags of `openk3 fleet`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from openk3.commands.flag_kinds import Seed, unset
from openk3.fleet.simulated_replica import ReplicaShape
from openk3.fleet.trace_mix import Mix

Trace = Positional[Annotated[Path, arg(metavar="TRACE", help="JSON lines, as `openk3 fleet trace` writes them.")]]
Out = Annotated[Path | None, unset("FILE", "none")]
Policy = Literal["random", "round-robin", "least-loaded", "affinity", "affinity+budgets"]


@dataclass(frozen=True)
class FleetTrace:
    """Make a trace of three populations: coding agents with long prefixes, short chats, and bursts of huge requests.

    Each line is one request: when it comes, its session, how many tokens of its prompt are a shared system prompt,
    history and new, and how long its answer is. No texts: only lengths, and what prompts have in common.

    example: openk3 fleet trace agents.jsonl --mix.coding-sessions 100 --mix.bursts 0
    """

    out: Positional[Annotated[Path, arg(metavar="FILE", help="Where to write it, as JSON lines.")]]
    mix: Mix = field(default_factory=Mix)
    scale_tokens: float = 1.0
    """Make everything so many times as long, for small models."""
    scale_seconds: float = 1.0
    """Let everything take so many times as long."""
    seed: Seed = 0


@dataclass(frozen=True)
class FleetSimulate:
    """Replay a trace on simulated replicas behind the router's own policy: first tokens, hit rate, refusals, balance.

    What a pass takes comes from a few constants: reckoned for the released model on 16 H200, or measured on one of your
    servers by `openk3 fleet probe`. docs/fleet_simulation.md says what is in it, what is not, and how far off it was.

    example: openk3 fleet simulate

    example: openk3 fleet simulate agents.jsonl --replicas 16 --deaths r3:600:900

    example: openk3 fleet simulate agents.jsonl --scale-tokens 0.0125 --costs costs.json --shape.capacity 40000
    --shape.block 16 --shape.page 48 --shape.state 48 --shape.step-tokens 512
    """

    trace: Positional[
        Annotated[
            Path | None, arg(metavar="[TRACE]", help="JSON lines.", help_behavior_hint="(default: one as trace makes)")
        ]
    ] = None
    replicas: int = 8
    """Replicas, r0, r1 and so on."""
    policies: tuple[Policy, ...] = ("random", "round-robin", "least-loaded", "affinity", "affinity+budgets")
    """Who decides: the last three are the router's code with both parts off, one on, and both."""
    costs: Annotated[Path | None, unset("FILE", "the released model's on 16 H200, reckoned")] = None
    """Seconds of a pass and of each token in it, as `openk3 fleet probe` writes them."""
    shape: ReplicaShape = field(default_factory=ReplicaShape)
    deaths: Annotated[tuple[str, ...], unset("NAME:S[:S]", "none")] = ()
    """NAME:SECOND[:SECOND]: this replica is gone from then on, or until then."""
    scale_tokens: float = 1.0
    """Make the trace's prompts and answers so many times as long; budgets too."""
    scale_seconds: float = 1.0
    """Multiply the times between requests: below 1 they come sooner."""
    patience_seconds: Annotated[float | None, unset("FLOAT", "the router's")] = None
    """Time that a request waits for the replica with its prefix."""
    queue_seconds: Annotated[float | None, unset("FLOAT", "the router's")] = None
    """Time that a request waits for any replica."""
    out: Out = None
    """JSON file to write."""
    json: bool = False
    """Print the same JSON instead of the table."""
    seed: Seed = 0


@dataclass(frozen=True)
class FleetReplay:
    """Send a trace to live servers and measure each answer: first token, cached tokens, fate.

    One address, a router's say, or several, among which a policy chooses here. Prompts are token ids that mean nothing
    and have in common what the trace says. A server's key is read from OPENK3_API_KEY.

    example: openk3 fleet replay agents.jsonl http://127.0.0.1:8000 --scale-tokens 0.0125 --scale-seconds 0.1

    example: openk3 fleet replay agents.jsonl http://127.0.0.1:8001 http://127.0.0.1:8002 --policy random
    """

    trace: Trace
    urls: Positional[Annotated[tuple[str, ...], arg(metavar="URL [URL ...]", help="Servers, http://HOST:PORT.")]]
    policy: Policy = "affinity+budgets"
    """Who decides among several."""
    scale_tokens: float = 1.0
    """Make prompts and answers so many times as long; budgets too."""
    scale_seconds: float = 1.0
    """Multiply the times between requests: below 1 they come sooner."""
    out: Out = None
    """JSON file to write, with a row for each request."""
    json: bool = False
    """Print the figures as JSON instead of the table."""
    seed: Seed = 0


@dataclass(frozen=True)
class FleetProbe:
    """Measure what a live server's passes take, for `openk3 fleet simulate --costs`. It should have nothing else to do.

    example: openk3 fleet probe http://127.0.0.1:8000 --shape.step-tokens 2048 --shape.page 48 --out costs.json
    """

    url: Positional[Annotated[str, arg(metavar="URL", help="A server, http://HOST:PORT.")]]
    shape: ReplicaShape = field(default_factory=ReplicaShape)
    lengths: tuple[int, ...] = (200, 800, 3000, 8000)
    """Prompts to read, in tokens."""
    rounds: int = 3
    """Each is measured so often; the median counts."""
    out: Out = None
    """JSON file to write."""


Fleet = (
    Annotated[FleetTrace, subcommand("trace")]
    | Annotated[FleetSimulate, subcommand("simulate")]
    | Annotated[FleetReplay, subcommand("replay")]
    | Annotated[FleetProbe, subcommand("probe")]
)
