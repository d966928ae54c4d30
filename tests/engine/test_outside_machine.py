"""A state machine drives requests through small pools with memory outside: out, back, swapped, lost, in any order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from named_outside import NamedOutside
from page_runner import PageRunner
from test_cache_machine import CacheMachine

from openk3.config.serve import CacheConfig, PageShape
from openk3.engine.block_pool import NoRoom, PageKind
from openk3.engine.hybrid_cache import HybridCache, RequestTooLarge


class OutsideMachine(CacheMachine):
    """S03, S04, S05: every event of CacheMachine, in pools from which nearly everything is evicted at once.

    What a request reads is its own prefix, wherever it has been meanwhile; entries outside are let go as often as held.
    """

    @initialize(
        hash_tokens=st.sampled_from((1, 2, 4)),
        blocks=st.integers(1, 3),
        groups=st.integers(0, 3),
        room=st.integers(1, 12),
        checkpoint_pages=st.integers(0, 2),
    )
    def build(self, hash_tokens: int, blocks: int, groups: int, room: int, checkpoint_pages: int) -> None:
        """Room for one request and a little more."""
        shape = PageShape(hash_tokens * blocks, hash_tokens, 1, groups, 1)
        pages = shape.latent_pages(34) + 2 * groups + room
        self.runner = PageRunner(
            HybridCache(CacheConfig(shape, pages, max_tokens=60, checkpoint_pages=checkpoint_pages))
        )
        self.outside = NamedOutside(self.runner)

    @rule(
        shared=st.sampled_from((9, 13, 20, 24)),
        own=st.integers(0, 8),
        part=st.integers(1, 30),
        then=st.sampled_from(("preempt", "finish", "leave")),
        evicted=st.sampled_from((0, 3, 30)),
    )
    def visit(self, shared: int, own: int, part: int, then: str, evicted: int) -> None:
        """Start and compute a part; then be preempted, with others' pages in between, or go on to the end."""
        tokens = [n % 3 for n in range(shared)] + [10] * own
        try:
            driven = self.runner.start(tokens)
        except (NoRoom, RequestTooLarge):
            return
        self.running.append(driven)
        self.evict(evicted)
        try:
            self.runner.run(driven, max(driven.cache.num_computed, min(part, len(tokens))))
            if then == "preempt":
                self.running.remove(driven)
                self.runner.swap_out(driven)
                self.runner.release(driven)
                self.evict(evicted)
                driven = self._again(driven)
                self.running += driven
            if then != "leave":
                for one in self.running[-1:]:
                    self.runner.run(one)
        except NoRoom:
            return
        if self.running and then != "leave":
            self.runner.release(self.running.pop())

    def _again(self, driven):  # noqa: ANN001, ANN202
        try:
            return [self.runner.again(driven)]
        except (NoRoom, RequestTooLarge):
            self.runner.let_go(driven)
            return []

    @precondition(lambda self: self.outside.entries)
    @rule(data=st.data(), swaps=st.booleans())
    def lose_outside(self, data: st.DataObject, swaps: bool) -> None:
        """Some entries, whoever counts on them; and perhaps no more states of preempted requests."""
        self.outside.swaps = swaps
        for key in list(self.outside.entries):
            if data.draw(st.integers(0, 3)) == 0:
                del self.outside.entries[key]

    @rule(count=st.sampled_from((1, 3, 30)))
    def evict(self, count: int) -> None:
        """The longest idle pages."""
        pool = self.runner.cache.pool
        pool.unpin(pool.allocate([PageKind.STATE] * min(pool.num_available, pool.num_free + count)))
        self.runner.check()

    @precondition(lambda self: not self.running)
    @rule()
    def stop(self) -> None:
        """Everything outside, nothing left inside: as when an engine is closed and another one follows."""
        self.runner.cache.prefixes.write_back()
        self.runner.cache.prefixes.clear()
        self.runner.check()

    def teardown(self) -> None:
        """Everything is given back, outside too."""
        super().teardown()
        if hasattr(self, "outside"):
            assert self.outside.idle()


OutsideMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestOutsideMachine = OutsideMachine.TestCase
