"""Where the tokens of packed sequences go when they are cut into chunks and scanned side by side."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.device_tables import device_table


@dataclass(frozen=True)
class Block:
    """A few consecutive steps of the scan: everything but the state is computed block by block, to bound the memory.

    Its rows are the slots of X matrices of `chunk` tokens, one for each chunk and head; slots behind a sequence's last
    token are padding.
    """

    chunk: int
    heads: int
    first_step: int
    counts: tuple[int, ...]  # sequences that take part in each of its steps
    source_R: Tensor  # token * H + head of each row; padding repeats its sequence's last token
    padding_P: Tensor  # rows that are padding

    @property
    def sizes(self) -> list[int]:
        """Matrices in each of its steps: one for every sequence and head."""
        return [count * self.heads for count in self.counts]

    @property
    def steps(self) -> slice:
        """Its steps among those of all blocks."""
        return slice(self.first_step, self.first_step + len(self.counts))

    def spread(self, x_THD: Tensor, *, zero: bool) -> Tensor:
        """Put tokens into rows [X, chunk, D]; padding is zero, or any token of its sequence."""
        rows = x_THD.reshape(-1, x_THD.shape[2]).index_select(0, self.source_R)
        if zero and len(self.padding_P):
            rows.index_fill_(0, self.padding_P, 0)
        return rows.view(-1, self.chunk, x_THD.shape[2])


@dataclass(frozen=True)
class ChunkPlan:
    """Chunks of all sequences, ordered by chunk number and inside one number by falling sequence length.

    So the chunks of one scan step lie together, and the sequences that go on are a prefix of those that were there.
    """

    blocks: tuple[Block, ...]
    order_N: Tensor | None  # sequences by falling length; None if they already are
    rank_N: Tensor | None  # the inverse of order_N
    row_Y: Tensor  # row of each token and head, Y = T * H

    @property
    def sizes(self) -> list[int]:
        """Matrices in each step of the whole scan."""
        return [size for block in self.blocks for size in block.sizes]

    def collect(self, blocks: list[Tensor]) -> Tensor:
        """Take tokens [T, H, D] back out of the rows [X, chunk, D] of each block."""
        rows = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        D = rows.shape[2]
        return rows.reshape(-1, D).index_select(0, self.row_Y).view(-1, self.blocks[0].heads, D)

    def sort(self, x_N: Tensor) -> Tensor:
        """Sequences by falling length."""
        return x_N if self.order_N is None else x_N.index_select(0, self.order_N)

    def unsort(self, x_N: Tensor) -> Tensor:
        """Sequences in the order given, from falling length."""
        return x_N if self.rank_N is None else x_N.index_select(0, self.rank_N)


@device_table(8)
def chunk_plan(bounds: tuple[int, ...], chunk: int, heads: int, block_rows: int, device: torch.device) -> ChunkPlan:
    """Plan for sequences [bounds[n], bounds[n + 1]) in blocks of up to `block_rows` rows, but at least one step.

    Remembered, because all layers of a training step ask for the same one.
    """
    start_N, length_N = torch.tensor(bounds)[:-1], torch.tensor(bounds).diff()
    chunks_N = (length_N + chunk - 1) // chunk
    order_N = torch.argsort(length_N, descending=True, stable=True)
    rank_N = torch.argsort(order_N)
    steps = torch.arange(int(chunks_N.max()) if len(length_N) else 0)
    counts = (chunks_N[None, :] > steps[:, None]).sum(1)
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    sequence_T = torch.repeat_interleave(torch.arange(len(length_N)), length_N)
    position_T = torch.arange(bounds[-1]) - start_N[sequence_T]
    slot_T = (first[position_T // chunk] + rank_N[sequence_T]) * chunk + position_T % chunk
    token_MC = torch.full((int(first[-1]) * chunk,), -1)
    token_MC[slot_T] = torch.arange(bounds[-1])
    row_Y = (slot_T // chunk * heads * chunk + slot_T % chunk)[:, None] + torch.arange(heads) * chunk
    in_order = torch.equal(order_N, torch.arange(len(order_N)))
    blocks = []
    for steps in _groups(counts.tolist(), block_rows // (chunk * heads)):
        start, end = int(first[steps.start]), int(first[steps.stop])
        token = token_MC.view(-1, 1, chunk)[start:end].expand(-1, heads, -1)
        # The tokens of a chunk come before its padding and in order, so the running maximum repeats the last one.
        source_R = (token.cummax(2).values * heads + torch.arange(heads)[:, None]).flatten()
        padding_P = (token.flatten() < 0).nonzero()[:, 0]
        sizes = tuple(counts[steps].tolist())
        where = (steps.start, sizes)
        blocks.append(Block(chunk, heads, *where, source_R.to(device), padding_P.to(device)))
    order, rank = (None, None) if in_order else (order_N.to(device), rank_N.to(device))
    return ChunkPlan(tuple(blocks), order, rank, row_Y.flatten().to(device))


def _groups(counts: list[int], most: int) -> Iterator[slice]:
    """Consecutive steps of together at most `most` chunks, but at least one step."""
    start, size = 0, 0
    for step, count in enumerate(counts):
        if size and size + count > most:
            yield slice(start, step)
            start, size = step, 0
        size += count
    if size:
        yield slice(start, len(counts))
