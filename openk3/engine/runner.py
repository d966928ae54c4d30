"""Runner: one pass of the model over the works of a step, in the page memory of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import Tensor

from openk3.engine.decode_steps import DecodeSteps
from openk3.engine.draft import Draft, Passed
from openk3.engine.host_step import HostSteps
from openk3.engine.hybrid_cache import HybridCache
from openk3.engine.job import Job, Work, held
from openk3.engine.outer_tier import OuterTier
from openk3.engine.page_memory import PageMemory
from openk3.engine.paged_cache import PagedCache, PagedStates, Span, bounds_of
from openk3.engine.request import Token
from openk3.engine.sampler import best
from openk3.inputs.packed import MediaItem
from openk3.model.cache import Sequences
from openk3.model.k3 import K3
from openk3.model.kda import KimiDeltaAttention
from openk3.model.layer import Layer
from openk3.ops.cross_entropy import token_logprobs
from openk3.ops.device_tables import sent

SCORED_ROWS = 256  # whose logits exist at once


class Results(NamedTuple):
    """What a pass is for: logits [N, V] behind last known tokens and guesses, and scored tokens of prompts."""

    logits_NV: Tensor
    works: list[Work]  # those that have such rows: one each, and one for each guess
    scored: dict[Job, list[Token]]
    carry_TD: Tensor | None  # see Draft.observe


class Runner:
    """Owns the tensors of the pages that `books` counts. Whoever runs a pass with it looks after errors."""

    def __init__(self, model: K3, books: HybridCache) -> None:
        self.books = books
        self.device = model.embed.weight.device
        self.memory = PageMemory(books.config, model.config, model.embed.weight.dtype, self.device, num_spare=1)
        self.cache = PagedCache(self.memory, model.config, self.device)
        self.draft: Draft | None = None
        self.tier: OuterTier | None = None
        self.decode: DecodeSteps | None = None
        self._last: Sequence[Work] = ()  # of the newest pass, those that the cache is bound to
        self.model = model

    @property
    def model(self) -> K3:
        """Whose weights are in use."""
        return self._model

    @model.setter
    def model(self, model: K3) -> None:
        self._model, self._steps = model, HostSteps(model, self.cache)
        if self.decode is not None or self.device.type == "cuda":
            self.use_decode_steps(None if self.decode is None else self.decode.graphs)

    def use_decode_steps(self, graphs: bool | None = None) -> None:
        """Take passes of one token each as DecodeSteps; on a GPU they are from the start."""
        config = self.books.config
        pages = config.pages.latent_pages(self.books.largest_request + 1)
        self.decode = DecodeSteps(
            self._model, self.memory, most=config.max_requests, pages=pages, nobody=config.num_pages, graphs=graphs
        )

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

        Works are in their order (`Work.order`). Those with guesses are entered by `settle`. If it raises, states of its
        jobs may have moved on without the books: every one of them must start again.
        """
        self._land(works)
        stepped, rest = list[Work](), list[Work]()
        takes = self.decode.takes if self.decode is not None and self.decode.now() else None
        for work in works:
            (stepped if takes is not None and takes(work) else rest).append(work)
        self._last = rest
        found = [part(group) for part, group in ((self._step, stepped), (self._pass, rest)) if group]
        if len(found) == 1:
            return found[0]
        first, second = found
        logits_NV = torch.cat((first.logits_NV, second.logits_NV))
        return Results(logits_NV, first.works + second.works, first.scored | second.scored, second.carry_TD)

    def _step(self, works: list[Work]) -> Results:
        """A pass, or the part of one, with one token for each work."""
        assert self.decode is not None
        h_ND, logits_NV = self.decode.run(works)
        carry_ND = None
        if self.draft is not None:
            self.cache.bind([Span(held(work), work.start, 1) for work in works])
            ids_N = sent(torch.tensor([work.token_ids[0] for work in works]), self.device)
            carry_ND = self.draft.observe(Passed(self.cache, self.model.embed(ids_N), h_ND))
        self._enter(works, {n: work.end for n, work in enumerate(works)}, carry_ND)
        last = [n for n, work in enumerate(works) if work.samples]
        if len(last) < len(works):
            logits_NV = logits_NV[sent(torch.tensor(last, dtype=torch.int64), self.device)]
        return Results(logits_NV, [works[n] for n in last], {}, None)

    def _pass(self, works: Sequence[Work]) -> Results:
        """A pass, or the part of one, by the model's modules or the step of a CPU."""
        drafted = [n for n, work in enumerate(works) if work.num_drafts]
        spans = [Span(held(work), work.start, work.num_tokens) for work in works]
        batch = self.cache.bind(spans, slice(drafted[0], drafted[-1] + 1) if drafted else None)
        x_TD, draft = _inputs(self.model, works), self.draft
        step = None if draft is not None or drafted else self._steps.now()
        if step is not None and step.fits(x_TD):
            h_TD = step(x_TD)
        else:
            h_TD = self.model.backbone(x_TD, batch.cu_seqlens, self.cache, None if draft is None else draft.trace)
        carry_TD = None if draft is None else draft.observe(Passed(self.cache, x_TD, h_TD))
        results = _results(self.model, h_TD, works, carry_TD)
        self._enter(works, {n: work.end for n, work in enumerate(works) if not work.num_drafts}, carry_TD)
        return results

    @torch.no_grad()
    def settle(self, carry_TD: Tensor | None) -> None:
        """Behind `run`, when jobs have taken over what was right of their works' guesses: move their states on.

        Only the accepted tokens are replayed, from inputs that the pass has kept, in pieces that end where a checkpoint
        belongs. A job that has got no token stays where it was. The same holds if it raises as for `run`.
        """
        works = self._last  # in the places that the cache knows; those of single tokens are there already
        left = {n: work for n, work in enumerate(works) if work.num_drafts and work.job.num_tokens > work.num_known}
        while left:
            stops = self.books.checkpoints.next_stop
            ends = {n: stops(held(work), work.job.num_tokens - 1) for n, work in left.items()}
            self._replay(works, ends)
            self._enter(works, ends, carry_TD)
            left = {n: work for n, work in left.items() if work.job.num_left > 1}

    def _replay(self, works: Sequence[Work], ends: dict[int, int]) -> None:
        """Move states of works with guesses from what is computed to these ends."""
        first = next(n for n, work in enumerate(works) if work.num_drafts)
        begins = list(accumulate((work.num_tokens for work in works[first:]), initial=0))
        rows, bounds = list[int](), [0]
        for n, end in ends.items():
            before = begins[n - first] - works[n].start
            rows += range(before + works[n].job.num_computed, before + end)
            bounds.append(len(rows))
        rows_T = sent(torch.tensor(rows), self.device)
        sequences = Sequences(bounds_of(bounds, self.device))
        for layer, states in zip(self.model.layers, self.cache.layers):
            if isinstance(states, PagedStates):
                mixer = cast(KimiDeltaAttention, cast(Layer, layer).mixer)
                states.replay(mixer.replay, list(ends), rows_T, sequences)

    def _enter(self, works: Sequence[Work], ends: dict[int, int], carry_TD: Tensor | None) -> None:
        """States of some works have come to these ends: carry, books, checkpoints."""
        if carry_TD is not None and ends:
            begins = list(accumulate((work.num_tokens for work in works), initial=0))
            last = [begins[n] + end - 1 - works[n].start for n, end in ends.items()]
            assert self.cache.carries is not None
            self.cache.carries.write(list(ends), carry_TD[last])
        for n, end in ends.items():
            self.books.computed(held(works[n]), end)
        self._land([works[n] for n in ends])

    def _land(self, works: Sequence[Work]) -> None:
        """Make the copies that jobs' starts or checkpoints ask for."""
        waiting = [(request, request.plan) for request in map(held, works) if request.plan is not None]
        if waiting:
            self.memory.carry_out(*(plan for _, plan in waiting))
        for request, plan in waiting:
            if self.tier is not None:
                self.tier.load(plan)
            self.books.landed(request)


