"""Replica lists: which servers belong to the fleet, from the command line or from a file that may change."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import httpx

from openk3.config.model import ConfigError

LOG = logging.getLogger(__name__)
HELD = "drain"


@dataclass(frozen=True)
class Listed:
    """A server as its owner wants it."""

    url: str
    weight: float = 1.0
    is_held: bool = False  # it gets nothing new


class ReplicaList(Protocol):
    """Asked once a second."""

    def changed(self) -> list[Listed] | None:
        """All that belong to the fleet, or None if they are the same as last time."""
        ...


class FixedList:
    """Those of the command line."""

    def __init__(self, listed: Sequence[Listed]) -> None:
        self._listed: list[Listed] | None = list(listed)

    def changed(self) -> list[Listed] | None:
        """Once."""
        listed, self._listed = self._listed, None
        return listed


class ListFile:
    """A file with a line `URL [WEIGHT] [drain]` for each server, read again when it changes.

    Whoever may write it decides where prompts and keys go. A file with an error is not used: what was read before
    stays, and the log says why. Nor is one without a server, once there were some: it may be half written.
    """

    def __init__(self, file: Path) -> None:
        """Raises ConfigError naming the line, OSError if there is no such file."""
        self._file, self._has_any, self._why = file, False, ""
        self._stamp = self._look()
        self._first: list[Listed] | None = self._read()

    def changed(self) -> list[Listed] | None:
        """What it holds now, if that is new."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return None
            listed = self._read()
        except (OSError, ConfigError) as error:  # looked at again: it may be readable by then
            if str(error) != self._why:
                LOG.error("the list of replicas stays as it was: %s", error)
            self._why = str(error)
            return None
        self._stamp, self._why = stamp, ""
        return listed

    def _read(self) -> list[Listed]:
        try:
            listed = read_lines(self._file.read_text(encoding="utf-8"), str(self._file))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._file}: is not UTF-8 ({error.reason} at byte {error.start})") from None
        if self._has_any and not listed:
            raise ConfigError(f"{self._file}: names no replica; to take all of them out, mark them `{HELD}`")
        self._has_any = bool(listed)
        return listed

    def _look(self) -> tuple[int, int, int]:
        found = self._file.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino


def read_lines(text: str, where: str) -> list[Listed]:
    """Lines `URL [WEIGHT] [drain]`; `#` begins a remark. Raises ConfigError naming the line."""
    listed: dict[str, Listed] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place, url = f"{where}:{number}", checked_url(words[0], f"{where}:{number}")
        is_held = words[-1] == HELD and len(words) > 1
        rest = words[1:-1] if is_held else words[1:]
        if len(rest) > 1 or url in listed:
            raise ConfigError(
                f"{place}: " + (f"{url} is there twice" if url in listed else "expected URL [WEIGHT] [drain]")
            )
        listed[url] = Listed(url, _weight(rest[0], place) if rest else 1.0, is_held)
    return list(listed.values())


def checked_url(text: str, where: str) -> str:
    """http(s)://HOST[:PORT] without anything behind. Raises ConfigError."""
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        is_bare = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username or parts.password)
        httpx.URL(text)
    except (ValueError, httpx.InvalidURL):
        is_good = is_bare = False
    if not is_good or not is_bare:
        raise ConfigError(f"{where}: a replica is http://HOST:PORT, got {text[:80]!r}")
    return text.rstrip("/")


def _weight(text: str, where: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0.01 <= weight <= 100:
        raise ConfigError(f"{where}: a weight lies between 0.01 and 100, got {text[:20]!r}")
    return weight
