"""Features, Ticket and Reject: a request as the policy knows it, where it is, and why it is not taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["ok", "broken", "refused", "left"]
Place = Literal["home", "primary", "secondary", "other"]


@dataclass(frozen=True)
class Features:
    """What the policy knows of a request. `key` names its session; empty, it may go anywhere."""

    key: bytes
    tenant: str
    num_prompt: int  # tokens, estimated
    num_answer: int  # likewise


@dataclass(frozen=True)
class Reject:
    """The request is not taken; `reason` is a code for programs."""

    reason: Literal["no_replica", "queue_full", "waited_too_long", "tries_used_up"]
    retry_after: float


@dataclass(eq=False)
class Ticket:
    """One request. It runs while `replica` is a name, waits while it is None, and is refused once `rejected` is set."""

    features: Features
    arrived: float
    number: int  # of all requests, in their order
    kind: int = 0  # index of its class
    cost: int = 0  # uncached tokens and answer; what its class's budget is charged
    replica: str | None = None
    rejected: Reject | None = None
    place: Place = "other"
    excluded: set[str] = field(default_factory=set)  # replicas that have failed or refused it
    may_move: bool = False  # it has waited for its prefix long enough
    waits: bool = False
    is_trial: bool = False  # the one request that tries a replica which broke the ones before

    @property
    def num_uncached(self) -> int:
        """Tokens of the prompt that its replica has to compute, as far as is known."""
        return self.cost - self.features.num_answer
