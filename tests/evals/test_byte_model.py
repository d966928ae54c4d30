"""The byte model against the formula written out with dictionaries, and on text whose answer is known."""

import math
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.evals import byte_model
from openk3.evals.byte_model import ByteModel


def slow_bits(train: list[bytes], held: list[bytes], order: int) -> float:
    followers: dict[bytes, Counter] = defaultdict(Counter)
    for text in train:
        padded = bytes(order) + text
        for i in range(order, len(padded)):
            for n in range(order + 1):
                followers[bytes([n]) + padded[i - n : i]][padded[i]] += 1

    def probability(byte: int, context: bytes, n: int) -> float:
        if n < 0:
            return 1 / 256
        seen = followers[bytes([n]) + context[len(context) - n :]]
        lower = probability(byte, context, n - 1)
        return (seen[byte] + len(seen) * lower) / (seen.total() + len(seen)) if seen else lower

    bits = num = 0
    for text in held:
        padded = bytes(order) + text
        for i in range(order, len(padded)):
            bits -= math.log2(probability(padded[i], padded[i - order : i], order))
            num += 1
    return bits / num


texts = st.lists(st.text(alphabet="abé\0", max_size=12).map(str.encode), min_size=1, max_size=4)


@settings(deadline=None, max_examples=40)
@given(train=texts, held=texts, order=st.integers(0, 7), chunk=st.integers(1, 9))
def test_equals_the_formula_at_any_chunk_size(train, held, order, chunk):
    if not any(train) or not any(held):
        return
    whole, byte_model.CHUNK_BYTES = byte_model.CHUNK_BYTES, chunk
    try:
        bits = ByteModel.fit(train, order).bits_per_byte(held)
    finally:
        byte_model.CHUNK_BYTES = whole
    assert len(bits) == order + 1
    for n in range(order + 1):
        assert bits[n] == pytest.approx(slow_bits(train, held, n), rel=1e-12)


def test_unseen_bytes_cost_finite_bits_and_order_helps_on_periodic_text():
    model = ByteModel.fit(["abcd" * 500])
    bits = model.bits_per_byte(["abcd" * 100])
    assert bits[0] == pytest.approx(2.0, abs=0.1)
    assert bits[1] < 0.1
    assert 8 < model.bits_per_byte(["zzzz"])[0] < 64


def test_order_n_sees_n_bytes():
    """A byte fixed by the one two places before it: order 1 learns nothing, order 2 everything."""
    text = "".join(a + "x" + a for a in "pqrs" * 200)
    bits = ByteModel.fit([text], 2).bits_per_byte([text])
    after_x = sum(1 for i in range(2, len(text)) if text[i - 1] == "x")
    assert bits[1] > after_x / len(text) * 1.9
    assert bits[2] < 0.5 * bits[1]


def test_documents_do_not_see_each_other():
    joined = ByteModel.fit(["ab", "cd"], 1)
    assert joined.num_bytes == 4
    assert ord("c") not in joined.orders[1].keys[joined.orders[1].keys >> 8 == ord("b")] & 0xFF


@pytest.mark.parametrize("texts", [[], [""], [b"", ""]])
def test_empty_text_is_refused(texts):
    with pytest.raises(ValueError, match="no bytes"):
        ByteModel.fit(texts)
    with pytest.raises(ValueError, match="no bytes"):
        ByteModel.fit(["a"]).bits_per_byte(texts)


def test_order_must_fit_one_key():
    with pytest.raises(ValueError, match="max_order"):
        ByteModel.fit(["a"], 8)
