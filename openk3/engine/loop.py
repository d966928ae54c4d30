"""Loop: step after step for all jobs of an engine: schedule, pass, tokens, ends, and what becomes of errors."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field

from openk3.config.serve import EngineConfig
from openk3.engine.hybrid_cache import HybridCache
from openk3.engine.job import Job, Work
from openk3.engine.outer_tier import open_tier
from openk3.engine.prefetch import Prefetcher
from openk3.engine.request import Finish, Token
from openk3.engine.runner import Results, Runner
from openk3.engine.scheduler import Scheduler
from openk3.engine.speculation import Speculation, make_draft, rows_version
from openk3.engine.store import Store
from openk3.engine.verify import Outcome, verify
from openk3.model.generate import BrokenModelError
from openk3.model.k3 import K3

LOG = logging.getLogger(__name__)


@dataclass
class News:
    """What has come to one job since the last look."""

    tokens: list[Token] = field(default_factory=list)
    prompt_tokens: list[Token] = field(default_factory=list)
    finish: Finish | None = None


class Loop:
    """Owns the books, the memory and the jobs of an engine; one thread at a time.

    An error of a job ends that job. When a pass fails, its jobs start again, and each is alone in its passes until it
    has come past the place: only one that fails alone has the error.
    """

    def __init__(self, model: K3, config: EngineConfig, weights_version: str, store: Store | None = None) -> None:
        self.config = config
        self.books = HybridCache(config.cache, rows_version(weights_version, config.speculation))
        self.runner = Runner(model, self.books)
        self.scheduler = Scheduler(config, self.books)
        self.speculation: Speculation | None = None
        if config.speculation is not None:
            self.runner.draft = make_draft(config.speculation, self.runner)
            self.speculation = Speculation(config.speculation, self.runner.draft, self.books.largest_request)
        self.tier = open_tier(config, self.runner.memory, model.config, store)
        self.runner.tier = self.books.prefixes.outside = self.tier
        self._prefetcher = None if self.tier is None else Prefetcher(self.tier, self.books)
        self.num_failed_passes = 0
        self.num_computed = 0
        self._jobs: dict[Job, None] = {}
        self._news: dict[Job, News] = {}

    def __contains__(self, job: Job) -> bool:
        """Whether a job is here and has not ended."""
        return job in self._jobs

    def add(self, job: Job) -> None:
        """A job waits from now on."""
        self._jobs[job] = None
        self.scheduler.add(job)

    def end(self, job: Job, reason: str, error: Exception | None = None) -> None:
        """A job is over, and gives back what it holds; not during a pass.

        Prefixes whose logits are no numbers are forgotten: others would come upon them.
        """
        self.scheduler.remove(job)
        if isinstance(error, BrokenModelError):
            self.books.prefixes.forget(job.chain.keys)
        self._of(job).finish = Finish(reason, error)
        del self._jobs[job]

    def take_news(self) -> dict[Job, News]:
        """What has come since the last call."""
        news, self._news = self._news, {}
        return news

    def close(self, *, write: bool) -> None:
        """End all jobs, keep cached prefixes in the store, stop what runs beside."""
        for job in list(self._jobs):
            self.end(job, "cancelled")
        if self.tier is not None:
            if write and self.tier.io.store is not None:
                self.tier.wait = True
                self.books.prefixes.write_back()
            self.tier.close(write=write)

    def step(self) -> None:
        """One pass for as many jobs as there is time and room for."""
        self._ask_parked()
        if self.speculation is not None:
            self.speculation.plan(self.scheduler.running, self.config.step_tokens)
        works = [work for work in self.scheduler.schedule() if self._is_readable(work)]
        if not works:
            return
        ends = dict[Job, Finish]()
        try:
            self._pass(works if self.speculation is None else self.speculation.propose(works), ends)
        except Exception as error:
            self._isolate(works, ends, error)
        except BaseException:  # an interrupt: books and states may differ, so nobody goes on from them
            _restart(self.scheduler, works, ends)
            raise
        finally:
            for job, finish in ends.items():
                self.end(job, *finish)

    def _pass(self, works: list[Work], ends: dict[Job, Finish]) -> None:
        """Run it, and take its tokens over before states follow; whose answer ends is entered in `ends`."""
        began = time.perf_counter()
        results = self.runner.run(works)
        outcomes = verify(results.logits_NV, results.works)
        self._accept(works, results, outcomes, ends)
        self.runner.settle(results.carry_TD)
        self.num_computed += sum(work.job.num_computed - work.start for work in works)
        if self.tier is not None:
            self.tier.costs.passed(sum(work.num_tokens for work in works), time.perf_counter() - began)
        if self.speculation is not None:
            self.speculation.learn(works, dict(zip(results.works, outcomes)), time.perf_counter() - began)

    def _ask_parked(self) -> None:
        for job in [job for job in self.scheduler.waiting if job.request.ready is not None]:
            assert job.request.ready is not None
            try:
                job.parked = not job.request.ready()
            except Exception as error:  # foreign code
                self.end(job, "error", error)
        if self._prefetcher is not None:
            self._prefetcher.look(self.scheduler.waiting)

    def _is_readable(self, work: Work) -> bool:
        """Whether a work's images could be read; if not, its job has ended."""
        if not work.job.prompt.spans:
            return True
        try:
            self.runner.prepare(work)
        except Exception as error:  # whatever is wrong with an image is wrong with this job
            self.end(work.job, "error", error)
            return False
        return True

    def _accept(
        self, works: list[Work], results: Results, outcomes: list[list[Outcome]], ends: dict[Job, Finish]
    ) -> None:
        for job, scored in results.scored.items():
            job.num_scored += len(scored)
            self._of(job).prompt_tokens += scored
            if not all(math.isfinite(token.logprob) for token in scored):
                ends[job] = Finish("error", BrokenModelError("the prompt's log-probabilities are not finite"))
        for work, tokens in zip(results.works, outcomes):
            if work.job not in ends:
                finish = _extend(work.job, tokens, self._of(work.job), self.books.largest_request)
                if finish is not None:
                    ends[work.job] = finish
        if len(results.works) < len(works):
            for job in [work.job for work in works if work.job not in ends]:
                if job.num_left == 0:  # only its prompt was asked about
                    ends[job] = Finish("length")

    def _isolate(self, works: list[Work], ends: dict[Job, Finish], error: Exception) -> None:
        """A pass has failed: a job that was alone is guilty, others start again unless they have ended."""
        self.num_failed_passes += 1
        LOG.warning("a pass of %d requests failed: %s: %s", len(works), type(error).__name__, error)
        if len(works) == 1:
            ends.setdefault(works[0].job, Finish("error", error))
            return
        _restart(self.scheduler, works, ends)
        for work in works:
            work.job.suspect_until = max(work.job.suspect_until, work.num_known)

    def _of(self, job: Job) -> News:
        return self._news.get(job) or self._news.setdefault(job, News())


def _restart(scheduler: Scheduler, works: list[Work], ends: dict[Job, Finish]) -> None:
    """The jobs of a pass that failed wait again, unless they have ended."""
    for work in works:
        if work.job not in ends:
            scheduler.preempt(work.job, keep_state=False)


def _extend(job: Job, tokens: list[Outcome], news: News, largest: int) -> Finish | None:
    """Take tokens over into an answer; how it ends, if it does."""
    for token in tokens:
        if isinstance(token, Exception):
            return Finish("error", token)
        news.tokens.append(token)
        job.token_ids.append(token.id)
        job.chain.append([token.id])
        if token.id in job.request.params.stop_ids:
            return Finish("stop")
        count = len(job.token_ids)
        if count - job.num_prompt == job.request.params.max_tokens or count > largest:
            return Finish("length")
    return None
