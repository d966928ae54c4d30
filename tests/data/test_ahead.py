"""Ahead: the loader's batches and states from another process, changes of the window length, resuming, errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from openk3.data.ahead import Ahead
from openk3.data.documents import DataError, Encoder
from openk3.data.loader import Loader
from openk3.data.sources import Files, Records
from openk3.inputs.packed import Packed
from openk3.inputs.tokenizer import Tokenizer

ENCODER = Encoder(Tokenizer({bytes([b]): b for b in range(256)}))


def loader() -> Loader:
    """A loader of two micro-batches of 64 tokens, always in the same order."""
    records = Records("docs", [{"text": f"d{n:03d}" * (1 + n % 5)} for n in range(50)])
    return Loader([records], ENCODER, batch_tokens=128, micro_batch_tokens=64)


@pytest.fixture
def ahead() -> Iterator[Ahead]:
    """One over `loader()`; its process ends with the test."""
    made = Ahead(loader())
    yield made
    made.close()
    assert not made._process.is_alive()


def shown(batch: list[Packed]) -> list[list[int]]:
    """A batch's ids and boundaries."""
    return [[*packed.token_ids_T.tolist(), *packed.cu_seqlens.tolist()] for packed in batch]


def test_batches_and_states_are_the_loaders(ahead: Ahead) -> None:
    """Also where the window length changes back and forth: nothing made ahead for another length is given out."""
    plain = loader()
    assert ahead.state_dict() == plain.state_dict()
    for seq_len in (16, 16, 32, 32, 32, 16, 64, 64):
        assert shown(ahead.batch(seq_len)) == shown(plain.batch(seq_len))
        assert ahead.state_dict() == plain.state_dict()


def test_goes_on_where_a_state_was_taken(ahead: Ahead) -> None:
    """As a checkpoint does it, forwards and backwards."""
    plain = loader()
    states, wanted = [], []
    for _ in range(5):
        states.append(plain.state_dict())
        wanted.append(shown(plain.batch(32)))
    for number in (3, 1, 0):
        ahead.load_state_dict(states[number])
        assert [shown(ahead.batch(32)) for _ in range(number, 5)] == wanted[number:]


def test_other_data_is_refused_as_the_loader_refuses_it(ahead: Ahead) -> None:
    """And the place stays."""
    with pytest.raises(DataError, match="the training documents, weights or seed changed"):
        ahead.load_state_dict({**ahead.state_dict(), "fingerprint": "another"})
    assert shown(ahead.batch(32)) == shown(loader().batch(32))


def test_a_document_that_goes_away_is_reported_in_its_batch(tmp_path: Path) -> None:
    """Raised where the batch would have come, each time; after the file is back, it comes."""
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text(f"text {n} " * 40)
    made = Ahead(Loader([Files(tmp_path)], ENCODER, batch_tokens=64, micro_batch_tokens=64))
    (tmp_path / "1.txt").rename(tmp_path / "gone")
    for _ in range(2):
        with pytest.raises(OSError, match=r"1\.txt"):
            made.batch(32)
    (tmp_path / "gone").rename(tmp_path / "1.txt")
    wanted = Loader([Files(tmp_path)], ENCODER, batch_tokens=64, micro_batch_tokens=64)
    assert [shown(made.batch(32)) for _ in range(3)] == [shown(wanted.batch(32)) for _ in range(3)]
    made.close()


def test_a_process_that_died_is_an_error(ahead: Ahead) -> None:
    """Not a wait without end."""
    ahead.batch(32)
    ahead._process.kill()
    ahead._process.join()
    with pytest.raises(RuntimeError, match="process that reads the training data has died"):
        for _ in range(5):
            ahead.batch(32)
