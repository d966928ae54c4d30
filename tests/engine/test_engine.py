"""Engine: answers are those of plain K3.forward, however they were cut, shared, preempted, scored or sampled."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from checked_engine import GREEDY, CheckedEngine, engine, greedy, plain_logits, verify, verify_scores
from engine_model import MEDIA, VOCAB, cache_config, engine_model, picture, prompt
from torch import Tensor

from openk3.config.serve import EngineConfig, PageShape
from openk3.engine.engine import Engine
from openk3.engine.job import Job, Status
from openk3.engine.request import Request, SamplingParams
from openk3.engine.stream import Stream
from openk3.inputs.packed import MediaItem


def finish(one: CheckedEngine, *streams: Stream) -> None:
    """All to the end, and right."""
    for stream in streams:
        verify(stream.result(), stream.job)


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 128, 299, 300])
def test_s04_chunks_of_any_size(budget: int) -> None:
    """S04: log-probabilities at every place of a prompt in chunks, mixed with answers, are those of one pass."""
    length = 300 if budget > 60 else 24
    one = engine(120, step_tokens=budget, page_tokens=16, hash_tokens=4, checkpoint_pages=0)
    other = one.submit(greedy(prompt(3, 9), 12))
    one.step()
    long = one.submit(Request(prompt(length), dataclasses.replace(GREEDY, prompt_logprobs=0)))
    finish(one, long, other)
    verify_scores(long.prompt_tokens, long.job)
    assert one.is_empty()


@pytest.mark.parametrize("budget", [1, 2, 5, 7, 100])
def test_s04_an_image_across_chunks(budget: int) -> None:
    """S04: six image tokens in pieces, with text around and another image behind, also from inside the image."""
    images = [picture(0), picture(1, (1, 2, 4))]
    ids = [*prompt(5), *[MEDIA] * 6, *prompt(2, 1), MEDIA, MEDIA, *prompt(2, 2)]
    one = engine(step_tokens=budget)
    first = one.submit(Request(ids, GREEDY, images=images, turn_ends=[9]))
    finish(one, first)
    again = one.submit(Request([*prompt(5), MEDIA, *prompt(2, 1), MEDIA, *prompt(2, 2)], GREEDY, images=images))
    finish(one, again)
    assert again.result().num_cached == 16 and again.result().token_ids == first.result().token_ids
    assert first.job.num_prompt == 17 and not first.job.features
    cut = one.submit(Request([*prompt(5), MEDIA, *prompt(3)], GREEDY, images=images[:1]))
    finish(one, cut)
    assert cut.result().num_cached == 8 and cut.job.num_prompt == 14 and one.is_empty()


def undisturbed(request: Request) -> list[int]:
    """The answer of an engine with nothing else to do."""
    return engine().generate([request])[0].token_ids


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=6, temperature=1.2, top_p=0.95, seed=11)])
@pytest.mark.parametrize("at", range(1, 10))
def test_s03_preempted_at_every_step(at: int, params: SamplingParams) -> None:
    """S03: after each kind of step, chunk, checkpoint and token; a third request with the same prefix comes between."""
    request = Request(prompt(21), params, turn_ends=[13])
    want = undisturbed(request)
    one = engine(30, step_tokens=8)
    first, second = one.submit(request), one.submit(greedy(prompt(11, 2)))
    for _ in range(at):
        one.step()
    if first.job.status is Status.RUNNING:
        one.scheduler.preempt(first.job)
    third = one.submit(greedy([*prompt(21)[:17], 1]))
    finish(one, third, first, second)
    assert [token.id for token in first.tokens] == want and one.is_empty()


@pytest.mark.parametrize("priority", [0, 1])
def test_s03_room_for_one_and_a_half(priority: int) -> None:
    """S03: requests push each other out, by rank or by priority, and all answers are right, in memory full of NaN."""
    one = engine(11, step_tokens=16, checkpoint_pages=1)
    streams = [one.submit(greedy(prompt(20, n), 24, priority=priority * n)) for n in range(3)]
    for _ in range(6):
        one.step()
    streams.append(one.submit(greedy([*prompt(16, 1), 7], 5)))
    finish(one, *streams)
    assert one.stats().num_preempted >= 1 and one.is_empty()


def red_and_green() -> tuple[MediaItem, MediaItem]:
    """Two images of one size, and of one colour each."""
    pixels = torch.full((24, 3, 14, 14), -1.0, dtype=torch.float64)
    red, green = pixels.clone(), pixels.clone()
    red[:, 0], green[:, 1] = 1.0, 1.0
    return MediaItem(red, (1, 4, 6)), MediaItem(green, (1, 4, 6))


def test_s05_images_do_not_share_a_key() -> None:
    """S05: another colour, one other pixel, another order: no hit past what differs; the same images do hit."""
    red, green = red_and_green()
    dot = MediaItem(red.pixels_N3PP.clone(), red.grid_thw)
    dot.pixels_N3PP[3, 1, 5, 5] += 0.01
    ids = [*prompt(5), MEDIA, *prompt(3, 1), MEDIA, *prompt(4, 2)]
    one, cached = engine(100), []
    for pair in ((red, green), (red, green), (green, red), (dot, green), (red, dot), (red, green)):
        request = Request(ids, GREEDY, images=list(pair), turn_ends=[5])
        stream = one.submit(request)
        finish(one, stream)
        cached.append(stream.result().num_cached)
        assert stream.result().token_ids == undisturbed(request)
    assert cached[1] == cached[5] == 22 and cached[0] == 0
    assert cached[2] <= 5 and cached[3] <= 5 and cached[4] <= 14


def test_s06_too_large_is_refused_at_once() -> None:
    """S06: a request that never fits is an error at the door, and small ones go on; who has no limit ends by length."""
    one = engine(12, page_tokens=4)
    with pytest.raises(ValueError, match="prompt: 41 tokens do not fit; there is room for 40"):
        one.submit(greedy(prompt(41)))
    small = [one.submit(greedy(prompt(3, n))) for n in range(5)]
    finish(one, *small)
    full = one.submit(Request(prompt(33), SamplingParams(temperature=0)))
    finish(one, full)
    assert full.finish == ("length", None) and full.job.num_tokens == 41
    whole = one.submit(Request(prompt(40), SamplingParams(temperature=0)))
    finish(one, whole)
    assert len(whole.tokens) == 1 and one.is_empty()


@pytest.mark.parametrize("shared", [0, 1, 7, 8, 15, 17, 24, 31])
def test_prefixes_are_shared_and_answers_the_same(shared: int) -> None:
    """From nothing to a whole prompt, with a place to part inside a block, a page, and the first answer."""
    one = engine(100)
    first = one.submit(greedy(prompt(24), 8))
    finish(one, first)
    common = first.job.token_ids[:shared]
    streams = [one.submit(greedy([*common, *prompt(5, 3 + n)], tenant="", turn_ends=[shared])) for n in range(2)]
    finish(one, *streams)
    assert all((stream.result().num_cached or 0) <= shared for stream in streams)
    third = one.submit(greedy([*common, *prompt(6, 9)]))
    finish(one, third)
    assert third.result().num_cached == shared - shared % 2
    stranger = one.submit(greedy([*common, *prompt(6, 9)], tenant="other"))
    finish(one, stranger)
    assert stranger.result().num_cached == 0


def test_a_seed_gives_one_answer_whatever_else_runs() -> None:
    """Alone, beside others of every kind, preempted, in another engine; without a seed, answers differ."""
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=2**64 - 1)
    request = Request(prompt(9), params)
    want = undisturbed(request)
    one = engine(100, step_tokens=9)
    others = [SamplingParams(max_tokens=9, temperature=t, top_p=p) for t, p in ((0, 1), (2, 0.8), (1, 1))]
    streams = [one.submit(Request(prompt(4 + n, n), other)) for n, other in enumerate(others)]
    mine = one.submit(request)
    for _ in range(4):
        one.step()
    one.scheduler.preempt(mine.job)
    finish(one, mine, *streams)
    assert mine.result().token_ids == want
    free = Request(prompt(9), dataclasses.replace(params, seed=None))
    assert len({tuple(answer.token_ids) for answer in one.generate([free] * 3)}) > 1


def test_alternatives_and_their_log_probabilities() -> None:
    """The best ids of the model's own distribution, before temperature and cuts, for answer and prompt."""
    params = SamplingParams(max_tokens=4, temperature=0.5, top_k=2, seed=1, logprobs=5, prompt_logprobs=3)
    one = engine()
    stream = one.submit(Request(prompt(9), params))
    finish(one, one.submit(greedy(prompt(3, 1))), stream)
    verify_scores(stream.prompt_tokens, stream.job)
    log_probs_TV = plain_logits(stream.job).log_softmax(-1)
    for place, token in enumerate([*stream.prompt_tokens, *stream.tokens]):
        count = 3 if place < 8 else 5
        values, ids = log_probs_TV[place].topk(count)
        assert [id for id, _ in token.top] == ids.tolist()
        torch.testing.assert_close(torch.tensor([p for _, p in token.top]), values.float(), rtol=0, atol=1e-6)


