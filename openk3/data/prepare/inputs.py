"""The list of input files: folders are walked in order, links are never followed in circles, each file comes once."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from openk3.config.prepare import DOMAINS
from openk3.data.documents import DataError
from openk3.data.prepare.items import Fault

_CODE = (
    ".py .pyi .js .mjs .ts .tsx .jsx .c .h .cc .cpp .cxx .hpp .cu .cuh .java .kt .go .rs .rb .php .swift .scala .cs"
    " .sh .bash .pl .lua .r .jl .hs .ml .ex .erl .clj .el .sql .html .css .scss .yaml .yml .toml .cmake .proto"
)
CODE_SUFFIXES = frozenset(_CODE.split())
PROSE_SUFFIXES = frozenset((".txt", ".md", ".markdown", ".rst", ".org", ".adoc"))
MATHEMATICS_SUFFIXES = frozenset((".tex", ".ltx"))
TEXT_SUFFIXES = CODE_SUFFIXES | PROSE_SUFFIXES | MATHEMATICS_SUFFIXES
RECORD_SUFFIXES = frozenset((".jsonl", ".ndjson"))
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
SKIPPED_FOLDERS = frozenset(("__pycache__", "node_modules"))


class Kind(NamedTuple):
    """How a file is read: "records", "text", "parquet", "zip" or "tar"; its compression; the suffix of its text."""

    form: str
    compression: str = ""
    suffix: str = ""


class Entry(NamedTuple):
    """One input file."""

    path: str
    label: str  # the path as text, whatever bytes are in it
    kind: Kind
    size: int
    changed: int  # nanoseconds
    domain: str = ""


def kind_of(name: str) -> Kind | None:
    """How a file of this name is read; None if it is not."""
    lower = name.lower()
    if lower.endswith((".tgz", ".tzst")):
        return Kind("tar", "gzip" if lower.endswith(".tgz") else "zstd")
    stem, suffix = os.path.splitext(lower)
    compression = COMPRESSIONS.get(suffix, "")
    if compression:
        suffix = os.path.splitext(stem)[1]
    if suffix in RECORD_SUFFIXES:
        return Kind("records", compression)
    if suffix in TEXT_SUFFIXES:
        return Kind("text", compression, suffix)
    if suffix == ".tar":
        return Kind("tar", compression)
    if suffix in (".zip", ".parquet") and not compression:
        return Kind(suffix[1:])
    return None


def list_inputs(inputs: Sequence[str], out: str = "") -> tuple[list[Entry], list[Fault]]:
    """Every file to read, in the order of the inputs and of paths below them, and what is left out.

    The folder `out` is not entered.
    Raises DataError naming an input that does not exist, is of no kind that is read, or lists nothing.
    """
    entries: list[Entry] = []
    faults: list[Fault] = []
    seen: set[tuple[int, int]] = set()
    for given in inputs:
        domain, path = _labelled(given)
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
        before = len(entries) + len(faults)
        for found in _walk(path, _identity(out)) if path.is_dir() else iter([str(path)]):
            entry = found if isinstance(found, Fault) else _entry(found, domain, seen)
            if isinstance(entry, Fault):
                faults.append(entry)
            else:
                entries.append(entry)
        if not path.is_dir() and faults[-1:] and faults[-1].where == text_of(str(path)):
            _refuse(faults[-1])
        if len(entries) + len(faults) == before:
            raise DataError(f"{path}: the folder is empty")
    return entries, faults


def text_of(path: str) -> str:
    """A path as text, whatever bytes are in it."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _labelled(given: str) -> tuple[str, Path]:
    domain, equals, rest = given.partition("=")
    is_labelled = bool(equals) and domain in DOMAINS
    path = rest if is_labelled else given
    if not path:  # else an unset variable of the shell would read all of the current folder
        raise DataError(f"IN: {given!r} names no path; write . for the current folder")
    return domain if is_labelled else "", Path(os.path.expanduser(path))


def require_outside(inputs: Sequence[str], out: Path) -> None:
    """Raise DataError naming an input that is the folder `out` or lies in it, links followed."""
    for path in (_labelled(given)[1] for given in inputs):
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(out)):
            raise DataError(f"{path}: lies in the folder that --out names, which is written over; name another --out")


def _refuse(fault: Fault) -> None:
    """A file that was named itself must be of use."""
    if fault.reason == "unknown_kind":
        raise DataError(
            f"{fault.where}: not a kind that is read; name .jsonl, .parquet, text, code, .zip or .tar files"
            " (.gz and .zst too), or a folder"
        )
    if fault.reason != "same_file":
        raise DataError(f"{fault.where}: {fault.detail or fault.reason.replace('_', ' ')}")


def _identity(folder: str) -> tuple[int, int] | None:
    """What names a folder however its path is written, or None if it is not there."""
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _walk(root: Path, out: tuple[int, int] | None) -> Iterator[str | Fault]:
    """Paths of all files below a folder, in order; folders that are not entered as faults.

    However deep the folders lie; one whose path is too long to be opened is unreadable.
    """
    waiting: list[Iterator[os.DirEntry[str] | Fault]] = [_listed(str(root))]
    while waiting:
        entry = next(waiting[-1], None)
        if entry is None:
            waiting.pop()
        elif isinstance(entry, Fault):
            yield entry
        elif entry.name.startswith(".") or entry.name in SKIPPED_FOLDERS:
            yield Fault(text_of(entry.path), "hidden", True)
        elif entry.is_dir(follow_symlinks=False):
            if out is not None and entry.inode() == out[1] and _identity(entry.path) == out:
                yield Fault(text_of(entry.path), "output", True)
            else:
                waiting.append(_listed(entry.path))
        elif entry.is_symlink() and os.path.isdir(entry.path):
            yield Fault(text_of(entry.path), "linked_folder", True)
        else:
            yield entry.path


def _listed(folder: str) -> Iterator[os.DirEntry[str] | Fault]:
    """What is in a folder, in the order of names, or why that cannot be said."""
    try:
        with os.scandir(folder) as listing:
            found = sorted(listing, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        return iter([Fault(text_of(folder), "unreadable", True, error.strerror or str(error))])
    return iter(found)


def require_unchanged(entries: Sequence[Entry]) -> None:
    """Raise DataError naming a file that is not as it was when it was listed."""
    for entry in entries:
        try:
            status = os.stat(entry.path)
        except OSError:
            continue  # it is gone, which the reader has counted
        if (status.st_size, status.st_mtime_ns) != (entry.size, entry.changed):
            raise DataError(f"{entry.label}: has changed while it was read; begin again with --restart")


def _entry(path: str, domain: str, seen: set[tuple[int, int]]) -> Entry | Fault:
    label = text_of(path)
    try:
        status = os.stat(path)
    except OSError as error:  # a link that leads nowhere, or in a circle
        return Fault(label, "not_a_file", True, error.strerror or str(error))
    if not stat.S_ISREG(status.st_mode):
        return Fault(label, "not_a_file", True, "not an ordinary file")
    kind = kind_of(os.path.basename(path))
    if kind is None:
        return Fault(label, "unknown_kind", True)
    if not status.st_size:
        return Fault(label, "empty_file", True)
    if not os.access(path, os.R_OK):
        return Fault(label, "unreadable", True, "permission denied")
    identity = (status.st_dev, status.st_ino)
    if identity in seen:
        return Fault(label, "same_file", True)
    seen.add(identity)
    return Entry(path, label, kind, status.st_size, status.st_mtime_ns, domain)
