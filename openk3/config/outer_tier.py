"""TierConfig and MooncakeConfig: where prefixes go that no longer fit into an engine's pages, and how much of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from openk3.config.model import ConfigError

SWAP_RULES = ("auto", "always", "never")
LOAD_RULES = ("auto", "always")


@dataclass(frozen=True)
class TierConfig:
    """CPU memory and a folder behind the pages of one engine. Raises ConfigError naming the field.

    `swap` says when a preempted request's private state is kept, `load` when a prefix is brought back; "auto" compares
    measured times (see Costs). `wait_seconds` bounds how long a request waits for its prefix before it is computed.
    With a `secret`, names and checksums can be made only by those who have it.
    """

    memory_bytes: int
    folder: str | None = None
    disk_bytes: int = 64 << 30
    swap: str = "auto"
    load: str = "auto"
    wait_seconds: float = 30.0
    io_threads: int = 2  # that read and check; one more writes
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "disk_bytes", "io_threads"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 2**60:
                raise ConfigError(f"{name}: must be a whole number of at least 1, got {str(value)[:40]}")
        if self.folder == "":
            raise ConfigError("folder: must name a folder; leave it out for none")
        for name, rules in (("swap", SWAP_RULES), ("load", LOAD_RULES)):
            if getattr(self, name) not in rules:
                raise ConfigError(f"{name}: must be one of {', '.join(rules)}, got {getattr(self, name)!r}")
        if not 0 < self.wait_seconds < float("inf"):
            raise ConfigError(f"wait_seconds: must be a positive number, got {self.wait_seconds!r}")
        if not isinstance(self.secret, bytes):
            raise ConfigError("secret: must be bytes")


@dataclass(frozen=True)
class MooncakeConfig:
    """How to reach a Mooncake Store. Raises ConfigError naming the field.

    `segment_bytes` of this machine's memory are lent to the store; `buffer_bytes` must hold the largest entry, one page
    of latents or one state, several times over where entries are read at the same time.
    """

    master: str  # host:port of mooncake_master
    hostname: str = "localhost"  # by which other clients reach this one
    metadata: str = "P2PHANDSHAKE"
    segment_bytes: int = 4 << 30
    buffer_bytes: int = 1 << 30
    protocol: str = "tcp"
    devices: str = ""  # of RDMA; empty: found by itself
    prefix: str = "openk3"  # of keys, where several projects share a store

    def __post_init__(self) -> None:
        for name in ("segment_bytes", "buffer_bytes"):
            value, least = getattr(self, name), 0 if name == "segment_bytes" else 1
            if type(value) is not int or not least <= value <= 2**60:
                raise ConfigError(f"{name}: must be a whole number of at least {least}, got {str(value)[:40]}")
        if not self.master or ":" not in self.master:
            raise ConfigError(f"master: must be host:port of a running mooncake_master, got {self.master!r}")
