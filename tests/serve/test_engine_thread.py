"""EngineThread: news reach the event loop, a failing engine is replaced, and nobody waits for a lost answer."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from live_server import TOKENIZER, tiny_engine
from waiting import wait_for

from openk3.engine.engine import Engine
from openk3.engine.request import Request, SamplingParams, Token
from openk3.engine.stream import Update
from openk3.serve import engine_thread, health
from openk3.serve.answers import Answers
from openk3.serve.engine_thread import EngineDown, EngineThread
from openk3.serve.errors import ApiError
from openk3.serve.mail import Ticket
from openk3.serve.turn_reader import TurnReader
from openk3.serve.turns import read_turns

PROMPT = TOKENIZER.encode("hello")


def request(count: int = 4, **options: Any) -> Request:
    """A greedy request."""
    return Request(PROMPT, SamplingParams(max_tokens=count, temperature=0), **options)


def run(make_engine: Callable[[], Engine], work: Callable[[EngineThread], Any]) -> Any:
    """A coroutine beside a running thread."""

    async def inside() -> Any:
        thread = EngineThread(make_engine)
        thread.start(asyncio.get_running_loop())
        try:
            return await work(thread)
        finally:
            thread.stop()

    return asyncio.run(inside())


async def read(thread: EngineThread, requests: list[Request], most_unread: int = 1000) -> list[list[int]]:
    """Tokens of each request."""
    answers = Answers(thread, requests, most_unread)
    answers.submit()
    tokens: list[list[int]] = [[] for _ in requests]
    async for piece in answers.pieces():
        tokens[piece.choice] += [token.id for token in piece.tokens]
    return tokens


class Faulty(Engine):
    """The first `faults` steps let an error out, as a fault of the books would."""

    faults = 0

    def step(self) -> Any:
        """Fail, or step."""
        if Faulty.faults:
            Faulty.faults -= 1
            raise AssertionError("page 3: lost")
        return super().step()


def faulty() -> Engine:
    """A tiny engine of that kind."""
    plain = tiny_engine(num_pages=64)
    return Faulty(plain._loop.runner.model, plain.config)


def test_tokens_arrive_in_order_and_pages_go_back() -> None:
    """As the engine alone would give them."""
    want = [answer.token_ids for answer in tiny_engine().generate([request(9), request(3)])]

    async def work(thread: EngineThread) -> list[list[int]]:
        tokens = await read(thread, [request(9), request(3)])
        stats = thread.stats()
        assert thread.num_live == 0 and stats is not None and stats.num_pages_held == 0 and thread.is_healthy
        return tokens

    assert run(tiny_engine, work) == want


def test_an_engine_that_fails_is_replaced() -> None:
    """Those under way end with an error that says so, the next ones are answered; the old memory is let go."""
    Faulty.faults = 0
    engines: list[Any] = []
    threads: list[EngineThread] = []

    def make() -> Engine:
        if engines:  # as a server asks that must not stop now
            assert not threads[0].is_lost and not threads[0].is_healthy
            # Its memory is free for this one; a thread that submits may hold it a moment longer.
            wait_for(lambda: gc.collect() >= 0 and engines[0]() is None)
        engine = faulty()
        engines.append(weakref.ref(engine))
        return engine

    async def work(thread: EngineThread) -> None:
        threads.append(thread)
        first = await read(thread, [request()])
        Faulty.faults = 1
        with pytest.raises(ApiError, match="AssertionError.*restarted") as error:
            await read(thread, [request()])
        assert error.value.status == 500 and error.value.code == "engine_failed"
        assert await read(thread, [request()]) == first
        assert thread.restarts.count == 1 and thread.is_healthy and thread.num_live == 0
        assert engines[1]() is not None

    run(make, work)


def test_an_engine_that_cannot_be_made_at_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may come free a moment later; requests wait for it."""
    monkeypatch.setattr(engine_thread, "PAUSE_SECONDS", 0.02)
    Faulty.faults, made = 0, list[int]()

    def make() -> Engine:
        made.append(len(made))
        if len(made) in (2, 3):
            raise MemoryError
        return faulty()

    async def work(thread: EngineThread) -> None:
        first = await read(thread, [request()])
        Faulty.faults = 1
        with pytest.raises(ApiError):
            await read(thread, [request()])
        assert await read(thread, [request()]) == first and made == [0, 1, 2, 3] and thread.is_healthy

    run(make, work)