def _inputs(model: K3, works: Sequence[Work]) -> Tensor:
    """x_TD of all works: embedded tokens, and features where images are."""
    ids = [token for work in works for token in work.token_ids]
    x_TD = model.embed(sent(torch.tensor(ids), model.embed.weight.device))
    row = 0
    for job, start, end, _ in works:
        for n, features_TD in job.features.items():
            first, count, _ = job.prompt.spans[n]
            inside = slice(max(first, start), min(first + count, end))
            rows = slice(row + inside.start - start, row + inside.stop - start)
            x_TD[rows] = features_TD[inside.start - first : inside.stop - first]
        row += end - start
    return x_TD


def _results(model: K3, h_TD: Tensor, works: Sequence[Work], carry_TD: Tensor | None) -> Results:
    ends = accumulate(work.num_tokens for work in works)
    last = [row for end, work in zip(ends, works) if work.samples for row in range(end - 1 - work.num_drafts, end)]
    rows = sent(torch.tensor(last, dtype=torch.int64), h_TD.device)
    scored, row = {}, 0
    for work in works:
        if work.job.request.params.prompt_logprobs is not None:
            scored[work.job] = _score(model, h_TD[row : row + work.num_tokens], work)
        row += work.num_tokens
    return Results(model.logits(h_TD[rows]), [work for work in works if work.samples], scored, carry_TD)


def _score(model: K3, h_TD: Tensor, work: Work) -> list[Token]:
    """The prompt's tokens that follow this work's, and whose log-probability is not known yet."""
    job, scored = work.job, list[Token]()
    first, last = max(work.start, job.num_scored - 1), min(work.end, job.num_prompt - 1)
    alternatives = job.request.params.prompt_logprobs or 0
    for start in range(first, last, SCORED_ROWS):
        end = min(start + SCORED_ROWS, last)
        normed_TD = model.norm(h_TD[start - work.start : end - work.start])
        ids = job.token_ids[start + 1 : end + 1]
        ids_T = sent(torch.tensor(ids), h_TD.device)
        logprob_T, _ = token_logprobs(normed_TD, model.lm_head.weight, ids_T)
        tops = best(model.lm_head(normed_TD), alternatives) if alternatives else [()] * len(ids)
        scored += map(Token, ids, logprob_T.tolist(), tops)
    return scored
