"""HostPages: where the latents of a pass lie, and attention of one query per request over whole pages at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from openk3.engine.paged_cache import Batch

MOST_VALUES = 1 << 20  # of latents that are gathered at once (float32: 4 MiB), unless one request has more


@dataclass(frozen=True)
class _Group:
    """Consecutive requests whose pages are gathered together: X pages of T rows."""

    requests: slice
    page_X: Tensor
    owner_X: Tensor  # the request, counted from the group's first
    count_N: Tensor  # pages of each request
    tail_R: Tensor  # rows of the gathered pages that are nobody's, in the last page of each request
    page_tokens: int

    @classmethod
    def of(cls, first: int, tables: Sequence[Sequence[int]], lengths: Sequence[int], page_tokens: int) -> _Group:
        """Pages of some requests; a table may go on behind what the length needs."""
        counts = [-(-length // page_tokens) for length in lengths]
        pages = [page for table, count in zip(tables, counts) for page in table[:count]]
        tails, end = list[int](), 0
        for count, length in zip(counts, lengths):
            end += count * page_tokens
            tails += range(end - (count * page_tokens - length), end)
        count_N = torch.tensor(counts)
        owner_X = torch.repeat_interleave(count_N)
        last = first + len(counts)
        return cls(
            slice(first, last),
            torch.tensor(pages),
            owner_X,
            count_N,
            torch.tensor(tails, dtype=torch.int64),
            page_tokens,
        )

    @cached_property
    def bias_X1T(self) -> Tensor:
        """-inf at rows that are nobody's."""
        bias = torch.zeros(len(self.page_X), 1, self.page_tokens)
        bias.view(-1)[self.tail_R] = float("-inf")
        return bias

    def attend(self, q_NHC: Tensor, latents_PTC: Tensor, rank: int, scale: float) -> Tensor:
        """Contexts [N, H, C]: softmax inside each page, then over the pages of each request."""
        rows_XTC = latents_PTC.index_select(0, self.page_X)
        if len(self.tail_R):  # what lies there may be no number
            rows_XTC.view(-1, rows_XTC.shape[2]).index_fill_(0, self.tail_R, 0)
        scores_XHT = torch.baddbmm(
            self.bias_X1T.to(q_NHC.dtype), q_NHC.index_select(0, self.owner_X), rows_XTC.mT, alpha=scale
        )
        top_XH = scores_XHT.amax(-1)
        highest_NH = torch.segment_reduce(top_XH, "max", lengths=self.count_N, axis=0, unsafe=True)
        parts_XHT = scores_XHT.sub_(highest_NH.index_select(0, self.owner_X).unsqueeze(-1)).exp_()
        N, H = q_NHC.shape[:2]
        sum_NH = parts_XHT.new_zeros(N, H).index_add_(0, self.owner_X, parts_XHT.sum(-1))
        found_XHC = torch.bmm(parts_XHT, rows_XTC[..., :rank])
        ctx_NHC = found_XHC.new_zeros(N, H, rank).index_add_(0, self.owner_X, found_XHC)
        return ctx_NHC.div_(sum_NH.unsqueeze(-1))


@dataclass(frozen=True)
class HostPages:
    """The pages of a pass's requests, in groups of a bounded size; the same for all layers."""

    groups: tuple[_Group, ...]

    @classmethod
    def of(cls, batch: Batch, width: int) -> HostPages:
        """Groups of as many requests as a gather may hold, with latents of `width` values."""
        lengths = [span.start + span.num_tokens for span in batch.spans]
        tables = [span.cache.pages for span in batch.spans]
        size, groups, first, rows = batch.page_tokens, list[_Group](), 0, 0
        for n, length in enumerate(lengths):
            if n > first and (rows + length) * width > MOST_VALUES:
                groups.append(_Group.of(first, tables[first:n], lengths[first:n], size))
                first, rows = n, 0
            rows += length
        groups.append(_Group.of(first, tables[first:], lengths[first:], size))
        return cls(tuple(groups))

    def attend(self, q_NHC: Tensor, latents_PTC: Tensor, rank: int, scale: float) -> Tensor:
        """Contexts [N, H, rank] of one query per request over all its latents, this pass's included."""
        found = [group.attend(q_NHC[group.requests], latents_PTC, rank, scale) for group in self.groups]
        return found[0] if len(found) == 1 else torch.cat(found)
