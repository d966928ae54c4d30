"""`openk3 route`: several servers behind one address, each conversation with the one that has its prefix."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import sys
from collections.abc import Generator
from dataclasses import replace

from openk3.commands.errors import UserError

try:
    import fastapi  # noqa: F401
    import httpx  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:  # an extra of the package
    raise UserError(f"openk3 route needs the package {error.name}; pip install 'openk3[serve]'") from None

from openk3.commands.listening import bind, require_keys, shown_address
from openk3.commands.ray_replicas import ray_replicas
from openk3.commands.route_flags import Route
from openk3.config.fleet import CLASSES, FleetConfig, ProxyConfig
from openk3.config.http import MIB, ServerConfig
from openk3.fleet.app import make_app
from openk3.fleet.replica_list import FixedList, Listed, ListFile, ReplicaList, checked_url
from openk3.fleet.router import Router
from openk3.serve.keys import read_keys
from openk3.serve.server import DrainingServer

LOG = logging.getLogger(__name__)
FILES_BESIDE = 1024  # kept connections to replicas, listeners, logs


def run(flags: Route) -> None:
    """Route until SIGTERM or Ctrl-C, then let answers end. Raises UserError and ConfigError."""
    config = server_config(flags)
    keys = read_keys(flags.keys, os.environ)
    require_keys(config, keys, is_open=flags.open)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("uvicorn", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    raise_file_limit(flags.max_open)
    with contextlib.closing(bind(config)) as listener, replica_list(flags) as replicas:
        router = Router(config, fleet_config(flags), proxy_config(flags), keys)
        server = DrainingServer(make_app(router, replicas), router)
        print(greeting(router, listener), file=sys.stderr, flush=True)
        server.run(sockets=[listener])


def raise_file_limit(num_calls: int) -> None:
    """A call takes a connection on both sides; as many of them as the system allows are allowed to this process."""
    need = 2 * num_calls + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < need:
        LOG.warning("%d calls need %d open files, the system allows %d; see ulimit -Hn", num_calls, need, hard)
        need = hard
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


@contextlib.contextmanager
def replica_list(flags: Route) -> Generator[ReplicaList]:
    """The list that the flags name; of a Ray cluster, for as long as it is used. Raises UserError or ConfigError."""
    given = [bool(flags.replicas), flags.replicas_file is not None, bool(flags.ray)]
    if sum(given) != 1:
        raise UserError("give one of --replicas URL ..., --replicas-file FILE and --ray ADDRESS")
    if flags.run is not None and not flags.ray:
        raise UserError(f"{flags.run}: servers that run already have their model; RUN goes with --ray")
    if flags.replicas:
        yield FixedList(
            [Listed(url) for url in dict.fromkeys(checked_url(one, "--replicas") for one in flags.replicas)]
        )
    elif flags.replicas_file is not None:
        yield ListFile(flags.replicas_file)
    else:
        with ray_replicas(flags) as listed:
            yield listed


def server_config(flags: Route) -> ServerConfig:
    """The client's side. Raises ConfigError naming the field."""
    return ServerConfig(
        model_name="fleet",  # replicas know their models' names
        host=flags.host,
        port=flags.port,
        max_body_bytes=flags.max_body_mib * MIB,
        max_open=flags.max_open,
        requests_per_minute=flags.requests_per_minute,
        requests_at_once=flags.requests_at_once,
        drain_seconds=flags.drain_seconds,
    )


def fleet_config(flags: Route) -> FleetConfig:
    """The policy's side. Raises ConfigError naming the field."""
    rows = zip(CLASSES, (*flags.class_tokens, 0), flags.class_budgets, flags.class_seconds)
    return FleetConfig(
        classes=tuple(
            replace(one, most_tokens=most, replica_tokens=budget, queue_seconds=seconds)
            for one, most, budget, seconds in rows
        ),
        patience_seconds=flags.patience_seconds,
    )


def proxy_config(flags: Route) -> ProxyConfig:
    """The replicas' side. Raises ConfigError naming the field."""
    return ProxyConfig(silence_seconds=flags.silence_seconds, answer_seconds=flags.answer_seconds)


def greeting(router: Router, listener: socket.socket) -> str:
    """Where it listens, and who may use it."""
    count = len(router.keys)
    who = f"{count} API key{'s' * (count > 1)}" if count else "no API keys: whoever reaches it may use it"
    return f"router at {shown_address(listener)}/v1\n  {who}; Ctrl-C stops it when answers have ended"
