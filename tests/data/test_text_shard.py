"""Shards of text: records as they were written, found by the trainer, refused where they are damaged."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from openk3.data.documents import DataError, Document
from openk3.data.shard import open_source, write_shard
from openk3.data.sources import split, texts
from openk3.data.text_shard import TextDocument, TextShard, write_text_shard
from openk3.inputs.tokenizer import Tokenizer

BODIES = ["first text", "zweiter \u00fc\u4e2d\U0001f600", "third\n\ntext"]


def documents(bodies: list[str]) -> list[TextDocument]:
    """As the pipeline makes them."""
    return [
        TextDocument(body.encode(), f"file\n{n}", 0.5, hashlib.md5(body.encode()).digest())
        for n, body in enumerate(bodies)
    ]


def test_records_come_back(tmp_path: Path) -> None:
    """Text, places, quality, and keys that depend on the text alone."""
    meta = write_text_shard(tmp_path / "a.shard", documents(BODIES))
    shard = TextShard(tmp_path / "a.shard")
    assert len(shard) == meta["documents"] == 3
    assert [shard.record(n).fields["text"] for n in range(3)] == BODIES
    assert shard.record(1).where == "a.shard:1"
    assert shard.where() == ["file 0", "file 1", "file 2"] and shard.quality.tolist() == [0.5] * 3
    write_text_shard(tmp_path / "b.shard", documents(BODIES[1:]))
    assert TextShard(tmp_path / "b.shard").key(0) == shard.key(1) == hashlib.md5(BODIES[1].encode()).hexdigest()
    assert TextShard(tmp_path / "b.shard").fingerprint() != shard.fingerprint()


def test_the_trainer_finds_them(tmp_path: Path) -> None:
    """One shard, a folder of them, a folder of such folders with an index; beside shards of token ids."""
    tokenizer = Tokenizer.train(["some text to learn from"] * 10, 600)
    write_text_shard(tmp_path / "web" / "web-0.shard", documents(BODIES[:2]))
    write_text_shard(tmp_path / "code" / "code-0.shard", documents(BODIES[2:]))
    ids = Document("x", np.array([1, 2, 3], np.int32), np.ones(3, bool))
    write_shard(tmp_path / "code" / "code-1.shard", [ids], tokenizer)
    assert len(open_source(tmp_path / "web" / "web-0.shard")) == 2
    assert list(texts(open_source(tmp_path / "web"))) == BODIES[:2]
    assert len(open_source(tmp_path / "code", tokenizer)) == 2
    (tmp_path / "index.json").write_text("{}")
    whole = open_source(tmp_path, tokenizer)
    assert len(whole) == 4 and list(texts(whole)) == [BODIES[2], *BODIES[:2]]
    with pytest.raises(DataError, match="encoded with another tokenizer"):
        open_source(tmp_path, Tokenizer.train(["other text to learn from"] * 10, 620))
    train, held = split(open_source(tmp_path / "web"), 50)
    assert sorted([*texts(train), *texts(held)]) == sorted(BODIES[:2])


@pytest.mark.parametrize("name", ["starts.npy", "digests.npy", "quality.npy", "text.bin", "shard.json"])
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    """A missing file, a cut one, and text that is not UTF-8."""
    path = tmp_path / "a.shard"
    write_text_shard(path, documents(BODIES))
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"a\.shard: not a shard, or damaged"):
        open_source(path)
    (path / name).unlink()
    with pytest.raises(DataError, match=r"a\.shard"):
        TextShard(path)
    path = tmp_path / "b.shard"
    write_text_shard(path, documents(BODIES))
    body = bytearray((path / "text.bin").read_bytes())
    body[len(BODIES[0])] = 0xFF
    (path / "text.bin").write_bytes(body)
    assert TextShard(path).record(0).fields["text"] == BODIES[0]
    with pytest.raises(DataError, match=r"b\.shard:1: the shard is damaged"):
        TextShard(path).record(1)


def test_a_shard_is_whole_or_not_there(tmp_path: Path) -> None:
    """Nothing is left of one whose documents end in an error, or that has none."""

    def broken() -> list[TextDocument]:
        yield documents(BODIES)[0]
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        write_text_shard(tmp_path / "a.shard", broken())
    with pytest.raises(DataError, match="at least one document"):
        write_text_shard(tmp_path / "a.shard", [])
    assert list(tmp_path.iterdir()) == []
