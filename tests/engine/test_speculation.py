"""Speculation in the engine: whatever is guessed, answers, states and caches are those of plain decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from checked_engine import CheckedEngine, engine, greedy, verify, verify_scores
from engine_model import MEDIA, VOCAB, engine_model, picture, prompt
from scripted_draft import plain_answer, take_script
from torch import Tensor

from openk3.config.serve import SpeculationConfig
from openk3.engine.job import Job, Status
from openk3.engine.paged_cache import PagedStates
from openk3.engine.request import Request, SamplingParams
from openk3.engine.stream import Stream
from openk3.inputs.packed import Packed
from openk3.model.cache import KdaCache
from openk3.model.generate import prefill

SCRIPT = SpeculationConfig("ngram", 7, adaptive=False)
MTP = SpeculationConfig("mtp", 3, adaptive=False)
SAMPLED = (
    SamplingParams(max_tokens=12, temperature=1.3, seed=5),
    SamplingParams(max_tokens=12, temperature=0.8, top_k=20, seed=6),
    SamplingParams(max_tokens=12, temperature=1.0, top_p=0.8, seed=7, logprobs=2),
)


def scripted(script: Sequence[bool], **options: Any) -> CheckedEngine:
    """An engine whose guesses are right where the script says so."""
    one = engine(**{"speculation": SCRIPT, "page_tokens": 8, **options})
    take_script(one, script)
    return one


def finish(*streams: Stream) -> None:
    """All to the end, and right."""
    for stream in streams:
        verify(stream.result(), stream.job)


def compare_states(one: CheckedEngine, job: Job) -> None:
    """States and windows of the computed tokens, and the vector that is carried, are those of plain decoding."""
    model, count = engine_model(), job.num_computed
    assert job.cache is not None and count
    cache = model.new_cache(1)
    with torch.no_grad():
        prefill(model, Packed.join([job.token_ids[:count]]), cache)
        h_TD = model.hidden(Packed.join([job.token_ids[:count]]))
    groups = one.memory.shape.layers_per_page
    states = [layer for layer in one._loop.runner.cache.layers if isinstance(layer, PagedStates)]
    for n, (paged, plain) in enumerate(zip(states, [x for x in cache.layers if isinstance(x, KdaCache)])):
        page = job.cache.states[n // groups]
        torch.testing.assert_close(paged._state_PHKV[page], plain.state_NHKV[0], rtol=0, atol=1e-10)
        for inputs_PCW, window_NCW in zip(paged._inputs_PXW.chunk(3, 1), plain.windows):
            torch.testing.assert_close(inputs_PCW[page], window_NCW[0, :, 1:], rtol=0, atol=1e-10)
    if one.config.speculation is not None and one.config.speculation.draft == "mtp":
        carry_D = one.memory.carries()[job.cache.states[0]]
        torch.testing.assert_close(carry_D, h_TD[-1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("accepted", range(8))
def test_d01_every_number_of_right_guesses(accepted: int) -> None:
    """D01: seven guesses of which the first `accepted` are right, beside a request with another number of them, and
    again in the next pass; memory is NaN; states, windows and next tokens are those of plain decoding after each."""
    one = engine(speculation=SCRIPT, hash_tokens=8, step_tokens=40)
    draft = take_script(one, [False])
    streams = [one.submit(greedy(prompt(9 + n, n), 25)) for n in range(2)]
    while any(stream.job.num_left != 1 for stream in streams):
        one.step()
    for first, second in ((accepted, (accepted + 3) % 8), (min(accepted, 2), 0)):
        before = [stream.job.num_computed for stream in streams]
        words = [[n < count for n in range(7)] for count in (first, second)]
        draft.follow(words[0] + words[1])
        one.step()
        gained = [stream.job.num_computed - count for stream, count in zip(streams, before)]
        assert gained == [1 + first, 1 + second]
        for stream in streams:
            compare_states(one, stream.job)
            verify(stream.tokens, stream.job)
    draft.follow([True])
    finish(*streams)
    assert one.is_empty()


@pytest.mark.parametrize("params", SAMPLED)
@pytest.mark.parametrize("script", [[True], [False], [True, True, False], [False, True]])
def test_a_seed_gives_one_answer_however_it_was_guessed(params: SamplingParams, script: list[bool]) -> None:
    """With temperature and cuts, beside a greedy request: token for token what plain decoding draws."""
    one = scripted(script)
    streams = [one.submit(Request(prompt(7), params)), one.submit(greedy(prompt(12, 1), 9))]
    finish(*streams)
    want = engine().generate([Request(prompt(7), params)])[0]
    assert streams[0].result().token_ids == want.token_ids
    assert [[id for id, _ in token.top] for token in streams[0].tokens] == [
        [id for id, _ in token.top] for token in want.tokens
    ]
    assert one.is_empty()


@pytest.mark.parametrize("config", [MTP, SpeculationConfig("ngram", 4), SpeculationConfig("mtp")])
def test_drafts_of_every_kind(config: SpeculationConfig) -> None:
    """Prompts with images, in chunks, some from the cache, greedy and sampled, scored; adaptive or not."""
    one = engine(100, step_tokens=9, speculation=config)
    for _ in range(2):
        pictured = [*prompt(5), MEDIA, *prompt(3, 1), MEDIA, *prompt(2, 2)]
        streams = [
            one.submit(greedy([*prompt(6), *prompt(6), *prompt(6)], 9, turn_ends=[6])),
            one.submit(Request(pictured, SAMPLED[0], images=[picture(0), picture(1, (1, 2, 4))])),
            one.submit(Request(prompt(14, 3), SamplingParams(max_tokens=7, temperature=0, prompt_logprobs=0))),
            one.submit(greedy(prompt(1, 4), 12)),
        ]
        finish(*streams)
        verify_scores(streams[2].prompt_tokens, streams[2].job)
    stats = one.stats().drafts
    assert stats is not None and stats.num_turns + stats.num_plain_turns > 40
    assert (config.draft == "ngram" and config.adaptive) or stats.num_drafts > 0
    assert one.is_empty()


def reference_guesses(ids: list[int], count: int) -> list[int]:
    """What K3.draft goes on with: pairs of each token and the hidden vector before it, zero before the first."""
    model = engine_model()
    with torch.no_grad():
        h_TD = model.hidden(Packed.join([ids[:-1]])) if len(ids) > 1 else torch.zeros(0, 32, dtype=torch.float64)
        h_TD = torch.cat((h_TD.new_zeros(1, h_TD.shape[1]), h_TD))
        cache, guesses = model.new_cache(1), list[int]()
        next_T = torch.tensor(ids)
        for _ in range(count):
            bounds = torch.tensor([0, len(next_T)], dtype=torch.int32)
            h_TD, logits_TV = model.draft(h_TD, next_T, bounds, cache)
            h_TD, next_T = h_TD[-1:], logits_TV[-1:].argmax(-1)
            guesses += next_T.tolist()
    return guesses


def test_the_mtp_layer_guesses_as_if_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, behind a hit that begins inside a page, behind a preemption, with refused guesses before: the guesses
    are those of K3.draft over the whole request, and what is carried is the last token's vector."""
    one, seen = engine(100, step_tokens=7, speculation=MTP), list[tuple[list[int], list[int]]]()
    draft = one._loop.speculation.draft  # pyrefly: ignore
    propose = draft.propose

    def watch(works: Any) -> Any:
        guesses = propose(works)
        seen.extend((list(work.job.token_ids), found) for work, found in zip(works, guesses))
        return guesses

    monkeypatch.setattr(draft, "propose", watch)
    first = one.submit(greedy(prompt(20), 6, turn_ends=[13]))
    finish(first)
    second = one.submit(greedy([*prompt(20)[:13], 7, 8], 6))
    third = one.submit(greedy([*prompt(20)[:18], *prompt(5, 4)], 8))
    for _ in range(7):
        one.step()
    one.scheduler.preempt(third.job)
    while third.finish is None:
        one.step()
        for stream in (second, third):
            if stream.job.status is Status.RUNNING and stream.job.num_computed:
                compare_states(one, stream.job)
    assert second.result().num_cached == 12 and third.result().num_cached == 18 and len(seen) > 12
    finish(second, third)
    for ids, guesses in seen:
        assert guesses == reference_guesses(ids, len(guesses)) and 1 <= len(guesses) <= 3
    assert one.is_empty()


