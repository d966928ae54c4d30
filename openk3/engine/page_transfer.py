"""PageTransfer: bytes of pages in the order in which they are kept outside, out of and into the pages of one memory.

Only what means something is moved: of a whole page the latents of each row, of a checkpoint the state of each KDA layer
(those of a group one after another, see PageMemory) and the first latents of one page. So an entry never carries what a
page held before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openk3.config.model import ModelConfig
from openk3.config.serve import PageShape
from openk3.engine.page_memory import PageMemory
from openk3.engine.page_plans import CopyPlan

WORD = 8  # bytes


class PageTransfer:
    """Copies between pages and flat CPU buffers of whole words; every call is over when it returns."""

    def __init__(self, memory: PageMemory, model: ModelConfig) -> None:
        self._memory = memory
        self._token_bytes = model.text.latent_dim * memory.dtype.itemsize
        self._state_words = memory.state_words
        self._num_kda = len(model.text.linear_attn_config.kda_layers)
        self._pinned = memory.words_PRB.device.type == "cuda"

    @property
    def shape(self) -> PageShape:
        """Of the pages."""
        return self._memory.shape

    def buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] in CPU memory, pinned if the pages are on a GPU."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def page_bytes(self) -> int:
        """Of a whole page of latents."""
        return self._memory.shape.layers_per_page * self._latent_words(self._memory.shape.page_tokens) * WORD

    def tail_bytes(self, num_rows: int) -> int:
        """Of a state with the first `num_rows` latents of a page."""
        latents = self._memory.shape.layers_per_page * self._latent_words(num_rows)
        return (self._num_kda * self._state_words + latents) * WORD

    def read_page(self, page: int, out_B: Tensor) -> None:
        """A whole page of latents."""
        self._read([self._whole(page)], out_B)

    def read_tail(self, states: Sequence[int], page: int | None, num_rows: int, out_B: Tensor) -> None:
        """The state in the page of each KDA group, then latents of `page`."""
        self._read(self._tail(states, page, num_rows), out_B)

    def load(self, plan: CopyPlan, header_bytes: int) -> int:
        """Write what a plan brings from outside into its pages; the bytes of it. Entries begin with a header."""
        moved = 0
        for load in plan.page_loads:
            data_B = load.entry.data[header_bytes:]
            self._write([self._whole(load.target)], data_B)
            moved += data_B.nbytes
        if plan.tail_load is not None:
            tail = plan.tail_load
            data_B = tail.entry.data[header_bytes:]
            self._write(self._tail(tail.states, tail.page, tail.num_rows), data_B)
            moved += data_B.nbytes
        return moved

    def _whole(self, page: int) -> tuple[int, int, int]:
        """(page, rows, words of each row) of a whole page of latents."""
        shape = self._memory.shape
        return page, shape.layers_per_page, self._latent_words(shape.page_tokens)

    def _tail(self, states: Sequence[int], page: int | None, num_rows: int) -> list[tuple[int, int, int]]:
        """The same of every piece of a checkpoint; the last group may fill a part of its page's rows only."""
        per_page, pieces = self._memory.shape.layers_per_page, []
        for group, state in enumerate(states):
            pieces.append((state, min(per_page, self._num_kda - group * per_page), self._state_words))
        if num_rows:
            assert page is not None
            pieces.append((page, per_page, self._latent_words(num_rows)))
        return pieces

    def _read(self, pieces: list[tuple[int, int, int]], out_B: Tensor) -> None:
        for (page, rows, words), part_RB in zip(pieces, _parts(pieces, out_B)):
            part_RB.copy_(self._memory.words_PRB[page, :rows, :words])

    def _write(self, pieces: list[tuple[int, int, int]], in_B: Tensor) -> None:
        for (page, rows, words), part_RB in zip(pieces, _parts(pieces, in_B)):
            self._memory.words_PRB[page, :rows, :words] = part_RB.to(self._memory.words_PRB.device)

    def _latent_words(self, num_rows: int) -> int:
        return -(-num_rows * self._token_bytes // WORD)


def _parts(pieces: list[tuple[int, int, int]], flat_B: Tensor) -> list[Tensor]:
    """The buffer's words, cut into [rows, words] for each piece; it has exactly as many as all of them."""
    sizes = [rows * words for _, rows, words in pieces]
    parts = flat_B.view(torch.int64).split(sizes)
    return [part.view(rows, words) for part, (_, rows, words) in zip(parts, pieces)]
