"""Where the tokens of packed sequences go when they are cut into chunks and scanned side by side."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkPlan:
    """Chunks of all sequences, ordered by chunk number and inside one number by falling sequence length.

    So the chunks of one scan step lie together, and the sequences that go on are a prefix of those that were there.
    Rows are chunk-major token slots, M chunks of `chunk` rows; the slots behind a sequence's last token stay zero.
    """

    chunk: int
    active: tuple[int, ...]  # sequences that have a chunk number 0, 1, 2, ...
    order_N: Tensor | None  # sequences by falling length; None if they already are
    rank_N: Tensor | None  # the inverse of order_N
    rows_T: Tensor | None  # row of each token; None if row t is token t and no row is empty

    @property
    def num_chunks(self) -> int:
        """M, the number of chunks of all sequences together."""
        return sum(self.active)

    def spread(self, x_T: Tensor) -> Tensor:
        """Put tokens [T, ...] into their rows: [M, chunk, ...], zeros where there is no token."""
        if self.rows_T is None:
            rows = x_T.contiguous()
        else:
            rows = x_T.new_zeros(self.num_chunks * self.chunk, *x_T.shape[1:])
            rows.index_copy_(0, self.rows_T, x_T)
        return rows.view(self.num_chunks, self.chunk, *x_T.shape[1:])

    def collect(self, x_MC: Tensor) -> Tensor:
        """Take tokens [T, ...] back out of rows [M, chunk, ...]."""
        rows = x_MC.flatten(0, 1)
        return rows if self.rows_T is None else rows.index_select(0, self.rows_T)


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
    rows_T = (first[position_T // chunk] + rank_N[sequence_T]) * chunk + position_T % chunk
    in_order = torch.equal(order_N, torch.arange(len(order_N)))
    in_place = len(rows_T) == int(first[-1]) * chunk and torch.equal(rows_T, torch.arange(len(rows_T)))
    return ChunkPlan(
        chunk,
        tuple(active.tolist()),
        None if in_order else order_N.to(device),
        None if in_order else rank_N.to(device),
        None if in_place else rows_T.to(device),
    )