def test_nothing_is_guessed_before_the_first_copies() -> None:
    """Who has started and not had a turn has no state yet, though one token is left."""
    one = engine(step_tokens=3, speculation=MTP)
    propose = one._loop.speculation.draft.propose  # pyrefly: ignore

    def watch(works: Any) -> Any:
        assert all(work.job.cache.plan is None for work in works)
        return propose(works)

    one._loop.speculation.draft.propose = watch  # pyrefly: ignore
    streams = [one.submit(greedy([5 + n], 9)) for n in range(5)]
    one.step()
    waiting = [job for job in one.scheduler.running if job.cache is not None and job.cache.plan is not None]
    assert [job.num_left for job in waiting] == [1, 1]
    finish(*streams)
    assert one.is_empty()


def test_guesses_that_are_good_take_fewer_passes() -> None:
    """Seven right guesses a pass: 25 tokens in the prompt's two passes and three more; what happened is counted."""
    one = scripted([True], hash_tokens=8)
    stream = one.submit(greedy(prompt(10), 25))
    finish(stream)
    assert one.stats().num_steps == 2 + 3
    stats = one.stats().drafts
    assert stats is not None and (stats.num_turns, stats.num_drafts, stats.num_accepted) == (3, 21, 21)
    assert stats.accepted_per_turn == 7 and stats.rates_at == (1.0,) * 7
    assert one.stats().num_computed == 10 + 24
    take_script(one, [True, True, False])
    finish(one.submit(greedy(prompt(10, 1), 4)))
    more = one.stats().drafts
    assert more is not None and more.drafts_at[:3] == (4, 4, 3) and more.accepted_at[:3] == (4, 4, 3)


