"""The loader: C01 (order after a resume), epochs, mixing, mixture weights, changed data."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openk3.data.documents import DataError, Encoder, Record
from openk3.data.loader import Loader, permutation
from openk3.data.sources import Records
from openk3.inputs.packed import Packed
from openk3.inputs.tokenizer import Tokenizer

ENCODER = Encoder(Tokenizer({bytes([b]): b for b in range(256)}))
NUM_DOCUMENTS = 100


def numbered(count: int = NUM_DOCUMENTS, name: str = "docs", length: int = 4) -> Records:
    """Documents that spell their own number, of different lengths."""
    return Records(name, [{"text": f"{name[0]}{n:03d}" * (1 + n % length)} for n in range(count)])


def make(*sources: Records, weights: tuple[float, ...] = (), seed: int = 0, batch: int = 128) -> Loader:
    """A loader of two micro-batches of 64 tokens a step."""
    return Loader(
        list(sources) or [numbered()],
        ENCODER,
        batch_tokens=batch,
        micro_batch_tokens=64,
        weights=weights,
        seed=seed,
    )


def rows(batch: list[Packed]) -> list[tuple[int, ...]]:
    """The token ids of every sequence of a step, micro-batches in order."""
    return [tuple(part.tolist()) for packed in batch for part in packed.token_ids_T.split(packed.lengths.tolist())]


def numbers(stream: list[tuple[int, ...]]) -> list[int]:
    """Document numbers of whole-document sequences."""
    return [int(bytes(row[2:5]).decode()) for row in stream]


def resumed(loader: Loader, **options: Any) -> Loader:
    """A new loader with the state of `loader`, through JSON as a checkpoint stores it."""
    other = make(**options)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    return other


def steps_of_an_epoch() -> int:
    """Steps after which the first epoch is used up, at least."""
    loader, seen = make(), 0
    for step in range(1000):
        seen += len(rows(loader.batch(64)))
        if seen >= NUM_DOCUMENTS:
            return step + 1
    raise AssertionError("no end of the epoch")


def test_resume_gives_the_uninterrupted_stream() -> None:
    """C01: stop after k steps for every k through three epochs and a bit, stop twice: the joined stream is the same."""
    total = 3 * steps_of_an_epoch() + 3
    loader, whole = make(), []
    states = [make().state_dict()]
    for _ in range(total):
        whole.append(rows(loader.batch(64)))
        states.append(json.loads(json.dumps(loader.state_dict())))
    for k in range(total):  # 0, 1, mid epoch 2, the exact end of an epoch, the last step: all of them
        again = make()
        again.load_state_dict(states[k])
        first = rows(again.batch(64))
        assert first == whole[k]
        if k + 1 < total:  # and once more within the epoch
            assert rows(resumed(again).batch(64)) == whole[k + 1]


def test_every_document_once_per_epoch() -> None:
    """C01: the stream is three different permutations, end to end, whatever the packer passed over."""
    loader, stream = make(), []
    while len(stream) < 3 * NUM_DOCUMENTS:
        stream += numbers(rows(loader.batch(64)))
    epochs = [tuple(stream[n * NUM_DOCUMENTS : (n + 1) * NUM_DOCUMENTS]) for n in range(3)]
    assert all(sorted(epoch) == list(range(NUM_DOCUMENTS)) for epoch in epochs)
    assert len(set(epochs)) == 3 and epochs[0] != tuple(range(NUM_DOCUMENTS))


def test_exact_end_of_an_epoch_goes_on() -> None:
    """C01: a state saved when the last window of the epoch has just been given out starts the next epoch."""
    stream = make().streams[0]
    for _ in range(NUM_DOCUMENTS):
        assert stream.next_window(64).origin.epoch == 0
    assert stream.position == NUM_DOCUMENTS
    other = make().streams[0]
    other.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    expected, found = stream.next_window(64), other.next_window(64)
    assert expected.origin.epoch == 1 and expected.origin == found.origin and expected.span == found.span


def test_seed_decides_the_order() -> None:
    """Same seed, same stream; another seed, another order."""
    assert rows(make().batch(64)) == rows(make().batch(64)) != rows(make(seed=1).batch(64))


def test_micro_batches_keep_to_the_budget_and_use_it() -> None:
    """No micro-batch passes its budget; on average they are nearly full; windows longer than it widen it."""
    loader = make(Records("docs", [{"text": "word " * (1 + n % 17)} for n in range(50)]), batch=512)
    sizes = [packed.num_tokens for _ in range(10) for packed in loader.batch(64)]
    assert len(sizes) == 80 and max(sizes) <= 64 and np.mean(sizes) > 60
    (long,) = make(Records("docs", [{"text": "word " * 500}])).batch(128)
    assert long.num_tokens == 128 and len(make().batch(64)) == 2


def test_long_documents_are_mixed() -> None:
    """Windows of one file do not fill a batch while other files wait."""
    loader = make(Records("docs", [{"text": chr(65 + n) * 2000} for n in range(20)]), batch=1024)
    letters = {row[3] for row in rows(loader.batch(64))}
    assert len(letters) > 6


class Broken(Records):
    """Numbered documents of which one cannot be read for a while."""

    broken = ""

    def record(self, index: int) -> Record:
        if self.key(index) == self.broken:
            raise DataError(f"{self.broken}: gone")
        return super().record(index)


def test_an_unreadable_document_costs_no_place() -> None:
    """The step that met it can be asked for again, or saved and resumed, as if nothing had been."""
    expected = [rows(batch) for batch in map(make().batch, [32] * 12)]
    source = Broken("docs", numbered().records)
    loader, met = make(source), 0
    for n, want in enumerate(expected):
        source.broken = f"docs:{(n * 29 + 5) % NUM_DOCUMENTS}"
        before = loader.state_dict()
        try:
            batch = loader.batch(32)
        except DataError:
            met += 1
            assert loader.state_dict() == before
            source.broken = ""
            batch = loader.batch(32)
        assert rows(batch) == want
    assert met >= 2


def test_growing_windows_lose_nothing() -> None:
    """A length step in the middle of documents: every byte is still predicted exactly once in the epoch."""
    texts = [f"{n:02d}" + "".join(chr(33 + (n * 7 + i) % 90) for i in range(300)) for n in range(6)]
    stream, predicted, lengths = make(Records("docs", [{"text": text} for text in texts])).streams[0], [], set()
    while True:
        window = stream.next_window(16 if len(predicted) < 600 else 96)
        if window.origin.epoch:
            break
        start, stop, num_tokens = window.span
        lengths.add(num_tokens)
        predicted += [(window.origin.index, place) for place in range(start + 1, stop)]
    assert sorted(predicted) == [(n, place) for n, text in enumerate(texts) for place in range(1, len(text) + 2)]
    assert {16, 96} <= lengths and max(lengths) == 96


def test_weights_set_the_shares_of_tokens() -> None:
    """Three to one whatever the sources' sizes, with epochs of their own."""
    loader = make(numbered(20, "apple", 1), numbered(500, "berry", 3), weights=(3.0, 1.0))
    count = Counter(chr(row[1]) for _ in range(40) for row in rows(loader.batch(64)) for _ in row)
    assert count["a"] / count["b"] == pytest.approx(3, rel=0.1)
    assert loader.streams[0].epoch > 5 and loader.streams[1].epoch == 0
    first = rows(loader.batch(64))
    other = make(numbered(20, "apple", 1), numbered(500, "berry", 3), weights=(3.0, 1.0))
    for _ in range(40):
        other.batch(64)
    assert rows(other.batch(64)) == first


