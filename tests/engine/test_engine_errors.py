"""Engine: errors end their own request, callbacks and threads do no harm, and whoever leaves gives everything back."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from checked_engine import GREEDY, CheckedEngine, engine, greedy, verify
from engine_model import MEDIA, VOCAB, engine_config, engine_model, picture, prompt

from openk3.engine.job import Status, Work, held
from openk3.engine.paged_cache import Span
from openk3.engine.request import Finish, Request, SamplingParams
from openk3.engine.runner import Results, Runner
from openk3.engine.stream import Update
from openk3.inputs.packed import MediaItem
from openk3.model.cache import Sequences
from openk3.model.generate import BrokenModelError
from openk3.model.k3 import K3

POISON = 299


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "prompt: at least one token"),
        ({"prompt": [1, VOCAB]}, "prompt: token id 320 lies outside the vocabulary of 320"),
        ({"prompt": [1.5]}, "token ids must be integers"),
        ({"prompt": [[1]]}, "one flat list"),
        ({"prompt": [1, MEDIA]}, "images: 1 placeholders .* for 0 images"),
        ({"images": [picture(0)]}, "images: 0 placeholders .* for 1 images"),
        ({"images": ["x.png"]}, "image 0: expected .pixels"),
        ({"turn_ends": [4]}, r"turn_ends: every end must lie in 0..3, got \[4\]"),
        ({"turn_ends": [True]}, "turn_ends: every end"),
        ({"params": SamplingParams(stop_ids=frozenset([-1]))}, "stop_ids: token id -1 lies outside"),
        ({"params": SamplingParams(logprobs=321)}, "logprobs: there are 320 tokens only"),
        ({"prompt": [1] * 600}, "prompt: 600 tokens do not fit; there is room for 496"),
    ],
)
def test_a_wrong_request_is_refused_at_the_door(changes: dict[str, Any], message: str) -> None:
    """One line that names the field; nothing of it stays."""
    one = engine()
    with pytest.raises(ValueError, match=message) as error:
        one.submit(Request(**{"prompt": [1, 2, 3], **changes}))
    assert "\n" not in str(error.value)
    assert one.step() == [] and one.is_empty()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": -1}, "max_tokens: must be a whole number from 0"),
        ({"max_tokens": 1.0}, "max_tokens: must be a whole number"),
        ({"max_tokens": 0}, "max_tokens: 0 asks for nothing"),
        ({"temperature": -0.1}, "temperature: must be a number between 0 and inf, got -0.1"),
        ({"temperature": float("nan")}, "temperature: must be"),
        ({"temperature": True}, "temperature: must be"),
        ({"top_p": 1.1}, "top_p: must be a number between 0 and 1"),
        ({"top_k": -1}, "top_k: must be a whole number"),
        ({"seed": 2**64}, "seed: must be a whole number from 0 to 18446744073709551615"),
        ({"stop_ids": ["a"]}, "stop_ids: must be token ids"),
        ({"logprobs": None, "prompt_logprobs": -1}, "prompt_logprobs: must be a whole number"),
    ],
)
def test_wrong_parameters_are_refused(changes: dict[str, Any], message: str) -> None:
    """By field."""
    with pytest.raises(ValueError, match=message):
        SamplingParams(**changes)


def test_wrong_requests_that_no_model_would_read() -> None:
    """Priority and tenant."""
    for changes, message in (({"priority": 101}, "priority: must be"), ({"tenant": 3}, "tenant: must be a text")):
        with pytest.raises(ValueError, match=message):
            Request([1], **changes)


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass fails whenever a token POISON is in it, after the first layer has moved states on."""
    run = Runner._pass

    def failing(runner: Runner, works: Sequence[Work]) -> Results:
        if any(POISON in work.token_ids for work in works):
            batch = runner.cache.bind([Span(held(work), work.start, work.num_tokens) for work in works])
            x_TD = runner.model.embed(torch.tensor([token for work in works for token in work.token_ids]))
            runner.model.layers[0].mixer(x_TD, Sequences(batch.cu_seqlens), runner.cache.layers[0])
            raise RuntimeError("this token breaks the kernel")
        return run(runner, works)

    monkeypatch.setattr(Runner, "_pass", failing)


