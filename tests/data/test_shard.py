"""Shards: documents come back bit for bit, through the loader and in training; other vocabularies are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from openk3.config.model import VisionConfig
from openk3.data.documents import DataError, Document, Encoder, Record
from openk3.data.loader import Loader
from openk3.data.shard import Shard, open_source, write_shard
from openk3.data.sources import Files, Records, texts
from openk3.inputs.tokenizer import Tokenizer

TOKENIZER = Tokenizer({bytes([b]): b for b in range(256)})
ENCODER = Encoder(TOKENIZER, vision=VisionConfig(), max_image_tokens=64)
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
RECORDS = [
    {"text": "one text"},
    {"image": Image.effect_noise((56, 28), 80).convert("RGB"), "text": "noise"},
    {"messages": CHAT, "thinking": False},
    {"image": [Image.new("RGB", (28, 28), "red"), Image.new("RGB", (28, 56), "blue")], "text": "two"},
]


def documents() -> list[Document]:
    """The records, encoded now."""
    return [ENCODER.encode(Record(record, f"r{n}")) for n, record in enumerate(RECORDS)]


def test_documents_come_back_bit_for_bit(tmp_path: Path) -> None:
    """Ids, targets, pixels and the places of images, as encoding gives them."""
    assert write_shard(tmp_path / "a.shard", documents(), TOKENIZER) == sum(map(len, documents()))
    shard = open_source(tmp_path / "a.shard", TOKENIZER)
    assert len(shard) == len(RECORDS) and shard.key(1) == "a.shard:1"
    for number, want in enumerate(documents()):
        got = ENCODER.encode(shard.record(number))
        assert np.array_equal(got.ids, want.ids) and np.array_equal(got.targets, want.targets)
        assert got.blocks == want.blocks
        for (pixels, grid), (wanted, shape) in zip(got.images, want.images, strict=True):
            assert grid == shape and pixels.dtype == np.float32 and np.array_equal(pixels, wanted)


def test_batches_are_those_of_the_records(tmp_path: Path) -> None:
    """The loader gives the same windows from several shards as from the records in memory."""
    split = documents()
    write_shard(tmp_path / "s" / "0.shard", split[:2], TOKENIZER)
    write_shard(tmp_path / "s" / "1.shard", split[2:], TOKENIZER)
    sources = (Records("r", RECORDS), open_source(tmp_path / "s", TOKENIZER))
    both = [Loader([source], ENCODER, batch_tokens=64, micro_batch_tokens=64) for source in sources]
    for _ in range(6):
        (here,), (there,) = (loader.batch(64) for loader in both)
        assert here.token_ids_T.tolist() == there.token_ids_T.tolist()
        assert here.cu_seqlens.tolist() == there.cu_seqlens.tolist()
        assert all(np.array_equal(a[0], b[0]) for a, b in zip(here.images, there.images, strict=True))


def test_fingerprint_follows_the_documents(tmp_path: Path) -> None:
    """So that a resumed run notices other data."""
    for name, chosen in (("a", documents()), ("b", documents()), ("c", documents()[:3])):
        write_shard(tmp_path / f"{name}.shard", chosen, TOKENIZER)
    prints = [Shard(tmp_path / f"{name}.shard").fingerprint() for name in "abc"]
    assert prints[0] == prints[1] != prints[2]
    assert list(texts(Shard(tmp_path / "a.shard"))) == []


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """The message names the shard and the flag."""
    write_shard(tmp_path / "a.shard", documents(), TOKENIZER)
    other = Tokenizer({**{bytes([b]): b for b in range(256)}, b"ab": 256})
    with pytest.raises(DataError, match=r"a\.shard: encoded with another tokenizer; .*--data\.tokenizer"):
        open_source(tmp_path / "a.shard", other)


def test_folders_without_shards_hold_text(tmp_path: Path) -> None:
    """As before there were shards."""
    (tmp_path / "a.txt").write_text("some text")
    assert isinstance(open_source(tmp_path), Files)


def test_damage_is_one_line(tmp_path: Path) -> None:
    """A missing array, and no document at all."""
    write_shard(tmp_path / "a.shard", documents(), TOKENIZER)
    (tmp_path / "a.shard" / "grids.npy").unlink()
    with pytest.raises(DataError, match=r"a\.shard: not a shard, or damaged"):
        Shard(tmp_path / "a.shard")
    with pytest.raises(DataError, match="at least one document"):
        write_shard(tmp_path / "b.shard", [], TOKENIZER)
