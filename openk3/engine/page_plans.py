"""What a runner is told about page memory: plans of copies, and the pages of each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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


class PageLoad(NamedTuple):
    """All rows of a whole page of latents, from an entry outside the pages."""

    entry: Any
    target: int


class TailLoad(NamedTuple):
    """The state of every KDA group, and the first num_rows latents of the page that goes on behind the whole ones."""

    entry: Any
    states: tuple[int, ...]
    page: int
    num_rows: int


@dataclass(frozen=True)
class CopyPlan:
    """What a runner does to pages before the next pass of a request: zero, copy, and load from outside.

    `held` are the pages that the plan itself counts on: sources of a start, targets of a checkpoint. `key` names the
    checkpoint that will be there once the copies are; None in the plan of a start.
    """

    held: tuple[int, ...]
    zero_states: tuple[int, ...] = ()
    latent_copies: tuple[LatentCopy, ...] = ()
    state_copies: tuple[StateCopy, ...] = ()
    key: bytes | None = None
    kept: bool = False
    page_loads: tuple[PageLoad, ...] = ()
    tail_load: TailLoad | None = None

    @property
    def entries(self) -> list[Any]:
        """What the plan reads outside the pages; pinned there until it has landed or is dropped."""
        loads = [*self.page_loads, *([] if self.tail_load is None else [self.tail_load])]
        return [load.entry for load in loads]


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
    kept: int = 0  # tokens before its newest checkpoint that is not given up
