"""RayList: servers as actors of a Ray cluster, started, watched and started again when they are lost."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import shlex
import socket
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from openk3.commands.errors import UserError
from openk3.commands.ray_actor import ServerActor
from openk3.commands.route_flags import Route
from openk3.commands.runs import find_model
from openk3.fleet.replica_list import Listed
from openk3.serve.keys import VARIABLE

LOG = logging.getLogger(__name__)
LOCAL = "local"
START_SECONDS = 900.0  # of all servers, with the time that a large model needs to be read
CONNECT_SECONDS = 5.0
AGAIN_SECONDS = 5.0  # between two attempts to start a lost one
STORE_BYTES = 80 * 2**20  # Ray's own memory for objects, of which there are none to speak of


class Slot:
    """One server to be kept alive: its actor, and what is waited for."""

    def __init__(self, ray: Any, arguments: tuple[Any, ...], resources: dict[str, float]) -> None:
        self._ray, self._arguments, self._resources = ray, arguments, resources
        self.url: str | None = None
        self._again_at = 0.0
        self.begin()

    def begin(self) -> None:
        """A new actor; `pending` is its address."""
        actor = self._ray.remote(ServerActor).options(max_restarts=0, max_concurrency=4, **self._resources)
        self.actor = actor.remote()
        self.pending = self.actor.start.remote(*self._arguments)
        self.url = None

    def ready(self, found: tuple[str, int, str]) -> None:
        """It serves; from now on `pending` is its end."""
        self.url, pid, node = found
        LOG.info("%s is served by process %d of node %s", self.url, pid, node)
        self.pending = self.actor.wait.remote()

    def look(self) -> bool:
        """Whether the address has changed: a server was lost, or is there. Does not block."""
        if self.pending is None:
            if time.monotonic() >= self._again_at:
                self.begin()
            return False
        if not self._ray.wait([self.pending], timeout=0)[0]:
            return False
        try:
            found = self._ray.get(self.pending)
            if self.url is None:
                self.ready(found)
                return True
            LOG.warning("%s has ended", self.url)
        except self._ray.exceptions.RayError as error:
            LOG.warning("%s is lost: %s", self.url or "a server that was starting", str(error).splitlines()[0])
        with contextlib.suppress(Exception):
            self._ray.kill(self.actor)
        was_listed, self.url, self.pending = self.url is not None, None, None
        self._again_at = time.monotonic() + AGAIN_SECONDS
        return was_listed


class RayList:
    """The replicas of a router, for as long as it runs."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots
        self._is_first = True

    def changed(self) -> list[Listed] | None:
        """The addresses now, if they are others than last time."""
        news = [slot.look() for slot in self._slots]
        if not any(news) and not self._is_first:
            return None
        self._is_first = False
        return [Listed(slot.url) for slot in self._slots if slot.url is not None]


@contextlib.contextmanager
def ray_replicas(flags: Route) -> Generator[RayList]:
    """Start the servers and wait for all of them; end them afterwards. Raises UserError if one cannot start."""
    if flags.num_replicas < 1:
        raise UserError(f"--num-replicas: at least 1, got {flags.num_replicas}")
    run = find_model(flags.run).resolve()
    with contextlib.ExitStack() as stack:
        if flags.ray == LOCAL:
            stack.enter_context(loopback_only())
        ray = _import_ray()
        _connect(ray, flags)
        stack.callback(ray.shutdown)
        words = [str(run), *shlex.split(flags.serve_flags), *(["--open"] * flags.open)]
        key_lines = "" if flags.keys is None else flags.keys.read_text(encoding="utf-8")
        arguments = (words, flags.ray == LOCAL, key_lines, os.environ.get(VARIABLE, ""))
        resources = {"num_cpus": flags.replica_cpus, "num_gpus": flags.replica_gpus}
        slots = [Slot(ray, arguments, resources) for _ in range(flags.num_replicas)]
        stack.callback(lambda: [ray.kill(slot.actor) for slot in slots])
        try:
            for slot, found in zip(slots, ray.get([slot.pending for slot in slots], timeout=START_SECONDS)):
                slot.ready(found)
        except ray.exceptions.GetTimeoutError:
            raise UserError(f"--num-replicas: not all started in {START_SECONDS:g} s; has the cluster room?") from None
        except ray.exceptions.RayTaskError as error:
            raise UserError(f"--ray: a server did not start: {error.cause}") from None
        yield RayList(slots)


@contextlib.contextmanager
def loopback_only() -> Generator[None]:
    """A cluster of this machine alone: no listener that others reach, no reports, a token that only we can read.

    Ray reads these variables when it is imported, and hands them to its processes.
    """
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        wanted = {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on those systems Ray binds to the loopback interface; so here
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
        }
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise UserError("--ray needs the package ray; pip install 'openk3[cluster]'") from None


def _connect(ray: Any, flags: Route) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
    if flags.ray == LOCAL:
        cpus, gpus = flags.num_replicas * flags.replica_cpus, flags.num_replicas * flags.replica_gpus
        ray.init(
            "local",
            num_cpus=cpus,
            num_gpus=int(gpus + 0.999),
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            **quiet,
        )
        return
    try:
        host, colon, port = flags.ray.rpartition(":")
        if colon and port.isdecimal():  # Ray itself tries for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(flags.ray, **quiet)
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"--ray {flags.ray}: no such cluster ({(str(error) or type(error).__name__).splitlines()[0]})"
        ) from None
