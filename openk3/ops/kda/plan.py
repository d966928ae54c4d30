"""Where the tokens of packed sequences go when they are cut into chunks and scanned side by side."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkPlan:
    """Chunks of all sequences, ordered by chunk number and inside one number by falling sequence length.

    So the chunks of one scan step lie together, and the sequences that go on are a prefix of those that were there.
    Rows are token slots, `chunk` for each of the M chunks; slots behind a sequence's last token are padding.
    """

    chunk: int
    active: tuple[int, ...]  # sequences that have a chunk number 0, 1, 2, ...
    order_N: Tensor | None  # sequences by falling length; None if they already are
    rank_N: Tensor | None  # the inverse of order_N
    token_R: Tensor | None  # token of each row, padding repeats the sequence's last; None if row t is token t
    row_T: Tensor | None  # row of each token
    padding_P: Tensor  # rows that are padding

    @property
    def num_chunks(self) -> int:
        """M, the number of chunks of all sequences together."""
        return sum(self.active)

    def spread(self, x_T: Tensor, *, zero: bool) -> Tensor:
        """Put tokens [T, ...] into rows [M, chunk, ...]; padding is zero, or any token of its sequence."""
        rows = x_T.contiguous() if self.token_R is None else x_T.index_select(0, self.token_R)
        if zero and len(self.padding_P):
            rows.index_fill_(0, self.padding_P, 0)
        return rows.view(self.num_chunks, self.chunk, *x_T.shape[1:])

    def collect(self, x_MC: Tensor) -> Tensor:
        """Take tokens [T, ...] back out of rows [M, chunk, ...]."""
        rows = x_MC.flatten(0, 1)
        return rows if self.row_T is None else rows.index_select(0, self.row_T)

    def sort(self, x_N: Tensor) -> Tensor:
        """Sequences by falling length."""
        return x_N if self.order_N is None else x_N.index_select(0, self.order_N)

    def unsort(self, x_N: Tensor) -> Tensor:
        """Sequences in the order given, from falling length."""
        return x_N if self.rank_N is None else x_N.index_select(0, self.rank_N)


@lru_cache(maxsize=64)
def chunk_plan(bounds: tuple[int, ...], chunk: int, device: torch.device) -> ChunkPlan:
    """Plan for sequences [bounds[n], bounds[n + 1]); remembered, because all layers of a step ask for the same one."""
    bounds_N1 = torch.tensor(bounds)
    lengths_N = bounds_N1.diff()
    chunks_N = (lengths_N + chunk - 1) // chunk
    order_N = torch.argsort(lengths_N, descending=True, stable=True)
    rank_N = torch.argsort(order_N)
    most = int(chunks_N.max()) if len(lengths_N) else 0
    active = (chunks_N[None, :] > torch.arange(most)[:, None]).sum(1)
    first = torch.cat([active.new_zeros(1), active.cumsum(0)])
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths_N)), lengths_N)
    position_T = torch.arange(bounds[-1]) - bounds_N1[sequence_T]
    row_T = (first[position_T // chunk] + rank_N[sequence_T]) * chunk + position_T % chunk
    num_rows = int(first[-1]) * chunk
    token_R = torch.full((num_rows,), -1)
    token_R[row_T] = torch.arange(bounds[-1])
    padding_P = (token_R < 0).nonzero()[:, 0]
    # A row before the padding of its chunk always holds a token, so a running maximum reaches only that chunk's own.
    token_R = token_R.view(-1, chunk).cummax(1).values.flatten()
    in_order = torch.equal(order_N, torch.arange(len(order_N)))
    in_place = torch.equal(row_T, torch.arange(num_rows))
    return ChunkPlan(
        chunk,
        tuple(active.tolist()),
        None if in_order else order_N.to(device),
        None if in_order else rank_N.to(device),
        None if in_place else token_R.to(device),
        None if in_place else row_T.to(device),
        padding_P.to(device),
    )
