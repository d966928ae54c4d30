"""The tile table: every token in one tile, tiles cut where sequences and checkpoints end, parts as equal as can be."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.ops.kda.tiles import Span, Tiles, tile_table

CPU = torch.device("cpu")


def table(
    lengths: list[int], *, checkpoints: tuple[int, ...] = (), part_tiles: int | None = None, chunk: int = 32
) -> Tiles:
    """The tiles of packed sequences."""
    bounds = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    return tile_table(bounds, CPU, checkpoints=checkpoints, part_tiles=part_tiles, chunk=chunk)


def rows(x: torch.Tensor) -> list[int]:
    """Values of a column of the table."""
    assert x.dtype == torch.int32
    return x.tolist()


def test_an_example() -> None:
    """Three sequences, the middle one empty, cut at one checkpoint and into parts of two tiles."""
    tiles = table([70, 0, 40], checkpoints=(10, 110), part_tiles=2)
    assert rows(tiles.start_X) == [0, 10, 42, 70, 102] and rows(tiles.length_X) == [10, 32, 28, 32, 8]
    assert rows(tiles.first_N) == [0, 3, 3, 5] and rows(tiles.token_N) == [0, 70, 70, 110]
    assert tiles.part_first == (0, 1, 3, 3, 5) and tiles.part_bounds == (0, 10, 70, 70, 110)
    assert tiles.sequence_parts == (0, 2, 3, 4)
    assert rows(tiles.mark_X) == [1, -1, -1, -1, 4]  # the state entering part 1 is also the first checkpoint
    assert tiles.checkpoint_rows == (1, 4) and tiles.num_saved == 5 and not tiles.even


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 150), max_size=5),
    cuts=st.sets(st.floats(0.01, 1), max_size=4),
    part_tiles=st.none() | st.integers(1, 3),
    chunk=st.sampled_from([16, 32]),
)
def test_every_token_has_its_tile(lengths: list[int], cuts: set[float], part_tiles: int | None, chunk: int) -> None:
    """Tiles cover all tokens in order, none crosses a border, and every mark names the state that it should."""
    T = sum(lengths)
    checkpoints = tuple(sorted({max(1, round(cut * T)) for cut in cuts})) if T else ()
    tiles = table(lengths, checkpoints=checkpoints, part_tiles=part_tiles, chunk=chunk)
    start, length, mark = rows(tiles.start_X), rows(tiles.length_X), rows(tiles.mark_X)
    ends = [s + n for s, n in zip(start, length)]
    assert [t for s, e in zip(start, ends) for t in range(s, e)] == list(range(T))
    assert all(1 <= n <= chunk for n in length)
    borders = {*tiles.bounds, *checkpoints}
    assert all(n == chunk or end in borders for n, end in zip(length, ends)) and borders <= {0, *ends}
    assert [ends[x - 1] if x else 0 for x in rows(tiles.first_N)] == list(tiles.bounds)
    for (low, high), (first, end) in zip(pairwise(tiles.sequence_parts), pairwise(rows(tiles.first_N))):
        sizes = [b - a for a, b in pairwise(tiles.part_first[low : high + 1])]
        assert sizes and sum(sizes) == end - first and max(sizes) - min(sizes) <= 1
        assert part_tiles is None or max(sizes) <= part_tiles
    begins = set(tiles.sequence_parts[:-1])
    inner = {first - 1: part for part, first in enumerate(tiles.part_first[:-1]) if part not in begins}
    assert all(mark[tile] == part for tile, part in inner.items())
    assert [ends[mark.index(row)] for row in tiles.checkpoint_rows] == list(checkpoints)
    assert sum(m >= 0 for m in mark) == len({*inner.values(), *tiles.checkpoint_rows})
    assert max((-1, *mark)) < tiles.num_saved
    assert tiles.even == (set(checkpoints) <= set(tiles.bounds))


def test_slabs_are_views() -> None:
    """A slab has its own tiles and runs, counted from the first of all, and no memory of its own."""
    tiles = table([100, 0, 70, 33], part_tiles=1)
    span = tiles.slab(2, 7)
    assert (span.tile_low, span.token_low, span.num_tokens, span.num_tiles, span.num_runs) == (2, 64, 100, 4, 5)
    assert rows(span.first_P) == [2, 3, 4, 4, 5, 6] and rows(span.token_P) == [64, 96, 100, 100, 132, 164]
    assert rows(span.start_X) == [64, 96, 100, 132]
    assert span.start_X.data_ptr() == tiles.start_X.data_ptr() + 8
    everything = (tiles.sequences(), tiles.parts(), tiles.slab(0, tiles.num_parts))
    assert [(x.num_tiles, x.num_tokens, x.num_runs) for x in everything] == [(9, 203, 4), (9, 203, 10), (9, 203, 10)]
    assert all(isinstance(x, Span) for x in everything)


def test_tables_are_remembered() -> None:
    """The same sequences have the same table."""
    assert table([5, 6]) is table([5, 6])
    assert table([5, 6]) is not table([6, 5])


@pytest.mark.parametrize("checkpoints", [(0,), (12,), (5, 5), (7, 3)])
def test_checkpoints_lie_behind_tokens(checkpoints: tuple[int, ...]) -> None:
    """Positions out of range, twice, or out of order are named."""
    with pytest.raises(ValueError, match=r"checkpoints: token positions must rise strictly within 1\.\.11"):
        table([5, 6], checkpoints=checkpoints)


@pytest.mark.parametrize("chunk", [0, 8, 24, 64])
def test_tiles_have_16_or_32_tokens(chunk: int) -> None:
    """Kernels would give NaN for 64 without a word."""
    with pytest.raises(
        ValueError, match=f"CHUNK of ops/kda/tiles.py.*: kernels take tiles of 16 or 32 tokens, not {chunk}"
    ):
        table([100], chunk=chunk)
