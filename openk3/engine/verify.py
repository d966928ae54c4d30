"""verify: which guesses of a pass are right, and the token behind them; answers are those without guesses.

The token at a place of an answer follows from the model's logits there and from the request's own number for the place
(`sampler.uniform`), guess or not. So a guess is right if it is that token, and refused if not: the distribution of
answers is the model's exactly, whatever guesses are, and with a seed even the answer is the same one, however many
guesses were made. Accepting at random and drawing again from what is left, the usual way, keeps the distribution too,
and accepts a little more of guesses drawn by chance; but with it an answer depends on how many guesses each pass had,
which follows from what else runs and from measured times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from openk3.engine.job import Work
from openk3.engine.request import Token
from openk3.engine.sampler import choose

Outcome = Token | Exception


def verify(logits_NV: Tensor, works: Sequence[Work]) -> list[list[Outcome]]:
    """The tokens that each work adds to its answer: its right guesses and one more, or up to a stop id, or an error.

    `logits_NV` has a row behind the last known token and behind each guess of each work. A constraint is asked for each
    token once and in order, and never behind a guess that was wrong.
    """
    firsts = [0, *accumulate(1 + work.num_drafts for work in works)]
    outcomes: list[list[Outcome]] = [[] for _ in works]
    rows = [(n, i) for n, work in enumerate(works) for i in range(1 if _is_bound(work) else 1 + work.num_drafts)]
    while rows:
        jobs, places = [works[n].job for n, _ in rows], [works[n].job.num_answer + i for n, i in rows]
        which = [firsts[n] + i for n, i in rows]
        asked_NV = logits_NV if which == list(range(len(logits_NV))) else logits_NV[which]
        for (n, i), outcome in zip(rows, choose(asked_NV, jobs, places)):
            if i == len(outcomes[n]) and _goes_on(works[n], outcomes[n]):
                outcomes[n].append(outcome)
        rows = [
            (n, len(outcomes[n])) for n, work in enumerate(works) if _is_bound(work) and _goes_on(work, outcomes[n])
        ]
    return outcomes


def _is_bound(work: Work) -> bool:
    return work.job.request.constraint is not None


def _goes_on(work: Work, outcomes: Sequence[Outcome]) -> bool:
    """Whether another token follows: all so far were guessed, and none ends the answer."""
    if not outcomes:
        return True
    last, count = outcomes[-1], len(outcomes)
    if isinstance(last, Exception) or count > work.num_drafts or last.id in work.job.request.params.stop_ids:
        return False
    return last.id == work.job.drafts[count - 1]
