"""Draft, the interface of whatever guesses at the next tokens of requests, and how a guess is drawn from logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from openk3.engine.job import Job, Work
from openk3.engine.paged_cache import PagedCache
from openk3.engine.sampler import draw
from openk3.model.trace import Trace
from openk3.ops.norm import at_least_float32


class Passed(NamedTuple):
    """A pass over the backbone: the cache bound to its requests, the inputs x_TD, and h_TD before the final norm."""

    cache: PagedCache
    x_TD: Tensor
    h_TD: Tensor


class Draft(Protocol):
    """Guesses at tokens. A wrong guess costs time and nothing else: the model has the last word on every token.

    A draft that reads hidden values sees every pass through `observe`, before anything of the pass can be found by
    others, and each request carries one vector from its last token to the next pass, with its state. One that reads
    several depths of the backbone (an EAGLE-3 head, report section 4.1.4) has a `trace` that takes them in the pass,
    and carries what it makes of them.
    """

    one_by_one: bool  # whether guessing takes a step for each token, one after the other
    trace: Trace

    def observe(self, passed: Passed) -> Tensor | None:
        """Behind each pass, before it is known which guesses were right: write rows that belong to the pass's tokens.

        Rows of refused tokens are overwritten by the pass that comes to their places. Returns what to carry from each
        token of the pass, should it be the last one [T, D].
        """
        ...

    def propose(self, works: Sequence[Work]) -> list[list[int]]:
        """Up to `work.num_drafts` tokens behind each work's last known one, whose room is reserved."""
        ...


def guess(logits_NV: Tensor, jobs: Sequence[Job], places: Sequence[int]) -> list[int]:
    """What each job would draw at that place of its answer if these were the model's logits.

    The draft draws with the request's own number for the place, as the model will: the more its distribution is like
    the model's, the more often the two agree. Logits that are no numbers give some token.
    """
    return draw(at_least_float32(logits_NV).nan_to_num(0, 0, 0), jobs, places).tolist()
