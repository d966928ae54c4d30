"""The mix on disk: the same for a seed, readable by the training sources, and never with held-out text in it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from openk3.config.model import VisionConfig
from openk3.data.documents import DataError, Encoder, Record
from openk3.data.local_mix import QUESTIONS, Mix, data_uri, tokenizer_texts, write_mix
from openk3.data.local_text import Corpus, TextFile
from openk3.data.render import render
from openk3.data.sources import Files
from openk3.inputs.tokenizer import Tokenizer

SHARES = (0.7, 0.2, 0.1)
MODULE = '"""Tools number {n}."""\n\n\ndef cut(board, width={n}):\n    """Cut the board number {n} into strips."""\n'


def corpus() -> Corpus:
    files = []
    for n in range(40):
        text = MODULE.format(n=n)
        files.append(TextFile(f"wood{n}.py", text, len(text)))
    return Corpus("wood", tuple(files[:37]), tuple(files[37:]))


def written(folder: Path, seed: int = 0) -> Mix:
    mix = Mix.at(folder, SHARES)
    folder.mkdir(exist_ok=True)
    write_mix(mix, corpus(), num_images=30, num_conversations=25, seed=seed)
    return mix


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Mix:
    return written(tmp_path_factory.mktemp("mix"))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_same_seed_same_files_and_other_seed_other_images(mix, tmp_path):
    again, other = written(tmp_path / "again"), written(tmp_path / "other", seed=5)
    for name in ("text", "captions", "chat", "held_out"):
        assert getattr(mix, name).read_bytes() == getattr(again, name).read_bytes()
    assert mix.captions.read_bytes() != other.captions.read_bytes()
    assert mix.text.read_bytes() == other.text.read_bytes()


def test_text_is_all_there_and_held_out_text_apart(mix):
    assert [line["text"] for line in lines(mix.text)] == [file.text for file in corpus().train]
    assert [line["text"] for line in lines(mix.held_out)] == [file.text for file in corpus().held_out]
    everything = mix.text.read_text() + mix.chat.read_text()
    assert not any(f"number {n} " in everything for n in (37, 38, 39))
    assert mix.paths == tuple(str(p.resolve()) for p in (mix.text, mix.captions, mix.chat))


def test_every_record_encodes_with_its_images_and_targets(mix):
    tokenizer = Tokenizer.train(tokenizer_texts(mix, corpus(), 50_000), 800)
    encoder = Encoder(tokenizer, vision=VisionConfig())
    for path in mix.paths:
        source = Files(path)
        for index in range(len(source)):
            document = encoder.encode(source.record(index))
            assert document.targets.any()
            assert path.endswith("text.jsonl") or len(document.images) == len(document.blocks)
    captions = Files(mix.captions)
    document = encoder.encode(captions.record(4))
    plain = encoder.encode(Record({"image": render(0, 4).image, "text": render(0, 4).text}, "x"))
    assert document.ids.tolist() == plain.ids.tolist()
    assert np.array_equal(document.images[0][0], plain.images[0][0])


def test_a_fifth_of_the_conversations_is_about_images(mix):
    talks = lines(mix.chat)
    shown = [talk for talk in talks if isinstance(talk["messages"][0]["content"], list)]
    assert len(talks) - len(shown) == 25
    assert 1 <= len(shown) <= 15
    for talk in shown:
        for question, answer in zip(talk["messages"][::2], talk["messages"][1::2]):
            assert question["content"][0]["image"].startswith("data:image/png;base64,")
            assert question["content"][1]["text"] in QUESTIONS
            assert ("reasoning_content" in answer) == talk["thinking"]


def test_text_without_docstrings_borrows_the_standard_librarys(tmp_path):
    prose = tuple(TextFile(f"{n}.txt", f"Some prose {n}.\n" * 9, 9 * 15) for n in range(5))
    mix = Mix.at(tmp_path, SHARES)
    write_mix(mix, Corpus("prose", prose, prose[:1]), num_images=1, num_conversations=5)
    assert sum(isinstance(t["messages"][0]["content"], str) for t in lines(mix.chat)) == 5


def test_tokenizer_texts_hold_some_of_everything_within_the_limit(mix):
    texts = list(tokenizer_texts(mix, corpus(), 3_000))
    assert sum(map(len, texts)) < 4_500
    assert any(text.startswith('"""Tools') for text in texts)
    assert any("What" in text for text in texts)
    assert render(0, 0).text in texts


def test_data_uris_hold_the_image_and_broken_ones_are_named():
    image = render(0, 1).image
    tokenizer = Tokenizer.train(["abc"], 512)
    encoder = Encoder(tokenizer, vision=VisionConfig())
    whole = encoder.encode(Record({"image": data_uri(image), "text": "a"}, "here:1"))
    assert np.array_equal(whole.images[0][0], encoder.encode(Record({"image": image, "text": "a"}, "x")).images[0][0])
    for broken in ("data:image/png;base64,@@@", "data:image/png;base64,AAAA", "data:,"):
        with pytest.raises(DataError, match="here:1"):
            encoder.encode(Record({"image": broken, "text": "a"}, "here:1"))