def test_what_was_refused_is_never_found() -> None:
    """A request that goes on as the wrong guesses did finds the right part of the prefix only, and is right."""
    one = scripted([True, True, False], hash_tokens=2)
    stream = one.submit(greedy(prompt(8), 16))
    for _ in range(3):
        one.step()
    job = stream.job
    guessed = [*job.token_ids, *job.drafts]
    known = job.num_computed
    wrong = [*job.token_ids[:known], *[(token + 1) % 280 for token in plain_answer(job, 30)[known - 8 : known + 6]]]
    for ids in (guessed, wrong):
        other = one.submit(greedy([*ids, 3, 3, 3], 3))
        finish(other)
        assert (other.result().num_cached or 0) <= known + 1
    finish(stream)
    assert one.is_empty()


def test_checkpoints_among_accepted_guesses() -> None:
    """Passes of eight tokens end between boundaries: states are kept at those as without guesses, for others."""
    cached = []
    for one in (scripted([True], hash_tokens=4), engine(hash_tokens=4)):
        stream = one.submit(greedy(prompt(10), 17))
        finish(stream)
        ids = stream.job.token_ids
        for end in (26, 22, 11):
            other = one.submit(greedy([*ids[:end], *prompt(4, 5)], 3))
            finish(other)
            cached.append(other.result().num_cached)
        assert one.is_empty()
    assert cached[:3] == cached[3:] and cached[0] == 24


@pytest.mark.parametrize("place", range(6))
def test_a_stop_among_right_guesses(place: int) -> None:
    """The answer ends with the stop id, wherever it lies among the guesses; the rest of them is forgotten."""
    want = engine().generate([greedy(prompt(8), 9)])[0].token_ids
    stop = want[place]
    one = scripted([True], hash_tokens=8)
    stream = one.submit(Request(prompt(8), SamplingParams(max_tokens=9, temperature=0, stop_ids=frozenset([stop]))))
    updates = []
    while stream.finish is None:
        updates += one.step()
    assert [token.id for token in stream.tokens] == want[: want.index(stop) + 1]
    assert stream.finish == ("stop", None) and sum(update.finish is not None for update in updates) == 1
    finish(stream, one.submit(greedy([*prompt(8), *want[:place], 1], 4)))
    assert one.is_empty()


