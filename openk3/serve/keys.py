"""API keys: read from a file or the environment, kept as digests, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from openk3.config.model import ConfigError

LOG = logging.getLogger(__name__)
VARIABLE = "OPENK3_API_KEYS"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]{16,512}")


@dataclass(frozen=True)
class Caller:
    """Who asks: its name in logs and as tenant of the prefix cache, and its own limits (None: the server's)."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class Keys:
    """Digests of all keys; an empty set lets everybody in as one caller."""

    def __init__(self, entries: Iterable[tuple[str, Caller]] = ()) -> None:
        self._callers = [(_digest(key), caller) for key, caller in entries]

    def __len__(self) -> int:
        return len(self._callers)

    def find(self, key: str) -> Caller | None:
        """Who has the key. Every key is compared to its end, so the time says nothing about any of them."""
        digest, found = _digest(key), None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def read_keys(file: Path | None, environment: Mapping[str, str]) -> Keys:
    """Keys of a file (lines `NAME KEY [REQUESTS_PER_MINUTE [TOKENS_PER_MINUTE]]`) and of OPENK3_API_KEYS.

    The variable holds keys, or NAME:KEY pairs, separated by commas. Raises ConfigError naming the line, never the key.
    """
    entries: list[tuple[str, Caller]] = []
    if file is not None:
        try:
            text, mode = file.read_text(encoding="utf-8"), file.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from None
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            LOG.warning("%s: everybody on this machine can read the keys; chmod 600 it", file)
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.split("#")[0].split() if line.lstrip().startswith("#") else line.split()
            if words:
                entries.append(_entry(words, f"{file}:{number}"))
        if not entries:
            raise ConfigError(f"{file}: holds no key; write lines `NAME KEY`")
    given = [word.strip() for word in environment.get(VARIABLE, "").split(",") if word.strip()]
    for number, word in enumerate(given, start=1):
        name, colon, key = word.partition(":")
        entries.append(_entry([name, key] if colon else [f"key{number}", word], f"{VARIABLE}, key {number}"))
    for index, what in ((0, "key"), (1, "name")):
        values = [entry[0] if index == 0 else entry[1].name for entry in entries]
        if len(set(values)) < len(values):
            raise ConfigError(f"{file or VARIABLE}: one {what} is given twice")
    return Keys(entries)


def _entry(words: list[str], where: str) -> tuple[str, Caller]:
    if not 2 <= len(words) <= 4 or not _NAME.fullmatch(words[0]):
        raise ConfigError(f"{where}: expected NAME KEY [REQUESTS_PER_MINUTE [TOKENS_PER_MINUTE]]")
    if not _KEY.fullmatch(words[1]):
        raise ConfigError(
            f"{where}: a key has 16 to 512 visible ASCII characters; make one with `openssl rand -hex 24`"
        )
    if not all(word.isdecimal() and len(word) < 13 for word in words[2:]):
        raise ConfigError(f"{where}: limits are whole numbers")
    return words[1], Caller(words[0], *map(int, words[2:]))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
