"""Real text already on this machine: the Python standard library's sources, or a file or folder of the user's."""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from openk3.data.sources import is_held_out

HELD_OUT_SHARE = 0.05
MIN_BYTES = 50_000  # below this neither a tokenizer nor a held-out figure means anything
MAX_FILES = 100_000
_MIN_UNITS = 60  # fewer files than this are cut, so that 5 % of the units is at least a few
_SKIPPED_FOLDERS = {"__pycache__", "node_modules"}
_SKIPPED_LIBRARY_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload"}


class TextError(ValueError):
    """No usable text where the user pointed; the message is one line that names the path and what to do."""


@dataclass(frozen=True)
class TextFile:
    """One document: `name` is the path relative to the folder that was given, with '/' between folders."""

    name: str
    text: str
    num_bytes: int


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, split once by the md5 of their names."""

    source: str  # what to call it
    train: tuple[TextFile, ...]
    held_out: tuple[TextFile, ...]
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> number of files

    @property
    def train_bytes(self) -> int:
        """UTF-8 bytes of the training documents."""
        return sum(f.num_bytes for f in self.train)

    @property
    def held_out_bytes(self) -> int:
        """UTF-8 bytes of the held-out documents."""
        return sum(f.num_bytes for f in self.held_out)


def gather(paths: Sequence[str | Path] = (), *, max_bytes: int | None = None) -> Corpus:
    """Read the text under `paths` (files or folders; none: the standard library without its tests).

    Binary, non-UTF-8, unreadable, empty and repeated files are left out and counted in `skipped`. 5 % of the files,
    chosen by the md5 of their relative path, are held out. Fewer than 60 files are cut into pieces at line ends and
    the pieces are split instead. With `max_bytes` the training part is a sample of at most that many bytes in the
    order of another md5, and the held-out part gives 5 % of that, a share of every file; no file changes sides.
    Raises TextError if nothing, or less than 50 kB, is left.
    """
    files = [file for path in paths for file in _list(path, len(paths) > 1)] if paths else _list_library()
    source = ", ".join(map(str, paths)) if paths else "Python's standard library"
    skipped: Counter[str] = Counter()
    kept = _read(sorted(files, key=lambda file: _digest("order", file[0])), skipped, max_bytes)
    if not kept:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items())) or "the folder is empty"
        raise TextError(f"{source}: no text to learn from ({reasons}); pass --text with a file or folder of UTF-8 text")
    if len(kept) < _MIN_UNITS:
        kept = _cut(kept)
    total = sum(f.num_bytes for f in kept)
    if total < MIN_BYTES:
        raise TextError(
            f"{source}: only {total:,} bytes of text; at least {MIN_BYTES:,} are needed, pass more with --text"
        )
    train, held_out = _split(kept)
    if max_bytes is not None:
        train = _sample(train, max_bytes)
        held_out = even_sample(held_out, max(1, round(max_bytes * HELD_OUT_SHARE)))
    return Corpus(source, tuple(train), tuple(held_out), dict(sorted(skipped.items())))


def standard_library() -> Path:
    """The folder of this interpreter's own Python sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def _digest(purpose: str, name: str) -> bytes:
    return hashlib.md5(f"{purpose}:{name}".encode("utf-8", "surrogateescape"), usedforsecurity=False).digest()


def _list_library() -> list[tuple[str, Path]]:
    root = standard_library()
    names = [n for n in _walk(root, _SKIPPED_FOLDERS | _SKIPPED_LIBRARY_FOLDERS) if n.endswith(".py")]
    if not names:
        raise TextError(f"{root}: this Python comes without its sources; pass your own text with --text PATH")
    return [(name, root / name) for name in names]


def _list(path: str | Path, whole_names: bool) -> list[tuple[str, Path]]:
    """(name, file) of everything under `path`; `whole_names` starts names with the path itself."""
    root = Path(path).expanduser()
    if root.is_file():
        return [(root.as_posix() if whole_names else root.name, root)]
    if not root.is_dir():
        raise TextError(f"{path}: no such file or folder; --text takes a text file or a folder of them")
    return [((root / n).as_posix() if whole_names else n, root / n) for n in _walk(root, _SKIPPED_FOLDERS)]


def _walk(root: Path, skip: set[str]) -> Iterator[str]:
    """Relative names of the plain files under `root`, sorted; hidden files and folders are not entered."""
    found = 0
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in skip and not f.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()
                found += 1
                if found == MAX_FILES:
                    return