def test_score() -> None:
    """Log-probabilities of whole prompts, in chunks, again after a preemption, with nothing taken from the cache."""
    one, rows = engine(step_tokens=7), [prompt(30, 1), prompt(1), prompt(12, 2)]
    one.generate([greedy(rows[0])])
    got = one.score(rows)
    assert [len(row) for row in got] == [29, 0, 11]
    stream = one.submit(Request(rows[0], SamplingParams(max_tokens=0, prompt_logprobs=0)))
    for _ in range(3):
        one.step()
    one.scheduler.preempt(stream.job)
    assert [token.logprob for token in stream.result().prompt_tokens] == pytest.approx(got[0], abs=1e-9)
    verify_scores(stream.prompt_tokens, stream.job)
    assert stream.result().num_cached == 0 and stream.finish == ("length", None) and one.is_empty()


def test_the_ends_of_answers() -> None:
    """A stop id is the last token; max_tokens counts; both are told."""
    one = engine()
    want = one.generate([greedy(prompt(8), 6)])[0]
    assert want.finish == ("length", None) and len(want.tokens) == 6 == len(want.logprobs) and want.num_prompt == 8
    stop = want.token_ids[3]
    cut = one.generate([Request(prompt(8), dataclasses.replace(GREEDY, stop_ids=frozenset([stop])))])[0]
    assert cut.finish == ("stop", None) and cut.token_ids == want.token_ids[: want.token_ids.index(stop) + 1]
    assert cut.num_cached == 6


