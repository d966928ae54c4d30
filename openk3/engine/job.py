"""Job: a request on its way through an engine, its tokens so far and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from openk3.engine.outside import Fetch, Staged
from openk3.engine.page_plans import RequestCache
from openk3.engine.prefix_keys import HashChain, ImageSpan
from openk3.engine.request import Finish, Request


class Status(Enum):
    """Where a job stands. Preempted jobs wait again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Prompt(NamedTuple):
    """A prompt as the model reads it: one token per image token, and where images and turns lie in it."""

    token_ids: list[int]
    images: tuple[Any, ...]  # MediaItem
    spans: tuple[ImageSpan, ...]
    turn_ends: tuple[int, ...]


@dataclass(eq=False)
class Job:
    """A running job holds pages through `cache`; one that waits holds none, but perhaps entries outside of them."""

    request: Request
    prompt: Prompt
    seed: int
    token_ids: list[int]  # the prompt, then the answer
    chain: HashChain  # names of the same tokens
    status: Status = Status.WAITING
    cache: RequestCache | None = None
    finish: Finish | None = None
    rank: tuple[int, int] = (0, 0)  # who goes first where only one can; set once, by the scheduler
    last_served: int = -1  # step of its last turn
    blocked_since: int | None = None  # step at which room was missing first
    parked: bool = False
    suspect_until: int = 0  # a pass failed that was to compute so many tokens: until then it runs alone
    num_scored: int = 1  # tokens of the prompt whose log-probability is known, or of no interest
    num_cached: int | None = None  # tokens that its first start found in the cache
    features: dict[int, Any] = field(default_factory=dict)  # of images that the next passes reach into
    num_drafts: int = 0  # guesses that are wanted behind its known tokens in the next pass
    drafts: list[int] = field(default_factory=list)  # guesses in the pass that is under way
    swapped: Staged | None = None  # its state of before, if it was preempted and that was kept
    fetch: Fetch | None = None  # of its prefix, from outside the pages

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt, images expanded."""
        return len(self.prompt.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that are known."""
        return len(self.token_ids)

    @property
    def num_computed(self) -> int:
        """Tokens whose latents and states its pages hold."""
        return 0 if self.cache is None else self.cache.num_computed

    @property
    def num_left(self) -> int:
        """Tokens that passes have yet to compute; it catches up, whether they are prompt or answer."""
        return self.num_tokens - self.num_computed

    @property
    def num_answer(self) -> int:
        """Tokens of the answer so far."""
        return self.num_tokens - self.num_prompt

    @property
    def is_suspect(self) -> bool:
        """Whether a pass failed that had it aboard, and it has not come past that place since."""
        return self.num_computed < self.suspect_until

    @property
    def most_hit(self) -> int:
        """Tokens that may come from the cache: log-probabilities of the prompt need the others computed."""
        if self.request.params.prompt_logprobs is None or self.num_scored >= self.num_prompt:
            return self.num_tokens
        return self.num_scored - 1


class Work(NamedTuple):
    """A job's part of a pass: its tokens start .. end - 1, for which room is reserved; the last ones may be guesses."""

    job: Job
    start: int
    end: int
    num_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in the pass."""
        return self.end - self.start

    @property
    def num_known(self) -> int:
        """Tokens of the job before guesses."""
        return self.end - self.num_drafts

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the pass."""
        return self.job.token_ids[self.start : self.num_known] + self.job.drafts[: self.num_drafts]

    @property
    def samples(self) -> bool:
        """Whether the pass reaches the last known token, and another one is wanted."""
        return self.num_known == self.job.num_tokens and self.job.request.params.max_tokens != 0

    @property
    def order(self) -> tuple[bool, int, tuple[int, int]]:
        """For sorting a pass: single tokens, then those with guesses, then the others, fewest tokens first."""
        return not self.num_drafts and self.num_tokens > 1, self.num_tokens, self.job.rank


def held(work: Work) -> RequestCache:
    """What the work's job holds of the memory: it runs."""
    assert work.job.cache is not None
    return work.job.cache
