"""NamedEngine: a scheduler over pages of names (see PageRunner), so that thousands of steps take a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from named_outside import NamedFetch
from page_runner import DRAFT, POISON, Driven, PageRunner

from openk3.config.serve import EngineConfig
from openk3.engine.hybrid_cache import HybridCache
from openk3.engine.job import Job, Prompt, Status, Work
from openk3.engine.prefix_keys import ImageSpan
from openk3.engine.request import Request, SamplingParams
from openk3.engine.scheduler import Scheduler, name_again


class NamedEngine:
    """What an engine does with a scheduler; the answer's tokens follow from the tokens before them."""

    def __init__(self, books: HybridCache, step_tokens: int = 8, patience: int = 20) -> None:
        self.books = books
        self.config = EngineConfig(books.config, step_tokens, patience)
        self.scheduler = Scheduler(self.config, books)
        self.pages = PageRunner(books)
        self.first_token: dict[Job, int] = {}
        self.works: list[Work] = []
        self.most_drafts = 0  # each pass has up to so many guesses for a job, of which some are right

    def submit(
        self,
        tokens: Sequence[int],
        answer: int = 1,
        *,
        priority: int = 0,
        tenant: str = "",
        images: Sequence[ImageSpan] = (),
        turn_ends: Sequence[int] = (),
    ) -> Job:
        """A job that wants `answer` tokens."""
        params: dict[str, Any] = {"max_tokens": answer} if answer else {"max_tokens": 0, "prompt_logprobs": 0}
        request = Request(tokens, SamplingParams(**params), tenant=tenant, priority=priority)
        prompt = Prompt(list(tokens), (), tuple(images), tuple(turn_ends))
        job = Job(request, prompt, 0, list(tokens), self.books.name(tokens, tenant=tenant, images=images))
        self.scheduler.add(job)
        return job

    def step(self) -> list[Work]:
        """One pass; every rule is checked before and after it."""
        for job in self.scheduler.running:
            job.num_drafts = self._num_drafts(job)
        self._fetch()
        self.works = self.scheduler.schedule()
        self.check()
        assert all(work.num_drafts <= max(0, work.job.num_drafts) for work in self.works)
        assert sum(work.num_tokens for work in self.works) <= self.config.step_tokens
        assert len({work.job for work in self.works}) == len(self.works)
        for work in self.works:
            self._land(work.job)
        for work in self.works:
            self._compute(work)
        for work in self.works:
            self._land(work.job)
            self._go_on(work)
        self.check()
        return self.works

    def run(self, *jobs: Job, most: int = 2000) -> int:
        """Steps until these jobs have ended."""
        for count in range(most + 1):
            if all(job.status is Status.FINISHED for job in jobs):
                return count
            self.step()
        raise AssertionError(f"{most} steps, and still no end")

    def check(self) -> None:
        """Scheduler, books and names; free pages are poisoned."""
        self.scheduler.check()
        self.pages.check()

    def idle(self) -> bool:
        """Whether nobody is left and all pages can be had."""
        nobody = not self.scheduler.running and not self.scheduler.waiting
        outside = self.pages.outside is None or self.pages.outside.idle()
        return nobody and outside and self.books.pool.num_available == self.books.config.num_pages

    def _fetch(self) -> None:
        """What lies outside is there at once, for every job that waits."""
        outside = self.pages.outside
        for job in self.scheduler.waiting if outside is not None else ():
            assert outside is not None
            if job.fetch is not None:
                job.fetch.close()
            name_again(self.books, job)
            most = min(job.most_hit, job.num_tokens - 1)
            job.fetch = NamedFetch(outside, outside.stage(job.chain, most, job.swapped))

    def _land(self, job: Job) -> None:
        assert job.cache is not None
        if job.cache.plan is not None:
            self.pages._copy(job.cache.plan)
            self.books.landed(job.cache)

    def _compute(self, work: Work) -> None:
        """Read what the job's pages hold, which must be its own prefix; write its tokens' names and states."""
        job, cache = work.job, work.job.cache
        assert cache is not None and cache.num_computed == work.start
        driven = Driven(cache, job.token_ids, job.request.tenant, job.prompt.spans, [self._root(job)])
        self.pages._extend(driven, work.num_known)
        self.pages.read(driven)
        self._write(driven, work.start, work.num_known)
        if work.num_drafts:
            self._write(driven, work.num_known, work.end)
        else:
            self._enter(driven, work.end)

    def _write(self, driven: Driven, start: int, end: int) -> None:
        """Rows of tokens: their names, or of guesses nothing that anybody may read."""
        size = self.pages.shape.page_tokens
        for t in range(start, end):
            page = driven.cache.pages[t // size]
            self.pages.rows[page][t % size] = driven.names[t + 1] if t + 1 < len(driven.names) else DRAFT
            self.pages.states[page] = (POISON, POISON)

    def _enter(self, driven: Driven, end: int) -> None:
        for group, page in enumerate(driven.cache.states):
            self.pages._write_state(page, (group, driven.names[end]))
        self.books.computed(driven.cache, end)

    def _num_drafts(self, job: Job) -> int:
        if job.num_left != 1 or job.cache is None or job.cache.plan is not None:
            return 0
        most = min(
            (job.request.params.max_tokens or 0) - job.num_answer - 1, self.books.largest_request - job.num_tokens
        )
        return max(0, min(most, (job.rank[1] + self.scheduler.step) % (self.most_drafts + 1)))

    def _settle(self, work: Work) -> None:
        """Rows and states of the guesses that were right."""
        job, cache = work.job, work.job.cache
        assert cache is not None
        driven = Driven(cache, job.token_ids, job.request.tenant, job.prompt.spans, [self._root(job)])
        self.pages._extend(driven, job.num_tokens - 1)
        self._write(driven, work.num_known, job.num_tokens - 1)
        while job.num_left > 1:
            self._enter(driven, self.books.checkpoints.next_stop(cache, job.num_tokens - 1))
            self._land(job)

    def _root(self, job: Job) -> int:
        return self.pages._intern(("root", job.request.tenant))

    def _go_on(self, work: Work) -> None:
        job = work.job
        if work.samples:
            self.first_token.setdefault(job, self.scheduler.step)
            for _ in range(1 + (sum(job.token_ids) + self.scheduler.step) % (work.num_drafts + 1)):
                token = sum(job.token_ids) % 7
                job.token_ids.append(token)
                job.chain.append([token])
        if work.num_drafts:
            self._settle(work)
        over = job.num_tokens > self.books.largest_request
        if over or (work.end >= job.num_prompt and job.num_answer == job.request.params.max_tokens):
            self.scheduler.remove(job)
