"""Staging: starts that go on from entries outside the pages, and private states that leave the pages for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openk3.engine.outside import Staged
from openk3.engine.page_plans import CopyPlan, LatentCopy, PageLoad, RequestCache, StateCopy, TailLoad
from openk3.engine.prefix_cache import Hit, PrefixCache
from openk3.engine.prefix_keys import HashChain

if TYPE_CHECKING:
    from openk3.engine.hybrid_cache import HybridCache


def extend(prefixes: PrefixCache, chain: HashChain, hit: Hit, staged: Staged | None, most_tokens: int) -> Hit:
    """The hit that also uses what is staged, if that reaches further and nothing that it needs is missing.

    Pages of the hit that are there are not pinned yet, as those of `PrefixCache.lookup`.
    """
    if staged is None or staged.chain is not chain or not hit.num_tokens < staged.num_tokens <= most_tokens:
        return hit
    shape = prefixes.shape
    whole, blocks = staged.num_tokens // shape.page_tokens, staged.num_tokens // shape.hash_tokens
    full, missing = list[int](), []
    for j in range(whole):
        page = prefixes.page_of(chain.keys[(j + 1) * shape.blocks_per_page - 1])
        if page is not None:
            full.append(page)
        elif j in staged.pages:
            missing.append((j, staged.pages[j]))
        else:
            return hit
    partial, checkpoint = None, ()
    if staged.tail is None:
        key = chain.keys[blocks - 1]
        partial = prefixes.page_of(key) if blocks % shape.blocks_per_page else None
        checkpoint = prefixes.checkpoint(key) if shape.kda_groups else ()
        if checkpoint is None:
            return hit
    places = staged.num_tokens, hit.shared_tokens
    return Hit(*places, tuple(full), partial, checkpoint, tuple(missing), staged.tail)


def laid_out(hit: Hit, fresh: list[int], page_tokens: int) -> list[int]:
    """Pages of the hit in order, then the one behind; `fresh` are for those that lie outside, and for that one."""
    outside, own, new = {j for j, _ in hit.missing}, iter(hit.full_pages), iter(fresh)
    return [next(new if j in outside else own) for j in range(hit.num_tokens // page_tokens)] + [next(new)]


def start_plan(hit: Hit, states: list[int], pages: list[int], page_tokens: int) -> CopyPlan:
    """What a runner does before the first pass of a request that starts from `hit`; `pages` are laid out."""
    if hit.num_tokens == 0:
        return CopyPlan(held=(), zero_states=tuple(states))
    rows = hit.num_tokens % page_tokens
    latents = () if hit.partial_page is None else (LatentCopy(hit.partial_page, pages[-1], rows),)
    return CopyPlan(
        held=hit.sources,
        latent_copies=latents,
        state_copies=tuple(map(StateCopy, hit.checkpoint, states)),
        page_loads=tuple(PageLoad(entry, pages[j]) for j, entry in hit.missing),
        tail_load=None if hit.tail is None else TailLoad(hit.tail, tuple(states), pages[-1], rows),
    )


def swap_out(books: HybridCache, request: RequestCache) -> Staged | None:
    """Copy a request's private state outside, before it is released; None if it is not worth it or cannot be.

    Whole pages stay behind, cached: they go outside when they are evicted, and are found again either way.
    """
    outside, num_tokens = books.prefixes.outside, request.num_computed
    if outside is None or request.plan is not None or not request.started or request.epoch != books.epoch:
        return None
    lost = num_tokens - books.prefixes.lookup(request.chain.keys, num_tokens).num_tokens
    if lost == 0:
        return None
    whole, rows = divmod(num_tokens, books.config.pages.page_tokens)
    entry = outside.swap_out(request.states, request.pages[whole] if rows else None, rows, lost)
    return None if entry is None else Staged(request.chain, num_tokens, tail=entry)
