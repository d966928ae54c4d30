"""The ring: all routers agree, a change moves only what it must, and what a replica leaves spreads over all others."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.fleet.ring import Ring

KEYS = [f"session {number}".encode() for number in range(2000)]
NAMES = st.sets(st.integers(0, 40).map("http://replica-{}:8000".format), min_size=1, max_size=9)


def ring_of(names: object, weight: float = 1.0) -> Ring:
    """A ring with these replicas, in this order."""
    ring = Ring()
    for name in names:  # pyrefly: ignore
        ring.add(name, weight)
    return ring


def owners(ring: Ring, key: bytes, count: int = 2) -> list[str]:
    """The first ones."""
    return [name for name, _ in zip(ring.owners(key), range(count), strict=False)]


@settings(max_examples=20)
@given(NAMES, st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_matter(names: set[str], random: object) -> None:
    """Replicas that came, went and came again in another order, with other weights between, leave the same ring."""
    shuffled = sorted(names)
    random.shuffle(shuffled)  # pyrefly: ignore
    one, other = ring_of(sorted(names)), ring_of(shuffled, 0.5)
    other.add("gone")
    other.remove("gone")
    for name in shuffled:
        other.add(name, 1.0)
    for key in KEYS[:50]:
        assert list(one.owners(key)) == list(other.owners(key))
        assert sorted(one.owners(key)) == sorted(names)


@settings(max_examples=20)
@given(NAMES, st.integers(41, 60).map("http://replica-{}:8000".format))
def test_a_change_moves_only_what_it_must(names: set[str], new: str) -> None:
    """Without the new replica, each key's owners are the same ones in the same order; its share is about fair."""
    small, large = ring_of(names), ring_of([*names, new])
    moved = 0
    for key in KEYS[:400]:
        before, after = list(small.owners(key)), list(large.owners(key))
        assert [name for name in after if name != new] == before
        moved += after[0] == new
    assert moved <= 400 * 2 / (len(names) + 1) + 20


def test_the_secondary_takes_over_and_gives_back() -> None:
    """Where the primary goes, the secondary becomes the primary: a session that failed over need not move again."""
    ring = ring_of(f"r{number}" for number in range(6))
    before = {key: owners(ring, key, 3) for key in KEYS}
    ring.remove("r2")
    for key, (first, second, third) in before.items():
        left = [name for name in (first, second, third) if name != "r2"]
        assert owners(ring, key) == left[:2]
    ring.add("r2")
    assert {key: owners(ring, key, 3) for key in KEYS} == before


def test_shares_follow_weights_and_secondaries_spread() -> None:
    """Eight replicas: each has its share, and what it leaves goes to all seven others."""
    ring = ring_of(f"r{number}" for number in range(8))
    pairs = Counter(tuple(owners(ring, key)) for key in KEYS)
    primaries = Counter(first for first, _ in pairs.elements())
    assert min(primaries.values()) > 2000 / 8 * 0.6 and max(primaries.values()) < 2000 / 8 * 1.5
    for name, share in primaries.items():
        heirs = Counter(second for first, second in pairs.elements() if first == name)
        assert len(heirs) == 7 and max(heirs.values()) < share / 7 * 2.5
    ring.add("r0", 3.0)
    share = sum(owners(ring, key)[0] == "r0" for key in KEYS) / 2000
    assert 0.22 < share < 0.38  # 3 of 10


def test_an_empty_ring_owns_nothing() -> None:
    """And removing what is not there is no harm."""
    ring = Ring()
    ring.remove("nobody")
    assert list(ring.owners(b"key")) == [] and len(ring) == 0 and "nobody" not in ring
