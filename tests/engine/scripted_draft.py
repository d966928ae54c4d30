"""ScriptedDraft: guesses that are right or wrong as a script says, whatever else goes on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import torch
from checked_engine import CheckedEngine
from engine_model import engine_model

from openk3 import Packed
from openk3.engine.draft import Passed
from openk3.engine.job import Job, Work
from openk3.engine.sampler import draw
from openk3.model.generate import prefill
from openk3.model.trace import NO_TRACE

ANSWERS: dict[tuple[object, ...], list[int]] = {}


def plain_answer(job: Job, count: int) -> list[int]:
    """The first tokens of what plain decoding answers, token by token with a cache of its own; remembered."""
    key = (tuple(job.prompt.token_ids), job.prompt.spans, job.request.params, job.seed)
    if len(ANSWERS.get(key, ())) < count:
        model, ids = engine_model(), list[int]()
        cache = model.new_cache(1)
        with torch.no_grad():
            logits_1V = prefill(model, Packed.join([job.prompt.token_ids], list(job.prompt.images)), cache)
            for place in range(count):
                ids += draw(logits_1V, [job], [place]).tolist()
                x_1D = model.embed(torch.tensor(ids[-1:]))
                logits_1V = model.logits(model.backbone(x_1D, torch.tensor([0, 1], dtype=torch.int32), cache))
        ANSWERS[key] = ids
    return ANSWERS[key]


class ScriptedDraft:
    """Each guess takes the next word of the script, which begins again at its end: right, or not."""

    one_by_one = False
    trace = NO_TRACE

    def __init__(self, script: Sequence[bool] = (True,)) -> None:
        self.follow(script)
        self.asked: list[list[int]] = []

    def follow(self, script: Sequence[bool]) -> None:
        """Another script."""
        self._words = cycle(script)

    def observe(self, passed: Passed) -> None:
        """Nothing to see."""

    def propose(self, works: Sequence[Work]) -> list[list[int]]:
        """As many as asked for."""
        self.asked.append([work.num_drafts for work in works])
        return [self._guesses(work.job, work.num_drafts) for work in works]

    def _guesses(self, job: Job, count: int) -> list[int]:
        done = job.num_answer
        truth = plain_answer(job, max(done + count, job.request.params.max_tokens or 0))[done : done + count]
        return [token if right else (token + 1) % 280 for token, right in zip(truth, self._words)]


def take_script(one: CheckedEngine, script: Sequence[bool] = (True,)) -> ScriptedDraft:
    """Let an engine's guesses come from a script."""
    draft = ScriptedDraft(script)
    assert one._loop.speculation is not None
    one._loop.speculation.draft = one._loop.runner.draft = draft
    return draft
