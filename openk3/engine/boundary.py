"""Boundary: the longest prefix that a request could start from if entries from outside join what the pages hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from openk3.config.serve import PageShape
from openk3.engine.prefix_cache import PrefixCache

PAGE, TAIL = "page", "tail"  # a whole page of latents; a checkpoint with the latents of its partial page
Has = Callable[[str, Sequence[bytes]], Sequence[bool]]  # whether entries of one kind lie outside, by their keys


class Inside(NamedTuple):
    """What the pages hold of one chain, so that another thread can think about it."""

    num_tokens: int  # where a request would start without anything from outside
    pages: frozenset[int]  # places of whole pages
    ends: frozenset[int]  # hash blocks whose end has a checkpoint


class Boundary(NamedTuple):
    """A place to start, and what has to be brought for it."""

    num_tokens: int
    pages: tuple[int, ...]  # places of whole pages that lie outside
    tail: bool  # whether state and partial page lie outside


def inside(prefixes: PrefixCache, keys: Sequence[bytes], most_tokens: int) -> Inside:
    """As things stand now."""
    shape = prefixes.shape
    hit = prefixes.lookup(keys, most_tokens)
    places = range(most_tokens // shape.page_tokens)
    pages = [j for j in places if prefixes.page_of(keys[(j + 1) * shape.blocks_per_page - 1]) is not None]
    most = min(len(keys), most_tokens // shape.hash_tokens)
    first = hit.num_tokens // shape.hash_tokens
    ends = [end for end in range(first + 1, most + 1) if prefixes.has_checkpoint(keys[end - 1])]
    return Inside(hit.num_tokens, frozenset(pages), frozenset(ends))


def find_boundary(shape: PageShape, keys: Sequence[bytes], most_tokens: int, here: Inside, has: Has) -> Boundary | None:
    """The longest boundary of at most `most_tokens` tokens that is longer than what is here; None if there is none.

    `has` may be slow: it is asked twice at most.
    """
    per_page, size = shape.blocks_per_page, shape.hash_tokens
    places = range(most_tokens // shape.page_tokens)
    unknown = [j for j in places if j not in here.pages]
    found = dict(zip(unknown, has(PAGE, [keys[(j + 1) * per_page - 1] for j in unknown]))) if unknown else {}
    reach = next((j for j in unknown if not found[j]), len(places))
    last = min(len(keys), most_tokens // size, (reach + 1) * per_page - 1)
    ends = range(last, here.num_tokens // size, -1)
    if not shape.kda_groups:  # latents are all there is: whole pages do
        end, tail = reach * per_page, False
        if end * size <= here.num_tokens:
            return None
    else:
        tails = [end for end in ends if end not in here.ends]
        outside = dict(zip(tails, has(TAIL, [keys[end - 1] for end in tails]))) if tails else {}
        end = next((end for end in ends if end in here.ends or outside[end]), 0)
        if not end:
            return None
        tail = end not in here.ends
    return Boundary(end * size, tuple(j for j in range(end // per_page) if j not in here.pages), tail)


def pages_for_swapped(
    shape: PageShape, keys: Sequence[bytes], num_tokens: int, here: Inside, has: Has
) -> Boundary | None:
    """What has to be brought for a private state after `num_tokens` tokens; None if some of its pages are lost."""
    per_page = shape.blocks_per_page
    unknown = [j for j in range(num_tokens // shape.page_tokens) if j not in here.pages]
    if unknown and not all(has(PAGE, [keys[(j + 1) * per_page - 1] for j in unknown])):
        return None
    return Boundary(num_tokens, tuple(unknown), tail=True)
