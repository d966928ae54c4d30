"""Speculation: guesses for the passes of an engine: how many, by which draft, and how they fared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from openk3.config.serve import SpeculationConfig
from openk3.engine.draft import Draft
from openk3.engine.draft_length import FADE, FADE_ALL, DraftLength, Record
from openk3.engine.job import Job, Work
from openk3.engine.mtp_draft import MtpDraft
from openk3.engine.ngram_draft import NgramDraft
from openk3.engine.paged_cache import PagedCache
from openk3.engine.request import Token
from openk3.engine.runner import Runner
from openk3.engine.verify import Outcome


@dataclass(frozen=True)
class DraftStats:
    """How guesses have fared since an engine's start; a turn is one request's part of a pass."""

    num_turns: int = 0  # that had guesses
    num_plain_turns: int = 0  # decoding turns without any
    drafts_at: tuple[int, ...] = ()  # guesses by their place behind the last known token
    accepted_at: tuple[int, ...] = ()  # of those, the right ones behind none that was wrong
    length: float = 0.0  # guesses per decoding request in the newest pass with such requests

    @property
    def num_drafts(self) -> int:
        """Guesses in all."""
        return sum(self.drafts_at)

    @property
    def num_accepted(self) -> int:
        """Guesses that were right."""
        return sum(self.accepted_at)

    @property
    def accepted_per_turn(self) -> float:
        """Right guesses of a turn that had guesses, on average; it brings one token more."""
        return self.num_accepted / max(1, self.num_turns)

    @property
    def rates_at(self) -> tuple[float, ...]:
        """By place, the share of guesses that were accepted."""
        accepted = self.accepted_at + (0,) * (len(self.drafts_at) - len(self.accepted_at))
        return tuple(right / count for right, count in zip(accepted, self.drafts_at))

    def and_turn(self, num_drafts: int, num_accepted: int) -> DraftStats:
        """With one more."""
        if not num_drafts:
            return replace(self, num_plain_turns=self.num_plain_turns + 1)
        drafts, accepted = _raised(self.drafts_at, num_drafts), _raised(self.accepted_at, num_accepted)
        return replace(self, num_turns=self.num_turns + 1, drafts_at=drafts, accepted_at=accepted)


class Speculation:
    """Asked by a Loop: `plan` before a pass is scheduled, `propose` before it runs, `learn` behind it."""

    def __init__(self, config: SpeculationConfig, draft: Draft, largest_request: int) -> None:
        self.config, self.draft = config, draft
        self.stats = DraftStats()
        self.length = DraftLength(config.most_drafts, draft.one_by_one)
        self._largest = largest_request
        self._records: WeakKeyDictionary[Job, Record] = WeakKeyDictionary()

    def plan(self, jobs: Sequence[Job], step_tokens: int) -> None:
        """Say how many guesses each running job should have: those that have one known token left, and a state."""
        limits = {job: limit for job in jobs if (limit := self._limit(job)) > 0}
        for job in jobs:
            job.num_drafts = 0
        others = sum(job.num_left for job in jobs if job not in limits)
        if self.config.adaptive:
            rates = self.length.rates([self._record(job) for job in limits])
            counts = self.length.choose(rates, list(limits.values()), min(others, step_tokens))
        else:
            counts = [min(limit, self.config.most_drafts) for limit in limits.values()]
        for job, count in zip(limits, counts):
            job.num_drafts = count

    def propose(self, works: Sequence[Work]) -> list[Work]:
        """The works of a pass with guesses in their jobs, shorter where fewer were made than there is room for."""
        for work in works:
            work.job.drafts = []
        wanted = [work for work in works if work.num_drafts]
        if not wanted:
            return list(works)
        began = time.perf_counter()
        for work, guesses in zip(wanted, self.draft.propose(wanted), strict=True):
            work.job.drafts = guesses[: work.num_drafts]
        steps = max((len(work.job.drafts) for work in wanted), default=0) if self.draft.one_by_one else 1
        if steps:
            num_drafts = sum(len(work.job.drafts) for work in wanted)
            self.length.guessed(num_drafts, steps, time.perf_counter() - began)
        cut = [work._replace(end=work.num_known + len(work.job.drafts)) for work in works]
        return sorted((work._replace(num_drafts=len(work.job.drafts)) for work in cut), key=lambda work: work.order)

    def learn(self, works: Sequence[Work], outcomes: dict[Work, list[Outcome]], seconds: float) -> None:
        """What became of the guesses of each work, and how long the pass took."""
        decoding = [work for work in works if work.num_known - work.start == 1]
        other = sum(work.num_tokens for work in works if work.num_known - work.start > 1)
        num_drafts = sum(work.num_drafts for work in works)
        self.length.passed(len(decoding), num_drafts, other, seconds)
        if decoding:
            self.stats = replace(self.stats, length=num_drafts / len(decoding))
        for work in decoding:
            if work in outcomes:
                tokens = outcomes[work]
                right = sum(isinstance(a, Token) and a.id == b for a, b in zip(tokens, work.job.drafts))
                self.stats = self.stats.and_turn(work.num_drafts, right)
                for record, fade in ((self._record(work.job), FADE), (self.length.all, FADE_ALL)):
                    record.see(min(work.num_drafts, len(tokens)), right, fade)

    def _record(self, job: Job) -> Record:
        return self._records.setdefault(job, Record())

    def _limit(self, job: Job) -> int:
        """The most guesses that a job has a use for; the token behind them counts too."""
        if job.num_left != 1 or job.cache is None or job.cache.plan is not None or job.is_suspect:
            return 0
        most = job.request.params.max_tokens
        answer = self._largest if most is None else most - job.num_answer - 1
        return min(answer, self._largest - job.num_tokens)


def make_draft(config: SpeculationConfig, runner: Runner) -> Draft:
    """The draft that a configuration names. Raises ConfigError if the model does not have what it needs."""
    if config.draft == "ngram":
        return NgramDraft()
    return MtpDraft(lambda: runner.model, PagedCache(runner.memory, runner.model.config, runner.device))


def rows_version(version: str, config: SpeculationConfig | None) -> str:
    """The name of weights as prefixes are told apart by it: pages of an engine with an MTP draft hold its rows too."""
    return version if config is None or config.draft != "mtp" else f"{version} with MTP rows"


def _raised(counts: tuple[int, ...], upto: int) -> tuple[int, ...]:
    """One more at each of the first places."""
    longer = counts + (0,) * (upto - len(counts))
    return tuple(count + (place < upto) for place, count in enumerate(longer))