def test_changed_data_is_refused() -> None:
    """C01: another document, order, seed or weight, and the state does not load."""
    state = make().state_dict()
    changed = Records("docs", [*numbered().records[:-1], {"text": "another"}])
    for other in (make(changed), make(numbered(99)), make(seed=1), make(numbered(), weights=(2.0,))):
        with pytest.raises(DataError, match="docs: the training documents, weights or seed changed"):
            other.load_state_dict(state)


def test_nothing_to_learn_is_an_error() -> None:
    """No documents, or only conversations without an assistant's turn: one line, no endless loop."""
    with pytest.raises(DataError, match="docs: no training documents"):
        make(Records("docs", []))
    silent = Records("docs", [{"messages": [{"role": "user", "content": "hello"}]}] * 3)
    with pytest.raises(DataError, match="docs: no document has anything to predict"):
        make(silent).batch(64)
    with pytest.raises(DataError, match="weights: 2 for 1 sources"):
        make(numbered(), weights=(1.0, 2.0))


@given(st.integers(0, 200), st.integers(0, 10**9))
def test_permutation(size: int, key: int) -> None:
    """Every index once, the same every time."""
    order = permutation(size, key)
    assert sorted(order.tolist()) == list(range(size)) and np.array_equal(order, permutation(size, key))


def test_permutation_is_pinned() -> None:
    """The order is part of a checkpoint's meaning: it may not change between versions or machines."""
    assert permutation(10, 0, 0, 0).tolist() == [2, 8, 3, 4, 9, 7, 1, 6, 5, 0]
    moved = [int((permutation(1000, epoch) == np.arange(1000)).sum()) for epoch in range(20)]
    assert max(moved) < 10
