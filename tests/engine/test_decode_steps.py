"""Passes of one token each as a GPU has them, run as they are on a CPU: tokens, places, and when they are not taken."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from checked_engine import CheckedEngine, engine, greedy, verify
from engine_model import MEDIA, engine_model, picture, prompt

from openk3.config.serve import SpeculationConfig
from openk3.engine.decode_steps import DecodeSteps, places_for
from openk3.engine.job import Work
from openk3.engine.request import Request, SamplingParams
from openk3.model.capture import has_kernels, is_plain


def watched(one: CheckedEngine) -> list[int]:
    """How many requests each pass of one token each has; whatever runs must not touch spare memory's neighbours."""
    decode, counts = one._loop.runner.decode, list[int]()
    assert decode is not None
    run = decode.run

    def counting(works: Sequence[Work]) -> Any:
        counts.append(len(works))
        return run(works)

    decode.run = counting  # pyrefly: ignore
    return counts


@pytest.mark.parametrize(
    "guesses",
    [None, SpeculationConfig("mtp", 2, adaptive=False), SpeculationConfig("ngram", 3, adaptive=False)],
    ids=str,
)
def test_tokens_are_those_of_plain_passes(guesses: SpeculationConfig | None) -> None:
    """Requests of several lengths that come and go, over several pages, with images, scores and alternatives."""
    one = engine(60, step_tokens=20, decode_steps=True, speculation=guesses)
    counts = watched(one)
    requests = [greedy(prompt(3 + 5 * n, n), 4 + n) for n in range(5)]
    requests.append(greedy([1, MEDIA, 2, 3], 5, images=[picture(0)]))
    requests.append(Request(prompt(9, 1), SamplingParams(max_tokens=6, temperature=0.9, top_k=5, seed=1, logprobs=2)))
    requests.append(Request(prompt(7, 2), SamplingParams(max_tokens=6, temperature=0, prompt_logprobs=0)))
    streams = [one.submit(each) for each in requests]
    answers = [stream.result() for stream in streams]
    for stream, answer in zip(streams, answers):
        assert answer.finish.error is None
        verify(answer, stream.job)
    assert counts and one.is_empty()
    if guesses is None:
        assert max(counts) > 4


def test_requests_of_one_token_from_the_start() -> None:
    """A prompt of one token is a pass of one token too, over a state that is zeroed first."""
    one = engine(decode_steps=True)
    counts = watched(one)
    streams = [one.submit(greedy([n + 1], 9)) for n in range(3)]
    for stream in streams:
        verify(stream.result(), stream.job)
    assert counts[0] == 3 and one.is_empty()


def test_places() -> None:
    """Powers of two and one and a half of them, none above the most."""
    assert [places_for(n, 100) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17, 24, 25, 33, 49, 65)] == [
        *(1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 24, 24, 32, 48, 64, 96)
    ]
    assert all(n <= places_for(n, 77) <= 77 for n in range(1, 78))


def test_they_are_made_ahead() -> None:
    """As many as there are numbers of places; later passes make none."""
    one = engine(decode_steps=True, max_requests=5)
    decode = one._loop.runner.decode
    assert decode is not None and one.prepare() == 5  # 1, 2, 3, 4 and 5 places
    assert engine().prepare() == 0  # a CPU has none
    streams = [one.submit(greedy(prompt(4, n), 5)) for n in range(5)]
    for stream in streams:
        verify(stream.result(), stream.job)
    assert decode.prepare() == 5


def test_models_that_have_changed() -> None:
    """Weights in other places and parts that somebody changed are seen before each pass."""
    model = copy.deepcopy(engine_model())
    one = engine(model=model, decode_steps=True)
    counts, decode = watched(one), one._loop.runner.decode
    assert decode is not None
    stream = one.submit(greedy(prompt(5), 6))
    verify(stream.result(), stream.job, model)
    made, seen = dict(decode._found), len(counts)
    assert made and seen
    model.layers[0].ffn_norm.weight.data = model.layers[0].ffn_norm.weight.data.clone()  # pyrefly: ignore
    assert decode.now() and not decode._found
    stream = one.submit(greedy(prompt(6, 1), 6))
    verify(stream.result(), stream.job, model)
    hook = model.layers[1].register_forward_hook(lambda *args: None)
    assert not decode.now() and not is_plain(model)
    seen = len(counts)
    stream = one.submit(greedy(prompt(7, 2), 6))
    verify(stream.result(), stream.job, model)
    assert len(counts) == seen
    hook.remove()
    assert decode.now()
    stream = one.submit(greedy(prompt(8, 3), 6))
    verify(stream.result(), stream.job, model)
    assert len(counts) > seen


def test_new_weights() -> None:
    """load_weights makes other steps, with the same choice of graphs or none."""
    one, other = engine(decode_steps=True), engine_model(seed=1)
    before = one._loop.runner.decode
    one.load_weights(other)
    after = one._loop.runner.decode
    assert after is not None and after is not before and not after.graphs
    counts = watched(one)
    stream = one.submit(greedy(prompt(5), 6))
    verify(stream.result(), stream.job, other)
    assert counts


def test_a_pass_that_fails_behind_the_step() -> None:
    """Requests whose states the first part of a pass has moved on start again; nobody's tokens change."""
    one = engine(decode_steps=True)
    counts = watched(one)
    first = one.submit(greedy(prompt(4), 9))
    while len(first.tokens) < 3:
        one.step()
    second = one.submit(greedy(prompt(9, 1), 4))
    layer = one._loop.runner.cache.layers[0]
    write = layer.write

    def failing(*args: Any) -> None:
        write(*args)
        del layer.write  # pyrefly: ignore
        raise RuntimeError("out of memory")

    layer.write, seen = failing, len(counts)  # pyrefly: ignore
    one.step()
    assert len(counts) == seen + 1 and one._loop.num_failed_passes == 1
    for stream in (first, second):
        verify(stream.result(), stream.job)
    assert one.is_empty()


def test_graphs_need_kernels() -> None:
    """On a CPU there are none; and a float64 model has none anywhere."""
    model = engine_model()
    assert is_plain(model) and not has_kernels(model)
    one = engine()
    assert one._loop.runner.decode is None
    one._loop.runner.use_decode_steps(graphs=True)
    decode = one._loop.runner.decode
    assert isinstance(decode, DecodeSteps) and not decode.now()
    stream = one.submit(greedy(prompt(5), 4))
    verify(stream.result(), stream.job)
    with torch.inference_mode():
        assert not decode.now()
