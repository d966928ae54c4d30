"""A replica in simulated time: passes that prompts and decoding share, by the engine's own rule, and a prefix cache.

What is as in the engine: the tokens of a pass and how they are divided (`engine.shares`), where a prompt's passes end,
first come first served with small ones passing those without room for `patience` passes, requests at once, and what a
prefix can be reused for (`prefix_lru`). What is simpler: there has to be room for the whole answer at the start, so
nobody is preempted; there is no speculation; images are tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from openk3.config.serve import CacheConfig
from openk3.engine.job import Job
from openk3.engine.shares import Shares
from openk3.fleet.pass_costs import PassCosts
from openk3.fleet.prefix_lru import Held, PrefixLru
from openk3.fleet.trace import Entry, TraceError

_LATE = 1e-9  # seconds that two ways to reckon one moment may differ


@dataclass(frozen=True)
class ReplicaShape:
    """Limits of one replica, in tokens."""

    capacity: int = 12_000_000  # of page memory
    step_tokens: int = 8192  # of a pass
    max_requests: int = 256  # that run at the same time
    patience: int = 256  # passes after which nobody passes a request without room
    block: int = 512  # between two places where a prefix can end
    page: int = 6144  # a prompt's pass ends where a page does, for the state there is kept for a while
    state: int = 18_432  # what one KDA state of the whole model takes
    outer: int = 0  # of the outer tier

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < (0 if name in ("patience", "state", "outer") else 1):
                raise TraceError(f"{name}: must be positive, got {value}")

    @classmethod
    def of(cls, cache: CacheConfig, step_tokens: int, patience: int) -> ReplicaShape:
        """That of an engine with such a cache."""
        pages = cache.pages
        capacity, state = cache.num_pages * pages.page_tokens, pages.kda_groups * pages.page_tokens
        return cls(capacity, step_tokens, cache.max_requests, patience, pages.hash_tokens, pages.page_tokens, state)

    def next_stop(self, prompt_tokens: int, start: int, end: int) -> int:
        """Where a pass that would compute from `start` to `end` ends: pages' ends, and the prompt's last block."""
        turn = prompt_tokens // self.block * self.block
        stops = [end, (start // self.page + 1) * self.page]
        return min([*stops, turn] if turn > start else stops)

    def num_passes(self, prompt_tokens: int, cached: int) -> int:
        """Of a request alone, up to its first token."""
        count, done = 0, cached
        while done < prompt_tokens:
            done = self.next_stop(prompt_tokens, done, min(prompt_tokens, done + self.step_tokens))
            count += 1
        return count


class _Priority:
    priority = 0


class Visit:
    """A request at a replica. The names that `Shares` reads are those of the engine's jobs."""

    num_drafts = 0
    request = _Priority()

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.rank = (0, 0)
        self.last_served = 0
        self.held: Held | None = None
        self.blocked_since: int | None = None
        self.num_computed = 0
        self.num_answered = 0

    @property
    def num_left(self) -> int:
        """Known tokens that are not computed."""
        return self.entry.prompt_tokens + self.num_answered - self.num_computed

    @property
    def is_over(self) -> bool:
        """The last token of the answer is there."""
        return self.num_answered >= self.entry.answer_tokens


@dataclass
class _Passes:
    """What is under way: one pass, or several in which everybody decodes. The n-th of those takes first + n * more."""

    began: float
    shares: dict[Visit, int]
    count: int
    first: float
    more: float = 0.0

    def seconds(self, count: int) -> float:
        return count * self.first + self.more * count * (count - 1) / 2