def test_lengths_are_kept() -> None:
    """max_tokens, and the room that there is, whatever the guesses."""
    for count in range(1, 10):
        one = scripted([True])
        finish(stream := one.submit(greedy(prompt(5), count)))
        assert len(stream.tokens) == count and one.is_empty()
    one = scripted([True], num_pages=6, page_tokens=4)
    stream = one.submit(Request(prompt(7), SamplingParams(temperature=0)))
    finish(stream)
    assert stream.finish == ("length", None) and stream.job.num_tokens == 17 and one.is_empty()


class Recorded:
    """Allows odd ids, and any where the answer's length is a multiple of three."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.odd_V = torch.arange(VOCAB) % 2 == 1

    def allowed(self, answer: Sequence[int]) -> Tensor | None:
        """Keeps what it was asked."""
        self.asked.append(list(answer))
        return None if len(answer) % 3 == 0 else self.odd_V


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=11, temperature=0), SAMPLED[1]])
def test_a_constraint_is_asked_once_for_each_token(params: SamplingParams) -> None:
    """In order, and never behind a wrong guess; the answer is that without guesses, which the constraint changes."""
    plain, guessed = Recorded(), Recorded()
    want = engine().generate([Request(prompt(7), params, constraint=plain)])[0].token_ids
    one = scripted([True])
    draft = one._loop.speculation.draft  # pyrefly: ignore
    draft._guesses = lambda job, count: want[job.num_answer :][:count]  # some are right, as the constraint has it
    stream = one.submit(Request(prompt(7), params, constraint=guessed))
    free = one.submit(greedy(prompt(9, 1), 12))
    draft._guesses, right = lambda job, count: right(job, count) if job is stream.job else [], draft._guesses
    assert stream.result().token_ids == want
    finish(free)
    assert guessed.asked == plain.asked and all(len(b) == len(a) + 1 for a, b in pairwise(guessed.asked))
    stats = one.stats().drafts
    assert stats is not None and stats.num_accepted > 6
    stopped, ends = Recorded(), frozenset([want[6]])
    request = Request(prompt(7), dataclasses.replace(params, stop_ids=ends), constraint=stopped)
    draft._guesses = lambda job, count: want[job.num_answer :][:count]
    assert one.generate([request])[0].finish.reason == "stop"
    assert stopped.asked == plain.asked[: want.index(want[6]) + 1]
    draft._guesses = lambda job, count: [0] * count  # forbidden, or wrong
    again = Recorded()
    assert one.generate([Request(prompt(7), params, constraint=again)])[0].token_ids == want
    assert again.asked == plain.asked


@pytest.mark.parametrize("config", [SCRIPT, MTP])
@pytest.mark.parametrize("at", range(2, 8))
def test_s03_preempted_or_gone_after_each_step(at: int, config: SpeculationConfig) -> None:
    """S03: preempted after a pass with guesses, right or wrong, and another one cancelled; all shared a prefix."""
    one = engine(30, step_tokens=12, speculation=config)
    if config is SCRIPT:
        take_script(one, [True, True, False, True, False])
    streams = [one.submit(greedy([*prompt(9), *prompt(4, n)], 14, turn_ends=[9])) for n in range(3)]
    for _ in range(at):
        one.step()
    for stream in streams[:1]:
        if stream.job.status is Status.RUNNING:
            one.scheduler.preempt(stream.job)
    streams[1].cancel()
    verify(streams[1].tokens, streams[1].job)
    finish(streams[0], streams[2])
    assert one.is_empty()


def test_room_for_one_and_a_half() -> None:
    """Nobody is preempted for a guess: memory that two requests fill exactly, with seven guesses each, holds both."""
    one = scripted([True, False, True], num_pages=2 * (2 + 4), step_tokens=32)
    streams = [one.submit(greedy(prompt(8, n), 24)) for n in range(2)]
    finish(*streams)
    assert one.stats().num_preempted == 0
    one = scripted([True, False, True], num_pages=2 * (2 + 4) - 3, step_tokens=32)
    streams = [one.submit(greedy(prompt(8, n), 24)) for n in range(2)]
    finish(*streams)
    assert one.stats().num_preempted >= 1 and one.is_empty()
