"""Sessions: where each conversation's prefix lies, as far as a router knows, and how many tokens of it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True)
class Home:
    """A replica that has computed a session's prefix."""

    replica: str
    life: int  # of the replica: it forgets everything between two of them
    num_tokens: int
    seen: float


class Sessions:
    """The newest ones; an old or lost entry costs a wrong estimate, never a wrong answer."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._homes: OrderedDict[bytes, Home] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def find(self, key: bytes, now: float) -> Home | None:
        """Of a session, if it is not too old."""
        home = self._homes.get(key)
        return home if home is not None and now - home.seen <= self._seconds else None

    def note(self, key: bytes, home: Home) -> None:
        """A replica has computed this much of a session."""
        if not key:
            return
        self._homes[key] = home
        self._homes.move_to_end(key)
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)
