"""Sources: text files, JSONL files and in-memory records, numbered, named and split into training and held-out."""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from openk3.config.json_file import JsonError, parse_json
from openk3.data.documents import DataError, Document, Encoder, Record, check_record, record_texts

TEXT_SUFFIXES = (".txt", ".md", ".py")
PIECE_BYTES = 1 << 18  # a longer text file is several records, cut at line ends
log = logging.getLogger(__name__)


class Source(Protocol):
    """Numbered records. `key(i)` names record i and decides its side of the held-out split."""

    name: str

    def __len__(self) -> int: ...

    def record(self, index: int) -> Record:
        """Record `index`, read now."""
        ...

    def key(self, index: int) -> str:
        """The record's name: a path relative to the source, with a line or piece number where there are several."""
        ...

    def fingerprint(self) -> str:
        """Changes when any record does."""
        ...


class Documents:
    """A source's records as Documents, encoded when they are asked for."""

    def __init__(self, source: Source, encoder: Encoder) -> None:
        self.source, self.encoder = source, encoder

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Document:
        return self.encoder.encode(self.source.record(index))


class Place(NamedTuple):
    """One record of a file: bytes start..stop."""

    path: Path
    key: str
    start: int
    stop: int


class Files:
    """Records of a text or JSONL file, or of all such files below a folder, in the order of their paths.

    A text file is one record, or several of about 256 KiB; each line of a JSONL file is one. Every file is read once
    here, so that a broken line is reported before training starts; later a record is read when it is asked for. Files
    that are not UTF-8 are left out with a warning. Raises DataError naming the file, and the line, at fault.
    """

    def __init__(self, path: str | Path) -> None:
        self.root = Path(os.path.expanduser(path))
        self.name = str(path)
        self.places: list[Place] = []
        self.left_out: list[str] = []
        self._digest = hashlib.blake2b(digest_size=16)
        for file in _files(self.root):
            self._index(file)
        if self.left_out:
            more = ", ..." if len(self.left_out) > 3 else ""
            names = ", ".join(self.left_out[:3]) + more
            log.warning("%s: %d files left out, not UTF-8: %s", path, len(self.left_out), names)
        if not self.places:
            raise DataError(
                f"{path}: no text found; expected UTF-8 files ending in {', '.join(TEXT_SUFFIXES)} or .jsonl"
            )

    def _index(self, file: Path) -> None:
        """Find a file's records and hash it; mapped, not read, so that a file may be larger than memory."""
        relative = file.name if file == self.root else file.relative_to(self.root).as_posix()
        size = file.stat().st_size
        if not size:
            return
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                places = _lines(data, file, relative) if file.suffix == ".jsonl" else _pieces(data, file, relative)
            except UnicodeDecodeError as error:
                self.left_out.append(f"{relative} (byte {error.start})")
                return
            self.places += places
            self._digest.update(f"{relative}\0{size}\0".encode("utf-8", "surrogateescape"))
            self._digest.update(data)

    def __len__(self) -> int:
        return len(self.places)

    def record(self, index: int) -> Record:
        """One line of a JSONL file, or one piece of text."""
        path, key, start, stop = self.places[index]
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(stop - start)
        if len(data) != stop - start:
            raise DataError(f"{path}: has become shorter since training began; put it back and resume")
        if path.suffix == ".jsonl":
            where = f"{path}:{key.rpartition(':')[2]}"
            return Record(_parse(data, where), where, path.parent)
        try:
            return Record({"text": data.decode("utf-8").removeprefix("\ufeff")}, str(path))
        except UnicodeDecodeError:
            raise DataError(f"{path}: has changed since training began; put it back and resume") from None

    def key(self, index: int) -> str:
        """Path relative to the folder, with `:line` in a JSONL file and `#piece` in a long text."""
        return self.places[index].key

    def fingerprint(self) -> str:
        """Digest of every file's relative path and bytes."""
        return self._digest.hexdigest()


class Records:
    """Records in memory: the same fields as a JSONL line, images also as bytes, PIL images or arrays."""

    def __init__(self, name: str, records: Sequence[Mapping[str, Any]], keys: Sequence[str] = ()) -> None:
        """`keys` names the records (for the held-out split and errors); default: name:0, name:1, ..."""
        self.name, self.records = name, records
        self.keys = list(keys) or [f"{name}:{index}" for index in range(len(records))]
        if len(self.keys) != len(records):
            raise DataError(f"{name}: {len(self.keys)} keys for {len(records)} records")
        self._digest = hashlib.blake2b(digest_size=16)
        for fields, key in zip(records, self.keys, strict=True):
            check_record(Record(fields, key))
            _digest_value(self._digest, [key, fields])

    def __len__(self) -> int:
        return len(self.records)

    def record(self, index: int) -> Record:
        """The record as it was given."""
        return Record(self.records[index], self.keys[index])

    def key(self, index: int) -> str:
        """The name given to the record."""
        return self.keys[index]

    def fingerprint(self) -> str:
        """Digest of every key and field."""
        return self._digest.hexdigest()


