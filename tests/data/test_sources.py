"""Sources: folders, JSONL lines, long texts in pieces, names, the held-out split, fingerprints, errors."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from openk3.data import sources
from openk3.data.documents import DataError
from openk3.data.sources import Files, Joined, Records, Subset, is_held_out, split, texts


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    """Files below `folder`."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def keys(source: Files) -> list[str]:
    """Every record's name, in order."""
    return [source.key(index) for index in range(len(source))]


def test_folder(tmp_path: Path) -> None:
    """Text, Markdown, Python and JSONL below a folder in the order of their paths; the rest is not looked at."""
    lines = json.dumps({"text": "one"}) + "\n\n" + json.dumps({"text": "zwei \u00fc"})
    folder = write(
        tmp_path,
        {
            "b/x.py": "print(1)\n",
            "a.txt": "\ufeffhello",
            "c.md": "# T",
            "d.jsonl": lines,
            "e.bin": b"\0\1",
            ".hidden/y.txt": "no",
            "empty.txt": "",
        },
    )
    source = Files(folder)
    assert keys(source) == ["a.txt", "b/x.py", "c.md", "d.jsonl:1", "d.jsonl:3"]
    assert list(texts(source)) == ["hello", "print(1)\n", "# T", "one", "zwei \u00fc"]
    record = source.record(4)
    assert record.where == f"{folder}/d.jsonl:3" and record.folder == folder


def test_single_file_of_any_name(tmp_path: Path) -> None:
    """A file named directly is read whatever its suffix."""
    source = Files(write(tmp_path, {"notes.rst": "words"}) / "notes.rst")
    assert keys(source) == ["notes.rst"] and list(texts(source)) == ["words"]


def test_long_text_is_cut_at_line_ends_and_between_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces join to the text; a line longer than a piece is cut, but no character is."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 10)
    text = "ab\ncdef\nghi\n" + "\u00e4\u20ac\U0001f600" * 9 + "\nend"
    source = Files(write(tmp_path, {"a.txt": text}))
    parts = list(texts(source))
    assert "".join(parts) == text and len(parts) > 5 and parts[0] == "ab\ncdef\n"
    assert max(len(part.encode()) for part in parts) <= 10
    assert keys(source)[:2] == ["a.txt#0", "a.txt#1"]


