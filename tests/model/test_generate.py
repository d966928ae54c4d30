"""generate: greedy equals the argmax of the full forward, sampling, stopping, images, errors at once."""

from __future__ import annotations

import pytest
import torch
from tiny_model import MEDIA, close, random_ids, random_image, tiny_model

from openk3 import K3, Packed
from openk3.model import generate as generate_module
from openk3.model.generate import Steps, generate, prefill

MODEL = tiny_model()
GREEDY = {"temperature": 0.0}


def greedy_by_full_forward(model: K3, ids: list[int], count: int, images: tuple = ()) -> list[int]:
    """The slow way: the whole sequence again for every token."""
    ids = [*ids]
    first = len(ids)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(Packed.join([ids], images=images))[-1].argmax()))
    return ids[first:]


def test_greedy_equals_full_forward() -> None:
    """From a prompt of several tokens and of one."""
    for length in (23, 1):
        (prompt,) = random_ids([length])
        want = greedy_by_full_forward(MODEL, prompt, 12)
        assert list(generate(MODEL, prompt, max_tokens=12, **GREEDY)) == want
        assert list(generate(MODEL, torch.tensor(prompt), max_tokens=12, **GREEDY)) == want


def test_images_in_the_prompt() -> None:
    """A Packed of one sequence; the image is seen."""
    prompt, images = [7, MEDIA, 8, 9], [random_image((1, 4, 6)), random_image((1, 4, 6), seed=1)]
    packed = [Packed.join([prompt], images=[image]) for image in images]
    want = [greedy_by_full_forward(MODEL, prompt, 8, (image,)) for image in images]
    assert [list(generate(MODEL, one, max_tokens=8, **GREEDY)) for one in packed] == want
    assert not torch.equal(MODEL(packed[0])[-1], MODEL(packed[1])[-1])


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_prefill_in_chunks(chunk: int) -> None:
    """Any chunk size, an image across a border included, gives the logits and cache of one pass."""
    packed = Packed.join([[7, 8, MEDIA, 9, *random_ids([20])[0]]], images=[random_image((1, 4, 4))])
    cache, whole = MODEL.new_cache(1), MODEL.new_cache(1)
    close(prefill(MODEL, packed, cache, chunk), MODEL(packed, whole)[-1:])
    assert cache.lengths == whole.lengths == [27]
    step = Packed.join([[11]])
    close(MODEL(step, cache), MODEL(step, whole))


def test_stops_after_a_stop_id_and_at_max_tokens() -> None:
    """The stop id is the last one yielded."""
    (prompt,) = random_ids([9])
    want = greedy_by_full_forward(MODEL, prompt, 10)
    stop = want[4]
    got = list(generate(MODEL, prompt, max_tokens=10, stop_ids=[stop], **GREEDY))
    assert got == want[: want.index(stop) + 1]
    assert list(generate(MODEL, prompt, max_tokens=0, **GREEDY)) == []
    assert len(list(generate(MODEL, prompt, max_tokens=3, **GREEDY))) == 3


def test_sampling_is_reproducible_and_follows_its_generator() -> None:
    """Equal seeds give equal text; top_k 1 is greedy."""
    (prompt,) = random_ids([5])

    def draw(seed: int, **options: float) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return list(generate(MODEL, prompt, max_tokens=10, generator=generator, **options))

    assert draw(1) == draw(1) != draw(2)
    assert draw(1, top_k=1) == greedy_by_full_forward(MODEL, prompt, 10)
    assert draw(3, top_p=0.9, temperature=0.7) == draw(3, top_p=0.9, temperature=0.7)


def test_streams_without_touching_the_callers_gradient_mode() -> None:
    """Between tokens the caller may train."""
    stream = generate(MODEL, [7, 8], max_tokens=3, **GREEDY)
    for _ in stream:
        assert torch.is_grad_enabled()
        assert MODEL(Packed.join([[7]])).requires_grad


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "is empty"),
        (Packed.join([[7], [8]]), "continues one sequence, got 2"),
        ([7, 99], "outside the vocabulary"),
        (Packed.join([[7]], images=[random_image((1, 2, 2))]), "placeholders"),
    ],
)
def test_errors_come_before_the_first_token(prompt: object, message: str) -> None:
    """At the call, not when iteration starts."""
    with pytest.raises(ValueError, match=message):
        generate(MODEL, prompt, max_tokens=1)


def test_steps_by_a_decoder_are_those_over_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits agree to the last digits: where room runs out, and where the model changes in the middle of an answer."""
    monkeypatch.setattr(generate_module, "LEAST_ROOM", 4)
    model, (prompt, ids) = tiny_model(), random_ids([3, 14])
    caches = [model.new_cache(1) for _ in range(2)]
    for cache in caches:
        prefill(model, Packed.join([prompt]), cache)
    plain, graphed = Steps(model, caches[0], 14, False), Steps(model, caches[1], 14, True)
    assert graphed.is_graphed and not plain.is_graphed
    for n, token in enumerate(ids):
        if n == 11:
            model.norm.weight.data = model.norm.weight.data * 1.5
        close(graphed(token), plain(token))
        assert graphed.is_graphed == (n < 11)
    assert caches[0].lengths == caches[1].lengths == [17]


def test_a_cpu_takes_no_graphs() -> None:
    """Whatever the length of the answer."""
    cache = MODEL.new_cache(1)
    prefill(MODEL, Packed.join([[1, 2]]), cache)
    assert not Steps(MODEL, cache, 1000).is_graphed
