"""The quality model: trained, saved, loaded; what the shipped one keeps and refuses; what it does not judge."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from openk3.commands.data import train_quality
from openk3.commands.data_flags import DataTrainQuality
from openk3.commands.errors import UserError
from openk3.data.documents import DataError
from openk3.data.prepare.measures import Measures
from openk3.data.prepare.noise import bad_code, bad_prose
from openk3.data.prepare.quality import NUM_FEATURES, Linear, Quality, open_quality
from openk3.data.prepare.quality_texts import samples
from openk3.data.prepare.quality_training import Sample, train

ROOT = Path(__file__).resolve().parent.parent.parent
STORY = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
CODE = (ROOT / "openk3" / "data" / "packing.py").read_text(encoding="utf-8")


def test_the_shipped_model_tells_text_from_debris() -> None:
    """A page and a source file of this project, and what is made of them."""
    model = open_quality("default")
    assert model is not None
    prose, code = STORY[4000:8000], CODE
    assert (model.score(Measures(prose), "web") or 0) > 0.5 and (model.score(Measures(code), "code", ".py") or 0) > 0.5
    rng = random.Random(0)
    bad = [model.score(Measures(bad_code(code, rng)), "code", ".py") for _ in range(20)]
    assert sum((score or 0) < 0.5 for score in bad) >= 18
    scores = [model.score(Measures(bad_prose(prose, rng)), "web") for _ in range(20)]
    assert sum((score or 0) < 0.5 for score in scores) >= 17


def test_what_it_does_not_know_is_not_judged() -> None:
    """Other languages of people and of machines, and kinds without a model."""
    model = open_quality("default")
    assert model is not None and open_quality("off") is None
    assert model.score(Measures("Der Fluss entspringt in den Bergen im Norden. " * 10), "web") is None
    assert model.score(Measures(CODE), "code", ".zig") is None and model.score(Measures(CODE), "code") is None
    assert Quality({}, {}).score(Measures(STORY), "web") is None
    every = Quality({"code": Linear(np.zeros(NUM_FEATURES, np.float32), 0.0)}, {})
    assert every.score(Measures(CODE), "code", ".zig") == every.score(Measures(""), "code") == 0.5


def test_training_on_files(tmp_path: Path) -> None:
    """Good and bad examples of the user's own decide; the figures are of texts held out; the file gives it back."""
    rng = random.Random(1)
    words = {"good": ["the", "river", "and", "hills", "of", "an", "old", "town"], "bad": ["cheap", "buy", "now", "win"]}
    for kind, some in words.items():
        (tmp_path / kind).mkdir()
        for n in range(60):
            text = ". ".join(" ".join(rng.choices(some, k=9)) for _ in range(12))
            (tmp_path / kind / f"{n}.txt").write_text(text)
    found = list(samples([str(tmp_path / "good")], [str(tmp_path / "bad")]))
    assert sum(sample.is_good for sample in found) == 60 == len(found) / 2
    model, figures = train(found, about="made up")
    assert list(figures) == ["prose"] and figures["prose"].auc == 1 and figures["prose"].good_kept == 1
    assert figures["prose"].num_train + figures["prose"].num_held_out == 120
    model.save(tmp_path / "model.safetensors")
    loaded = Quality.load(tmp_path / "model.safetensors")
    for text in ("the old river and the town", "buy cheap now", ""):
        assert loaded.score(Measures(text), "web") == model.score(Measures(text), "web")
    assert (loaded.score(Measures("the old river and the hills"), "web") or 0) > 0.5
    assert loaded.card["about"] == "made up" and loaded.card["held_out"]["prose"]["auc"] == 1


def test_bad_text_is_made_where_none_is_given(tmp_path: Path) -> None:
    """One bad piece for each good one, of its kind, the same ones each time."""
    (tmp_path / "a.md").write_text(STORY[:30_000])
    (tmp_path / "b.py").write_text(CODE)
    found = list(samples([str(tmp_path)], []))
    assert found == list(samples([str(tmp_path)], [])) != list(samples([str(tmp_path)], [], seed=1))
    good, bad = found[0::2], found[1::2]
    assert [one.is_good for one in found] == [True, False] * len(good)
    assert [one.where for one in good] == [one.where for one in bad] and len(good) > 4
    assert {one.suffix for one in bad} == {".py", ".txt"}
    with pytest.raises(DataError, match="too few texts"):
        train([Sample("text", True, "a"), Sample("more", False, "b")])


def test_files_that_are_no_model(tmp_path: Path) -> None:
    """Named in one line."""
    path = tmp_path / "m.safetensors"
    with pytest.raises(DataError, match="no such file"):
        Quality.load(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(DataError, match="not a quality model, or damaged"):
        Quality.load(path)
    save_file({"x": np.zeros(1)}, path)
    with pytest.raises(DataError, match="not a quality model; make one"):
        Quality.load(path)
    Quality({"code": Linear(np.zeros(8, np.float32), 0.0)}, {}).save(path)
    with pytest.raises(DataError, match="of this version"):
        Quality.load(path)


@pytest.mark.parametrize(
    ("card", "weight"),
    [
        ([1], np.zeros(NUM_FEATURES)),
        ({"suffixes": 5}, np.zeros(NUM_FEATURES)),
        ({}, np.zeros((NUM_FEATURES, 2))),
        ({}, np.full(NUM_FEATURES, np.nan)),
        ({}, None),
    ],
)
def test_models_that_are_not_as_written_are_named(tmp_path: Path, card: object, weight: np.ndarray | None) -> None:
    """Before any text is scored, and not in the middle of it."""
    tensors = {} if weight is None else {"code.weight": weight.astype(np.float16), "code.bias": np.zeros(1, np.float32)}
    path = tmp_path / "bad.safetensors"
    save_file(tensors, path, metadata={"format": "openk3 quality 1", "card": json.dumps(card)})
    with pytest.raises(DataError, match=r"bad\.safetensors"):
        Quality.load(path)


def test_a_text_is_not_written_over_by_the_model(tmp_path: Path) -> None:
    """--out that is also --good."""
    path = tmp_path / "good.txt"
    path.write_text("some text")
    with pytest.raises(UserError, match="also a text to train on"):
        train_quality(DataTrainQuality(good=(str(path),), out=path))
    assert path.read_text() == "some text"
