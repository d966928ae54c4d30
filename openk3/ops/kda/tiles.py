"""The tile table of the KDA kernels: where every tile of at most 32 tokens lies, and which tiles belong together.

A tile never crosses the border of a sequence or a checkpoint. A part is a run of consecutive tiles of one sequence: the
piece that one program scans when a sequence is split, and the piece whose entering state the backward pass starts from.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

import torch
from torch import Tensor

from openk3.ops.device_tables import device_table, sent
from openk3.ops.sequences import shown

CHUNK = 32  # tokens of a tile in all kernels; 16 is possible too


@dataclass(frozen=True)
class Span:
    """Consecutive tiles as one launch sees them: X tiles in P runs, each scanned from its own entering state.

    Rows of workspaces are counted from the span's first tile (`tile_low`), rows of its per-token workspaces from its
    first token (`token_low`).
    """

    start_X: Tensor  # int32: first token of each tile, counted from the first of all tokens
    length_X: Tensor  # int32: tokens of each tile, 1 to chunk
    mark_X: Tensor  # int32: row in which the state behind the tile is saved, or -1
    first_P: Tensor  # int32 [P + 1]: first tile of each run, counted from the first of all tiles
    token_P: Tensor  # int32 [P + 1]: first token of each run
    even: bool  # all tiles of a run but its last one are full
    tile_low: int
    token_low: int
    num_tokens: int
    chunk: int

    @property
    def num_tiles(self) -> int:
        """X."""
        return self.start_X.shape[0]

    @property
    def num_runs(self) -> int:
        """P."""
        return self.first_P.shape[0] - 1


@dataclass(frozen=True)
class Tiles:
    """All tiles of N packed sequences, in parts; built by `tile_table` and never changed.

    The scan over whole sequences saves `num_saved` states: row p < P is the state entering part p (rows of parts that
    begin a sequence are left alone: their state is the initial one), and checkpoint m lies in row `checkpoint_rows[m]`.
    """

    chunk: int
    bounds: tuple[int, ...]  # of the sequences in tokens
    part_first: tuple[int, ...]  # first tile of each part, and the number of tiles
    part_bounds: tuple[int, ...]  # first token of each part, and the number of tokens
    sequence_parts: tuple[int, ...]  # first part of each sequence, and the number of parts
    checkpoint_rows: tuple[int, ...]
    num_saved: int
    even: bool  # no checkpoint cuts a tile short
    start_X: Tensor
    length_X: Tensor
    mark_X: Tensor
    first_N: Tensor  # int32 [N + 1]: first tile of each sequence
    first_P: Tensor  # int32 [P + 1]
    token_N: Tensor  # int32 [N + 1]: bounds on the device
    token_P: Tensor  # int32 [P + 1]: part_bounds on the device
    parts_N: Tensor  # int32 [N + 1]: sequence_parts on the device
    first_part_N: Tensor  # int64 [N]: first part of each sequence
    last_part_N: Tensor  # int64 [N]: last part of each sequence
    spans: dict[tuple[int, int], Span] = field(default_factory=dict, compare=False, repr=False)  # slabs asked for

    @property
    def num_tiles(self) -> int:
        """X."""
        return self.part_first[-1]

    @property
    def num_parts(self) -> int:
        """P; an empty sequence has one empty part."""
        return len(self.part_first) - 1

    @property
    def num_sequences(self) -> int:
        """N."""
        return len(self.bounds) - 1

    def sequences_of(self, low: int, high: int) -> tuple[int, int]:
        """First of the sequences that parts low up to, not including, high belong to, and the one behind the last."""
        return bisect_right(self.sequence_parts, low) - 1, bisect_left(self.sequence_parts, high)

    def sequences(self) -> Span:
        """Everything, one run for each sequence."""
        return self._all(self.first_N, self.token_N)

    def parts(self) -> Span:
        """Everything, one run for each part."""
        return self._all(self.first_P, self.token_P)

    def slab(self, low: int, high: int) -> Span:
        """Parts low up to, not including, high: one run for each. Remembered."""
        known = self.spans.get((low, high))
        if known is not None:
            return known
        tiles = slice(self.part_first[low], self.part_first[high])
        span = self.spans[low, high] = Span(
            start_X=self.start_X[tiles],
            length_X=self.length_X[tiles],
            mark_X=self.mark_X[tiles],
            first_P=self.first_P[low : high + 1],
            token_P=self.token_P[low : high + 1],
            even=self.even,
            tile_low=tiles.start,
            token_low=self.part_bounds[low],
            num_tokens=self.part_bounds[high] - self.part_bounds[low],
            chunk=self.chunk,
        )
        return span

    def _all(self, first: Tensor, token: Tensor) -> Span:
        return Span(
            start_X=self.start_X,
            length_X=self.length_X,
            mark_X=self.mark_X,
            first_P=first,
            token_P=token,
            even=self.even,
            tile_low=0,
            token_low=0,
            num_tokens=self.bounds[-1],
            chunk=self.chunk,
        )


@device_table(64)
def tile_table(
    bounds: tuple[int, ...],
    device: torch.device,
    *,
    checkpoints: tuple[int, ...] = (),
    part_tiles: int | None = None,
    chunk: int = CHUNK,
) -> Tiles:
    """Tiles of the sequences [bounds[n], bounds[n + 1]), cut at the checkpoints, in parts of at most `part_tiles`.

    A checkpoint p is the state of the sequence of token p - 1 behind that token. Parts of one sequence are as equal as
    they can be; None makes every sequence one part. Remembered: every caller of one plan shares the tensors.
    Raises ValueError unless the checkpoints rise strictly from 1 or more to at most the number of tokens, and for tiles
    of other than 16 or 32 tokens: with more, 2^G leaves the range of the formats.
    """
    if chunk not in (16, 32):
        raise ValueError(
            f"chunk (default: CHUNK of ops/kda/tiles.py): kernels take tiles of 16 or 32 tokens, not {chunk}"
        )
    if any(a >= b for a, b in zip((0, *checkpoints), (*checkpoints, bounds[-1] + 1))):
        raise ValueError(
            f"checkpoints: token positions must rise strictly within 1..{bounds[-1]}; got {shown(checkpoints)}"
        )
    bounds_N = torch.tensor(bounds)
    edges_E = torch.unique(torch.cat([bounds_N, torch.tensor(checkpoints, dtype=torch.int64)]))  # sorted
    lengths = edges_E.diff()
    counts = (lengths + chunk - 1) // chunk
    tiles_E = _running(counts)
    num_tiles = int(tiles_E[-1])
    piece_X = torch.repeat_interleave(torch.arange(len(counts)), counts)
    start_X = edges_E[piece_X] + (torch.arange(num_tiles) - tiles_E[piece_X]) * chunk
    length_X = torch.minimum(edges_E[1:][piece_X] - start_X, torch.tensor(chunk))
    first_N = tiles_E[torch.searchsorted(edges_E, bounds_N)]
    first_P, parts_N = _parts(first_N, part_tiles)
    mark_X, rows = _marks(first_P, parts_N, tiles_E[torch.searchsorted(edges_E, torch.tensor(checkpoints))], num_tiles)
    token_P = torch.cat([start_X, bounds_N[-1:]])[first_P]
    host = [start_X, length_X, mark_X, first_N, first_P, bounds_N, token_P, parts_N]
    ints = sent(torch.cat(host).to(torch.int32), device)  # one copy to the device
    start, length, mark, first, part, token, part_token, of = ints.split([len(x) for x in host])
    ends = sent(torch.stack([parts_N[:-1], parts_N[1:] - 1]), device)
    return Tiles(
        chunk=chunk,
        bounds=bounds,
        part_first=tuple(first_P.tolist()),
        part_bounds=tuple(token_P.tolist()),
        sequence_parts=tuple(parts_N.tolist()),
        checkpoint_rows=rows,
        num_saved=max([len(first_P) - 1, *(row + 1 for row in rows)]),
        even=set(checkpoints) <= set(bounds),
        start_X=start,
        length_X=length,
        mark_X=mark,
        first_N=first,
        first_P=part,
        token_N=token,
        token_P=part_token,
        parts_N=of,
        first_part_N=ends[0],
        last_part_N=ends[1],
    )


def _running(counts: Tensor) -> Tensor:
    """Sum of all counts before each, and of all."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _parts(first_N: Tensor, part_tiles: int | None) -> tuple[Tensor, Tensor]:
    """First tile of each part [P + 1], and first part of each sequence [N + 1]."""
    counts_N = first_N.diff()
    if part_tiles is None:
        return first_N, torch.arange(len(first_N))
    pieces_N = ((counts_N + part_tiles - 1) // part_tiles).clamp(min=1)
    parts_N = _running(pieces_N)
    sequence_P = torch.repeat_interleave(torch.arange(len(pieces_N)), pieces_N)
    inside_P = torch.arange(int(parts_N[-1])) - parts_N[sequence_P]
    first_P = first_N[sequence_P] + inside_P * counts_N[sequence_P] // pieces_N[sequence_P]
    return torch.cat([first_P, first_N[-1:]]), parts_N


def _marks(
    first_P: Tensor, parts_N: Tensor, checkpoint_tiles: Tensor, num_tiles: int
) -> tuple[Tensor, tuple[int, ...]]:
    """Row in which the state behind each tile is saved [X], and the row of each checkpoint."""
    num_parts = len(first_P) - 1
    inner = torch.ones(num_parts, dtype=torch.bool)
    inner[parts_N[:-1]] = False
    rows_P = torch.arange(num_parts)[inner]
    mark_X = torch.full((num_tiles,), -1)
    mark_X[first_P[:-1][inner] - 1] = rows_P
    free = num_parts
    rows: list[int] = []
    for tile in checkpoint_tiles.tolist():
        if mark_X[tile - 1] < 0:
            mark_X[tile - 1] = free
            free += 1
        rows.append(int(mark_X[tile - 1]))
    return mark_X, tuple(rows)
