"""Stats: how an engine is doing, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from openk3.engine.loop import Loop
from openk3.engine.outer_tier import TierStats
from openk3.engine.speculation import DraftStats


@dataclass(frozen=True)
class Stats:
    """How an engine is doing; counts of tokens, steps and passes are since its start."""

    num_waiting: int
    num_running: int
    num_pages: int
    num_pages_held: int
    num_pages_cached: int  # held by nobody, and there for whoever has the same prefix
    num_steps: int
    num_preempted: int
    num_failed_passes: int
    num_computed: int  # tokens, of prompts and answers
    num_asked: int  # tokens of requests when they started
    num_hit: int  # those of them that came from the cache
    num_swapped: int = 0  # preempted requests whose state was kept
    num_evicted: int = 0  # cached pages that were given to somebody else
    outer: TierStats | None = None  # of the memory behind the pages
    drafts: DraftStats | None = None  # where answers are guessed at


def stats_of(loop: Loop, num_arrived: int) -> Stats:
    """Of a loop, and requests that it has not taken in yet."""
    scheduler, books = loop.scheduler, loop.books
    return Stats(
        num_waiting=len(scheduler.waiting) + num_arrived,
        num_running=len(scheduler.running),
        num_pages=books.config.num_pages,
        num_pages_held=books.pool.num_held,
        num_pages_cached=books.pool.num_idle,
        num_steps=scheduler.step,
        num_preempted=scheduler.num_preempted,
        num_failed_passes=loop.num_failed_passes,
        num_computed=loop.num_computed,
        num_asked=books.asked_tokens,
        num_hit=books.hit_tokens,
        num_swapped=scheduler.num_swapped,
        num_evicted=books.pool.num_evicted,
        outer=None if loop.tier is None else loop.tier.stats(),
        drafts=None if loop.speculation is None else loop.speculation.stats,
    )
