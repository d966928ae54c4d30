"""ServerConfig: where a server listens, whom it lets in, and how much it takes from one client."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from openk3.config.model import ConfigError

MIB = 2**20
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServerConfig:
    """Limits of the HTTP side; the engine's own are in EngineConfig. Raises ConfigError naming the field.

    Limits per key apply to each API key by itself, or to all callers together where there are no keys; 0 is no limit.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 32 * MIB
    max_images: int = 16  # in one request
    max_image_bytes: int = 16 * MIB  # of one picture, before decoding
    max_image_pixels: int = 50_000_000  # of one picture, after decoding
    max_prompts: int = 128  # answers that one request may ask for: prompts times n
    max_open: int = 512  # requests in the server; more are answered with 503
    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # of prompts and answers
    requests_at_once: int = 0
    unread_tokens: int = 16384  # that wait for one client; a client further behind is cut off
    body_seconds: float = 30.0  # for the whole body to arrive
    write_seconds: float = 60.0  # for a client to take what was sent
    drain_seconds: float = 60.0  # for answers to end after SIGTERM
    image_folders: tuple[Path, ...] = ()  # whose files requests may name
    fetch_images: bool = False  # whether requests may name http(s) addresses outside
    temperature: float | None = None  # of requests that name none; None: as the interface has it
    top_p: float | None = None
    share_prefixes: bool = False  # let keys use each other's cached prefixes

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if spec.type in ("int", "float") and (isinstance(value, bool) or not 0 <= value < 2**48):
                raise ConfigError(f"{spec.name}: must not be negative, got {value!r}")
        for name in ("max_body_bytes", "max_prompts", "max_open", "unread_tokens", "body_seconds", "write_seconds"):
            if getattr(self, name) == 0:
                raise ConfigError(f"{name}: must be positive")
        if self.port > 65535:
            raise ConfigError(f"port: must lie in 0..65535, got {self.port}")
        if not self.model_name:
            raise ConfigError("model_name: must not be empty")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK
