"""Checkpoints: where a request's KDA states are kept for others, and which of them are given up again.

A state exists for one moment only, so a pass must end where it is to be kept. That is at hash boundaries: the last one
before each end of a turn (kept for good), one every so many pages of a long prompt, and each one in an answer; the
latter two are given up when the next one of the same request is there, unless another request has used them, so that a
pass goes over all but the last of them.
"""

from __future__ import annotations

from openk3.config.serve import CacheConfig
from openk3.engine.block_pool import BlockPool, NoRoom, PageKind
from openk3.engine.page_plans import CopyPlan, RequestCache, StateCopy
from openk3.engine.prefix_cache import PrefixCache


class Checkpoints:
    """Plans checkpoints in pages of `pool` and enters them in `prefixes`."""

    def __init__(self, config: CacheConfig, pool: BlockPool, prefixes: PrefixCache) -> None:
        self._config, self._pool, self._prefixes = config, pool, prefixes

    def next_stop(self, request: RequestCache, num_tokens: int, least: int = 0) -> int:
        """Where a pass that would compute up to `num_tokens` must end, because a checkpoint is wanted there.

        The first that is kept for good, or the last of others: each of those would be given up for the next one. None
        that would save others fewer than `least` tokens beside what the request has found or kept before.
        """
        size = request.chain.hash_tokens
        first = max(request.num_computed + 1, max(request.hit_tokens, request.kept) + least)
        places = range(-(-first // size) * size, num_tokens + 1, size)
        kept = (end for end in places if end in request.stops and self.wanted(request, end))
        passing = (end for end in reversed(places) if self.wanted(request, end))
        return next(kept, None) or next(passing, num_tokens)

    def wanted(self, request: RequestCache, end: int) -> bool:
        """Whether the state after `end` tokens is to be kept, and is not there yet. `end` may lie among drafts."""
        size, every = request.chain.hash_tokens, self._config.checkpoint_tokens
        if end % size or not self._config.pages.kda_groups:
            return False
        place = end in request.stops or end >= request.prompt_tokens or (every > 0 and end % every == 0)
        known = request.chain.keys[end // size - 1 : end // size]
        return place and not any(map(self._prefixes.has_checkpoint, known))

    def plan(self, request: RequestCache) -> CopyPlan | None:
        """Copies of the private state to fresh pages, if this is a place for it.

        None also when there is no room: a checkpoint only saves time, and nobody is preempted for it.
        """
        if not self.wanted(request, request.num_computed):
            return None
        try:
            fresh = self._pool.allocate([PageKind.STATE] * len(request.states))
        except NoRoom:
            return None
        self._pool.require_writable(fresh)
        return CopyPlan(
            held=tuple(fresh),
            state_copies=tuple(map(StateCopy, request.states, fresh)),
            key=request.chain.keys[request.num_computed // request.chain.hash_tokens - 1],
            kept=request.num_computed in request.stops,
        )

    def enter(self, request: RequestCache, plan: CopyPlan) -> None:
        """The plan's copies are done: let others find the checkpoint, and give up the one before it."""
        if plan.key is None:
            raise ValueError("the plan is not that of a checkpoint")
        added = self._prefixes.add_checkpoint(plan.key, plan.held, kept=plan.kept)
        if plan.kept:
            request.kept = request.num_computed
        if request.passing is not None:
            self._prefixes.recycle(request.passing)
        request.passing = plan.key if added else None
