"""PagedCache: K3 in pages gives what K3 gives without a cache, for any mix of requests, from memory full of NaN."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from engine_model import MEDIA, cache_config, engine_config, engine_model, picture, prompt
from torch import Tensor

from openk3 import Packed
from openk3.engine.hybrid_cache import HybridCache
from openk3.engine.page_memory import PageMemory
from openk3.engine.page_plans import RequestCache
from openk3.engine.paged_cache import PagedCache, Span
from openk3.model.cache import Sequences

MODEL = engine_model()


class Pages:
    """Books, memory and cache of a few requests, driven by hand; free pages are always NaN."""

    def __init__(self, **options: int) -> None:
        self.books = HybridCache(cache_config(**options))
        self.memory = PageMemory(self.books.config, engine_config(), torch.float64)
        self.cache = PagedCache(self.memory, engine_config())
        self.poison()

    def start(self, ids: list[int]) -> RequestCache:
        """With its first copies made."""
        request = self.books.start(self.books.name(ids))
        assert request.plan is not None
        self.memory.carry_out(request.plan)
        self.books.landed(request)
        return request

    def run(self, requests: Sequence[RequestCache], pieces: Sequence[list[int]]) -> list[Tensor]:
        """One pass; logits of each request's piece, and checkpoints where they belong."""
        spans = [Span(r, r.num_computed, len(piece)) for r, piece in zip(requests, pieces)]
        for request, start, count in spans:
            self.books.reserve(request, start + count)
        self.cache.bind(spans)
        logits = MODEL(Packed.join(pieces), self.cache)
        for request, start, count in spans:
            plan = self.books.computed(request, start + count)
            if plan is not None:
                self.memory.carry_out(plan)
                self.books.landed(request)
        self.poison()
        return list(logits.split([span.num_tokens for span in spans]))

    def poison(self) -> None:
        """Whatever is free."""
        self.books.check()
        pages = range(self.books.config.num_pages)
        self.memory.poison([page for page in pages if self.books.pool.kind(page) is None])


def close(got: Tensor, want: Tensor) -> None:
    """Up to rounding in float64."""
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def whole(ids: list[int]) -> Tensor:
    """Logits without a cache."""
    return MODEL(Packed.join([ids]))


def test_unequal_requests_in_one_pass() -> None:
    """Prompts, pieces, single tokens and nothing at all, over page ends, for three requests that share no page."""
    rows = [prompt(30, 1), prompt(41, 2), prompt(23, 3)]
    pages = Pages()
    requests = [pages.start(row) for row in rows]
    done, wants = [0, 0, 0], [whole(row) for row in rows]
    for counts in ((9, 20, 0), (1, 1, 13), (0, 2, 1), (1, 1, 1), (8, 17, 8), (11, 0, 0)):
        pieces = [row[a : a + n] for row, a, n in zip(rows, done, counts)]
        for got, want, a, n in zip(pages.run(requests, pieces), wants, done, counts):
            close(got, want[a : a + n])
        done = [a + n for a, n in zip(done, counts)]
    assert done == [30, 41, 23]


@pytest.mark.parametrize("shared", [0, 3, 7, 8, 13, 16, 21])
def test_a_hit_continues_from_shared_pages(shared: int) -> None:
    """Whole pages in place, part of one copied, the state from its checkpoint; the first request goes on."""
    first, second = prompt(24, 1), prompt(29, 2)
    second[:shared] = first[:shared]
    pages = Pages(checkpoint_pages=1)
    a = pages.start(first)
    while a.num_computed < 22:
        end = pages.books.checkpoints.next_stop(a, 22)
        pages.run([a], [first[a.num_computed : end]])
    b = pages.start(second)
    assert b.hit_tokens in {shared - shared % 8, shared - shared % 2, 0}
    got = pages.run([b, a], [second[b.hit_tokens :], first[22:]])
    close(got[0], whole(second)[b.hit_tokens :])
    close(got[1], whole(first)[22:])
    c = pages.start([*first, 5])
    assert c.hit_tokens >= 16
    close(pages.run([c], [[*first[c.hit_tokens :], 5]])[0], whole([*first, 5])[c.hit_tokens :])


def test_a_checkpoint_is_never_written() -> None:
    """Its bytes are the same after two requests have run on from it."""
    first, pages = prompt(17, 1), Pages(checkpoint_pages=0)
    a = pages.start(first)
    while a.num_computed < 17:
        end = pages.books.checkpoints.next_stop(a, 17)
        pages.run([a], [first[a.num_computed : end]])
    held = pages.books.prefixes._checkpoints[a.chain.keys[7]].pages
    before = pages.memory._words_PRB[list(held)].clone()
    for own in (7, 8):
        b = pages.start([*first, own, own])
        assert b.hit_tokens == 16 and not set(b.states) & set(held)
        pages.run([b], [[first[16], own, own]])
    assert torch.equal(pages.memory._words_PRB[list(held)], before)


def test_images_in_pages() -> None:
    """K3.forward with a batch that holds images continues paged requests too."""
    ids = [*prompt(3), MEDIA, *prompt(4, 1)]
    packed = Packed.join([ids], [picture(0)]).expand(MEDIA)
    pages = Pages()
    request = pages.start(packed.token_ids_T.tolist())
    pages.books.reserve(request, packed.num_tokens)
    pages.cache.bind([Span(request, 0, packed.num_tokens)])
    close(MODEL(packed, pages.cache), MODEL(packed))


def test_the_draft_layer_has_its_own_row() -> None:
    """`K3.draft` continues the MTP layer's latents of each request, in pages, as without a cache."""
    rows = [prompt(12, 1), prompt(9, 2)]
    pages = Pages()
    requests = [pages.start(row) for row in rows]
    h_TD = MODEL.hidden(Packed.join([row[:-1] for row in rows]))
    after = torch.tensor([*rows[0][1:], *rows[1][1:]])
    _, want = MODEL.draft(h_TD, after, torch.tensor([0, 11, 19], dtype=torch.int32))
    for request, row in zip(requests, rows):
        pages.books.reserve(request, len(row))
    got, done = [], 0
    for count in (5, 3):
        batch = pages.cache.bind([Span(request, done, count) for request in requests])
        rows_T = torch.tensor([*range(done, done + count), *range(11 + done, 11 + done + count)])
        _, logits = MODEL.draft(h_TD[rows_T], after[rows_T], batch.cu_seqlens, pages.cache)
        got.append(logits)
        close(logits, want[rows_T])
        done += count


def test_another_batch_than_the_bound_one_is_refused() -> None:
    """Before anything is written."""
    pages = Pages()
    request = pages.start(prompt(5))
    pages.cache.bind([Span(request, 0, 5)])
    with pytest.raises(ValueError, match=r"cache: bound to \[5\] tokens, the batch has \[4\]"):
        MODEL(Packed.join([prompt(4)]), pages.cache)
    with pytest.raises(ValueError, match="bound to"):
        pages.cache.check(Sequences(torch.tensor([0, 2, 5])))


def test_an_empty_request_reads_nothing() -> None:
    """A sequence of no tokens that has none in the cache."""
    pages = Pages()
    a, b = pages.start(prompt(5)), pages.start(prompt(6, 1))
    close(pages.run([a, b], [[], prompt(6, 1)])[1], whole(prompt(6, 1)))
    close(pages.run([b, a], [[], prompt(5)])[1], whole(prompt(5)))