def test_a_pass_that_fails_ends_only_the_guilty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests share passes with one that breaks them: they start again, it has the error, the engine lives."""
    poisoned(monkeypatch)
    one = engine(step_tokens=12)
    streams = [one.submit(greedy(prompt(7 + n, n), 8)) for n in range(2)]
    for _ in range(3):
        one.step()
    guilty = one.submit(greedy([*prompt(15, 5), POISON, *prompt(3, 6)]))
    streams.append(one.submit(greedy(prompt(10, 7), 8)))
    for stream in streams:
        verify(stream.result(), stream.job)
    with pytest.raises(RuntimeError, match="breaks the kernel"):
        list(guilty)
    assert guilty.finish is not None and guilty.finish.reason == "error" and guilty.tokens == []
    assert one.stats().num_failed_passes >= 2 and one.is_empty()


def test_all_passes_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is gone: every request has the error, one by one, and nobody waits for ever."""
    one = engine()
    streams = [one.submit(greedy(prompt(9, n))) for n in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_pass", lambda *_: (_ for _ in ()).throw(RuntimeError("device lost")))
        for _ in range(12):
            one.step()
    assert [str(stream.finish.error) for stream in streams if stream.finish] == ["device lost"] * 4
    late = one.submit(greedy(prompt(5)))
    verify(late.result(), late.job)
    assert one.is_empty()


def broken_model() -> K3:
    """Embeds token POISON as NaN."""
    model = copy.deepcopy(engine_model())
    model.embed.weight[POISON] = float("nan")
    return model


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=0, prompt_logprobs=0)])
def test_numbers_that_are_none_end_their_request(params: SamplingParams) -> None:
    """Others in the same pass are right, and nobody comes upon the prefix later."""
    model = broken_model()
    one = engine(model=model)
    ids = [*prompt(9), POISON, *prompt(9, 1)]
    guilty, good = one.submit(Request(ids, params, turn_ends=[12])), one.submit(greedy(prompt(9)))
    verify(good.result(), good.job, model)
    answer = guilty.result()
    assert answer.finish.reason == "error" and isinstance(answer.finish.error, BrokenModelError)
    again = one.submit(Request(ids, params, turn_ends=[12]))
    assert again.result().finish.reason == "error" and again.result().num_cached == 0
    assert one.is_empty()


def test_an_image_that_cannot_be_read_ends_its_request() -> None:
    """Patches of another size are found when it is its turn."""
    one = engine()
    small = MediaItem(torch.zeros(24, 3, 7, 7, dtype=torch.float64), (1, 4, 6))
    bad = one.submit(Request([1, MEDIA, 2], GREEDY, images=[small]))
    good = one.submit(Request([1, MEDIA, 2], GREEDY, images=[picture(0)]))
    verify(good.result(), good.job)
    with pytest.raises(ValueError, match="image 0: patches of"):
        next(bad)
    assert one.is_empty()


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        (lambda answer: 1 // len(answer), "division"),
        (lambda answer: torch.zeros(VOCAB, dtype=torch.bool), "constraint: no token is allowed"),
        (lambda answer: torch.ones(3, dtype=torch.bool), "one answer for each of 320"),
        (lambda answer: [True] * VOCAB, "has no attribute"),
    ],
)
def test_a_constraint_that_fails_ends_its_request(allowed: Any, message: str) -> None:
    """Others go on."""

    class Bad:
        """As given."""

        def allowed(self, answer: Sequence[int]) -> Any:
            """As given."""
            return allowed(answer)

    one = engine()
    bad, good = one.submit(greedy(prompt(4), constraint=Bad())), one.submit(greedy(prompt(4)))
    verify(good.result(), good.job)
    assert message in str(bad.result().finish.error) and one.is_empty()


