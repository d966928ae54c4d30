"""A state machine drives engines with memory outside, in float64: every token must be the one of plain K3.forward."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path
from random import Random

from checked_engine import CheckedEngine, engine
from engine_model import prompt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from pytest import MonkeyPatch
from test_engine_machine import SHARED, EngineMachine

from openk3.config.outer_tier import TierConfig
from openk3.config.serve import SpeculationConfig
from openk3.engine import prefetch
from openk3.engine.block_pool import PageKind
from openk3.engine.request import Request, SamplingParams

SEEDS = st.integers(0, 99)
LENGTHS = st.sampled_from((30, 20, 13))


def steady(one: CheckedEngine) -> None:
    """Everything that was asked of the tier's threads is done before anything else is, so that runs can be repeated."""
    loop, io = one._loop, one._loop.tier.io
    write = io.write
    io.write = lambda entry: (write(entry), io.finish_writing())  # pyrefly: ignore
    step, look = loop.step, loop._prefetcher.look
    loop.step = lambda: (one.pinned_bytes(), step())[1]  # pyrefly: ignore
    loop._prefetcher.look = lambda waiting: (look(waiting), one.pinned_bytes())  # pyrefly: ignore


class TierMachine(EngineMachine):
    """S03, S04, S05: every event of EngineMachine, and out, back, swap, loss, damage, restart, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = MonkeyPatch()
        self.patch.setattr(prefetch, "GRACE_SECONDS", 20.0)  # every answer comes in time
        self.folder = Path(tempfile.mkdtemp())

    @initialize(
        pages=st.integers(0, 6),
        page_tokens=st.sampled_from((2, 4, 8)),
        hash_tokens=st.sampled_from((1, 2)),
        budget=st.integers(3, 40),
        checkpoint_pages=st.integers(0, 2),
        memory=st.sampled_from((40_000, 200_000, 9_000_000)),
        swap=st.sampled_from(("always", "always", "never")),
        on_disk=st.sampled_from((True, True, False)),
        guesses=st.sampled_from(
            (None, None, SpeculationConfig("mtp", 3, adaptive=False), SpeculationConfig("ngram", 4, adaptive=False))
        ),
    )
    def build(  # pyrefly: ignore
        self,
        *,
        pages: int,
        page_tokens: int,
        hash_tokens: int,
        budget: int,
        checkpoint_pages: int,
        memory: int,
        swap: str,
        on_disk: bool,
        guesses: SpeculationConfig | None,
    ) -> None:
        """Little room in the pages; little or much outside."""
        tier = TierConfig(memory, str(self.folder) if on_disk else None, swap=swap, load="always", io_threads=1)
        limits = {"max_requests": 5, "checkpoint_pages": checkpoint_pages}
        sizes = {"page_tokens": page_tokens, "hash_tokens": hash_tokens}
        self.engine = engine(
            4 + (42 + 8 * pages) // page_tokens, step_tokens=budget, tier=tier, speculation=guesses, **limits, **sizes
        )
        self.draft = None
        steady(self.engine)

    @rule(
        shared=LENGTHS,
        own=st.integers(0, 3),
        steps=st.integers(1, 9),
        then=st.sampled_from(("preempt", "stay", "leave")),
    )
    def visit(self, *, shared: int, own: int, steps: int, then: str) -> None:
        """A request that others resemble, some steps of it, and all that is idle goes out."""
        if len(self.alive()) > 4:
            return
        request = Request(
            [*SHARED[:shared], *prompt(own)], SamplingParams(max_tokens=5, temperature=0), turn_ends=[shared]
        )
        stream = self.engine.submit(request)
        self.streams.append(stream)
        self.steps(steps)
        if then == "leave":
            while self.alive():
                self.steps(1)
        elif then == "preempt":
            for job in list(self.engine.scheduler.running):
                self.engine.scheduler.preempt(job)
        self.evict_all()

    @rule()
    def evict_all(self) -> None:
        """Every idle page."""
        pool = self.engine.pool
        pool.unpin(pool.allocate([PageKind.STATE] * pool.num_available))
        self.engine.check()

    @rule(seed=SEEDS)
    def lose(self, seed: int) -> None:
        """Some entries in memory, as if others had taken their place."""
        memory, chance = self.engine._loop.tier.memory, Random(seed)
        memory.remove([name for name in list(memory._entries) if chance.random() < 0.3])
        self.engine.check()

    @rule(seed=SEEDS, how=st.sampled_from(("flip", "cut", "empty", "gone")))
    def damage(self, seed: int, how: str) -> None:
        """Some of the files."""
        chance = Random(seed)
        self.engine.pinned_bytes()  # nothing is being written
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            if chance.random() < 0.3:
                whole = path.read_bytes()
                place = chance.randrange(len(whole)) if whole else 0
                flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] if whole else b""
                path.write_bytes({"flip": flipped, "cut": whole[:place]}.get(how, b""))
                if how == "gone":
                    path.unlink()

    @rule(
        write=st.sampled_from((True, True, False)),
        how=st.sampled_from((None, "flip", "flip", "cut")),
        seed=SEEDS,
        shared=LENGTHS,
    )
    def restart(self, *, write: bool, how: str | None, seed: int, shared: int) -> None:
        """Whatever runs is cancelled; another engine begins where the files are, some of them damaged meanwhile."""
        streams, old = self.alive(), self.engine
        old.close(write=write)
        for stream in streams:
            assert stream.finish is not None and stream.finish.reason == "cancelled"
            self.compare(stream)
        assert old.is_empty()
        config = old.config
        if how is not None:
            self.damage(seed, how)
        self.engine = CheckedEngine(dataclasses.replace(config, step_tokens=old.scheduler.config.step_tokens))
        steady(self.engine)
        self.visit(shared=shared, own=1, steps=4, then="stay")

    @precondition(lambda self: self.engine.scheduler.waiting)
    @rule()
    def forget(self) -> None:
        """The prefixes of a request that waits, as if its numbers were none."""
        job = self.engine.scheduler.waiting[0]
        self.engine._loop.books.prefixes.forget(job.chain.keys)
        self.engine.check()

    def teardown(self) -> None:
        """Everybody gets to the end, every page and every entry comes back."""
        try:
            super().teardown()
            if hasattr(self, "engine"):
                self.engine.close()
        finally:
            self.patch.undo()
            shutil.rmtree(self.folder)


TierMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)
TestTierMachine = TierMachine.TestCase
