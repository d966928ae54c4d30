"""Books from a folder: chapters of EPUB sources as plain paragraphs, and the short tales that some of them hold."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from openk3.data.documents import DataError

# Front and back matter, which is not the author's text.
_MATTER = re.compile(r"^(colophon|imprint|titlepage|halftitle\w*|uncopyright|endnotes|loi|dedication|epigraph)")
_PLAIN = str.maketrans(
    {"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\u2026": "...", "\xa0": " ", "\u202f": " "}
    | dict.fromkeys("\u2060\ufeff\u200a\u00ad", "")
)
_TALE = (200, 1100)  # characters of a tale that can be told in one answer


class Chapter(NamedTuple):
    """A chapter's book, file and text: paragraphs with a blank line between them."""

    book: str
    name: str
    text: str


class Tale(NamedTuple):
    """A short tale and its title."""

    title: str
    text: str


def read_chapters(folder: str | Path) -> list[Chapter]:
    """Every chapter below `folder`: one folder per book, with XHTML files of an EPUB's text in it, or .txt files.

    Raises DataError if there is none.
    """
    root = Path(folder)
    found: list[Chapter] = []
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".xhtml", ".txt")):
        if _MATTER.match(path.stem):
            continue
        text = path.read_text(encoding="utf-8")
        text = _paragraphs(text) if path.suffix == ".xhtml" else text
        if text.strip():
            found.append(Chapter(path.relative_to(root).parts[0], path.stem, text.translate(_PLAIN)))
    if not found:
        raise DataError(f"{root}: no books; expected folders of .xhtml or .txt files")
    return found


def read_tales(folder: str | Path) -> list[Tale]:
    """Articles with a heading that are short enough for one answer, from the XHTML files below `folder`."""
    return [tale for path in sorted(Path(folder).rglob("*.xhtml")) for tale in _tales(path)]


def _tales(path: Path) -> Iterator[Tale]:
    text = path.read_text(encoding="utf-8")
    for article in re.findall(r"<article\b.*?</article>", text, re.S):
        heading = re.search(r"<h[2-5][^>]*>(.*?)</h[2-5]>", article, re.S)
        body = _paragraphs(article[heading.end() :]) if heading else ""
        if heading and _TALE[0] <= len(body) <= _TALE[1]:
            yield Tale(_text(heading[1]).translate(_PLAIN), body.translate(_PLAIN))


def _paragraphs(text: str) -> str:
    text = re.sub(r'<a [^>]*epub:type="noteref".*?</a>', "", text, flags=re.S)
    parts = re.findall(r"<(p|h[1-6])\b[^>]*>(.*?)</\1>", text, re.S)
    return "\n\n".join(filter(None, (_text(body) for _, body in parts)))


def _text(marked: str) -> str:
    marked = re.sub(r"<br\s*/?>", "\n", marked)
    lines = html.unescape(re.sub(r"<[^>]+>", "", marked)).split("\n")
    return "\n".join(filter(None, (" ".join(line.split()) for line in lines)))
