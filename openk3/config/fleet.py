"""FleetConfig and ProxyConfig: classes of requests and their budgets, when a replica counts as lost, and bounds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from openk3.config.model import ConfigError

_MOST = 2**48


@dataclass(frozen=True)
class CostClass:
    """Requests whose cost, uncached tokens of the prompt plus those of the answer, is at most `most_tokens`.

    They have a budget of their own, which requests of other classes neither use nor wait for.
    """

    name: str
    most_tokens: int  # 0 in the last class: whatever is larger
    replica_tokens: int  # of requests under way in one replica of weight 1
    fleet_tokens: int = 0  # of requests under way in all replicas; 0 is no limit
    queue: int = 1024  # requests that may wait
    queue_seconds: float = 60.0  # and how long


# For Kimi K3 on sixteen H200, by simulation (docs/fleet.md): one prefill of a million tokens at a time in each replica,
# and first turns of 400 thousand do not wait for those; no budget is so small that it binds before the engine does.
CLASSES = (
    CostClass("short", 8_192, 524_288),
    CostClass("long", 131_072, 524_288, queue_seconds=120.0),
    CostClass("huge", 655_360, 1_048_576, queue_seconds=600.0),
    CostClass("giant", 0, 1_048_576, queue_seconds=600.0),
)
UNBUDGETED = (CostClass("all", 0, _MOST - 1),)


@dataclass(frozen=True)
class FleetConfig:
    """How the policy of a router decides. Times are seconds. Raises ConfigError naming the field."""

    classes: tuple[CostClass, ...] = CLASSES
    is_affine: bool = True  # False: every request goes to the replica with the least work
    is_budgeted: bool = True  # False: nothing waits
    ring_points: int = 160  # of a replica of weight 1
    sessions: int = 100_000  # whose place is remembered
    session_seconds: float = 3600.0  # after which a prefix counts as evicted
    patience_seconds: float = 10.0  # that a request waits for its prefix before it is computed again elsewhere
    queue_seconds: float = 0.0  # that a request of any class waits; 0: as long as its class says
    answer_tokens: int = 1024  # of an answer: what is expected, if no less is asked for
    bytes_per_token: float = 4.0
    image_tokens: int = 1024
    tries: int = 3  # replicas that one request is sent to
    fail_after: int = 3  # checks in a row: the replica is failed
    recover_after: int = 2  # checks in a row: it is healthy again
    break_after: int = 3  # requests in a row that it broke: none is sent for a while
    backoff_seconds: float = 1.0  # doubles with each such time
    most_backoff_seconds: float = 30.0

    def __post_init__(self) -> None:
        _check_numbers(self)
        for name in ("ring_points", "sessions", "bytes_per_token", "tries", "fail_after", "recover_after"):
            if getattr(self, name) == 0:
                raise ConfigError(f"{name}: must be positive")
        if not self.classes or not self.break_after:
            raise ConfigError("classes, break_after: must not be empty or 0")
        limits = [one.most_tokens for one in self.classes]
        if limits[-1] != 0 or 0 in limits[:-1] or limits[:-1] != sorted(set(limits[:-1])):
            raise ConfigError("classes: most_tokens must rise from class to class and be 0 in the last one")
        if len({one.name for one in self.classes}) < len(self.classes):
            raise ConfigError("classes: two have the same name")
        for one in self.classes:
            _check_numbers(one)
            if one.replica_tokens == 0:
                raise ConfigError(f"classes: replica_tokens of {one.name!r} must be positive")

    @property
    def used_classes(self) -> tuple[CostClass, ...]:
        """The classes, or the one without limits."""
        return self.classes if self.is_budgeted else UNBUDGETED

    def longest_wait(self, kind: int) -> float:
        """Seconds that a request of the class with this index may wait."""
        return self.queue_seconds or self.used_classes[kind].queue_seconds


@dataclass(frozen=True)
class ProxyConfig:
    """Times, in seconds, and bounds of what a router does on the network. Raises ConfigError naming the field."""

    connect_seconds: float = 2.0
    silence_seconds: float = 60.0  # of a streamed answer; a replica that works says something every 15 s
    answer_seconds: float = 1800.0  # until a whole answer is there
    check_every_seconds: float = 1.0
    check_seconds: float = 5.0  # for one health check
    hold_bytes: int = 16 * 2**20  # of a whole answer: as long as it is held back, another replica can be asked
    body_bytes: int = 4 * 2**30  # of all calls under way: bodies are kept until they cannot be sent again
    event_bytes: int = 2**20  # of one event, likewise
    deaths: int = 2  # replicas that may break on one request: a request that breaks them is not sent to all

    def __post_init__(self) -> None:
        _check_numbers(self)
        for spec in dataclasses.fields(self):
            if getattr(self, spec.name) == 0:
                raise ConfigError(f"{spec.name}: must be positive")


def _check_numbers(config: Any) -> None:
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if spec.type in ("int", "float") and (isinstance(value, bool) or not 0 <= value < _MOST):
            raise ConfigError(f"{spec.name}: must not be negative or above {_MOST:g}, got {value!r}")
