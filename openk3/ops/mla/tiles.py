"""Tables of tiles for attention over packed sequences: which rows and keys a program takes, and where scores are kept.

The queries of a sequence are its last positions: query i sees key j if j <= n_k - n_q + i.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from openk3.ops.device_tables import device_table, sent

Bounds = tuple[int, ...]


@dataclass(frozen=True)
class Bands:
    """Bounds of N sequences among all queries and among all keys."""

    queries: Bounds
    keys: Bounds

    def sequences(self) -> list[tuple[int, int, int, int]]:
        """(first query, queries, first key, keys) of each."""
        starts = zip(self.queries, self.queries[1:], self.keys, self.keys[1:])
        return [(q0, q1 - q0, k0, k1 - k0) for q0, q1, k0, k1 in starts]

    def lines(self) -> Bounds:
        """Where numbers of each sequence's queries begin in a row of float32, and the length of a row.

        Every sequence begins at 16 bytes, as the copy engine wants it.
        """
        return tuple(accumulate((-(-(b - a) // 4) * 4 for a, b in zip(self.queries, self.queries[1:])), initial=0))


class Slab(NamedTuple):
    """Heads, and key tiles in the order of their sequences, whose gradients of scores exist at the same time."""

    heads: range
    tiles: range


@device_table(16)
def query_tiles(bands: Bands, rows: int, device: torch.device) -> Tensor:
    """int32 [tiles, 5]: first query, number of queries, first key of the sequence, keys before the first query's own,
    and the first query's place in rows of `Bands.lines`.

    Tiles that see most keys come first, so that no long one starts last.
    """
    found: list[tuple[int, ...]] = []
    for (q0, n_q, k0, n_k), line in zip(bands.sequences(), bands.lines()):
        found += [(q0 + i, min(rows, n_q - i), k0, n_k - n_q + i, line + i) for i in range(0, n_q, rows)]
    found.sort(key=lambda tile: -(tile[3] + tile[1]))
    return _table(found, 5, device)


@dataclass(frozen=True)
class GradientTiles:
    """Square tiles of scores as the backward pass cuts them; built by `gradient_tiles` and never changed.

    A key tile has a strip of score tiles, one for each tile of queries that sees any of its keys, and strips lie one
    after the other. Tables are int32. keys [X, 8]: first key, number of keys, first query of the sequence, its queries,
    the first one that sees the tile's first key (may be negative), number of its first query tile, place of the strip,
    and that of the sequence's first query in rows of `Bands.lines`. queries [Y, 10]: first query, number of queries,
    number m of the tile in its sequence; first key of the sequence, its keys, its first key tile, how many of those
    the queries see; then how many key tiles lie wholly or in part before the first query's own key (e), how many query
    tiles there are (M), and the place p of the first strip: the score tile of key tile j is
    p + j M - t (t + 1) / 2 + m, t = max(0, j - e).
    """

    size: int
    keys: Tensor
    queries: Tensor
    strips: tuple[int, ...]  # place of each strip, and the number of all score tiles

    @property
    def num_key_tiles(self) -> int:
        """X."""
        return len(self.strips) - 1

    def slabs(self, heads: int, room: int, programs: int) -> list[Slab]:
        """Cut heads and key tiles so that about `room` score tiles exist at once, or enough for so many programs.

        Whole heads together if they fit, alike many in each slab; else one head at a time, cut between key tiles.
        """
        each = self.strips[-1]
        longest = max((b - a for a, b in zip(self.strips, self.strips[1:])), default=0)
        room = max(room, min(each, programs * longest))
        if each <= room:
            count = -(-heads // max(1, room // max(1, each)))
            edges = [heads * n // max(1, count) for n in range(count + 1)]
            return [Slab(range(low, high), range(self.num_key_tiles)) for low, high in zip(edges, edges[1:])]
        cuts = [0]
        while cuts[-1] < self.num_key_tiles:
            cuts.append(max(cuts[-1] + 1, bisect_right(self.strips, self.strips[cuts[-1]] + room) - 1))
        return [Slab(range(h, h + 1), range(a, b)) for h in range(heads) for a, b in zip(cuts, cuts[1:])]

    def most(self, slabs: list[Slab]) -> int:
        """Score tiles of the slab that has most."""
        sizes = ((slab.tiles.start, slab.tiles.stop, len(slab.heads)) for slab in slabs)
        return max((heads * (self.strips[high] - self.strips[low]) for low, high, heads in sizes), default=0)

    def order(self, tiles: range) -> Tensor:
        """Key tiles of a slab, those with long strips first; int32."""
        return _order(tuple(self.strips[tiles.start : tiles.stop + 1]), tiles.start, self.keys.device)


@dataclass(frozen=True)
class Portion:
    """A slab, and the memory of its score gradients: what the launches for it share."""

    tiles: GradientTiles
    slab: Slab
    d_scores: Tensor

    @property
    def whole(self) -> bool:
        """Whether it has all key tiles of its heads."""
        return len(self.slab.tiles) == self.tiles.num_key_tiles

    @property
    def order(self) -> Tensor:
        """Its key tiles, those with long strips first; int32."""
        return self.tiles.order(self.slab.tiles)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Key tiles of a head, its score tiles, the first of these among all of the head's, and the first head."""
        low, high = (self.tiles.strips[end] for end in (self.slab.tiles.start, self.slab.tiles.stop))
        return len(self.slab.tiles), high - low, low, self.slab.heads.start


@device_table(16)
def gradient_tiles(bands: Bands, size: int, device: torch.device) -> GradientTiles:
    """Tiles of `size` keys and queries; every key has a tile, seen or not."""
    keys: list[tuple[int, ...]] = []
    lines: list[int] = []
    queries: list[tuple[int, ...]] = []
    counts: list[int] = []
    for (q0, n_q, k0, n_k), line in zip(bands.sequences(), bands.lines()):
        first_tile, last_tile, place = len(keys), -(-n_q // size), sum(counts)
        for k in range(0, n_k, size):
            sees = k - (n_k - n_q)
            first = max(0, sees) // size
            keys.append((k0 + k, min(size, n_k - k), q0, n_q, sees, first))
            counts.append(max(0, last_tile - first))
            lines.append(line)
        for i in range(0, n_q, size):
            rows = min(size, n_q - i)
            seen = (n_k - n_q + i + rows - 1) // size + 1
            places = (-(-(n_k - n_q) // size), last_tile, place)
            queries.append((q0 + i, rows, i // size, k0, n_k, first_tile, seen, *places))
    strips = tuple(accumulate(counts, initial=0))
    queries.sort(key=lambda tile: -tile[6])
    placed: list[tuple[int, ...]] = [(*tile, *rest) for tile, *rest in zip(keys, strips, lines)]
    return GradientTiles(size, _table(placed, 8, device), _table(queries, 10, device), strips)


@device_table(64)
def _order(strips: tuple[int, ...], first: int, device: torch.device) -> Tensor:
    lengths = [b - a for a, b in zip(strips, strips[1:])]
    order = sorted(range(len(lengths)), key=lambda tile: -lengths[tile])
    return sent(torch.tensor([first + tile for tile in order], dtype=torch.int32), device)


def _table(rows: list[tuple[int, ...]], columns: int, device: torch.device) -> Tensor:
    return sent(torch.tensor(rows, dtype=torch.int32).view(-1, columns), device)
