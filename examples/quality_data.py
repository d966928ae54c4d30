"""The good texts that the shipped quality model was trained on, as files for `openk3 data train-quality`.

python examples/quality_data.py --books BOOKS --rust /path/to/share/doc/rust/html --out good

BOOKS holds one folder per book (docs/pocket.md says where they come from); RUST the books of the Rust project as they
are installed with it. Python's own texts and PyTorch's headers are taken from this environment. docs/data.md trains.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

from openk3.data.books import read_chapters
from openk3.data.local_text import standard_library

RUST_BOOKS = ("book", "reference", "nomicon", "rust-by-example", "cargo", "edition-guide", "embedded-book")
LEFT_OUT = ("test", "tests", "__pycache__", "site-packages", "dist-packages", "lib-dynload", "idlelib", "pydoc_data")


def write(path: Path, text: str) -> None:
    """A text file, and the folders that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def rust_books(html: Path, out: Path) -> None:
    """Their paragraphs and headings, a file for each page."""
    with tempfile.TemporaryDirectory() as folder:
        for book in RUST_BOOKS:
            for page in (html / book).rglob("*.html"):
                if page.name != "print.html":
                    write(Path(folder) / "rust" / f"{book}_{page.stem}.xhtml", page.read_text(encoding="utf-8"))
        for chapter in read_chapters(folder):
            write(out / f"{chapter.name}.txt", chapter.text)


def main() -> None:
    """Write OUT/books, OUT/prose and OUT/code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--books", "--rust", "--out"):
        parser.add_argument(name, type=Path, required=True)
    options = parser.parse_args()
    for chapter in read_chapters(options.books):
        write(options.out / "books" / chapter.book / f"{chapter.name}.txt", chapter.text)
    for name, text in topics.items():
        write(options.out / "prose" / "topics" / f"{re.sub(r'[^a-z0-9]', '_', name.lower())}.txt", text)
    rust_books(options.rust, options.out / "prose" / "rust")
    code, torch = options.out / "code", importlib.util.find_spec("torch")
    shutil.copytree(standard_library(), code / "python", ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copytree(Path(torch.origin).parent / "include", code / "torch")


if __name__ == "__main__":
    main()
