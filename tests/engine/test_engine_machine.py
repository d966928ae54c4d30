"""A state machine drives a real engine on a real model in float64: every token must be the one of plain K3.forward."""

from __future__ import annotations

import dataclasses

import torch
from checked_engine import CheckedEngine, engine, verify, verify_scores
from engine_model import MEDIA, picture, prompt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scripted_draft import ScriptedDraft, take_script

from openk3.config.serve import SpeculationConfig
from openk3.engine.block_pool import PageKind
from openk3.engine.hybrid_cache import RequestTooLarge
from openk3.engine.job import Job
from openk3.engine.request import Request, SamplingParams
from openk3.engine.stream import Stream

SHARED = prompt(30, 1)
PARAMS = (
    SamplingParams(max_tokens=5, temperature=0),
    SamplingParams(max_tokens=9, temperature=0),
    SamplingParams(max_tokens=4, temperature=1.3, seed=3, top_p=0.9),
    SamplingParams(max_tokens=6, temperature=0.8, seed=4, top_k=9),
    SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0),
    SamplingParams(max_tokens=0, prompt_logprobs=0),
)
SCRIPTS = st.lists(st.booleans(), min_size=1, max_size=9)
GUESSES = st.one_of(
    st.just((None, [])),
    st.tuples(st.just(SpeculationConfig("mtp", 3, adaptive=False)), st.just([])),
    st.tuples(st.just(SpeculationConfig("ngram", 4)), st.just([])),
    st.tuples(st.builds(SpeculationConfig, st.just("ngram"), st.integers(1, 8), st.just(False)), SCRIPTS),
)


def keep_time(one: CheckedEngine) -> None:
    """Adaptive lengths learn from times that tokens say, so that two runs of one example take the same steps."""
    speculation = one._loop.speculation
    assert speculation is not None
    learn, guessed = speculation.learn, speculation.length.guessed
    speculation.learn = lambda works, outcomes, seconds: learn(
        works, outcomes, 0.01 + 0.001 * sum(work.num_tokens for work in works)
    )
    speculation.length.guessed = lambda drafts, steps, seconds: guessed(drafts, steps, 0.001 * steps)


