"""Gathering text: what is kept, what is left out and counted, and that nothing moves between the two sides."""

import hashlib
import os
from pathlib import Path

import pytest

from openk3.data.local_text import TextError, TextFile, even_sample, gather, standard_library


def write(root: Path, name: str, text: str | bytes) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))


def lines(seed: str, num_bytes: int) -> str:
    """`num_bytes` of text that no other seed gives, in lines of 33 bytes."""
    rows, digest = [], seed
    while 33 * len(rows) < num_bytes:
        digest = hashlib.md5(digest.encode()).hexdigest()
        rows.append(digest)
    return "\n".join(rows)[: num_bytes - 1] + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(120):
        write(tmp_path, f"part{i % 3}/file{i}.txt", lines(str(i), 1000 + 10 * i))
    return tmp_path


def test_standard_library_without_its_tests():
    corpus = gather()
    names = [f.name for f in corpus.train + corpus.held_out]
    assert (standard_library() / corpus.train[0].name).read_text("utf-8").startswith(corpus.train[0].text[:100])
    assert {"textwrap.py", "json/decoder.py"} <= set(names)
    assert not any({"test", "tests", "site-packages", "__pycache__"} & set(n.split("/")) for n in names)
    assert corpus.train_bytes > 5e6
    assert 0.01 < corpus.held_out_bytes / corpus.train_bytes < 0.15


def test_split_is_by_the_md5_of_the_relative_path(folder):
    corpus = gather([folder])
    for file in corpus.train + corpus.held_out:
        share = int(hashlib.md5(file.name.encode()).hexdigest()[:16], 16) / 2**64
        assert (share < 0.05) == (file in corpus.held_out)


def test_order_is_fixed_and_a_smaller_sample_moves_no_file(folder):
    whole, again, sample = gather([folder]), gather([folder]), gather([folder], max_bytes=60_000)
    assert whole == again
    assert whole.train_bytes + whole.held_out_bytes == sum(p.stat().st_size for p in folder.rglob("*.txt"))
    assert 55_000 < sample.train_bytes <= 60_000
    assert sample.held_out_bytes <= 3_000
    assert {f.name for f in sample.train} < {f.name for f in whole.train}
    assert {f.name for f in sample.held_out} <= {f.name for f in whole.held_out}
    larger = gather([folder], max_bytes=90_000)
    cut = len({f.name for f in sample.train} - {f.name for f in larger.train})
    assert cut == 0


def test_what_cannot_be_learned_from_is_counted(folder):
    write(folder, "binary.dat", b"ab\0cd" * 100)
    write(folder, "latin.txt", "caf\xe9".encode("latin-1"))
    write(folder, "empty.txt", " \n\n")
    write(folder, "copy.txt", lines("5", 1050))
    write(folder, ".hidden/secret.txt", lines("hidden", 2000))
    write(folder, "__pycache__/x.txt", lines("cache", 2000))
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe")
    corpus = gather([folder])
    assert corpus.skipped == {"binary": 1, "empty": 1, "not UTF-8": 1, "not a plain file": 2, "repeated": 1}
    assert not any("secret" in f.name or "x.txt" in f.name for f in corpus.train + corpus.held_out)
    texts = [f.text for f in corpus.train + corpus.held_out]
    assert len(texts) == len(set(texts)) == 120


def test_several_paths_keep_their_own_names(folder, tmp_path):
    write(tmp_path, "more/notes.txt", lines("more", 3000))
    corpus = gather([folder / "part0", folder / "part1", tmp_path / "more/notes.txt"])
    names = {f.name for f in corpus.train + corpus.held_out}
    assert len(names) == 81
    assert {(folder / "part0/file0.txt").as_posix(), (tmp_path / "more/notes.txt").as_posix()} <= names


def test_line_ends_and_byte_order_marks_are_normalised(folder):
    write(folder, "dos.txt", b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    corpus = gather([folder])
    (file,) = [f for f in corpus.train + corpus.held_out if f.name == "dos.txt"]
    assert file == TextFile("dos.txt", "one\ntwo\nthree\n", 14)


def test_one_file_is_cut_into_pieces_that_join_to_it(tmp_path):
    text = lines("one", 40_000) + "é" * 15_000 + lines("two", 40_000)
    write(tmp_path, "book.txt", text)
    corpus = gather([tmp_path / "book.txt"])
    pieces = sorted(corpus.train + corpus.held_out, key=lambda f: f.name)
    assert len(pieces) > 60
    assert corpus.held_out
    assert "".join(p.text for p in pieces) == text
    assert all(p.num_bytes == len(p.text.encode()) for p in pieces)
    assert gather([tmp_path / "book.txt"], max_bytes=60_000).train_bytes <= 60_000


def test_sample_never_ends_inside_a_character(tmp_path):
    write(tmp_path, "long.txt", "é" * 40_000)
    for cap in range(60_001, 60_004):
        corpus = gather([tmp_path / "long.txt"], max_bytes=cap)
        assert set("".join(f.text for f in corpus.train + corpus.held_out)) == {"é"}


def test_even_sample_takes_a_share_of_every_file():
    files = [TextFile(str(n), lines(str(n), n), n) for n in (100, 500, 3000, 9000)]
    sample = even_sample(files, 4000)
    assert [f.num_bytes for f in sample[:2]] == [100, 500]
    assert all(1600 < f.num_bytes <= 1700 for f in sample[2:])
    for whole, cut in zip(files, sample):
        before, after = whole.text.split(cut.text)
        assert before == "" or before.endswith("\n")
        assert abs(len(before) - len(after)) < 70
    assert even_sample(files, 12_600) == files


def test_errors_are_one_line_that_names_the_path(tmp_path, monkeypatch):
    write(tmp_path, "small/a.txt", "too little\n")
    write(tmp_path, "binary/a.bin", b"\0" * 100)
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("nowhere", "no such file or folder"),
        ("small", "only 11 bytes"),
        ("binary", "1 binary"),
        ("empty", "empty"),
    ):
        with pytest.raises(TextError) as caught:
            gather([tmp_path / name], max_bytes=10**6)
        message = str(caught.value)
        assert message.startswith(str(tmp_path / name)) and said in message and "--text" in message
        assert "\n" not in message
    monkeypatch.setattr("openk3.data.local_text.standard_library", lambda: tmp_path / "empty")
    with pytest.raises(TextError, match="--text PATH"):
        gather()


def test_unreadable_files_are_left_out(folder, monkeypatch):
    opened = Path.open

    def refuse(self, *args, **kwargs):
        if self.name == "file7.txt":
            raise PermissionError("no")
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    assert gather([folder]).skipped == {"unreadable": 1}
