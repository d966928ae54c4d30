"""The flags of `openk3 route`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from openk3.commands.flag_kinds import unset
from openk3.config.fleet import CLASSES


@dataclass(frozen=True)
class Route:
    """Answer through several servers of one model: each conversation by the one that has its prefix.

    A server that dies is replaced before an answer's first token, and its conversations go on elsewhere. SIGTERM or
    Ctrl-C takes no more calls and lets answers end. docs/fleet.md has the rules and the threat model.

    example: openk3 route --replicas http://127.0.0.1:8001 http://127.0.0.1:8002

    example: openk3 route --replicas-file fleet.txt --host 0.0.0.0 --keys keys.txt

    example: openk3 route --ray auto --num-replicas 2 runs/mine
    """

    run: Positional[
        Annotated[
            Path | None,
            arg(
                metavar="[RUN]", help="Run or model directory, with --ray.", help_behavior_hint="(default: newest run)"
            ),
        ]
    ] = None
    replicas: Annotated[tuple[str, ...], unset("[URL [URL ...]]", "none")] = ()
    """Servers, http://HOST:PORT."""
    replicas_file: Annotated[Path | None, unset("FILE", "none")] = None
    """Servers, a line `URL [WEIGHT] [drain]` each; read again when it changes."""
    ray: Annotated[str, unset("ADDRESS", "none")] = ""
    """Start the servers as actors of this Ray cluster; `local` starts a cluster on this machine."""
    num_replicas: int = 1
    """Servers to start there."""
    replica_cpus: int = 1
    """CPU cores of each of them."""
    replica_gpus: float = 0.0
    """GPUs of each of them."""
    serve_flags: Annotated[str, unset("'FLAGS'", "none")] = ""
    """Further flags of `openk3 serve` for them, in one word."""
    host: str = "127.0.0.1"
    """Address to listen on; any other than the loopback interface needs keys, or --open."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    keys: Annotated[Path | None, unset("FILE", "no keys")] = None
    """API keys, the same file as the servers'; keys are passed on."""
    open: bool = False
    """Answer other machines without keys."""
    max_open: int = 2048
    """Calls in the router at the same time; more are answered with 503."""
    requests_per_minute: int = 0
    """Calls of each key; 0 is no limit."""
    requests_at_once: int = 0
    """Calls of each key at the same time; 0 is no limit."""
    max_body_mib: int = 32
    """Largest body of a call, in MiB."""
    class_tokens: Annotated[
        tuple[int, int, int],
        arg(metavar="SHORT LONG HUGE", help="Most tokens, those not cached and the answer's, of a call of each class."),
    ] = tuple(one.most_tokens for one in CLASSES[:3])  # pyrefly: ignore
    class_budgets: Annotated[
        tuple[int, int, int, int],
        arg(metavar="SHORT LONG HUGE GIANT", help="Tokens of each class under way in one server."),
    ] = tuple(one.replica_tokens for one in CLASSES)  # pyrefly: ignore
    class_seconds: Annotated[
        tuple[float, float, float, float],
        arg(metavar="SHORT LONG HUGE GIANT", help="Time that a call of each class waits for a server."),
    ] = tuple(one.queue_seconds for one in CLASSES)  # pyrefly: ignore
    patience_seconds: float = 10.0
    """Time that a call waits for the server with its prefix before another one computes it again."""
    silence_seconds: float = 60.0
    """Time after which a stream without a sign of life is given up."""
    answer_seconds: float = 1800.0
    """Time for an answer that does not stream."""
    drain_seconds: float = 60.0
    """Time that answers have to end after SIGTERM."""
