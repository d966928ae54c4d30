"""What a runner is told about page memory: plans of copies, and the pages of each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from openk3.engine.prefix_keys import HashChain


class LatentCopy(NamedTuple):
    """The first num_tokens rows of every MLA layer, from page to page."""

    source: int
    target: int
    num_tokens: int


class StateCopy(NamedTuple):
    """States and convolution windows of one group of KDA layers, from page to page."""

    source: int
    target: int


@dataclass(frozen=True)
class CopyPlan:
    """What a runner does to pages before the next pass of a request: zero, then copy.

    `held` are the pages that the plan itself counts on: sources of a start, targets of a checkpoint. `key` names the
    checkpoint that will be there once the copies are; None in the plan of a start.
    """

    held: tuple[int, ...]
    zero_states: tuple[int, ...] = ()
    latent_copies: tuple[LatentCopy, ...] = ()
    state_copies: tuple[StateCopy, ...] = ()
    key: bytes | None = None
    kept: bool = False


@dataclass(eq=False)
class RequestCache:
    """A running request's part of the memory. Token t's latents are row t % page_tokens of pages[t // page_tokens].

    `states` has one private page per KDA group, which every pass reads and overwrites. A runner only reads this.
    """

    chain: HashChain
    epoch: int  # counts changes of the weights: after one, what it computes is nobody else's
    prompt_tokens: int
    hit_tokens: int
    stops: frozenset[int]  # hash boundaries whose checkpoint is to be kept
    pages: list[int]
    states: list[int]
    num_computed: int
    plan: CopyPlan | None
    started: bool = False  # its first plan has landed
    passing: bytes | None = None  # its newest checkpoint, given up for the next one
