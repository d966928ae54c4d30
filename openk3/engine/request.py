"""Request, what a caller asks of an engine, and what comes back: tokens with log-probabilities, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

MAX_SEED = 2**64 - 1
MAX_PRIORITY = 100


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when the answer ends. Raises ValueError naming the field that is out of range.

    temperature 0 is greedy; top_k 0 and top_p 1 cut nothing. With a seed, the same request has the same answer whatever
    else the engine does (up to rounding of the logits); without one, the engine draws a seed. Log-probabilities are the
    model's own, before temperature and cuts.
    """

    max_tokens: int | None = None  # None: as many as there is room for; 0 only scores the prompt
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()  # the one that ends an answer is its last token
    logprobs: int = 0  # most likely alternatives to report beside each token
    prompt_logprobs: int | None = None  # None: the prompt is not scored; else alternatives beside each of its tokens

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_ids", frozenset(self.stop_ids))
        _check_count("max_tokens", self.max_tokens)
        _check_count("top_k", self.top_k)
        _check_count("seed", self.seed, MAX_SEED)
        _check_count("logprobs", self.logprobs)
        _check_count("prompt_logprobs", self.prompt_logprobs)
        for name, most in (("temperature", float("inf")), ("top_p", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                raise ValueError(f"{name}: must be a number between 0 and {most:g}, got {value!r}")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens: 0 asks for nothing, unless the prompt is scored (prompt_logprobs)")
        if not all(type(token) is int for token in self.stop_ids):
            raise ValueError(f"stop_ids: must be token ids, got {sorted(map(repr, self.stop_ids))}")


class Constraint(Protocol):
    """Which tokens an answer may go on with: a grammar, say."""

    def allowed(self, answer: Sequence[int]) -> Tensor | None:
        """bool [V], true where a token may come next; None where any may.

        Asked once for each token of the answer, in order, in the thread that steps the engine. What it raises ends
        its own request.
        """
        ...


@dataclass(frozen=True)
class Request:
    """What an engine is asked for. Nothing of it is copied: leave it as it is until the answer has ended.

    `prompt` has one placeholder id per image; `images` are (pixels [N, 3, P, P], (t, h, w)) pairs in that order.
    Prefixes are shared inside one `tenant` only. A higher `priority` goes first (see Scheduler). `turn_ends` are token
    counts of the prompt at which turns of the conversation end: good places to start from another time. While
    `ready()` is false the request is parked, and costs nothing.
    """

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    images: Sequence[tuple[Any, tuple[int, int, int]]] = ()
    tenant: str = ""
    priority: int = 0
    turn_ends: Sequence[int] = ()
    constraint: Constraint | None = None
    ready: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        if type(self.priority) is not int or abs(self.priority) > MAX_PRIORITY:
            raise ValueError(f"priority: must be a whole number of at most {MAX_PRIORITY}, got {self.priority!r}")
        if not isinstance(self.tenant, str):
            raise ValueError(f"tenant: must be a text, got {self.tenant!r}")


class Token(NamedTuple):
    """One token, its log-probability, and the most likely alternatives (id, log-probability), the best one first."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Finish(NamedTuple):
    """How an answer ended: "stop" (a stop id), "length", "cancelled" or "error"."""

    reason: str
    error: Exception | None = None


@dataclass(frozen=True)
class Completion:
    """A whole answer. `num_cached` of `num_prompt` tokens (images expanded) came from the prefix cache.

    `prompt_tokens` has one entry per token of the prompt but the first, if the prompt was scored.
    """

    tokens: tuple[Token, ...]
    finish: Finish
    num_prompt: int
    num_cached: int
    prompt_tokens: tuple[Token, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """Ids of the answer."""
        return [token.id for token in self.tokens]

    @property
    def logprobs(self) -> list[float]:
        """Log-probability of each token of the answer."""
        return [token.logprob for token in self.tokens]


def _check_count(name: str, value: int | None, most: int = 2**48) -> None:
    if value is not None and (type(value) is not int or not 0 <= value <= most):
        raise ValueError(f"{name}: must be a whole number from 0 to {most}, got {value!r}")