class EngineMachine(RuleBasedStateMachine):
    """S03, S04, S05: chunks, hits, parts of pages, eviction, preemption, cancellation, images, failures, in any order.

    Memory is NaN wherever nothing was written, sealed pages must not change, and in the end every page comes back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        torch.set_num_threads(1)

    @initialize(
        pages=st.integers(5, 40),
        page_tokens=st.sampled_from((2, 4, 8)),
        hash_tokens=st.sampled_from((1, 2)),
        budget=st.integers(1, 40),
        checkpoint_pages=st.integers(0, 2),
        patience=st.integers(0, 9),
        guesses=GUESSES,
        decode_steps=st.booleans(),
        interval=st.sampled_from((1, 3, 16)),
        cut_tokens=st.sampled_from((0, 6, 100)),
    )
    def build(
        self,
        *,
        pages: int,
        page_tokens: int,
        hash_tokens: int,
        budget: int,
        checkpoint_pages: int,
        patience: int,
        guesses: tuple[SpeculationConfig | None, list[bool]],
        decode_steps: bool,
        interval: int,
        cut_tokens: int,
    ) -> None:
        """From memory that one request fills to memory that is rarely short; with guesses of every kind, or none."""
        pages = 4 + pages * 8 // page_tokens
        limits = {"max_requests": 5, "checkpoint_pages": checkpoint_pages, "cut_tokens": cut_tokens}
        sizes = {"page_tokens": page_tokens, "hash_tokens": hash_tokens}
        options = {**limits, **sizes, "speculation": guesses[0], "decode_steps": decode_steps}
        options["prompt_interval"] = interval
        self.engine: CheckedEngine = engine(pages, step_tokens=budget, patience=patience, **options)
        self.draft: ScriptedDraft | None = None
        if guesses[0] is not None and guesses[0].adaptive:
            keep_time(self.engine)
        if guesses[1]:
            self.draft = take_script(self.engine, guesses[1])

    @precondition(lambda self: self.draft is not None)
    @rule(script=SCRIPTS)
    def follow(self, script: list[bool]) -> None:
        """Guesses that are right or wrong at other places."""
        assert self.draft is not None
        self.draft.follow(script)

    @rule(
        shared=st.sampled_from((30, 20, 13, 8, 3, 0)),
        owns=st.lists(st.sampled_from((0, 1, 2, 6, 9)), min_size=1, max_size=3),
        params=st.sampled_from(PARAMS),
        pictured=st.sampled_from((None, None, None, 0, 1)),
        priority=st.integers(-1, 1),
    )
    def submit(
        self, *, shared: int, owns: list[int], params: SamplingParams, pictured: int | None, priority: int
    ) -> None:
        """Prompts that begin like others', with an image of theirs perhaps."""
        for who, own in enumerate(owns):
            ids = [*SHARED[:shared], *prompt(own, who)]
            images = []
            if pictured is not None:
                ids.insert(min(4, len(ids)), MEDIA)
                images = [picture(pictured)]
            if not ids:
                continue
            request = Request(ids, params, images=images, priority=priority, turn_ends=[shared])
            try:
                self.streams.append(self.engine.submit(request))
            except RequestTooLarge:
                assert len(ids) + 6 > self.engine._loop.books.largest_request

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        """Passes; those who end are compared with plain passes."""
        for _ in range(count):
            for update in self.engine.step():
                if update.finish is not None:
                    assert update.finish.error is None
                    self.compare(update.stream)

    @rule(budget=st.integers(1, 40))
    def change_budget(self, budget: int) -> None:
        """Chunks of another size."""
        config = self.engine.config
        self.engine.scheduler.config = dataclasses.replace(config, step_tokens=budget)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Wherever it stands; what it had is right."""
        stream = data.draw(st.sampled_from(self.alive()))
        stream.cancel()
        assert stream.finish is not None and stream.finish.reason == "cancelled"
        self.engine.check()
        self.compare(stream)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data(), everybody=st.booleans())
    def preempt(self, data: st.DataObject, everybody: bool) -> None:
        """Whatever its last step was: a chunk, a token, one that reached a checkpoint."""
        running = list[Job](self.engine.scheduler.running)
        for job in running if everybody else [data.draw(st.sampled_from(running))]:
            self.engine.scheduler.preempt(job)
        self.engine.check()

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        """The longest idle pages."""
        pool = self.engine.pool
        pool.unpin(pool.allocate([PageKind.STATE] * min(pool.num_available, pool.num_free + count)))
        self.engine.check()

    @precondition(lambda self: len(self.engine.scheduler.running) > 1)
    @rule(layer=st.integers(0, 3), interrupt=st.booleans())
    def fail_once(self, layer: int, interrupt: bool) -> None:
        """A pass that stops between two layers: states have moved on, books have not."""
        cache = self.engine._loop.runner.cache.layers[layer]
        name = "append" if layer == 2 else "write"
        write = getattr(cache, name)

        def failing(*args: object) -> None:
            write(*args)
            delattr(cache, name)
            raise KeyboardInterrupt if interrupt else RuntimeError("out of memory")

        works = len(self.engine.scheduler.running)
        setattr(cache, name, failing)
        try:
            self.engine.step()
        except KeyboardInterrupt:
            assert interrupt
        self.engine.check()
        if name in vars(cache):  # nothing was to be done
            delattr(cache, name)
        for stream in self.streams:
            if stream.finish is not None and stream.finish.error is not None:  # it was alone
                assert works >= 1 and not interrupt
                self.streams.remove(stream)
                break

    def alive(self) -> list[Stream]:
        """Those that have not ended."""
        return [stream for stream in self.streams if stream.finish is None]

    def compare(self, stream: Stream) -> None:
        """With passes without a cache."""
        verify(stream.tokens, stream.job)
        params = stream.job.request.params
        if params.prompt_logprobs is not None and stream.prompt_tokens and stream.finish.reason != "cancelled":
            verify_scores(stream.prompt_tokens, stream.job)

    def teardown(self) -> None:
        """Everybody gets to the end, and every page comes back."""
        if not hasattr(self, "engine"):
            return
        for _ in range(1500):
            if not self.alive():
                break
            self.steps(1)
        assert not self.alive()
        assert self.engine.is_empty()


EngineMachine.TestCase.settings = settings(max_examples=14, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase
