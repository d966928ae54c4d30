"""JSON from outside: every way a file can be wrong is one line that names it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from openk3.config import json_file
from openk3.config.json_file import JsonError, parse_json, read_json

DEEP = "[" * 100_000


def test_values_come_back(tmp_path: Path) -> None:
    """Text, bytes and a file, with or without a byte order mark."""
    assert parse_json('{"a": [1, null]}') == parse_json(b'\xef\xbb\xbf{"a": [1, null]}') == {"a": [1, None]}
    (tmp_path / "a.json").write_text('{"ä": 1}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == read_json(str(tmp_path / "a.json")) == {"ä": 1}


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000, "", "{", b"\xff", "9" * 5000, '"\x00"'])
def test_damaged_text_is_one_error(text: str | bytes, tmp_path: Path) -> None:
    """Nesting beyond Python's stack and numbers beyond its limit count as damage, and the file is named."""
    with pytest.raises(JsonError):
        parse_json(text)
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(JsonError, match="not valid JSON") as error:
        read_json(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_what_is_no_ordinary_file_is_not_opened(tmp_path: Path) -> None:
    """A pipe would wait for ever and a device never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zero", tmp_path):
        with pytest.raises(JsonError, match=f"{path}: not an ordinary file"):
            read_json(path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing")


def test_a_file_too_large_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is on bytes, inclusive."""
    (tmp_path / "a.json").write_text("[1]")
    monkeypatch.setattr(json_file, "MAX_BYTES", 3)
    assert read_json(tmp_path / "a.json") == [1]
    monkeypatch.setattr(json_file, "MAX_BYTES", 2)
    with pytest.raises(JsonError, match="3 bytes are more than"):
        read_json(tmp_path / "a.json")
