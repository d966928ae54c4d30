"""A state machine drives a scheduler and its books through any order of events; pages hold names of prefixes."""

from __future__ import annotations

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from named_engine import NamedEngine
from named_outside import NamedOutside

from openk3.config.serve import CacheConfig, EngineConfig, PageShape
from openk3.engine.block_pool import PageKind
from openk3.engine.hybrid_cache import HybridCache
from openk3.engine.job import Job, Status
from openk3.engine.prefix_keys import ImageSpan, image_digest

MEDIA = 9


class SchedulerMachine(RuleBasedStateMachine):
    """S03, S04, S06: whatever happens, a pass reads its own prefixes, and in the end everybody is through."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Job] = []
        self.version = 0

    @initialize(
        hash_tokens=st.sampled_from((1, 2, 4)),
        blocks=st.integers(1, 3),
        groups=st.integers(0, 3),
        room=st.integers(0, 60),
        budget=st.integers(1, 24),
        checkpoint_pages=st.integers(0, 2),
        patience=st.integers(0, 9),
        drafts=st.integers(0, 9),
        outside=st.booleans(),
    )
    def build(
        self,
        *,
        hash_tokens: int,
        blocks: int,
        groups: int,
        room: int,
        budget: int,
        checkpoint_pages: int,
        patience: int,
        drafts: int,
        outside: bool,
    ) -> None:
        """From a pool that one request fills to one that rarely evicts; with guesses and memory outside, or without."""
        shape = PageShape(hash_tokens * blocks, hash_tokens, 1, groups, 1)
        pages = shape.latent_pages(34 + room) + groups * (1 + room // 12)
        config = CacheConfig(shape, pages, max_requests=5, max_tokens=60, checkpoint_pages=checkpoint_pages)
        self.engine = NamedEngine(HybridCache(config), budget, patience)
        self.engine.most_drafts = drafts
        self.outside = NamedOutside(self.engine.pages) if outside else None

    @rule(
        shared=st.sampled_from((0, 3, 9, 13, 20, 24)),
        own=st.integers(0, 8),
        who=st.integers(0, 2),
        answer=st.integers(0, 9),
        picture=st.sampled_from((None, b"red", b"green")),
        priority=st.integers(-1, 1),
    )
    def submit(self, *, shared: int, own: int, who: int, answer: int, picture: bytes | None, priority: int) -> None:
        """A prompt with `shared` tokens like others', an image of theirs perhaps, and its own end."""
        tokens, images = [n % 3 for n in range(shared)], []
        if picture is not None and shared >= 9:
            tokens[4:9] = [MEDIA] * 5
            images = [ImageSpan(4, 5, image_digest(picture, (1, 4, 5)))]
        tokens += [10 + who] * own
        if tokens:
            tenant = "" if who else "other"
            ends = [len(tokens) // 2]
            options = {"priority": priority, "tenant": tenant, "images": images, "turn_ends": ends}
            self.jobs.append(self.engine.submit(tokens, answer, **options))

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        """Passes."""
        for _ in range(count):
            self.engine.step()

    @rule(budget=st.integers(1, 24))
    def change_budget(self, budget: int) -> None:
        """Chunks of another size from now on."""
        config = self.engine.config
        self.engine.config = EngineConfig(config.cache, budget, config.patience)
        self.engine.scheduler.config = self.engine.config

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Wherever it stands."""
        self.engine.scheduler.remove(self._pick(data, self.alive()))
        self.engine.check()

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Of all, not only the last in rank."""
        self.engine.scheduler.preempt(self._pick(data, self.engine.scheduler.running))
        self.engine.check()

    @rule(count=st.sampled_from((1, 5, 99)))
    def evict(self, count: int) -> None:
        """The longest idle pages."""
        pool = self.engine.books.pool
        pool.unpin(pool.allocate([PageKind.STATE] * min(pool.num_available, pool.num_free + count)))
        self.engine.check()

    @precondition(lambda self: self.outside is not None)
    @rule(seed=st.integers(0, 99), swaps=st.booleans())
    def lose_outside(self, seed: int, swaps: bool) -> None:
        """Some entries; and perhaps no more states of preempted jobs."""
        assert self.outside is not None
        chance, self.outside.swaps = Random(seed), swaps
        for key in list(self.outside.entries):
            if chance.random() < 0.3:
                del self.outside.entries[key]

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def suspect(self, data: st.DataObject) -> None:
        """As after a pass that failed."""
        job = self._pick(data, self.alive())
        job.suspect_until = job.num_tokens

    @precondition(lambda self: self.engine.scheduler.waiting)
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        """Or not any more."""
        job = self._pick(data, self.engine.scheduler.waiting)
        job.parked = not job.parked

    @rule(data=st.data())
    def change_weights(self, data: st.DataObject) -> None:
        """Rarely, since it empties the cache."""
        if data.draw(st.integers(0, 5)) == 0:
            self.version += 1
            self.engine.books.new_weights(str(self.version))
            self.restart_all()

    def restart_all(self) -> None:
        """Names of pages hold the weights that computed each token; a mixture has no one name."""
        for job in list(self.engine.scheduler.running):
            self.engine.scheduler.preempt(job)

    def alive(self) -> list[Job]:
        """Jobs that have not ended."""
        return [job for job in self.jobs if job.status is not Status.FINISHED]

    def teardown(self) -> None:
        """Everybody gets to the end, and every page comes back."""
        if not hasattr(self, "engine"):
            return
        for job in self.alive():
            job.parked = False
        self.engine.run(*self.jobs)
        assert self.engine.idle()
        self.engine.books.prefixes.clear()
        self.engine.check()
        assert self.engine.books.pool.num_free == self.engine.books.config.num_pages

    def _pick(self, data: st.DataObject, jobs: list[Job]) -> Job:
        return jobs[data.draw(st.integers(0, len(jobs) - 1))]


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
