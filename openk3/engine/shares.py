"""Shares: how the tokens of one pass are divided among jobs, so that nobody waits longer than stated.

Where one token is left (decoding), jobs served least recently go first. Of what there is for jobs with more left, a
quarter is for the first in rank, and the rest for the highest priority, there for the shortest. While both kinds want
tokens, three quarters of the budget are for the first kind and a quarter is for the second; what decoding jobs leave
of their part is for their drafts. Quarters are exact on average of four turns. Hence these bounds, with B tokens in a
pass, for jobs that have their pages:
- of D jobs with one token left, each has it within ceil(D / (3 B // 4)) passes (B > 1);
- a job with several tokens left has one left after ceil(4 W / 3 R) + 1 passes, and one more for each checkpoint that
  cuts a chunk short, where R tokens of each pass are for such jobs (B / 4 at worst), and W are those of all jobs of
  higher priority or not longer than it, itself included: a long prompt never delays a short one by its length; the
  last token waits as those of decoding jobs do, D of them with its own kind: ceil(4 D / 3 B) passes;
- the first in rank has R / 4 tokens of each pass, so no flow of short requests starves a long one.

Where a pass with prompts costs far more than one without (a GPU runs decoding as one graph), prompts may gather: with
an interval of N they have no part of a pass while others decode, until N - 1 passes have gone by or there are as many
tokens of them as a pass takes. What a prompt that has begun has left goes on in the very next pass, and others with it.
So at least one of N passes has prompts: the second and third bound are N times as many passes at worst.
"""

from __future__ import annotations

from collections.abc import Sequence

from openk3.engine.job import Job


class Shares:
    """Remembers whose turn the odd tokens are, for how many passes prompts have gathered, and which have begun."""

    def __init__(self, prompt_interval: int = 1) -> None:
        self._mixed_turns = self._prompt_turns = 0
        self._interval, self._gathered = prompt_interval, 0
        self._begun = set[Job]()

    def divide(self, budget: int, jobs: Sequence[Job]) -> dict[Job, int]:
        """Tokens of each job that has some; `jobs` are in order of their rank."""
        decodes, prompts = list[Job](), list[Job]()
        for job in jobs:
            if (left := job.num_left) == 1:
                decodes.append(job)
            elif left:
                prompts.append(job)
        if self._wait(prompts, budget - len(decodes) if decodes else 0):
            prompts = []
        self._mixed_turns += bool(decodes and prompts)
        kept = min(_quarter(budget, self._mixed_turns), sum(job.num_left for job in prompts))
        drafts = any(job.num_drafts for job in decodes)
        if drafts or len(decodes) > budget - kept:  # otherwise each has its turn, in any order
            decodes.sort(key=lambda job: (job.last_served, job.rank))
        shares = dict.fromkeys(decodes[: budget - kept], 1)
        spare = budget - kept - len(shares)
        for job in list(shares) if drafts else ():
            shares[job] += min(spare, job.num_drafts)
            spare -= shares[job] - 1
        budget -= sum(shares.values())
        if not prompts or not budget:
            return shares
        self._prompt_turns += 1
        self._begun = set(prompts)
        shares[prompts[0]] = first = min(_quarter(budget, self._prompt_turns), prompts[0].num_left)
        budget -= first
        for job in sorted(prompts, key=lambda job: (-job.request.priority, job.num_left, job.rank)):
            more = min(budget, job.num_left - shares.get(job, 0))
            shares[job] = shares.get(job, 0) + more
            budget -= more
        shares = {job: count for job, count in shares.items() if count}
        self._begun.intersection_update(shares)
        return shares

    def _wait(self, prompts: Sequence[Job], room: int) -> bool:
        """Whether prompts gather for another pass, which would have `room` for their tokens."""
        begun = any(job in self._begun for job in prompts)
        full = sum(job.num_left for job in prompts) >= room
        self._gathered = 0 if begun or full or not prompts else (self._gathered + 1) % self._interval
        return self._gathered > 0


def _quarter(budget: int, turn: int) -> int:
    """In four turns of the same budget, exactly the budget."""
    return (budget + turn % 4) // 4
