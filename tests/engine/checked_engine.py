"""CheckedEngine: an engine in which every page is NaN until it is written, and every rule is checked at every step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

import torch
from engine_model import MEDIA, cache_config, engine_model
from torch import Tensor

from openk3 import Packed
from openk3.config.outer_tier import TierConfig
from openk3.config.serve import CacheConfig, EngineConfig, SpeculationConfig
from openk3.engine.engine import Engine
from openk3.engine.job import Job
from openk3.engine.request import Completion, Request, SamplingParams, Token
from openk3.engine.sampler import uniform
from openk3.engine.store import Store
from openk3.engine.stream import Update
from openk3.model.k3 import K3
from openk3.ops.cross_entropy import token_logprobs
from openk3.ops.sampling import sample

GREEDY = SamplingParams(max_tokens=6, temperature=0)


class CheckedEngine(Engine):
    """Pages are poisoned the moment that they are free; sealed ones must keep every bit until then."""

    def __init__(
        self, config: EngineConfig, model: K3 | None = None, *, decode_steps: bool = False, **options: Any
    ) -> None:
        super().__init__(model or engine_model(), config, **options)
        if decode_steps:
            self._loop.runner.use_decode_steps(graphs=False)
        self.pool, self.memory = self._loop.books.pool, self._loop.runner.memory
        self.scheduler = self._loop.scheduler
        self.memory.poison(range(config.cache.num_pages + 1))
        self.sealed: dict[int, Tensor] = {}
        seal, let_go = self.pool.seal, self.pool._let_go

        def sealed(page: int) -> None:
            seal(page)
            self.sealed.setdefault(page, self.memory._words_PRB[page].clone())

        def gone(page: int) -> None:
            let_go(page)
            if self.pool.kind(page) is None:
                self.sealed.pop(page, None)
                self.memory.poison([page])

        check = self.scheduler.check
        self.pool.seal, self.pool._let_go = sealed, gone  # pyrefly: ignore
        self.scheduler.check = lambda: (check(), self._check_sealed())  # pyrefly: ignore

    def step(self) -> list[Update]:
        """Then check books, jobs and sealed pages."""
        updates = super().step()
        self.check()
        return updates

    def pinned_bytes(self) -> int:
        """Of entries outside that anybody uses, once readers and writers have done what they were asked."""
        tier = self._loop.tier
        if tier is None or self._is_closed:
            return 0
        for _ in range(2):  # what the one asks of the other
            for worker in (tier.io.askers, tier.io.readers, tier.io.writer):
                wait([worker.submit(int) for _ in range(4)])
        tier.check()
        return tier.memory.pinned_bytes

    def _check_sealed(self) -> None:
        pages = list(self.sealed)
        if pages:
            kept = torch.stack(list(self.sealed.values()))
            assert torch.equal(self.memory._words_PRB[pages], kept), "a page was written after it was sealed"

    def is_empty(self) -> bool:
        """Nobody holds a page or, once what is on its way has come, an entry outside; forgetting all frees all."""
        patience = time.monotonic() + 30
        while self.pinned_bytes() and time.monotonic() < patience:
            time.sleep(0.001)
        held = self.pool.num_held + self.pinned_bytes()
        self._loop.books.prefixes.clear()
        self.check()
        return held == 0 and self.pool.num_free == self.config.cache.num_pages and not self._streams


def engine(
    num_pages: int = 64,
    *,
    step_tokens: int = 16,
    patience: int = 20,
    model: K3 | None = None,
    tier: TierConfig | None = None,
    store: Store | None = None,
    speculation: SpeculationConfig | None = None,
    decode_steps: bool = False,
    prompt_interval: int = 1,
    **options: Any,
) -> CheckedEngine:
    """Pages of eight tokens, checkpoints every page, unless options say otherwise; `decode_steps` as on a GPU."""
    cache: CacheConfig = cache_config(num_pages, **{"checkpoint_pages": 1, **options})
    config = EngineConfig(
        cache, step_tokens, patience, tier=tier, speculation=speculation, prompt_interval=prompt_interval
    )
    return CheckedEngine(config, model, store=store, decode_steps=decode_steps)


def plain_logits(job: Job, model: K3 | None = None) -> Tensor:
    """Of one pass over all of a job's tokens, without a cache; an image's id in an answer is an ordinary token."""
    model, ids = model or engine_model(), job.token_ids
    with torch.no_grad():
        x_TD = model.inputs(Packed.join([ids[: job.num_prompt]], list(job.prompt.images)))
        x_TD = torch.cat((x_TD, model.embed(torch.tensor(ids[job.num_prompt :], dtype=torch.int64))))
        return model.logits(model.backbone(x_TD, torch.tensor([0, len(ids)], dtype=torch.int32)))


def verify(answer: Completion | Sequence[Token], job: Job, model: K3 | None = None) -> None:
    """Each token is what plain K3.forward and the request's own numbers give; log-probabilities agree to 1e-9."""
    tokens = answer.tokens if isinstance(answer, Completion) else list(answer)
    assert [token.id for token in tokens] == job.token_ids[job.num_prompt :]
    if not tokens:
        return
    logits_TV, params = plain_logits(job, model)[job.num_prompt - 1 : -1], job.request.params
    numbers = torch.tensor([uniform(job.seed, n) for n in range(len(tokens))], dtype=torch.float64)
    options = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
    want = sample(logits_TV, None, uniform_N=numbers, **options)
    assert [token.id for token in tokens] == want.tolist()
    logprobs = logits_TV.log_softmax(-1).gather(1, want[:, None]).squeeze(1)
    got = torch.tensor([token.logprob for token in tokens], dtype=torch.float64)
    torch.testing.assert_close(got, logprobs, rtol=0, atol=1e-9)


def verify_scores(tokens: Sequence[Token], job: Job) -> None:
    """Log-probabilities of the prompt are those of `token_logprobs` over hidden values without a cache."""
    model, ids = engine_model(), job.token_ids[: job.num_prompt]
    with torch.no_grad():
        h_TD = model.norm(model.hidden(Packed.join([ids], list(job.prompt.images)).expand(MEDIA)))
        want, _ = token_logprobs(h_TD[:-1], model.lm_head.weight, torch.tensor(ids[1:]))
    assert [token.id for token in tokens] == ids[1:]
    got = torch.tensor([token.logprob for token in tokens], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def greedy(prompt: Sequence[int], count: int = 6, **options: Any) -> Request:
    """A greedy request."""
    return Request(prompt, SamplingParams(max_tokens=count, temperature=0), **options)
