"""MtpDraft: the model's own MTP layer guesses, token by token, over latents of its own in the pages (report 4.1.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from openk3.config.model import ConfigError
from openk3.engine.draft import Passed, guess
from openk3.engine.job import Work, held
from openk3.engine.paged_cache import PagedCache, Span
from openk3.model.k3 import K3
from openk3.model.trace import NO_TRACE


class MtpDraft:
    """Row t of a request's MTP latents belongs to the pair of token t and the hidden vector of the token before it.

    So a row depends on no later token, and pages of a prefix hold it for everybody who has that prefix. Before token 0
    the vector is zero. `cache` is a view of the page memory of its own; `model` gives the model of the moment.
    """

    one_by_one = True
    trace = NO_TRACE

    def __init__(self, model: Callable[[], K3], cache: PagedCache) -> None:
        if model().mtp is None or cache.carries is None:
            raise ConfigError('draft: "mtp" needs a model with an MTP layer (num_nextn_predict_layers) and KDA layers')
        self._model, self._cache = model, cache

    def observe(self, passed: Passed) -> Tensor:
        """Write the rows of the pass's tokens; a token's hidden vector is what the next one needs."""
        cache, h_TD = passed.cache, passed.h_TD
        mtp, lengths = self._model().mtp, cache.batch.lengths
        assert mtp is not None and cache.carries is not None and cache.mtp is not None
        before_TD = torch.cat((h_TD[:1], h_TD[:-1]))
        some = torch.tensor([n for n, length in enumerate(lengths) if length], device=h_TD.device)
        before_TD[cache.batch.cu_seqlens[:-1].long()[some]] = cache.carries.read()[some]
        cache.mtp.write(mtp.latent(before_TD, passed.x_TD))
        return h_TD

    @torch.no_grad()
    def propose(self, works: Sequence[Work]) -> list[list[int]]:
        """As many tokens as each work asks for; the layer's own output stands for the next hidden vector."""
        cache, guesses = self._cache, [list[int]() for _ in works]
        live = list(range(len(works)))
        cache.bind([_next(work, 0) for work in works])
        assert cache.carries is not None
        h_ND, ids = cache.carries.read(), [work.job.token_ids[-1] for work in works]
        for depth in range(max((work.num_drafts for work in works), default=0)):
            stays = [i for i, n in enumerate(live) if works[n].num_drafts > depth]
            live, h_ND, ids = [live[i] for i in stays], h_ND[stays], [ids[i] for i in stays]
            batch = cache.bind([_next(works[n], depth) for n in live])
            ids_N = torch.tensor(ids, device=h_ND.device)
            h_ND, logits_NV = self._model().draft(h_ND, ids_N, batch.cu_seqlens, cache)
            jobs = [works[n].job for n in live]
            ids = guess(logits_NV, jobs, [job.num_answer + depth for job in jobs])
            for n, id in zip(live, ids):
                guesses[n].append(id)
        return guesses


def _next(work: Work, depth: int) -> Span:
    """The place of its newest known token, or of the guess so far behind it."""
    return Span(held(work), work.job.num_tokens - 1 + depth, 1)
