"""Scheduler: which requests run, and how many tokens each of them has in the next pass.

There are no phases: a job computes tokens until it has caught up with those that are known, be they prompt, answer or
what a preemption has lost, and with guesses behind them (`Job.num_drafts`), for which nobody is preempted. A pass has
at most `step_tokens` tokens.

Order. A job's rank is the step in which it came minus `patience` times its priority, then its number. It never changes,
so only jobs that come within `patience` steps per level of priority can overtake, and every job is first some day.

Time. See `Shares`: decoding jobs advance together, and no prompt delays another by its length.

Memory. A job starts only if there is room for all its known tokens beside what those before it still need. If there
is not, smaller ones may pass it, for `patience` steps; after that nobody starts before it. A job of higher priority may
take the place of those of lower priority and rank. When a running job needs a page and there is none, the last in rank
is preempted: its pages go back, its prefixes stay cached while there is room, and it computes the rest again, unless
its own state was worth keeping (see Costs). The first in rank is never preempted and always fits (larger requests are
refused at the door), so the engine never stands still. A job whose prefix is on its way from outside is parked.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from openk3.config.serve import EngineConfig
from openk3.engine.block_pool import NoRoom
from openk3.engine.hybrid_cache import HybridCache
from openk3.engine.job import Job, Status, Work
from openk3.engine.page_plans import RequestCache
from openk3.engine.shares import Shares
from openk3.engine.staging import swap_out

LOOK_PAST = 32  # jobs without room that are looked past in one step, to bound its time


class Scheduler:
    """Jobs of one engine. `schedule` plans a pass; what it computed is entered in `books` before the next call."""

    def __init__(self, config: EngineConfig, books: HybridCache) -> None:
        self.config = config
        self.books = books
        self.waiting: list[Job] = []  # by rank
        self.running: list[Job] = []  # by rank
        self.step = 0
        self.num_preempted = 0
        self.num_swapped = 0  # of those
        self._num_jobs = 0
        self._shares = Shares(config.prompt_interval or 1)

    def add(self, job: Job) -> None:
        """A new job waits from now on."""
        job.rank = (self.step - self.config.patience * job.request.priority, self._num_jobs)
        self._num_jobs += 1
        self._wait(job)

    def schedule(self) -> list[Work]:
        """Start jobs, share the budget and reserve pages; works in order of their tokens, fewest first.

        Jobs may be preempted for it, so no pass may be under way.
        """
        self.step += 1
        self._admit()
        works, candidates = list[Work](), self._candidates()
        shares = self._shares.divide(self.config.step_tokens, candidates)
        for job in [job for job in candidates if job in shares]:  # by rank
            job.last_served = self.step  # also without room: then it is the turn of those before it, who make room
            if (work := self._reserve(job, shares[job])) is not None:
                works.append(work)
        single = sum(shares.values()) == len(works)  # one token each: they are in order
        return works if single else sorted(works, key=lambda work: work.order)

    def preempt(self, job: Job, *, keep_state: bool = True) -> None:
        """Take a running job's pages; it waits, and computes again what the cache has lost by then.

        Its private state goes outside if that is worth it (see Outside); not after a pass that failed.
        """
        assert job.cache is not None
        job.swapped = swap_out(self.books, job.cache) if keep_state else None
        self.num_swapped += job.swapped is not None
        self._release(job)
        self._wait(job)
        self.num_preempted += 1

    def remove(self, job: Job) -> None:
        """A job has ended, wherever it stands."""
        if job.status is Status.RUNNING:
            self._release(job)
        elif job.status is Status.WAITING:
            self.waiting.remove(job)
        _let_go_outside(self.books, job)
        job.status = Status.FINISHED

    def check(self) -> None:
        """Assert that jobs are where they say, in order, and hold what they should."""
        _check_jobs(self)
        self.books.check()

    def _wait(self, job: Job) -> None:
        job.status, job.blocked_since = Status.WAITING, None
        insort(self.waiting, job, key=lambda other: other.rank)

    def _release(self, job: Job) -> None:
        assert job.cache is not None
        self.books.release(job.cache)
        job.cache, job.num_drafts, job.drafts = None, 0, []
        job.features.clear()
        self.running.remove(job)

    def _admit(self) -> None:
        """Start waiting jobs by rank, as far as there is room."""
        looked_past = 0
        for job in list(self.waiting):
            if job.parked:
                continue
            if not self._has_room(job) or not self._start(job):
                job.blocked_since = self.step if job.blocked_since is None else job.blocked_since
                looked_past += 1
                if looked_past > LOOK_PAST or self.step - job.blocked_since >= self.config.patience:
                    return

    def _has_room(self, job: Job) -> bool:
        """Whether all known tokens of a job fit; jobs of lower priority and rank are preempted if that helps."""
        limit = self.config.cache.max_requests
        if len(self.running) < limit and _need(self.books, job) <= _room(self.books, self.running):
            return True
        victims = _victims(self.running, job)
        gain = sum(_alone(self.books, other) + _missing(self.books, other) for other in victims)
        if not victims or _need(self.books, job) > _room(self.books, self.running) + gain:
            return False
        while victims and (len(self.running) >= limit or _need(self.books, job) > _room(self.books, self.running)):
            self.preempt(victims.pop())
        return len(self.running) < limit and _need(self.books, job) <= _room(self.books, self.running)

    def _start(self, job: Job) -> bool:
        """Give a waiting job its first pages and its prefix."""
        name_again(self.books, job)
        ends = {*job.prompt.turn_ends, job.num_prompt}
        staged = job.swapped if job.fetch is None else job.fetch.staged
        try:
            job.cache = self.books.start(job.chain, turn_ends=ends, most_hit=job.most_hit, staged=staged)
        except NoRoom:
            return False
        if job.num_cached is None:
            job.num_cached = job.cache.hit_tokens
        _let_go_outside(self.books, job)
        self.waiting.remove(job)
        job.status = Status.RUNNING
        insort(self.running, job, key=lambda other: other.rank)
        return True

    def _candidates(self) -> list[Job]:
        """Jobs for the next pass: every other one is for a single suspect, so that only the guilty one fails."""
        suspects = [job for job in self.running if job.is_suspect]
        others = [job for job in self.running if not job.is_suspect]
        return suspects[:1] if suspects and (self.step % 2 or not others) else others

    def _reserve(self, job: Job, num_tokens: int) -> Work | None:
        """Pages for a job's next tokens, at least for one; jobs after it make room. None if it must wait."""
        if job.cache is None:  # preempted for one before it
            return None
        start = job.cache.num_computed
        end = start + num_tokens
        if num_tokens == 1 and _fits(self.books, job.cache, end):
            return Work(job, start, end, max(0, end - job.num_tokens))
        if end <= job.num_tokens:  # of drafts, what is accepted is replayed in pieces that end at checkpoints
            end = self.books.checkpoints.next_stop(job.cache, end, self.config.cache.cut_tokens)
        for victim in self._after(job):
            if self.books.reservable(job.cache) > start:
                break
            self.preempt(victim)
        end = min(end, self.books.reservable(job.cache))
        if end <= start:
            return None
        self.books.reserve(job.cache, end)
        return Work(job, start, end, max(0, end - job.num_tokens))

    def _after(self, job: Job) -> Iterator[Job]:
        """Running jobs behind this one, the last in rank first."""
        while self.running[-1] is not job:
            yield self.running[-1]