def test_files_that_are_not_utf8_are_left_out_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning counts them and names the first ones, with the byte, also where that is in a later piece."""
    with caplog.at_level(logging.WARNING):
        source = Files(write(tmp_path, {"a.txt": "fine", "b.txt": b"caf\xe9", "c.txt": b"\x80" * 40}))
    assert keys(source) == ["a.txt"]
    late = write(tmp_path / "late", {"a.txt": "fine", "d.txt": b"1234567\n12\xe9\n"})
    monkeypatch.setattr(sources, "PIECE_BYTES", 8)
    with caplog.at_level(logging.WARNING):
        assert keys(Files(late)) == ["a.txt"]
    assert "1 files left out, not UTF-8: d.txt (byte 10)" in caplog.text
    assert f"{tmp_path}: 2 files left out, not UTF-8: b.txt (byte 3), c.txt (byte 0)" in caplog.text


def test_errors_name_file_and_line(tmp_path: Path) -> None:
    """Broken lines are found before training starts."""
    write(tmp_path, {"code/a.jsonl": b'{"text": "x"}\n{"text": "caf\xe9"}\n'})
    with pytest.raises(DataError, match=r"code/a\.jsonl:2: not valid JSON .*utf-8"):
        Files(tmp_path / "code")
    write(tmp_path, {"json/a.jsonl": '{"text": "x"}\n{"text": \n', "field/a.jsonl": '{"body": "x"}', "none/a.bin": "x"})
    with pytest.raises(DataError, match=r"json/a\.jsonl:2: not valid JSON"):
        Files(tmp_path / "json")
    with pytest.raises(DataError, match=r"field/a\.jsonl:1: no 'text', 'messages' or 'image'"):
        Files(tmp_path / "field")
    lines = {
        "deep": "[" * 100_000,
        "chat": '{"messages": [{"role": "wizard"}]}',
        "image": '{"image": "gone.png", "text": "x"}',
        "utf16": '{"text": "x"}'.encode("utf-16"),
    }
    words = {
        "deep": "nested too deeply",
        "chat": "role 'wizard'",
        "image": r"image/gone\.png: no such",
        "utf16": "utf-8",
    }
    for name, line in lines.items():
        write(tmp_path, {f"{name}/a.jsonl": line})
        with pytest.raises(DataError, match=rf"{name}/a\.jsonl:1: .*{words[name]}"):
            Files(tmp_path / name)
    with pytest.raises(DataError, match="nobody-of-this-name/x: no such file or folder"):
        Files("~nobody-of-this-name/x")
    with pytest.raises(DataError, match=r"none: no text found; expected UTF-8 files ending in \.txt"):
        Files(tmp_path / "none")
    with pytest.raises(DataError, match="gone: no such file or folder"):
        Files(tmp_path / "gone")


def test_fingerprints_follow_the_content(tmp_path: Path) -> None:
    """Same files in another place: the same; another byte, name or subset: another."""
    one = Files(write(tmp_path / "one", {"a.txt": "x", "b.txt": "y"}))
    two = Files(write(tmp_path / "two", {"a.txt": "x", "b.txt": "y"}))
    other = Files(write(tmp_path / "other", {"a.txt": "x", "b.txt": "z"}))
    renamed = Files(write(tmp_path / "renamed", {"a.txt": "x", "c.txt": "y"}))
    prints = [source.fingerprint() for source in (one, other, renamed, Subset(one, [0]), Joined([one, other]))]
    assert one.fingerprint() == two.fingerprint() and len(set(prints)) == 5
    assert Joined([one]).fingerprint() != Joined([one, one]).fingerprint()


def test_fingerprints_of_records_see_pictures() -> None:
    """A changed pixel changes the fingerprint, as an array, as bytes and as an image."""
    pixels = np.zeros((4, 4, 3), np.uint8)
    changed = pixels.copy()
    changed[1, 1] = 1
    prints = set()
    for picture in (pixels, changed, pixels.tobytes(), changed.tobytes(), Image.fromarray(changed)):
        prints.add(Records("r", [{"image": picture, "text": "x"}]).fingerprint())
    assert len(prints) >= 4
    same = [Records("r", [{"image": pixels, "text": "x"}]).fingerprint() for _ in range(2)]
    assert same[0] == same[1]


def test_held_out_split_by_md5() -> None:
    """About 5 % of many names, always the same ones, whatever else is in the source; both sides make the whole."""
    names = [f"lib/{n}.py" for n in range(4000)]
    source = Records("lib", [{"text": name} for name in names], names)
    train, held = split(source, 5)
    assert len(train) + len(held) == 4000 and 160 < len(held) < 240
    chosen = {held.key(index) for index in range(len(held))}
    assert chosen == {name for name in names if is_held_out(name, 5)}
    fewer = split(Records("lib", [{"text": name} for name in names[::2]], names[::2]), 5)[1]
    assert {fewer.key(index) for index in range(len(fewer))} == chosen & set(names[::2])
    assert train.record(0).fields["text"] == train.key(0)
    assert len(split(source, 0)[1]) == 0
    few = [f"{n}.md" for n in (7, 8, 9)]
    assert not any(is_held_out(name, 5) for name in few)
    train, held = split(Records("few", [{"text": name} for name in few], few), 5)
    assert len(train) == 2 and len(held) == 1
    train, held = split(Records("few", [{"text": name} for name in few], few), 99.99)
    assert len(train) == 2 and len(held) == 1
    train, held = split(Records("one", [{"text": "x"}]), 5)
    assert len(train) == 1 and len(held) == 0
    assert is_held_out("a.txt", 100) and not is_held_out("a.txt", 0)


def test_joined_counts_through() -> None:
    """Records of the second source follow those of the first."""
    empty = Records("e", [])
    joined = Joined([Records("a", [{"text": "1"}, {"text": "2"}]), empty, Records("b", [{"text": "3"}], ["three"])])
    assert (
        joined.name == "a, e, b"
        and len(Joined([])) == 0
        and [joined.key(n) for n in range(len(joined))] == ["a:0", "a:1", "three"]
    )
    assert joined.record(2).fields["text"] == "3"


def test_records_are_checked_at_once() -> None:
    """A wrong record or number of names is reported where the source is made."""
    with pytest.raises(DataError, match="chat:1: 'text' must be a string"):
        Records("chat", [{"text": "fine"}, {"text": None}])
    with pytest.raises(DataError, match="chat: 2 keys for 1 records"):
        Records("chat", [{"text": "fine"}], ["a", "b"])
