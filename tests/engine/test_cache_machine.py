"""A state machine drives pool, prefix cache and requests through any order of events, on pages that hold names."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from page_runner import Driven, PageRunner

from openk3.config.serve import CacheConfig, PageShape
from openk3.engine.block_pool import NoRoom
from openk3.engine.hybrid_cache import HybridCache, RequestTooLarge
from openk3.engine.prefix_keys import ImageSpan, image_digest

MEDIA = 9
lengths = st.integers(0, 30)


class CacheMachine(RuleBasedStateMachine):
    """S03, S04, S05, D01: start, chunk, hit, draft, evict, preempt, cancel, land late, change weights, in any order.

    Whatever is read must be the reader's own prefix, no page is lost or counted twice, and at the end all are free.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Driven] = []
        self.version = 0

    @initialize(
        hash_tokens=st.sampled_from((1, 2, 4)),
        blocks=st.integers(1, 3),
        groups=st.integers(0, 3),
        room=st.integers(1, 100),
        checkpoint_pages=st.integers(0, 2),
    )
    def build(self, hash_tokens: int, blocks: int, groups: int, room: int, checkpoint_pages: int) -> None:
        """From a pool that one request fills to one that rarely evicts."""
        shape = PageShape(hash_tokens * blocks, hash_tokens, 1, groups, 1)
        pages = shape.latent_pages(30 + room) + groups * (1 + room // 12)
        config = CacheConfig(shape, pages, max_tokens=60, checkpoint_pages=checkpoint_pages)
        self.runner = PageRunner(HybridCache(config))

    @rule(
        shared=st.sampled_from((0, 3, 9, 13, 20, 24)),
        own=st.integers(0, 8),
        who=st.integers(0, 2),
        tenant=st.sampled_from(("", "other")),
        picture=st.sampled_from((None, b"red", b"green")),
        ends=st.sets(lengths, max_size=3),
    )
    def start(self, shared: int, own: int, who: int, tenant: str, picture: bytes | None, ends: set[int]) -> None:
        """A prompt with `shared` tokens like others', an image of theirs perhaps, and its own end."""
        tokens, images = [n % 3 for n in range(shared)], []
        if picture is not None and shared >= 9:
            tokens[4:9] = [MEDIA] * 5
            images = [ImageSpan(4, 5, image_digest(picture, (1, 4, 5)))]
        tokens += [10 + who] * own
        try:
            turn_ends = {end for end in ends if end <= len(tokens)}
            self.running.append(self.runner.start(tokens, tenant, images, turn_ends))
        except (NoRoom, RequestTooLarge):
            assert self.running or len(tokens) > self.runner.cache.largest_request
        except ValueError:
            assert not tokens

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 20), drafts=st.sampled_from((0, 0, 1, 7)), land=st.booleans())
    def step(self, data: st.DataObject, num_tokens: int, drafts: int, land: bool) -> None:
        """A pass of one request, with rejected drafts behind it; without room another request is preempted."""
        driven = self._pick(data)
        if driven.cache.plan is not None and driven.cache.plan.key is not None:
            self.runner.land(driven)
        end = min(driven.cache.num_computed + num_tokens, len(driven.tokens))
        if end == driven.cache.num_computed:
            self._answer(driven, num_tokens)
            end += 1
        try:
            self.runner.step(driven, end, drafts)
        except NoRoom:
            others = [other for other in self.running if other is not driven]
            assert others or len(driven.tokens) > self.runner.cache.largest_request
            self._preempt(others[0] if others else driven)
        else:
            if land:
                self.runner.land(driven)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """All passes of a request, which is then released; or as many as there is room for."""
        driven = self._pick(data)
        self.runner.land(driven)
        try:
            self.runner.run(driven)
        except NoRoom:
            assert len(self.running) > 1 or len(driven.tokens) > self.runner.cache.largest_request
        self.running.remove(driven)
        self.runner.release(driven)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        """Copies that were not waited for."""
        self.runner.land(self._pick(data))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), carried_out=st.booleans())
    def cancel(self, data: st.DataObject, carried_out: bool) -> None:
        """Finished or cancelled, with its last copies made or not."""
        driven = self._pick(data)
        if carried_out:
            self.runner.carry_out(driven)
        self.running.remove(driven)
        self.runner.release(driven)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Released, and started again with all its tokens."""
        self._preempt(self._pick(data))

    @rule(data=st.data(), back=st.booleans())
    def change_weights(self, data: st.DataObject, back: bool) -> None:
        """To new ones, or back to the first: rarely, since it empties the cache."""
        if data.draw(st.integers(0, 5)) == 0:
            self.version += 1
            self.runner.cache.new_weights("0" if back else str(self.version))
            self.runner.check()

    @invariant()
    def books_agree(self) -> None:
        """Everything that `check` asserts, and what running requests have computed."""
        if hasattr(self, "runner"):
            self.runner.check()
            for driven in self.running:
                if driven.cache.started:
                    self.runner.read(driven)

    def teardown(self) -> None:
        """Everything is given back."""
        if hasattr(self, "runner"):
            self.runner.release(*self.running)
            cache = self.runner.cache
            assert cache.pool.num_held == 0
            cache.prefixes.clear()
            cache.check()
            assert cache.pool.num_free == cache.config.num_pages

    def _pick(self, data: st.DataObject) -> Driven:
        return self.running[data.draw(st.integers(0, len(self.running) - 1))]

    def _answer(self, driven: Driven, token: int) -> None:
        self.runner.append(driven, [token % 3])

    def _preempt(self, driven: Driven) -> None:
        self.running.remove(driven)
        self.runner.swap_out(driven)
        self.runner.release(driven)
        try:
            again = self.runner.again(driven)
        except (NoRoom, RequestTooLarge):
            assert self.running or len(driven.tokens) > self.runner.cache.largest_request
            self.runner.let_go(driven)
        else:
            self.running.append(again)


CacheMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
