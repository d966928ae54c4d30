"""Loop: step after step for all jobs of an engine: schedule, pass, tokens, ends, and what becomes of errors."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

from openk3.config.serve import EngineConfig
from openk3.engine.hybrid_cache import HybridCache
from openk3.engine.job import Job, Work
from openk3.engine.request import Finish, Token
from openk3.engine.runner import Results, Runner
from openk3.engine.sampler import choose
from openk3.engine.scheduler import Scheduler
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

    def __init__(self, model: K3, config: EngineConfig, weights_version: str) -> None:
        self.books = HybridCache(config.cache, weights_version)
        self.runner = Runner(model, self.books)
        self.scheduler = Scheduler(config, self.books)
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

    def step(self) -> None:
        """One pass for as many jobs as there is time and room for."""
        self._ask_parked()
        works = [work for work in self.scheduler.schedule() if self._is_readable(work)]
        if not works:
            return
        try:
            results = self.runner.run(works)
            tokens = choose(results.logits_NV, results.jobs)
        except Exception as error:
            self._isolate(works, error)
        except BaseException:  # an interrupt: books and states may differ, so nobody goes on from them
            self._restart(works)
            raise
        else:
            self.num_computed += sum(work.num_tokens for work in works)
            self._accept(works, results, tokens)

    def _ask_parked(self) -> None:
        for job in [job for job in self.scheduler.waiting if job.request.ready is not None]:
            assert job.request.ready is not None
            try:
                job.parked = not job.request.ready()
            except Exception as error:  # foreign code
                self.end(job, "error", error)

    def _is_readable(self, work: Work) -> bool:
        """Whether a work's images could be read; if not, its job has ended."""
        try:
            self.runner.prepare(work)
        except Exception as error:  # whatever is wrong with an image is wrong with this job
            self.end(work.job, "error", error)
            return False
        return True

    def _accept(self, works: list[Work], results: Results, tokens: list[Token | Exception]) -> None:
        for job, scored in results.scored.items():
            job.num_scored += len(scored)
            self._of(job).prompt_tokens += scored
            if not all(math.isfinite(token.logprob) for token in scored):
                self.end(job, "error", BrokenModelError("the prompt's log-probabilities are not finite"))
        for job, token in zip(results.jobs, tokens):
            if job not in self:
                continue
            if isinstance(token, Exception):
                self.end(job, "error", token)
            else:
                self._append(job, token)
        for job in [work.job for work in works if work.job in self]:
            if job.num_left == 0:  # only its prompt was asked about
                self.end(job, "length")

    def _append(self, job: Job, token: Token) -> None:
        self._of(job).tokens.append(token)
        job.token_ids.append(token.id)
        job.chain.append([token.id])
        if token.id in job.request.params.stop_ids:
            self.end(job, "stop")
        elif job.num_answer == job.request.params.max_tokens or job.num_tokens > self.books.largest_request:
            self.end(job, "length")

    def _isolate(self, works: list[Work], error: Exception) -> None:
        """A pass has failed: a job that was alone is guilty, others start again."""
        self.num_failed_passes += 1
        LOG.warning("a pass of %d requests failed: %s: %s", len(works), type(error).__name__, error)
        if len(works) == 1:
            self.end(works[0].job, "error", error)
            return
        self._restart(works)
        for work in works:
            work.job.suspect_until = max(work.job.suspect_until, work.end)

    def _restart(self, works: list[Work]) -> None:
        for work in works:
            self.scheduler.preempt(work.job)

    def _of(self, job: Job) -> News:
        return self._news.setdefault(job, News())