def test_parked_requests() -> None:
    """S06: one that is never ready costs nothing, one that becomes ready runs, one whose question fails ends."""
    one, open_gates = engine(), [False]
    never = one.submit(greedy(prompt(3), ready=lambda: False))
    later = one.submit(greedy(prompt(4), ready=lambda: open_gates[0]))
    fails = one.submit(greedy(prompt(5), ready=lambda: 1 // 0 > 0))
    good = one.submit(greedy(prompt(6)))
    verify(good.result(), good.job)
    assert isinstance(fails.result().finish.error, ZeroDivisionError)
    assert one.step() == [] and later.job.status is Status.WAITING
    open_gates[0] = True
    verify(later.result(), later.job)
    never.cancel()
    assert never.finish == ("cancelled", None) and one.is_empty()


def test_leaving_at_any_point() -> None:
    """Before the first step, in the prompt, in the answer, after the end; twice; all pages come back."""
    for steps in range(8):
        one = engine(step_tokens=8)
        stream, other = one.submit(greedy(prompt(20), 4)), one.submit(greedy(prompt(20, 1), 6))
        for _ in range(steps):
            one.step()
        ended = stream.finish
        stream.cancel()
        stream.cancel()
        assert stream.finish == (ended or Finish("cancelled"))
        verify(stream.tokens, stream.job)
        verify(other.result(), other.job)
        assert one.is_empty()


def test_iterating_gives_what_there_is() -> None:
    """Two streams by turns; an abandoned one keeps its tokens; results after iteration are whole."""
    one = engine()
    first, second = one.submit(greedy(prompt(5), 4)), one.submit(greedy(prompt(6), 9))
    pairs = list(zip(first, second))
    assert len(pairs) == 4 and [a.id for a, _ in pairs] == first.result().token_ids
    second.cancel()
    assert list(second) == second.tokens[len(pairs) :]
    assert one.is_empty()


def test_generate_leaves_nothing_behind() -> None:
    """If one of its requests is refused, those before it are cancelled."""
    one = engine()
    with pytest.raises(ValueError, match="prompt: at least one token"):
        one.generate([greedy(prompt(4)), greedy([])])
    assert one.is_empty()


def test_listeners_hear_everything_and_may_fail() -> None:
    """Each step's news, with the end; one that raises loses its request; from inside, submit and cancel work."""
    one, heard, more = engine(), list[Update](), []

    def hear(update: Update) -> None:
        heard.append(update)
        if len(heard) == 2:
            more.append(one.submit(greedy(prompt(3))))
            victim.cancel()

    def fail(update: Update) -> None:
        if len(update.tokens):
            raise KeyError("gone")

    def climb(update: Update) -> None:
        one.step()

    stream, failing = one.submit(greedy(prompt(5), 4), hear), one.submit(greedy(prompt(6)), fail)
    victim, climbing = one.submit(greedy(prompt(7), 30)), one.submit(greedy(prompt(8), 30), climb)
    verify(stream.result(), stream.job)
    assert [token for update in heard for token in update.tokens] == stream.tokens
    assert heard[-1].finish == stream.finish and all(update.stream is stream for update in heard)
    for lost in (failing, victim, climbing):
        assert lost.result().finish.reason == "cancelled"
    verify(more[0].result(), more[0].job)
    assert one.is_empty()


def test_many_threads() -> None:
    """Four of them submit, read and cancel at once: every answer is right."""
    one, faults = engine(100), []

    def work(number: int) -> None:
        try:
            for turn in range(3):
                stream = one.submit(greedy(prompt(4 + turn, number), 4))
                if turn == 1:
                    next(stream)
                    stream.cancel()
                    stream.result()
                verify(stream.result(), stream.job)
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert faults == [] and one.is_empty()


def test_weights_of_another_model_are_refused() -> None:
    """One line for a configuration or a dtype that differs."""
    one: CheckedEngine = engine()
    with pytest.raises(ValueError, match="load_weights: the new model's configuration differs"):
        one.load_weights(K3.build(engine_config(num_experts=5)))
    with pytest.raises(ValueError, match="load_weights: torch.float32 on cpu cannot follow torch.float64 on cpu"):
        one.load_weights(engine_model(torch.float32))


def test_a_model_without_vision() -> None:
    """Images are refused, and the placeholder's id is a token like any other."""
    model = K3.build(engine_config(), dtype=torch.float64)
    model.vision = model.projector = None
    one = engine(model=model.requires_grad_(False))
    with pytest.raises(ValueError, match="images: this model has no vision tower"):
        one.submit(Request([1, MEDIA], images=[picture(0)]))
    stream = one.submit(greedy([1, MEDIA, 2]))
    assert len(stream.result().tokens) == 6
