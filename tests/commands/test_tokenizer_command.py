"""`openk3 tokenizer`: train writes the released files, encode shows each token and keeps control tokens out."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from openk3.cli import main
from openk3.commands.tokenizer import readable
from openk3.inputs.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, small_text: Path) -> Path:
    """A tokenizer of 600 ids."""
    out = tmp_path_factory.mktemp("tokenizer") / "tok"
    text = small_text.parent / "model"
    assert main(["tokenizer", "train", "--text", str(text), "--out", str(out), "--vocab-size", "600"]) == 0
    return out


def test_training_writes_the_released_files(trained: Path) -> None:
    """Ranks and configuration, with K3's 256 special ids at the end."""
    assert {path.name for path in trained.iterdir()} == {"tiktoken.model", "tokenizer_config.json"}
    tokenizer = Tokenizer.load(trained)
    assert (tokenizer.vocab_size, tokenizer.num_ranks, tokenizer.special["[PAD]"]) == (600, 344, 599)


def test_encoding_shows_every_token(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids and texts line by line, then the compression."""
    assert main(["tokenizer", "encode", "import os", "--tokenizer", str(trained)]) == 0
    *rows, summary = capsys.readouterr().out.splitlines()
    ids = Tokenizer.load(trained).encode("import os")
    assert [int(row.split()[0]) for row in rows] == ids
    assert summary == f"{len(ids)} tokens for 9 bytes: {9 / len(ids):.2f} bytes per token"


def test_names_of_control_tokens_are_text(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a user types never becomes a control token."""
    assert main(["tokenizer", "encode", "<|end_of_msg|>[EOS]", "--tokenizer", str(trained), "--ids"]) == 0
    ids = [int(word) for word in capsys.readouterr().out.split()]
    assert max(ids) < Tokenizer.load(trained).num_ranks


def test_text_from_standard_input_and_tokenizer_of_the_newest_run(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No flag at all."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(tiny_run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("def f(): pass"))
    assert main(["tokenizer", "encode", "--ids"]) == 0
    expected = Tokenizer.load(tiny_run / "model").encode("def f(): pass")
    assert [int(word) for word in capsys.readouterr().out.split()] == expected


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["encode", "x", "--tokenizer", "gone"], "gone"),
        (["train", "--text", "gone", "--out", "new"], "gone"),
        (["train", "--text", "--out", "new"], "--text"),
        (["train", "--text", "{text}", "--out", "full"], "full: holds other files"),
        (["train", "--text", "{text}", "--out", "new", "--vocab-size", "300"], "vocab_size"),
    ],
)
def test_what_is_wrong_is_one_line(
    words: list[str],
    part: str,
    small_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And nothing is written."""
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/note.txt").write_text("mine")
    words = [word.format(text=small_text.parent / "model") for word in words]
    assert main(["tokenizer", *words]) == 2
    error = capsys.readouterr().err
    assert part in error and error.count("\n") == 1
    assert not Path("new").exists() and Path("full/note.txt").read_text() == "mine"


def test_parts_of_characters_are_shown_as_bytes() -> None:
    """A token need not be a whole character."""
    assert readable(b"ab") == "'ab'" and readable(b"\xc3") == r"b'\xc3'"
