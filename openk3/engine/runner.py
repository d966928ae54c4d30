"""Runner: one pass of the model over the works of a step, in the page memory of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import Tensor

from openk3.engine.hybrid_cache import HybridCache
from openk3.engine.job import Job, Work
from openk3.engine.page_memory import PageMemory
from openk3.engine.page_plans import RequestCache
from openk3.engine.paged_cache import PagedCache, Span
from openk3.engine.request import Token
from openk3.engine.sampler import best
from openk3.inputs.packed import MediaItem
from openk3.model.k3 import K3
from openk3.ops.cross_entropy import token_logprobs

SCORED_ROWS = 256  # whose logits exist at once


class Results(NamedTuple):
    """What a pass is for: logits [N, V] behind the last known token of N jobs, and scored tokens of prompts."""

    logits_NV: Tensor
    jobs: list[Job]
    scored: dict[Job, list[Token]]


class Runner:
    """Owns the tensors of the pages that `books` counts. Whoever runs a pass with it looks after errors."""

    def __init__(self, model: K3, books: HybridCache) -> None:
        self.model = model
        self.books = books
        self.device = model.embed.weight.device
        self.memory = PageMemory(books.config, model.config, model.embed.weight.dtype, self.device)
        self.cache = PagedCache(self.memory, model.config, self.device)

    @torch.no_grad()
    def prepare(self, work: Work) -> None:
        """Read the images that a work reaches into, and drop those behind it. Raises ValueError on bad ones."""
        job = work.job
        for n, (start, count, _) in enumerate(job.prompt.spans):
            if start < work.end and work.start < start + count:
                if n not in job.features:
                    image = cast(MediaItem, job.prompt.images[n])
                    pixels = image.pixels_N3PP.to(self.device)
                    job.features[n] = self.model.image_features([MediaItem(pixels, image.grid_thw)])
            else:
                job.features.pop(n, None)

    @torch.no_grad()
    def run(self, works: Sequence[Work]) -> Results:
        """Carry out plans, run the pass, enter it in the books, leave checkpoints where they belong.

        If it raises, states of its jobs may have moved on without the books: every one of them must start again.
        """
        for work in works:
            self._land(work)
        batch = self.cache.bind([Span(_held(work), work.start, work.num_tokens) for work in works])
        h_TD = self.model.backbone(self._inputs(works), batch.cu_seqlens, self.cache)
        results = self._results(h_TD, works)
        for work in works:
            self.books.computed(_held(work), work.end)
            self._land(work)
        return results

    def _land(self, work: Work) -> None:
        """Make the copies that a job's start or checkpoint asks for."""
        held = _held(work)
        if held.plan is not None:
            self.memory.carry_out(held.plan)
            self.books.landed(held)

    def _inputs(self, works: Sequence[Work]) -> Tensor:
        """x_TD of all works: embedded tokens, and features where images are."""
        ids = [token for job, start, end in works for token in job.token_ids[start:end]]
        x_TD = self.model.embed(torch.tensor(ids, device=self.device))
        row = 0
        for job, start, end in works:
            for n, features_TD in job.features.items():
                first, count, _ = job.prompt.spans[n]
                inside = slice(max(first, start), min(first + count, end))
                rows = slice(row + inside.start - start, row + inside.stop - start)
                x_TD[rows] = features_TD[inside.start - first : inside.stop - first]
            row += end - start
        return x_TD

    def _results(self, h_TD: Tensor, works: Sequence[Work]) -> Results:
        ends = accumulate(work.num_tokens for work in works)
        last = [(end - 1, work.job) for end, work in zip(ends, works) if work.samples]
        rows = torch.tensor([row for row, _ in last], dtype=torch.int64, device=self.device)
        scored, row = {}, 0
        for work in works:
            if work.job.request.params.prompt_logprobs is not None:
                scored[work.job] = self._score(h_TD[row : row + work.num_tokens], work)
            row += work.num_tokens
        return Results(self.model.logits(h_TD[rows]), [job for _, job in last], scored)

    def _score(self, h_TD: Tensor, work: Work) -> list[Token]:
        """The prompt's tokens that follow this work's, and whose log-probability is not known yet."""
        job, scored = work.job, list[Token]()
        first, last = max(work.start, job.num_scored - 1), min(work.end, job.num_prompt - 1)
        alternatives = job.request.params.prompt_logprobs or 0
        for start in range(first, last, SCORED_ROWS):
            end = min(start + SCORED_ROWS, last)
            normed_TD = self.model.norm(h_TD[start - work.start : end - work.start])
            ids = job.token_ids[start + 1 : end + 1]
            ids_T = torch.tensor(ids, device=self.device)
            logprob_T, _ = token_logprobs(normed_TD, self.model.lm_head.weight, ids_T)
            tops = best(self.model.lm_head(normed_TD), alternatives) if alternatives else [()] * len(ids)
            scored += map(Token, ids, logprob_T.tolist(), tops)
        return scored


def _held(work: Work) -> RequestCache:
    assert work.job.cache is not None
    return work.job.cache