class Only:
    """Allows the same ids everywhere; keeps what it was asked."""

    def __init__(self, *ids: int) -> None:
        self.allowed_V = torch.zeros(VOCAB, dtype=torch.bool)
        self.allowed_V[list(ids)] = True
        self.asked: list[list[int]] = []

    def allowed(self, answer: list[int]) -> Tensor | None:
        """The ids, but anything for the second token."""
        self.asked.append(answer)
        return None if len(answer) == 1 else self.allowed_V


def test_a_constraint_is_obeyed() -> None:
    """The best of what is allowed, beside a request that is free; log-probabilities stay the model's own."""
    one, only = engine(), Only(3, 5, 8)
    stream, free = one.submit(greedy(prompt(7), 4, constraint=only)), one.submit(greedy(prompt(7), 4))
    finish(one, free)
    tokens = stream.result().tokens
    logits_TV = plain_logits(stream.job)[6:-1]
    masked_TV = logits_TV.masked_fill(~only.allowed_V, float("-inf"))
    masked_TV[1] = logits_TV[1]
    assert [token.id for token in tokens] == masked_TV.argmax(-1).tolist()
    assert [token.logprob for token in tokens] == pytest.approx(
        [float(row.log_softmax(-1)[token.id]) for row, token in zip(logits_TV, tokens)], abs=1e-9
    )
    assert only.asked == [stream.job.token_ids[7 : 7 + n] for n in range(4)]


def test_new_weights() -> None:
    """Answers follow them and nothing old is hit; who was running ends, who was preempted is named anew."""
    one, new = engine(step_tokens=8), engine_model(seed=1)
    finish(one, one.submit(greedy(prompt(20))))
    running = [one.submit(greedy(prompt(20), 9)) for _ in range(2)]
    for _ in range(5):
        one.step()
    one.load_weights(new)
    one.scheduler.preempt(running[1].job)
    fresh = one.submit(greedy(prompt(20)))
    verify(fresh.result(), fresh.job, new)
    assert fresh.result().num_cached == 0
    assert [len(stream.result().tokens) for stream in running] == [9, 9]
    again = one.submit(greedy(prompt(20)))
    verify(again.result(), again.job, new)
    assert again.result().num_cached == 18
    seen = one.submit(Request([*prompt(5), MEDIA, *prompt(9)], GREEDY, images=[picture(0)]))
    while not seen.job.features:  # until a step ends in the image
        one.step()
    one.scheduler.preempt(seen.job)
    one.load_weights(engine_model(), "0 again")
    finish(one, seen)
    finish(one, one.submit(greedy(prompt(20))))
    assert one.is_empty()


def test_float32_differs_only_where_two_tokens_are_as_good() -> None:
    """The same engine in float32: a token may differ from plain argmax where the top two are within 1e-4."""
    model = engine_model(torch.float32)
    shape = PageShape.of(model.config, page_tokens=8, hash_tokens=2, value_bytes=4)
    config = dataclasses.replace(cache_config(60, checkpoint_pages=1), pages=shape)
    one = Engine(model, EngineConfig(config, 16))
    streams = [one.submit(greedy(prompt(n, n), 10)) for n in (3, 9, 17, 30)]
    for stream in streams:
        tokens = [token.id for token in stream]
        top = plain_logits(stream.job, model)[stream.job.num_prompt - 1 : -1].topk(2)
        for id, ids, values in zip(tokens, top.indices.tolist(), top.values.tolist()):
            assert id == ids[0] or values[0] - values[1] < 1e-4


def test_jobs_say_where_they_stand() -> None:
    """For whoever watches: numbers of an engine at work and at rest."""
    one = engine(step_tokens=8)
    assert one.is_idle
    streams = [one.submit(greedy(prompt(9, n), 3)) for n in range(3)]
    assert not one.is_idle and one.stats().num_waiting == 3 and one.stats().num_running == 0
    one.step()
    assert one.stats().num_running == 3 and one.stats().num_computed == 8 and one.stats().num_pages_held > 0
    jobs: list[Job] = [stream.job for stream in streams]
    assert {job.status for job in jobs} == {Status.RUNNING}
    finish(one, *streams)
    stats = one.stats()
    assert (stats.num_running, stats.num_pages_held, stats.num_asked, stats.num_hit) == (0, 0, 27, 0)
    assert stats.num_computed == 27 + 6 and stats.num_pages_cached > 0 and one.is_idle