class Subset:
    """Some records of another source, in the given order."""

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self.name, self.source, self.indices = source.name, source, list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def record(self, index: int) -> Record:
        """Record `indices[index]` of the source."""
        return self.source.record(self.indices[index])

    def key(self, index: int) -> str:
        """The record's name in its own source."""
        return self.source.key(self.indices[index])

    def fingerprint(self) -> str:
        """Changes with the source and with the choice of records."""
        return hashlib.blake2b(repr((self.source.fingerprint(), self.indices)).encode(), digest_size=16).hexdigest()


class Joined:
    """Several sources as one, end to end."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self.name = ", ".join(source.name for source in self.sources)
        self._ends = list(accumulate(len(source) for source in self.sources))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _place(self, index: int) -> tuple[Source, int]:
        number = bisect_right(self._ends, index)
        return self.sources[number], index - (self._ends[number - 1] if number else 0)

    def record(self, index: int) -> Record:
        """Record `index`, counted through all sources."""
        source, place = self._place(index)
        return source.record(place)

    def key(self, index: int) -> str:
        """The record's name in its own source."""
        source, place = self._place(index)
        return source.key(place)

    def fingerprint(self) -> str:
        """Changes with any of the sources, and with their order."""
        parts = "\n".join(source.fingerprint() for source in self.sources)
        return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def is_held_out(key: str, percent: float = 5) -> bool:
    """Whether the record called `key` is held out: its md5 falls in the lowest `percent` of all."""
    return _digest(key) < percent / 100 * 2**64


def _digest(key: str) -> int:
    digest = hashlib.md5(key.encode("utf-8", "surrogateescape"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big")


def split(source: Source, percent: float) -> tuple[Subset, Subset]:
    """(training, held-out) records by the md5 of their keys.

    Where a handful of records all fall on one side, the one with the lowest md5 is the held-out one. Nothing is held
    out of a single record, or at 0 percent.
    """
    keys = [source.key(index) for index in range(len(source))]
    held = {index for index, key in enumerate(keys) if is_held_out(key, percent)}
    if percent > 0 and len(held) in (0, len(keys)):
        held = {min(range(len(keys)), key=lambda index: _digest(keys[index]))} if len(keys) > 1 else set()
    kept = [index for index in range(len(keys)) if index not in held]
    return Subset(source, kept), Subset(source, sorted(held))


def texts(source: Source) -> Iterator[str]:
    """Every piece of text in the records, for training a tokenizer."""
    for index in range(len(source)):
        yield from record_texts(source.record(index))


def _files(root: Path) -> list[Path]:
    """The given file whatever its suffix, or the text and JSONL files below a folder, hidden ones left out."""
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DataError(f"{root}: no such file or folder")
    if not os.access(root, os.R_OK | os.X_OK):
        raise DataError(f"{root}: may not be read; change its permissions, or name another folder")
    found = [path for suffix in (*TEXT_SUFFIXES, ".jsonl") for path in root.rglob(f"*{suffix}")]
    visible = [path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts)]
    return sorted(path for path in visible if path.is_file())


def _lines(data: mmap.mmap, file: Path, relative: str) -> list[Place]:
    """One place per non-empty line, each parsed once. Raises DataError naming the line."""
    places: list[Place] = []
    number = start = 0
    while line := data.readline():
        number += 1
        if line.strip():
            check_record(Record(_parse(line, f"{file}:{number}"), f"{file}:{number}", file.parent))
            places.append(Place(file, f"{relative}:{number}", start, start + len(line)))
        start += len(line)
    return places


def _pieces(data: mmap.mmap, file: Path, relative: str) -> list[Place]:
    """Places of about PIECE_BYTES that end at line ends; a longer line is cut between two characters.

    Raises UnicodeDecodeError, with the place in the file, if it is not UTF-8.
    """
    spans, start = [], 0
    while start < len(data):
        stop = min(start + PIECE_BYTES, len(data))
        if stop < len(data):
            stop = data.rfind(b"\n", start, stop) + 1 or stop
            for _ in range(3):  # a character has at most three bytes after its first
                stop -= data[stop] & 0xC0 == 0x80
        try:
            data[start:stop].decode("utf-8")
        except UnicodeDecodeError as error:
            error.start += start
            raise
        spans.append((start, stop))
        start = stop
    names = [relative] if len(spans) == 1 else [f"{relative}#{number}" for number in range(len(spans))]
    return [Place(file, name, *span) for name, span in zip(names, spans, strict=True)]


def _parse(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        return parse_json(line)
    except JsonError as error:
        raise DataError(f"{where}: not valid JSON ({error})") from None


def _digest_value(digest: Any, value: Any) -> None:
    """Feed a record's field into a hash, images by their pixels."""
    if isinstance(value, Mapping):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, list | tuple):
        digest.update(b"[%d" % len(value))
        for item in value:
            _digest_value(digest, item)
    elif isinstance(value, bytes | bytearray):
        digest.update(b"b%d:" % len(value) + value)
    elif hasattr(value, "tobytes"):  # arrays and PIL images
        digest.update(np.ascontiguousarray(value).tobytes())
    else:
        digest.update(f"{type(value).__name__}:{value}\0".encode("utf-8", "surrogatepass"))
