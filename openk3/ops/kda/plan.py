"""Where the tokens of packed sequences go when they are cut into chunks and scanned side by side."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkPlan:
    """Chunks of all sequences, ordered by chunk number and inside one number by falling sequence length.

    So the chunks of one scan step lie together, and the sequences that go on are a prefix of those that were there.
    Rows are the slots of [M chunks, H heads, `chunk` tokens]; slots behind a sequence's last token are padding.
    """

    chunk: int
    heads: int
    active: tuple[int, ...]  # sequences that have a chunk number 0, 1, 2, ...
    order_N: Tensor | None  # sequences by falling length; None if they already are
    rank_N: Tensor | None  # the inverse of order_N
    source_R: Tensor  # token * H + head of each row; padding repeats its sequence's last token
    row_X: Tensor  # row of each token and head, X = T * H
    padding_P: Tensor  # rows that are padding

    @property
    def num_chunks(self) -> int:
        """M, the number of chunks of all sequences together."""
        return sum(self.active)

    def spread(self, x_THD: Tensor, *, zero: bool) -> Tensor:
        """Put tokens into rows [M, H, chunk, D]; padding is zero, or any token of its sequence."""
        rows = x_THD.reshape(-1, x_THD.shape[2]).index_select(0, self.source_R)
        if zero and len(self.padding_P):
            rows.index_fill_(0, self.padding_P, 0)
        return rows.view(self.num_chunks, self.heads, self.chunk, -1)

    def collect(self, x_MHCD: Tensor) -> Tensor:
        """Take tokens [T, H, D] back out of rows."""
        return x_MHCD.view(-1, x_MHCD.shape[3]).index_select(0, self.row_X).view(-1, self.heads, x_MHCD.shape[3])

    def sort(self, x_N: Tensor) -> Tensor:
        """Sequences by falling length."""
        return x_N if self.order_N is None else x_N.index_select(0, self.order_N)

    def unsort(self, x_N: Tensor) -> Tensor:
        """Sequences in the order given, from falling length."""
        return x_N if self.rank_N is None else x_N.index_select(0, self.rank_N)


@lru_cache(maxsize=8)
def chunk_plan(bounds: tuple[int, ...], chunk: int, heads: int, device: torch.device) -> ChunkPlan:
    """Plan for sequences [bounds[n], bounds[n + 1]); remembered, because all layers of a step ask for the same one."""
    start_N, length_N = torch.tensor(bounds)[:-1], torch.tensor(bounds).diff()
    chunks_N = (length_N + chunk - 1) // chunk
    order_N = torch.argsort(length_N, descending=True, stable=True)
    rank_N = torch.argsort(order_N)
    steps = torch.arange(int(chunks_N.max()) if len(length_N) else 0)
    active = (chunks_N[None, :] > steps[:, None]).sum(1)
    first = torch.cat([active.new_zeros(1), active.cumsum(0)])
    sequence_T = torch.repeat_interleave(torch.arange(len(length_N)), length_N)
    position_T = torch.arange(bounds[-1]) - start_N[sequence_T]
    slot_T = (first[position_T // chunk] + rank_N[sequence_T]) * chunk + position_T % chunk
    token_R = torch.full((int(first[-1]) * chunk,), -1)
    token_R[slot_T] = torch.arange(bounds[-1])
    token_R = token_R.view(-1, 1, chunk).expand(-1, heads, -1)
    padding_P = (token_R.flatten() < 0).nonzero()[:, 0]
    # The tokens of a chunk come before its padding and in order, so the running maximum repeats the last one.
    source_R = token_R.cummax(2).values * heads + torch.arange(heads)[:, None]
    row_X = (slot_T // chunk * heads * chunk + slot_T % chunk)[:, None] + torch.arange(heads) * chunk
    in_order = torch.equal(order_N, torch.arange(len(order_N)))
    return ChunkPlan(
        chunk,
        heads,
        tuple(active.tolist()),
        None if in_order else order_N.to(device),
        None if in_order else rank_N.to(device),
        source_R.flatten().to(device),
        row_X.flatten().to(device),
        padding_P.to(device),
    )
