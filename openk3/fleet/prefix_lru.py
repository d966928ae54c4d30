"""What a simulated replica remembers: prefixes by session, the least recently used of which make room, as a whole.

A prefix is of use only where a KDA state was kept, which is where the last turn ended, rounded down to a hash block. So
a session without its end is lost, whatever else of it were still there; earlier states went first, being older. Each
prefix takes the room of its tokens and of that state. What is evicted may go to an outer tier, from which it has to be
brought. A running request owns its session's prefix, and shares its system prompt's.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from openk3.fleet.trace import Entry

_Key = tuple[str, str]


@dataclass(frozen=True)
class Prefix:
    """Something to start from."""

    reach: int  # tokens from a prompt's start to where the state is
    size: int  # tokens' worth of memory


@dataclass
class Held:
    """What a running request was given."""

    num_cached: int  # tokens that need not be computed
    num_loaded: int  # of those, from the outer tier
    most: int  # tokens' worth of memory that it may come to have, beside what it shares
    size: int  # that it has


class PrefixLru:
    """Prefixes in `capacity` tokens of memory, which they share with running requests."""

    def __init__(self, capacity: int, *, block: int, state: int = 0, outer: int = 0) -> None:
        self.capacity, self.state = capacity, state
        self.held = self._promised = 0  # what running requests have, and may come to have
        self._block = block
        self._inner, self._outer = _Tier(capacity), _Tier(outer)

    @property
    def num_idle(self) -> int:
        """Tokens' worth of memory of prefixes that nobody uses."""
        return self._inner.size

    def find(self, entry: Entry) -> int:
        """Tokens that a request would start from; nothing changes."""
        return max((prefix.reach for _, prefix, _ in self._usable(entry)), default=0)

    def hold(self, entry: Entry) -> Held | None:
        """Give a request its prefix and a state, if there will be room for the rest and its answer; else None.

        What is idle is evicted only when it is computed (`grow`).
        """
        best = max(self._usable(entry), key=lambda found: found[1].reach, default=None)
        key, cached, from_outer = ("", ""), 0, False
        if best is not None:
            key, cached, from_outer = best[0], best[1].reach, best[2]
        shared = cached if key[0] == "system" and not from_outer else 0
        most = entry.prompt_tokens - shared + entry.answer_tokens + self.state
        if self._promised + most > self.capacity:
            return None
        self._promised += most
        self._inner.take(("session", entry.session))
        self._outer.take(("session", entry.session))
        self._inner.touch(("system", entry.system))
        held = Held(cached, cached if from_outer else 0, most, 0)
        self.grow(held, cached - shared + self.state)
        return held

    def grow(self, held: Held, num_tokens: int) -> None:
        """So much more of a request is there."""
        held.size += num_tokens
        self.held += num_tokens
        self._make_room(0)

    def let_go(self, entry: Entry, held: Held, *, is_computed: bool) -> None:
        """A request has ended; its prompt stays as long as there is room, if it was computed."""
        self.held -= held.size
        self._promised -= held.most
        if not is_computed:
            return
        system = entry.system_tokens // self._block * self._block
        reach = entry.prompt_tokens // self._block * self._block
        self._keep(("session", entry.session), Prefix(reach, reach - system + self.state))
        if system and self._inner.get(("system", entry.system)) is None:
            self._keep(("system", entry.system), Prefix(system, system + self.state))
        self._inner.touch(("system", entry.system))

    def _keep(self, key: _Key, prefix: Prefix) -> None:
        self._outer.take(key)
        if prefix.reach and self._make_room(prefix.size):
            self._inner.put(key, prefix)

    def _make_room(self, size: int) -> bool:
        if self.held + size > self.capacity:
            return False
        while self.held + self._inner.size + size > self.capacity:
            key, prefix = self._inner.pop()
            self._outer.put_evicting(key, prefix)
        return True

    def _usable(self, entry: Entry) -> list[tuple[_Key, Prefix, bool]]:
        """(key, prefix, whether it lies outside) of those that a prompt begins with; its last token is computed."""
        places = (
            (("system", entry.system), entry.system_tokens),
            (
                ("session", entry.session),
                entry.system_tokens + entry.history_tokens,
            ),
        )
        found = list[tuple[_Key, Prefix, bool]]()
        for key, common in places:
            for tier in (self._inner, self._outer):
                prefix = tier.get(key)
                if prefix is not None and prefix.reach <= min(common, entry.prompt_tokens - 1):
                    found.append((key, prefix, tier is self._outer))
        return found


class _Tier:
    """Prefixes in the order of their last use."""

    def __init__(self, capacity: int) -> None:
        self.size, self._capacity = 0, capacity
        self._prefixes = OrderedDict[_Key, Prefix]()

    def get(self, key: _Key) -> Prefix | None:
        return self._prefixes.get(key)

    def put(self, key: _Key, prefix: Prefix) -> None:
        self.take(key)
        self._prefixes[key] = prefix
        self.size += prefix.size

    def put_evicting(self, key: _Key, prefix: Prefix) -> None:
        """What is too large, or was not used for longest, is gone."""
        if prefix.size > self._capacity:
            return
        self.put(key, prefix)
        while self.size > self._capacity:
            self.pop()

    def take(self, key: _Key) -> Prefix | None:
        prefix = self._prefixes.pop(key, None)
        self.size -= 0 if prefix is None else prefix.size
        return prefix

    def pop(self) -> tuple[_Key, Prefix]:
        key, prefix = self._prefixes.popitem(last=False)
        self.size -= prefix.size
        return key, prefix

    def touch(self, key: _Key) -> None:
        if key in self._prefixes:
            self._prefixes.move_to_end(key)
