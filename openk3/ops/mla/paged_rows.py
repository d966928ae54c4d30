"""PagedRows: cached latents of requests that lie in pages, as the sequence of tensors that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import torch
from torch import Tensor

from openk3.ops.device_tables import sent


@dataclass(frozen=True)
class PageTables:
    """Where N requests' tokens lie, the same in every layer: token t of request n in page tables[n][t // page_tokens].

    Tables may go on behind what the lengths need.
    """

    tables: tuple[Sequence[int], ...]
    lengths: tuple[int, ...]
    page_tokens: int
    device: torch.device

    def part(self, which: slice) -> PageTables:
        """Of some of the requests; remembered, because every layer of a pass asks again."""
        key = which.indices(len(self.lengths))
        if key not in self._parts:
            self._parts[key] = PageTables(self.tables[which], self.lengths[which], self.page_tokens, self.device)
        return self._parts[key]

    @cached_property
    def page_NP(self) -> Tensor:
        """The tables on the device, as wide as the longest request needs, with page 0 behind the others' ends."""
        counts = [-(-length // self.page_tokens) for length in self.lengths]
        width = max([1, *counts])
        rows = [[*table[:count], *[0] * (width - count)] for table, count in zip(self.tables, counts)]
        return sent(torch.tensor(rows, dtype=torch.int32).view(-1, width), self.device)

    @cached_property
    def length_N(self) -> Tensor:
        """The lengths on the device, int32."""
        return sent(torch.tensor(self.lengths, dtype=torch.int32), self.device)

    @cached_property
    def _parts(self) -> dict[tuple[int, int, int], PageTables]:
        return {}


class PagedRows(Sequence[Tensor]):
    """One layer's latents [length, C+R] of each request: made when asked for, a view where one page holds them."""

    def __init__(self, latent_PTC: Tensor, where: PageTables) -> None:
        self.latent_PTC = latent_PTC
        self.where = where

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each request."""
        return self.where.lengths

    def __len__(self) -> int:
        return len(self.where.lengths)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> PagedRows: ...

    def __getitem__(self, index: int | slice) -> Tensor | PagedRows:
        if isinstance(index, slice):
            return PagedRows(self.latent_PTC, self.where.part(index))
        length, size = self.where.lengths[index], self.where.page_tokens
        count = -(-length // size)
        if count <= 1:
            return self.latent_PTC[self.where.tables[index][0] if count else 0, :length]
        return self.latent_PTC.index_select(0, self.where.page_NP[index, :count]).flatten(0, 1)[:length]
