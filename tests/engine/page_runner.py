"""PageRunner: carries plans out on pages that hold names of prefixes, so that anything read wrongly shows at once.

The row of a token holds the name of the prefix that ends in it, a state the name of all that went into it. A name
stands for tokens, images, tenant and the weights that computed each token. Pages that are free are poisoned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from named_outside import NamedOutside

from openk3.config.serve import CacheConfig, PageShape
from openk3.engine.block_pool import NoRoom
from openk3.engine.hybrid_cache import HybridCache
from openk3.engine.outside import Staged
from openk3.engine.page_plans import CopyPlan, RequestCache
from openk3.engine.prefix_keys import HashChain, ImageSpan
from openk3.engine.staging import swap_out

POISON, ZERO, DRAFT = -1, -2, -3


def small_cache(num_pages: int = 32, *, groups: int = 2, checkpoint_pages: int = 1, **limits: int) -> HybridCache:
    """Pages of eight tokens, hash blocks of two."""
    shape = PageShape(page_tokens=8, hash_tokens=2, layers_per_page=1, kda_groups=groups, row_bytes=8)
    return HybridCache(CacheConfig(shape, num_pages, checkpoint_pages=checkpoint_pages, **limits))


@dataclass(eq=False)
class Driven:
    """A request with all that its pages must hold: names[n] is the name of its first n tokens."""

    cache: RequestCache
    tokens: list[int]
    tenant: str
    images: Sequence[ImageSpan]
    names: list[int]
    swapped: Staged | None = None


class PageRunner:
    """What an engine does with a HybridCache, one request at a time, on a memory of names."""

    def __init__(self, cache: HybridCache) -> None:
        self.cache = cache
        self.shape = cache.config.pages
        pages = range(cache.config.num_pages)
        self.rows = [[POISON] * self.shape.page_tokens for _ in pages]
        self.states: list[tuple[int, int]] = [(POISON, POISON) for _ in pages]
        self.outside: NamedOutside | None = None
        self._names: dict[object, int] = {}

    def start(
        self,
        tokens: Sequence[int],
        tenant: str = "",
        images: Sequence[ImageSpan] = (),
        turn_ends: Iterable[int] = (),
    ) -> Driven:
        """Start a request; its hit must be what was computed for the same tokens, images, tenant and weights."""
        chain = self.cache.name(tokens, tenant=tenant, images=images)
        request = self.cache.start(chain, turn_ends=turn_ends, staged=self.stage(chain))
        return self._driven(request, Driven(request, list(tokens), tenant, images, []))

    def again(self, driven: Driven) -> Driven:
        """Start a preempted request again, with the chain it has, or named anew if the weights have changed."""
        chain, swapped = driven.cache.chain, driven.swapped
        if chain.salt.weights_version != self.cache.weights_version:
            chain = self.cache.name(driven.tokens, tenant=driven.tenant, images=driven.images)
        again = self._driven(self.cache.start(chain, staged=self.stage(chain, swapped)), driven)
        self.let_go(driven)
        return again

    def stage(self, chain: HashChain, swapped: Staged | None = None) -> Staged | None:
        """What lies outside."""
        return self.outside.stage(chain, chain.num_tokens - 1, swapped) if self.outside and chain.num_tokens else None

    def swap_out(self, driven: Driven) -> None:
        """Before a preemption."""
        driven.swapped = swap_out(self.cache, driven.cache)

    def let_go(self, driven: Driven) -> None:
        """Of what was swapped, once it has started again or will not."""
        if driven.swapped is not None:
            assert self.outside is not None
            self.outside.unpin([driven.swapped.tail])
            driven.swapped = None

    def carry_out(self, driven: Driven) -> None:
        """Execute the request's plan, if there is one, without telling anybody."""
        plan = driven.cache.plan
        if plan is not None:
            self._copy(plan)

    def land(self, driven: Driven) -> None:
        """Execute the request's plan, if there is one, and say so."""
        self.carry_out(driven)
        if driven.cache.plan is not None:
            self.cache.landed(driven.cache)
        self.check()

    def step(self, driven: Driven, num_tokens: int, drafts: int = 0) -> CopyPlan | None:
        """One pass up to `num_tokens` in all, or as far as it may go; rejected drafts write behind it.

        Raises NoRoom when not even one token fits. Returns the plan of a checkpoint, not carried out.
        """
        request = driven.cache
        end = self.cache.checkpoints.next_stop(request, num_tokens)
        end, wanted = min(end, self.cache.reservable(request)), end + drafts
        if end <= request.num_computed:
            raise NoRoom("not one token")
        self.cache.reserve(request, min(wanted, self.cache.reservable(request)))
        self.land(driven)
        self.read(driven)
        self._extend(driven, end)
        written = range(request.num_computed, min(wanted, len(request.pages) * self.shape.page_tokens))
        for t in written:
            name = driven.names[t + 1] if t < end else DRAFT
            page = request.pages[t // self.shape.page_tokens]
            self.rows[page][t % self.shape.page_tokens] = name
            self.states[page] = (POISON, POISON)  # the same memory
        for group, page in enumerate(request.states):
            self._write_state(page, (group, driven.names[end]))
        plan = self.cache.computed(request, end)
        self.check()
        return plan

    def run(self, driven: Driven, num_tokens: int | None = None) -> Driven:
        """Passes and checkpoints until so many tokens (default: all) are computed."""
        end = len(driven.tokens) if num_tokens is None else num_tokens
        while driven.cache.num_computed < end:
            self.step(driven, end)
            self.land(driven)
        return driven

    def append(self, driven: Driven, tokens: Sequence[int]) -> None:
        """Tokens that were sampled."""
        driven.tokens += tokens
        driven.cache.chain.append(tokens)

    def release(self, *driven: Driven) -> None:
        """Give requests back."""
        for one in driven:
            self.cache.release(one.cache)
        self.check()

    def read(self, driven: Driven) -> None:
        """Assert that pages and states hold the request's own prefix; its plan must have been carried out."""
        request, size = driven.cache, self.shape.page_tokens
        rows = [self.rows[request.pages[t // size]][t % size] for t in range(request.num_computed)]
        assert rows == driven.names[1 : request.num_computed + 1], "latents of another prefix"
        for group, page in enumerate(request.states):
            name = driven.names[request.num_computed] if request.num_computed else ZERO
            assert self.states[page] == (group if request.num_computed else ZERO, name), "state of another prefix"

    def check(self) -> None:
        """Assert the cache's own invariants, and poison what is free."""
        self.cache.check()
        for page in range(self.cache.config.num_pages):
            if self.cache.pool.kind(page) is None:
                self.rows[page] = [POISON] * self.shape.page_tokens
                self.states[page] = (POISON, POISON)

    def _driven(self, request: RequestCache, like: Driven) -> Driven:
        driven = Driven(request, like.tokens, like.tenant, like.images, [self._intern(("root", like.tenant))])
        self._extend(driven, request.hit_tokens)
        self.check()
        return driven

    def _copy(self, plan: CopyPlan) -> None:
        for page in plan.zero_states:
            self._write_state(page, (ZERO, ZERO))
        for source, target, num_tokens in plan.latent_copies:
            self.rows[target] = self.rows[source][:num_tokens] + [POISON] * (self.shape.page_tokens - num_tokens)
            self.states[target] = (POISON, POISON)
        for source, target in plan.state_copies:
            self._write_state(target, self.states[source])
        for entry, target in plan.page_loads:
            self.rows[target], self.states[target] = list(entry.rows), (POISON, POISON)
        if plan.tail_load is not None:
            entry, states, page, num_rows = plan.tail_load
            assert len(entry.rows) == num_rows and len(entry.states) == len(states)
            for state, name in zip(states, entry.states):
                self._write_state(state, name)
            self.rows[page] = entry.rows + [POISON] * (self.shape.page_tokens - num_rows)
            self.states[page] = (POISON, POISON)

    def _write_state(self, page: int, state: tuple[int, int]) -> None:
        self.states[page] = state
        self.rows[page] = [POISON] * self.shape.page_tokens

    def _extend(self, driven: Driven, end: int) -> None:
        for t in range(len(driven.names) - 1, end):
            image = next((i for i in driven.images if i.start <= t < i.start + i.num_tokens), None)
            key = (driven.names[-1], driven.tokens[t], image, self.cache.weights_version)
            driven.names.append(self._intern(key))

    def _intern(self, key: object) -> int:
        return self._names.setdefault(key, len(self._names))