def test_an_engine_that_always_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some restarts in a row: nobody waits, health says so, new requests are refused."""
    monkeypatch.setattr(health, "MAX_RESTARTS", 2)
    Faulty.faults = 100

    async def work(thread: EngineThread) -> None:
        for _ in range(3):
            with pytest.raises(ApiError):
                await read(thread, [request()])
        await asyncio.to_thread(wait_for, lambda: thread.is_lost)
        assert not thread.is_healthy and thread.restarts.count == 2 and thread.stats() is None
        with pytest.raises(EngineDown):
            thread.submit(request(), lambda news: None)
        with pytest.raises(ApiError) as error:
            await read(thread, [request()])
        assert error.value.status == 503

    run(faulty, work)
    Faulty.faults = 0


class Failing:
    """A constraint that raises: foreign code inside a step."""

    def allowed(self, answer: Any) -> None:
        """Raise."""
        raise RuntimeError("no grammar")


def test_a_request_that_fails_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of the same pass go on; of its own call all choices are cancelled."""

    async def work(thread: EngineThread) -> list[list[int]]:
        good = asyncio.create_task(read(thread, [request(12)]))
        with pytest.raises(ApiError, match="failed on this request .RuntimeError") as error:
            await read(thread, [request(100), request(constraint=Failing())])
        assert error.value.code == "request_failed"
        return await good

    assert run(tiny_engine, work) == [tiny_engine().generate([request(12)])[0].token_ids]


def test_passes_that_all_fail_make_it_unhealthy_until_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is gone fails request after request: the engine lives, and a health check has to tell."""

    async def work(thread: EngineThread) -> None:
        engine: Any = thread._engine
        with monkeypatch.context() as patch:
            patch.setattr(engine._loop.runner, "run", lambda works: (_ for _ in ()).throw(RuntimeError("device lost")))
            for _ in range(health.FAILED_PASSES):
                assert thread.is_healthy
                with pytest.raises(ApiError):
                    await read(thread, [request()])
            assert not thread.is_healthy and not thread.is_lost
        await read(thread, [request()])
        assert thread.is_healthy

    run(tiny_engine, work)


def test_a_step_that_never_ends_makes_it_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As seen from outside, for the thread itself cannot say it."""

    async def work(thread: EngineThread) -> None:
        assert thread.is_healthy
        thread.health.begin()
        assert thread.is_healthy
        monkeypatch.setattr(health, "STALL_SECONDS", -1.0)
        assert not thread.is_healthy

    run(tiny_engine, work)


def test_who_reads_too_slowly_is_cut_off() -> None:
    """So many tokens wait at most; the request is cancelled and its pages go back."""

    async def work(thread: EngineThread) -> None:
        answers = Answers(thread, [request(500)], 20)
        answers.submit()
        await asyncio.to_thread(wait_for, lambda: thread.num_live == 0)
        await asyncio.sleep(0)  # its news reach this loop
        got = 0
        with pytest.raises(ApiError, match="not read in time"):
            async for piece in answers.pieces():
                got += len(piece.tokens)
        stats = thread.stats()
        assert got < 60 and stats is not None and stats.num_pages_held == 0

    run(tiny_engine, work)


def test_pieces_behind_the_end_of_a_choice_are_dropped() -> None:
    """Two steps bring news before they are read; the first one ends the choice for its reader."""

    class Held:
        """Stands for a thread: keeps sinks and cancels."""

        def __init__(self) -> None:
            self.sinks, self.cancelled = [], 0

        def submit(self, request: Any, sink: Any) -> Any:
            self.sinks.append(sink)
            return Ticket(sink)

        def cancel(self, ticket: Any) -> None:
            self.cancelled += 1

    async def work() -> None:
        held = Held()
        answers = Answers(held, [request(), request()], 100)  # pyrefly: ignore
        answers.submit()
        readers = [TurnReader(TOKENIZER, "response", ["b"]), TurnReader(TOKENIZER, "response", ["b"])]
        ids = [Token(token, 0.0) for token in TOKENIZER.encode("ab")]
        for sink in held.sinks:
            for _ in range(3):
                sink((Update(None, tuple(ids), (), None), None))  # pyrefly: ignore
        found = [
            (choice, [d.text for d in deltas], reason) async for choice, deltas, reason in read_turns(readers, answers)
        ]
        assert found == [(0, ["a"], "stop"), (1, ["a"], "stop")] and held.cancelled == 2

    asyncio.run(work())


def test_a_call_that_is_refused_leaves_nothing() -> None:
    """The second of two requests is too long: the first one is taken back."""

    async def work(thread: EngineThread) -> None:
        with pytest.raises(ApiError) as error:
            await read(thread, [request(50), Request([1] * 4000)])
        assert error.value.code == "context_length_exceeded"

        def nothing_is_left() -> bool:
            stats = thread.stats()
            return thread.num_live == 0 and stats is not None and stats.num_pages_held == 0

        await asyncio.to_thread(wait_for, nothing_is_left)

    run(tiny_engine, work)