def _read(files: list[tuple[str, Path]], skipped: Counter[str], max_bytes: int | None) -> list[TextFile]:
    """Read files in the given order until the sample is full; returned sorted by name."""
    kept: list[TextFile] = []
    seen: set[bytes] = set()
    total = 0
    limit = (
        None if max_bytes is None else 2 * max_bytes // (min(len(files), 16) or 1)
    )  # one huge file must not fill memory
    for name, path in files:
        if max_bytes is not None and total > 1.2 * max_bytes and len(kept) >= _MIN_UNITS:
            break
        text = _text(path, limit, skipped)
        if text is None:
            continue
        data = text.encode("utf-8")
        content = hashlib.md5(data, usedforsecurity=False).digest()
        if content in seen:
            skipped["repeated"] += 1
            continue
        seen.add(content)
        kept.append(TextFile(name, text, len(data)))
        total += len(data)
    return sorted(kept, key=lambda f: f.name)


def _text(path: Path, limit: int | None, skipped: Counter[str]) -> str | None:
    """The text of the file's first `limit` bytes with plain line ends; None, and a reason counted, if there is none."""
    try:
        if not path.is_file():
            skipped["not a plain file"] += 1
            return None
        with path.open("rb") as file:
            data = file.read(-1 if limit is None else limit)
    except OSError:
        skipped["unreadable"] += 1
        return None
    if b"\0" in data:
        skipped["binary"] += 1
        return None
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=len(data) != limit)
    except UnicodeDecodeError:
        skipped["not UTF-8"] += 1
        return None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        skipped["empty"] += 1
        return None
    return text


def _cut(files: list[TextFile]) -> list[TextFile]:
    """Cut files at line ends into about 100 pieces of at least 1 kB, named `file#0000`, `file#0001`, ..."""
    size = max(1000, sum(f.num_bytes for f in files) // 100)
    pieces: list[TextFile] = []
    for file in files:
        lines: list[str] = []
        length = number = 0
        for line in file.text.splitlines(keepends=True):
            for start in range(0, len(line), size):
                lines.append(line[start : start + size])
                length += len(lines[-1].encode("utf-8"))
                if length >= size:
                    pieces.append(TextFile(f"{file.name}#{number:04d}", "".join(lines), length))
                    lines, length, number = [], 0, number + 1
        if lines:
            pieces.append(TextFile(f"{file.name}#{number:04d}", "".join(lines), length))
    return pieces


def _split(files: list[TextFile]) -> tuple[list[TextFile], list[TextFile]]:
    held_out = [f for f in files if is_held_out(f.name)]
    if not held_out or len(held_out) == len(files):  # a handful of files may all fall on one side
        held_out = [min(files, key=lambda f: _digest("", f.name))]
    chosen = {f.name for f in held_out}
    return [f for f in files if f.name not in chosen], held_out


def even_sample(files: Sequence[TextFile], max_bytes: int) -> list[TextFile]:
    """The middle part of every file, whole lines, with one limit for all so that the total fits `max_bytes`.

    The limit is the largest that fits: short files stay whole and long ones share what is left.
    """
    room, limit = max_bytes, max_bytes
    sizes = sorted(f.num_bytes for f in files)
    for i, size in enumerate(sizes):
        limit = room // (len(sizes) - i)
        if size > limit:
            break
        room -= size
    else:
        return list(files)
    return [cut for f in files if (cut := _middle(f, limit)) is not None]


def _middle(file: TextFile, max_bytes: int) -> TextFile | None:
    """Whole lines within `max_bytes` from the middle of the file: beginnings are harder to predict than the rest."""
    if file.num_bytes > max_bytes:
        data = file.text.encode("utf-8")
        start = data.rfind(b"\n", 0, (len(data) - max_bytes) // 2 + 1) + 1
        rest = data[start:].decode("utf-8")
        file = TextFile(file.name, rest, len(data) - start)
    return _first(file, max_bytes)


def _first(file: TextFile, max_bytes: int) -> TextFile | None:
    """The file's whole lines within `max_bytes` (characters, where not even one line fits); None if nothing is left."""
    if file.num_bytes <= max_bytes:
        return file
    data = file.text.encode("utf-8")[:max_bytes]
    text = data[: data.rfind(b"\n") + 1].decode("utf-8") or data.decode("utf-8", "ignore")
    return TextFile(file.name, text, len(text.encode("utf-8"))) if text.strip() else None


def _sample(files: list[TextFile], max_bytes: int) -> list[TextFile]:
    """Files in sampling order until `max_bytes` are full, the last one cut; sorted by name again."""
    chosen: list[TextFile] = []
    room = max_bytes
    for file in sorted(files, key=lambda f: _digest("order", f.name)):
        cut = _first(file, room)
        if cut is not None:
            chosen.append(cut)
            room -= cut.num_bytes
        if cut is not file:
            break
    return sorted(chosen, key=lambda f: f.name)
