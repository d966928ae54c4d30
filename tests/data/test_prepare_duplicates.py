"""Duplicates: words and signatures against their definitions, and what is removed against exact similarities."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from openk3.data.prepare import duplicates
from openk3.data.prepare.chunk import Kept, content_hash, signatures, write_chunk
from openk3.data.prepare.duplicates import band_rows, find_duplicates
from openk3.data.prepare.measures import Measures
from openk3.data.prepare.words import features, hashed, runs, tokens

VOCABULARY = [f"w{number}" for number in range(3000)]


def text(rng: random.Random, count: int = 200) -> str:
    """Words at random."""
    return " ".join(rng.choices(VOCABULARY, k=count))


def edited(one: str, rng: random.Random, edits: int) -> str:
    """The same with some words changed."""
    words = one.split()
    for place in rng.sample(range(len(words)), edits):
        words[place] = rng.choice(VOCABULARY)
    return " ".join(words)


def jaccard(one: str, other: str) -> float:
    """Of the sets of runs of five words."""
    sets = [{tuple(words[n : n + 5]) for n in range(len(words) - 4)} for words in (one.split(), other.split())]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def chunks(folder: Path, texts: list[str], size: int = 50, num_hashes: int = 128) -> list[Path]:
    """Files as the pipeline writes them."""
    paths = []
    for start in range(0, len(texts), size):
        some = texts[start : start + size]
        kept = [Kept(one.encode(), f"f:{n}", "web", 0.5, Measures(one).shingles) for n, one in enumerate(some)]
        paths.append(folder / f"{start:06}.safetensors")
        write_chunk(paths[-1], kept, num_hashes)
    return paths


def test_words() -> None:
    """Case and marks aside, letters of scripts without spaces by themselves; numbers are the same everywhere."""
    assert tokens("don't stop, 3_x.") == ["don", "'", "t", "stop", ",", "3_x", "."]
    assert tokens("\u4e2d\u6587 caf\u00e9!") == ["\u4e2d", "\u6587", "caf\u00e9", "!"]
    assert hashed(["the"]).tolist() == [7447168620089170830]
    assert np.array_equal(Measures("A b, c d e f").shingles, Measures("a B c; D e F").shingles)
    assert len(Measures("a b c d e f").shingles) == 2 and len(Measures("a b").shingles) == 1
    assert len(Measures("...").shingles) == 0
    hashes = hashed(["a", "b", "a", "b"])
    assert runs(hashes, 2)[0] == runs(hashes, 2)[2] != runs(hashes, 2)[1]
    found = features(hashes, 1 << 10)
    assert len(found) == 7 and found[0] == found[2] and found.max() < 1 << 10


def test_signatures_estimate_similarity() -> None:
    """Within what 1,024 values allow, and alike from one call to the next."""
    rng = random.Random(0)
    one = text(rng)
    for edits in (0, 2, 5, 20):
        other = edited(one, rng, edits)
        both = signatures([Measures(one).shingles, Measures(other).shingles], 1024)
        assert (both[0] == both[1]).mean() == pytest.approx(jaccard(one, other), abs=0.06)
    again = signatures([Measures(one).shingles], 128)
    assert np.array_equal(again, signatures([Measures(one).shingles], 128)) and again.dtype == np.uint32


def test_bands() -> None:
    """The most rows that keep 99 of 100 pairs at the threshold."""
    for similarity in (0.5, 0.8, 0.95, 1.0):
        rows = band_rows(similarity, 128)
        assert 1 - (1 - similarity**rows) ** (128 // rows) >= 0.99
        assert rows == 128 or 1 - (1 - similarity ** (rows + 1)) ** (128 // (rows + 1)) < 0.99
    assert band_rows(0.8, 128) == 6


@pytest.mark.parametrize("part", [1 << 24, 64])
def test_near_duplicates_go_and_others_stay(tmp_path: Path, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies far above the threshold go, those far below stay, also across chunks and where bands are cut in parts."""
    monkeypatch.setattr(duplicates, "PART", part)
    monkeypatch.setattr(duplicates, "BLOCK", 32)
    rng = random.Random(1)
    originals = [text(rng) for _ in range(120)]
    near = [edited(one, rng, 2) for one in originals[:40]]
    far = [edited(one, rng, 40) for one in originals[40:80]]
    texts = originals + near + far
    found = find_duplicates(chunks(tmp_path, texts), 0.8, tmp_path / "scratch")
    assert found.of[:120].tolist() == [-1] * 120 and found.of[160:].tolist() == [-1] * 40
    assert all(jaccard(one, other) > 0.85 for one, other in zip(originals, near, strict=False))
    assert found.of[120:160].tolist() == list(range(40))
    similar = [jaccard(texts[n], texts[found.of[n]]) for n in range(120, 160)]
    assert np.abs(found.similarity[120:160] - similar).max() < 0.15
    assert not (tmp_path / "scratch").exists()


def test_equal_texts_go_whatever_the_threshold(tmp_path: Path) -> None:
    """The first stays, blanks aside; with 0 nothing else is looked for."""
    rng = random.Random(2)
    one, other = text(rng), text(rng)
    texts = [one, other, f"  {one}\n", one.replace(" ", "\n", 3), edited(other, rng, 1), other]
    paths = chunks(tmp_path, texts, size=2)
    assert find_duplicates(paths, 0, tmp_path / "s").of.tolist() == [-1, -1, 0, 0, -1, 1]
    assert find_duplicates(paths, 0.8, tmp_path / "s").of.tolist() == [-1, -1, 0, 0, 1, 1]
    assert content_hash(b"a  b\n") == content_hash(b" a b") != content_hash(b"ab")


def test_a_chain_of_changes_does_not_take_its_end_along(tmp_path: Path) -> None:
    """Each is like its neighbour, but the last is unlike the first: it is compared with what stays, and so stays."""
    rng = random.Random(3)
    chain = [text(rng)]
    for _ in range(30):
        chain.append(edited(chain[-1], rng, 2))
    found = find_duplicates(chunks(tmp_path, chain), 0.8, tmp_path / "s")
    stays = np.flatnonzero(found.of < 0)
    assert 2 < len(stays) < 20 and stays[0] == 0
    for n in np.flatnonzero(found.of >= 0):
        assert found.of[n] < n and found.of[found.of[n]] == -1 and jaccard(chain[n], chain[found.of[n]]) > 0.65


def test_many_alike_are_found_in_time(tmp_path: Path) -> None:
    """One text of a template two hundred times: pairs are not all compared, yet one stays."""
    rng = random.Random(4)
    one = text(rng)
    texts = [edited(one, random.Random(n), 1) for n in range(200)]
    assert (find_duplicates(chunks(tmp_path, texts), 0.7, tmp_path / "s").of < 0).sum() == 1


def test_nothing_to_compare(tmp_path: Path) -> None:
    """No document at all."""
    assert len(find_duplicates(chunks(tmp_path, []), 0.8, tmp_path / "s").of) == 0
    write_chunk(tmp_path / "empty.safetensors", [], 128)
    assert len(find_duplicates([tmp_path / "empty.safetensors"], 0.8, tmp_path / "s").of) == 0