class SimulatedReplica:
    """One engine. Whoever drives it calls `begin` when it stands still, and `finish` when `busy_until` is reached."""

    def __init__(self, shape: ReplicaShape, costs: PassCosts) -> None:
        self.shape, self.costs = shape, costs
        self.waiting, self.running = list[Visit](), list[Visit]()
        self.busy_until: float | None = None
        self.busy_s = 0.0
        self.num_passes = 0
        self.cache = self._new_cache()
        self._shares, self._passes = Shares(), cast("_Passes | None", None)
        self._num_visits = 0

    def fits(self, entry: Entry) -> bool:
        """Whether a request could ever run here."""
        return entry.prompt_tokens + entry.answer_tokens + self.shape.state <= self.shape.capacity

    def add(self, visit: Visit, now: float) -> None:
        """A request has come; passes of nothing but decoding end early for it."""
        visit.rank = (self.num_passes, self._num_visits)
        self._num_visits += 1
        self.waiting.append(visit)
        if self._passes is not None:
            self._cut(now)

    def begin(self, now: float) -> None:
        """Start waiting requests and a pass, if there is anything to do and none is under way."""
        if self._passes is not None:
            return
        loaded = self._admit()
        if not self.running:
            return
        if len(self.running) <= self.shape.step_tokens and all(visit.num_answered for visit in self.running):
            count = min(visit.entry.answer_tokens - visit.num_answered for visit in self.running)
            each = [self.costs.decode_s(visit.num_computed) for visit in self.running]
            shares = dict.fromkeys(self.running, 1)
            more = len(each) * self.costs.row_s
            passes = _Passes(now, shares, count, self.costs.pass_s + sum(each), more)
        else:
            shares = self._shares.divide(self.shape.step_tokens, cast("Sequence[Job]", self.running))
            shares = {visit: self._cut_short(visit, count) for visit, count in cast("dict[Visit, int]", shares).items()}
            seconds = self.costs.pass_s + loaded * self.costs.load_s
            for visit, count in shares.items():
                seconds += self._seconds(visit, count)
            passes = _Passes(now, shares, 1, seconds)
        self._passes, self.busy_until = passes, now + passes.seconds(passes.count)

    def finish(self) -> tuple[list[Visit], list[Visit]]:
        """End what is under way: those that have their first token now, and those that are over."""
        passes = self._passes
        assert passes is not None
        self.num_passes += passes.count
        self.busy_s += passes.seconds(passes.count)
        self._passes = self.busy_until = None
        firsts, over = list[Visit](), list[Visit]()
        for visit, share in passes.shares.items():
            visit.last_served = self.num_passes
            assert visit.held is not None
            visit.num_computed += share * passes.count
            self.cache.grow(visit.held, share * passes.count)
            known = visit.entry.prompt_tokens + visit.num_answered
            if visit.num_computed < known:
                continue
            if not visit.num_answered:
                firsts.append(visit)
            visit.num_answered += passes.count
            if visit.is_over:
                over.append(visit)
                self._end(visit)
        return firsts, over

    def die(self) -> list[Visit]:
        """Everything is lost; the requests that were here."""
        visits = [*self.running, *self.waiting]
        for visit in visits:
            visit.held = None
        self.waiting, self.running = [], []
        self._passes = self.busy_until = None
        self.cache = self._new_cache()
        return visits

    def _new_cache(self) -> PrefixLru:
        shape = self.shape
        return PrefixLru(shape.capacity, block=shape.block, state=shape.state, outer=shape.outer)

    def _admit(self) -> int:
        """Start those for whom there is room; tokens that are loaded for them."""
        loaded = 0
        for visit in list(self.waiting):
            held = self.cache.hold(visit.entry) if len(self.running) < self.shape.max_requests else None
            if held is None:
                visit.blocked_since = self.num_passes if visit.blocked_since is None else visit.blocked_since
                if self.num_passes - visit.blocked_since >= self.shape.patience:
                    break
                continue
            visit.held, visit.num_computed = held, held.num_cached
            loaded += held.num_loaded
            self.waiting.remove(visit)
            self.running.append(visit)
            self.running.sort(key=lambda other: other.rank)
        return loaded

    def _seconds(self, visit: Visit, count: int) -> float:
        if visit.num_answered:
            return self.costs.decode_s(visit.num_computed)
        return self.costs.prompt_s(visit.num_computed, count)

    def _cut_short(self, visit: Visit, count: int) -> int:
        if visit.num_answered:
            return count
        start = visit.num_computed
        return self.shape.next_stop(visit.entry.prompt_tokens, start, start + count) - start

    def _cut(self, now: float) -> None:
        """Let decoding passes end with the one that is under way."""
        passes = self._passes
        assert passes is not None
        if passes.count == 1:
            return
        since = now - passes.began
        first = passes.first - passes.more / 2
        root = (
            since / first if not passes.more else (math.sqrt(first**2 + 2 * passes.more * since) - first) / passes.more
        )
        count = min(passes.count, max(1, int(root)))
        while count < passes.count and passes.seconds(count) < since - _LATE:
            count += 1
        passes.count = count
        self.busy_until = max(now, passes.began + passes.seconds(count))

    def _end(self, visit: Visit) -> None:
        assert visit.held is not None
        self.running.remove(visit)
        self.cache.let_go(visit.entry, visit.held, is_computed=True)