def _victims(running: list[Job], job: Job) -> list[Job]:
    """Running jobs of lower priority and rank than a waiting one, by rank."""
    priority = job.request.priority
    return [other for other in running if other.request.priority < priority and other.rank > job.rank]


def name_again(books: HybridCache, job: Job) -> None:
    """Names under the present weights for a job that does not run, if it was named for others."""
    if job.chain.salt.weights_version != books.weights_version:
        job.chain = books.name(job.token_ids, tenant=job.request.tenant, images=job.prompt.spans)


def _let_go_outside(books: HybridCache, job: Job) -> None:
    """It has started, and what it needs is pinned by its plan; or it has ended."""
    if job.fetch is not None:
        job.fetch.close()
    if job.swapped is not None and books.prefixes.outside is not None:
        books.prefixes.outside.unpin([job.swapped.tail])
    job.fetch = job.swapped = None


def _need(books: HybridCache, job: Job) -> int:
    """Available pages that a waiting job would take for its known tokens; those that others hold are shared."""
    hit = books.prefixes.lookup(job.chain.keys, min(job.most_hit, job.num_tokens - 1))
    return books.config.pages_for(job.num_tokens) - sum(books.pool.refs(page) > 0 for page in hit.full_pages)


def _fits(books: HybridCache, request: RequestCache, num_tokens: int) -> bool:
    """Whether `reserve` has nothing to do for so many tokens."""
    most = min(books.config.max_tokens, len(request.pages) * books.config.pages.page_tokens)
    return num_tokens <= most and (request.plan is None or request.plan.key is None)


def _room(books: HybridCache, running: list[Job]) -> int:
    """Pages that can be had, without those that running jobs still need for known tokens."""
    return books.pool.num_available - sum(_missing(books, job) for job in running)


def _missing(books: HybridCache, job: Job) -> int:
    assert job.cache is not None
    return max(0, books.config.pages.latent_pages(job.num_tokens) - len(job.cache.pages))


def _alone(books: HybridCache, job: Job) -> int:
    """Pages that only this job holds."""
    assert job.cache is not None
    return sum(books.pool.refs(page) == 1 for page in (*job.cache.pages, *job.cache.states))


def _check_jobs(scheduler: Scheduler) -> None:
    requests = scheduler.books.requests
    for jobs, status in ((scheduler.waiting, Status.WAITING), (scheduler.running, Status.RUNNING)):
        assert [job.rank for job in jobs] == sorted({job.rank for job in jobs}), f"{status}: out of order"
        for job in jobs:
            assert job.status is status and (job.cache is not None) == (status is Status.RUNNING)
            assert job.chain.num_tokens == job.num_tokens, "tokens without names"
            assert job.cache is None or job.cache in requests, "pages that were given back"
    assert len(requests) == len(scheduler.running), "pages are held for nobody"
