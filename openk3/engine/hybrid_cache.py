"""HybridCache: what each request holds of the page memory, and the copies that a runner makes for it.

In one engine step, before the pass: `start` a request (a new one, once it has a `name`, or a preempted one), ask
`checkpoints.next_stop` where its pass must end, and `reserve` room up to there. The runner zeroes and copies as
`RequestCache.plan` says and runs the pass. After it: `landed` for a plan that was carried out, then `computed`. That
may leave the plan of a checkpoint, which is carried out and landed before the next pass of the request. `release` gives
everything back at any point, but only between steps: pages that a pass still uses would be free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from openk3.config.serve import CacheConfig
from openk3.engine.block_pool import BlockPool, NoRoom, PageKind, PoolError
from openk3.engine.checkpoints import Checkpoints
from openk3.engine.outside import Staged
from openk3.engine.page_plans import CopyPlan, RequestCache
from openk3.engine.prefix_cache import Hit, PrefixCache
from openk3.engine.prefix_keys import HashChain, ImageSpan, Salt
from openk3.engine.staging import extend, laid_out, start_plan


class RequestTooLarge(ValueError):
    """A request that could not run if it were alone: refuse it, do not let it wait."""


class HybridCache:
    """Page memory of one engine. `weights_version` names the weights that compute from now on."""

    def __init__(self, config: CacheConfig, weights_version: str = "0") -> None:
        self.config = config
        self.weights_version = weights_version
        self.epoch = 0
        self.pool = BlockPool(config.num_pages)
        self.prefixes = PrefixCache(self.pool, config.pages)
        self.checkpoints = Checkpoints(config, self.pool, self.prefixes)
        self.asked_tokens = self.hit_tokens = 0  # of all requests so far: their quotient is the hit rate
        self.requests: dict[RequestCache, None] = {}  # that hold pages

    def name(self, token_ids: Sequence[int], *, tenant: str = "", images: Sequence[ImageSpan] = ()) -> HashChain:
        """Keys of a request's prefixes under the present weights. Raises ValueError for images that do not fit."""
        return HashChain(Salt(tenant, self.weights_version), self.config.pages.hash_tokens, token_ids, images)

    def start(
        self,
        chain: HashChain,
        *,
        turn_ends: Iterable[int] = (),
        most_hit: int | None = None,
        staged: Staged | None = None,
    ) -> RequestCache:
        """Find the longest cached prefix, pin it, and take private pages: a state, and latents for the next token.

        At least one token is left to compute; `most_hit` leaves more (0: all, for log-probabilities of the prompt).
        `turn_ends` are token counts at which turns of the conversation end: the last hash boundary before each keeps
        its checkpoint. So does the place where cached latents end without a state, since two requests came by there.
        What is `staged` outside is used if it reaches further. A request that was preempted starts again with the chain
        of all its tokens. Raises ValueError for an empty request, a turn end outside it or the chain of other weights,
        RequestTooLarge, and NoRoom when something must be released first.
        """
        total, size, ends = chain.num_tokens, chain.hash_tokens, set(turn_ends)
        _refuse(self, chain, ends)
        if len(self.requests) >= self.config.max_requests:
            raise NoRoom(f"{len(self.requests)} requests hold pages, no more are allowed")
        most = total - 1 if most_hit is None else min(most_hit, total - 1)
        hit, states, pages = _acquire(self, chain, most, staged)
        self.asked_tokens += total
        self.hit_tokens += hit.num_tokens
        ends |= {total, total - 1, hit.shared_tokens}  # total - 1: as far as the same prompt may use it again
        request = RequestCache(
            chain=chain,
            epoch=self.epoch,
            prompt_tokens=total,
            hit_tokens=hit.num_tokens,
            stops=frozenset(end - end % size for end in ends),
            pages=pages,
            states=states,
            num_computed=hit.num_tokens,
            plan=_planned(self, hit, states, pages),
        )
        self.requests[request] = None
        return request

    @property
    def largest_request(self) -> int:
        """Tokens that one request can have in all."""
        shape = self.config.pages
        return min(self.config.max_tokens, (self.config.num_pages - shape.kda_groups) * shape.page_tokens)

    def reservable(self, request: RequestCache) -> int:
        """The most tokens that `reserve` would grant now."""
        pages = len(request.pages) + self.pool.num_available
        return min(self.config.max_tokens, pages * self.config.pages.page_tokens)

    def reserve(self, request: RequestCache, num_tokens: int) -> None:
        """Take pages until latents of `num_tokens` tokens fit (drafts included); asked before each pass.

        Raises NoRoom, and then nothing has changed: shorten the pass (`reservable`) or release another request. Raises
        PoolError while a checkpoint has not landed: the pass would overwrite the state that is to be copied.
        """
        if request.plan is not None and request.plan.key is not None:
            raise PoolError("a checkpoint's copies must land before the request's next pass")
        if num_tokens > self.config.max_tokens:
            raise RequestTooLarge(f"request: {num_tokens} tokens are more than the limit of {self.config.max_tokens}")
        shape = self.config.pages
        missing = shape.latent_pages(num_tokens) - len(request.pages)
        request.pages += self.pool.allocate([PageKind.LATENTS] * missing)
        written = range(request.num_computed // shape.page_tokens, shape.latent_pages(num_tokens))
        self.pool.require_writable([*request.states, *(request.pages[j] for j in written)])

    def landed(self, request: RequestCache) -> None:
        """The request's plan has been carried out: sources are let go, and a checkpoint can be found from now on."""
        plan = request.plan
        if plan is None:
            raise PoolError("no plan to land")
        request.plan, request.started = None, True
        if plan.key is not None and request.epoch == self.epoch:
            _publish(self, request, request.num_computed - 1)  # again: a twin that held these latents may be gone
            self.checkpoints.enter(request, plan)
        _land_loads(self, request, plan)
        _give_back(self, plan)

    def computed(self, request: RequestCache, num_computed: int) -> CopyPlan | None:
        """Latents and states of the first `num_computed` tokens are there; rejected drafts do not count.

        Complete hash blocks can be found from now on. Returns the plan of a checkpoint if this is a place for one.
        """
        size, before = self.config.pages.page_tokens, request.num_computed
        most = min(len(request.pages) * size, request.chain.num_tokens)
        if request.plan is not None or not before <= num_computed <= most:
            raise PoolError(f"{num_computed} tokens computed: {before}..{most} are possible, with no plan left to land")
        request.num_computed = num_computed
        for j in range(before // size, num_computed // size):
            self.pool.seal(request.pages[j])
        if request.epoch != self.epoch:
            return None
        _publish(self, request, before)
        if num_computed > before:
            request.plan = self.checkpoints.plan(request)
        return request.plan

    def release(self, request: RequestCache) -> None:
        """Give everything back: finished, cancelled or preempted. What was computed stays cached while there is room.

        A plan that has not landed is dropped with all that it would have made visible.
        """
        if request not in self.requests:
            raise PoolError("the request was released before")
        del self.requests[request]
        plan, request.plan = request.plan, None
        if request.started and request.epoch == self.epoch:
            _publish(self, request, 0)  # pages whose twins of another request have gone meanwhile
        if plan is not None:
            _give_back(self, plan)
        self.pool.unpin(request.states)
        self.pool.unpin(request.pages)

    def new_weights(self, version: str) -> None:
        """Forget every prefix. Running requests go on, and leave nothing behind: theirs is a mixture of weights."""
        self.weights_version = version
        self.epoch += 1
        self.prefixes.clear()

    def check(self) -> None:
        """Assert every invariant of pool, index and requests; holders are counted anew."""
        _check_requests(self, self.requests)
        self.pool.check()
        self.prefixes.check()


def _publish(cache: HybridCache, request: RequestCache, first_token: int) -> None:
    """Enter the complete hash blocks of the computed pages from the one that holds `first_token`."""
    shape = cache.config.pages
    per_page = shape.blocks_per_page
    for j in range(first_token // shape.page_tokens, shape.latent_pages(request.num_computed)):
        end = min(request.num_computed // shape.hash_tokens, (j + 1) * per_page)
        cache.prefixes.add_latents(request.pages[j], request.chain.keys[j * per_page : end])


def _refuse(cache: HybridCache, chain: HashChain, turn_ends: set[int]) -> None:
    total = chain.num_tokens
    if not total:
        raise ValueError("request: at least one token is needed")
    if total > cache.largest_request:
        raise RequestTooLarge(f"request: {total} tokens do not fit; there is room for {cache.largest_request}")
    if any(not 0 <= end <= total for end in turn_ends):
        raise ValueError(f"turn_ends: every end must lie in 0..{total}")
    if chain.salt.weights_version != cache.weights_version:
        raise ValueError(f"request: named for weights {chain.salt.weights_version!r}, name it again")
    if any(chain is request.chain for request in cache.requests):
        raise PoolError("two requests cannot append to one chain: name the second one itself")


def _acquire(
    cache: HybridCache, chain: HashChain, most_tokens: int, staged: Staged | None
) -> tuple[Hit, list[int], list[int]]:
    """The longest prefix, pinned; the request's private states, and its pages in order."""
    hit = found = cache.prefixes.lookup(chain.keys, most_tokens)
    hit = extend(cache.prefixes, chain, found, staged, most_tokens)
    groups = cache.config.pages.kda_groups
    kinds = [PageKind.STATE] * groups + [PageKind.LATENTS] * (len(hit.missing) + 1)
    try:
        fresh = cache.pool.allocate(kinds, hit.pages)
    except NoRoom:
        if cache.pool.num_held:
            raise
        # Alone, and still no room: what it would reuse is what stands in its way.
        hit = Hit(shared_tokens=found.shared_tokens)
        fresh = cache.pool.allocate(kinds[: groups + 1])
    if hit.num_tokens and hit.tail is None:
        cache.prefixes.keep(chain.keys[hit.num_tokens // chain.hash_tokens - 1])
    return hit, fresh[:groups], laid_out(hit, fresh[groups:], cache.config.pages.page_tokens)


def _planned(cache: HybridCache, hit: Hit, states: list[int], pages: list[int]) -> CopyPlan:
    """The plan of a start, which counts on its entries outside as its hit counts on pages."""
    plan = start_plan(hit, states, pages, cache.config.pages.page_tokens)
    if cache.prefixes.outside is not None:
        cache.prefixes.outside.pin(plan.entries)
    return plan


def _land_loads(cache: HybridCache, request: RequestCache, plan: CopyPlan) -> None:
    """What was brought from outside is like what was computed: sealed where whole, and found by others."""
    for load in plan.page_loads:
        cache.pool.seal(load.target)
    if plan.entries and request.epoch == cache.epoch:
        _publish(cache, request, 0)


def _give_back(cache: HybridCache, plan: CopyPlan) -> None:
    """What a plan counted on, inside and outside."""
    cache.pool.unpin(plan.held)
    if cache.prefixes.outside is not None:
        cache.prefixes.outside.unpin(plan.entries)


def _check_requests(cache: HybridCache, requests: Iterable[RequestCache]) -> None:
    shape, held = cache.config.pages, Counter[int]()
    for request in requests:
        held.update([*request.pages, *request.states, *(request.plan.held if request.plan else ())])
        assert len(request.states) == shape.kda_groups, "a request lacks part of its state"
        assert shape.latent_pages(request.num_computed) <= len(request.pages), "computed tokens without pages"
        loading = {load.target for load in request.plan.page_loads} if request.plan else set[int]()
        for page in request.states:
            private = cache.pool.refs(page) == 1 and not cache.pool.is_cached(page) and not cache.pool.is_sealed(page)
            assert private and cache.pool.kind(page) is PageKind.STATE, f"page {page}: a state that is not private"
        for j, page in enumerate(request.pages):
            full = (j + 1) * shape.page_tokens <= request.num_computed and page not in loading
            assert cache.pool.kind(page) is PageKind.LATENTS, f"page {page}: latents expected"
            assert cache.pool.is_sealed(page) == full, f"page {page}: sealed before it is full, or not after"
    for page in range(cache.config.num_pages):
        assert cache.pool.refs(page) == held[page], f"page {page}: {cache.pool.refs(page)} holders, not {held[page]}"
