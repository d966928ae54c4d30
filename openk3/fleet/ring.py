"""Ring: consistent hashing of sessions to replicas, the same in every router, whatever came and went before."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from hashlib import blake2b

SPACE = 2**64


class Ring:
    """Each replica owns the arcs that end at its points; a key's owners are met walking on from the key's own place.

    The second owner is the one that takes over where the first is lost (report section 5.4.3): without the first on
    the ring, it is the first, so a session that has moved there stays. A replica's neighbours differ from point to
    point, which spreads what it leaves over all others. A change moves only keys that the replica in question gains or
    loses.
    """

    def __init__(self, points: int = 160) -> None:
        self._per_weight = points
        self._points: list[tuple[int, str]] = []
        self._weights: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._weights)

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def add(self, name: str, weight: float = 1.0) -> None:
        """A replica comes, or has another weight; its points for a smaller weight are among those for a larger one."""
        if self._weights.get(name) == weight:
            return
        self.remove(name)
        self._weights[name] = weight
        for index in range(max(1, round(self._per_weight * weight))):
            insort(self._points, (place(f"{name}#{index}".encode()), name))

    def remove(self, name: str) -> None:
        """A replica goes; an unknown one is no harm."""
        if self._weights.pop(name, None) is not None:
            self._points = [point for point in self._points if point[1] != name]

    def owners(self, key: bytes) -> Iterator[str]:
        """All replicas, each once: the primary, the secondary, and whoever would be next."""
        start, seen = bisect_right(self._points, (place(key), "")), set()
        for step in range(len(self._points)):
            name = self._points[(start + step) % len(self._points)][1]
            if name not in seen:
                seen.add(name)
                yield name
                if len(seen) == len(self._weights):
                    return


def place(key: bytes) -> int:
    """Where on the ring a key lies: 0 to 2^64 - 1, evenly."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")
