"""Tables of attention tiles: every visible pair of a query and a key lies in exactly one place."""

from __future__ import annotations

from itertools import accumulate

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.ops.mla.tiles import Bands, Portion, gradient_tiles, query_tiles

CPU = torch.device("cpu")
PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=4)


def bands(pairs: list[tuple[int, int]]) -> Bands:
    """Sequences of so many queries and earlier keys."""
    queries = tuple(accumulate((new for new, _ in pairs), initial=0))
    return Bands(queries, tuple(accumulate((new + old for new, old in pairs), initial=0)))


@settings(max_examples=40)
@given(PAIRS, st.sampled_from([4, 16]))
def test_query_tiles(pairs: list[tuple[int, int]], rows: int) -> None:
    """Each query once, with its sequence's first key and the keys before its own; longest first."""
    found = query_tiles(bands(pairs), rows, CPU).tolist()
    lines = bands(pairs).lines()
    seen = {start + i: (key, past + i, line + i) for start, count, key, past, line in found for i in range(count)}
    want = {
        q0 + i: (k0, n_k - n_q + i, line + i)
        for (q0, n_q, k0, n_k), line in zip(bands(pairs).sequences(), lines)
        for i in range(n_q)
    }
    assert seen == want and len(seen) == sum(tile[1] for tile in found)
    assert all(0 < tile[1] <= rows for tile in found) and all(line % 4 == 0 for line in lines)
    assert len({line for _, _, line in seen.values()}) == len(seen) and lines[-1] >= len(seen)
    ends = [past + count for _, count, _, past, _ in found]
    assert ends == sorted(ends, reverse=True)


@settings(max_examples=40)
@given(PAIRS, st.sampled_from([4, 16]))
def test_score_tiles(pairs: list[tuple[int, int]], size: int) -> None:
    """Strips of key tiles and the formula of query tiles name the same place, and nothing is left out."""
    tiles = gradient_tiles(bands(pairs), size, CPU)
    keys = tiles.keys.tolist()
    places: dict[tuple[int, int], tuple[int, int]] = {}
    for query, rows, m, key, n_k, first, seen, before, rounds, place in tiles.queries.tolist():
        for j in range(seen):
            at, count, start, queries, sees, first_m, strip, line = keys[first + j]
            assert at == key + j * size and count == min(size, n_k - j * size) and start == query - m * size
            late = max(0, j - before)
            found = place + j * rounds - late * (late + 1) // 2 + m
            assert found == strip + m - first_m and tiles.strips[first + j] <= found < tiles.strips[first + j + 1]
            places |= {(query + i, at + c): (found, c * size + i) for i in range(rows) for c in range(count)}
            assert all(
                sees + c <= m * size + i for i in range(rows) for c in range(count) if c == 0 and sees <= m * size
            )
            assert queries >= m * size + rows and line % 4 == 0
    visible = {
        (q0 + i, k0 + k)
        for q0, n_q, k0, n_k in bands(pairs).sequences()
        for i in range(n_q)
        for k in range(n_k - n_q + i + 1)
    }
    assert visible <= places.keys() and len(set(places.values())) == len(places)


@settings(max_examples=40)
@given(PAIRS, st.integers(1, 5), st.integers(1, 60), st.integers(1, 4))
def test_slabs(pairs: list[tuple[int, int]], heads: int, room: int, programs: int) -> None:
    """Each key tile of each head once; tiles in the room, or one key tile, or a strip for each program."""
    tiles = gradient_tiles(bands(pairs), 4, CPU)
    slabs = tiles.slabs(heads, room, programs)
    parts = [(h, x) for slab in slabs for h in slab.heads for x in slab.tiles]
    assert sorted(parts) == [(h, x) for h in range(heads) for x in range(tiles.num_key_tiles)]
    longest = max((b - a for a, b in zip(tiles.strips, tiles.strips[1:])), default=0)
    counts = {len(slab.heads) for slab in slabs}
    assert max(counts) <= min(counts) + 1
    for slab in slabs:
        count, each, low, head = Portion(tiles, slab, tiles.keys).place
        assert (count, head) == (len(slab.tiles), slab.heads.start)
        assert low + each == tiles.strips[slab.tiles.stop] and each * len(slab.heads) <= tiles.most(slabs)
        assert each * len(slab.heads) <= max(room, programs * longest) or count == 1
        order = tiles.order(slab.tiles).tolist()
        assert sorted(order) == list(slab.tiles)
        lengths = [tiles.strips[x + 1] - tiles.strips[x] for x in order]
        assert lengths == sorted(lengths, reverse=True)
