"""Decoder: steps in fixed places give what a DenseCache gives, for any slots, lengths and order of requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiny_model import tiny_config, tiny_model
from torch import Tensor

from openk3.inputs.packed import Packed
from openk3.model.cache import DenseCache
from openk3.model.decoder import Decoder
from openk3.model.k3 import K3


@pytest.fixture(scope="module")
def model() -> Iterator[K3]:
    """In float64, where the two ways agree to the last digits."""
    yield tiny_model(tiny_config(vision=False))


def prefilled(model: K3, prompts: list[list[int]]) -> tuple[DenseCache, Tensor]:
    """A cache of these prompts, and logits behind each."""
    cache = model.new_cache(len(prompts))
    packed = Packed.join(prompts)
    with torch.no_grad():
        logits_TV = model(packed, cache)
    return cache, logits_TV[packed.cu_seqlens[1:].long() - 1]


def prompts_of(lengths: list[int]) -> list[list[int]]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(61, (n,), generator=generator).tolist() for n in lengths]


def dense_steps(model: K3, cache: DenseCache, ids: list[list[int]]) -> list[Tensor]:
    """Logits of each step with a DenseCache; one list of ids for each step."""
    with torch.no_grad():
        return [model(Packed.join([[token] for token in step]), cache) for step in ids]


def test_steps_are_those_of_a_dense_cache(model: K3) -> None:
    """Three sequences of unequal length in slots of their own, given tokens; places that stand empty change nothing."""
    cache, _ = prefilled(model, prompts_of([5, 1, 9]))
    decoder = Decoder(model, slots=5, max_tokens=16)
    slots = [3, 0, 4]
    for n, slot in enumerate(slots):
        decoder.load(slot, cache, n)
    ids = prompts_of([3, 3, 3, 3])
    want = dense_steps(model, cache, ids)
    for step, expected in zip(ids, want):
        torch.testing.assert_close(decoder.step(slots, step), expected, rtol=1e-9, atol=1e-9)
    assert decoder.lengths == [5, 0, 0, 9, 13] and decoder.cache.length_R.tolist() == [5, 0, 0, 9, 13, 0]


def test_greedy_tokens(model: K3) -> None:
    """The most likely token of each step is the next one's input; sequences may stop and others take their slots."""
    first, logits_NV = prefilled(model, prompts_of([4, 7]))
    decoder = Decoder(model, slots=2, max_tokens=20)
    decoder.load(0, first, 0)
    decoder.load(1, first, 1)
    last = logits_NV.argmax(-1).tolist()
    want, ids = [], last
    for _ in range(5):
        ids = dense_steps(model, first, [ids])[0].argmax(-1).tolist()
        want.append(ids)
    assert decoder.greedy([0, 1], last, 5).tolist() == want
    second, logits_NV = prefilled(model, prompts_of([3]))
    decoder.load(0, second)
    token = logits_NV.argmax(-1).tolist()
    got = decoder.step([1, 0], [ids[1], token[0]])
    torch.testing.assert_close(got[1:], dense_steps(model, second, [token])[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got[:1], dense_steps(model, first, [ids])[0][1:], rtol=1e-9, atol=1e-9)


def test_a_sequence_from_its_first_token(model: K3) -> None:
    """An empty slot is an empty sequence: steps alone give the logits of the whole prompt."""
    decoder = Decoder(model, slots=1, max_tokens=6)
    (ids,) = prompts_of([6])
    with torch.no_grad():
        want = model(Packed.join([ids]))
    got = torch.cat([decoder.step([0], [token]).clone() for token in ids])
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: the kernels of all layers read and write the fixed places; an empty one beside two."""
    model = tiny_model(tiny_config(layers=4, vision=False), dtype=torch.float32)
    cache, _ = prefilled(model, prompts_of([5, 2]))
    decoder = Decoder(model, slots=3, max_tokens=8)
    for n, slot in enumerate([2, 0]):
        decoder.load(slot, cache, n)
    want = dense_steps(model, cache, [[7, 9]])[0]
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    torch.testing.assert_close(decoder.step([2, 0], [7, 9]), want, rtol=1e-3, atol=1e-4)
    assert decoder.cache.length_R.tolist() == [3, 0, 6, 0]


def test_refusals(model: K3) -> None:
    """Full slots, slots that are not there or twice, ids that do not fit, sequences that are too long."""
    decoder = Decoder(model, slots=2, max_tokens=3)
    for slots, ids, message in (
        ([0, 0], [1, 1], "distinct"),
        ([2], [1], "0..1"),
        ([], [], "distinct"),
        ([0], [1, 2], "ids: 1 of"),
        ([0], [10**6], "ids: 1 of"),
        ([0], None, "ids: needed"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.step(slots, ids)
    for _ in range(3):
        decoder.step([0], [5])
    with pytest.raises(ValueError, match="room for"):
        decoder.step([0], [5])
    decoder.step([1], [5])
    cache, _ = prefilled(model, prompts_of([4]))
    with pytest.raises(ValueError, match="a sequence of 4 tokens, room for 3"):
        decoder.load(1, cache)
    with pytest.raises(ValueError, match="must be positive"):
        Decoder(model, slots=0, max_tokens=3)
