"""Records of zip and tar archives, read in place: nothing is unpacked to disk, so that no name can lead anywhere."""

from __future__ import annotations

import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from openk3.data.prepare.inputs import Entry, kind_of, text_of
from openk3.data.prepare.items import Fault, Item, Place
from openk3.data.prepare.streams import BOMB_FLOOR, Damaged, Stream, bounded_lines

Reading = Iterator[tuple[Item | Fault, Place]]
MEMBER_BLOCK = 1 << 16  # where a tar file ends too early, the last block before that is lost
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError)


def read_zip(entry: Entry, start: Place, limit: int, max_ratio: int, on_share: Callable[[float], object]) -> Reading:
    """Members in the order of the archive's own list; the sizes that it declares are those that can come out.

    `on_share` is told which share of the members has been read.
    Raises Damaged for what is no zip file, and where the members together grow too much.
    """
    try:
        archive = zipfile.ZipFile(entry.path)
    except _BROKEN as error:
        raise Damaged("damaged", str(error)) from None
    with archive:
        grown, members = 0, archive.infolist()
        for number, member in enumerate(members):
            on_share(number / len(members))
            grown += member.file_size
            if grown > max(BOMB_FLOOR, max_ratio * entry.size):
                raise Damaged("bomb", f"its members declare more than {max_ratio} times its size")
            if number < start.member or member.is_dir():
                continue
            where = f"{entry.label}!{clean(member.filename)}"
            fault = _refused(where, member.filename, _is_link(member), bool(member.flag_bits & 1))
            place = start if number == start.member else Place(start.file, number)
            if fault is not None:
                yield fault, Place(start.file, number + 1)
                continue
            try:
                with archive.open(member) as file:
                    yield from _member(file, (entry, member.filename), place, limit)
            except Damaged as error:
                yield error.fault(where), Place(start.file, number + 1)
            except _BROKEN as error:
                yield Fault(where, "damaged", True, str(error)), Place(start.file, number + 1)


def read_tar(entry: Entry, stream: Stream, start: Place, limit: int) -> Reading:
    """Members as they come; those before `start` are passed over. Raises Damaged where the archive is broken."""
    number = -1
    try:
        with tarfile.open(fileobj=stream, mode="r|", errorlevel=0, bufsize=1 << 18) as archive:
            for number, member in enumerate(archive):
                vars(archive)["members"] = []  # the module keeps every header otherwise
                if number < start.member or member.isdir():
                    continue
                where = f"{entry.label}!{clean(member.name)}"
                fault = _refused(where, member.name, not member.isreg() or member.issparse(), False)
                place = start if number == start.member else Place(start.file, number)
                if fault is not None:
                    yield fault, Place(start.file, number + 1)
                    continue
                file = archive.extractfile(member)
                assert file is not None
                yield from _member(file, (entry, member.name), place, limit)
    except tarfile.ReadError as error:
        reason = "truncated" if "unexpected end" in str(error) else "damaged"
        raise Damaged(reason, str(error)) from None
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise Damaged("damaged", str(error)) from None
    if number < 0:
        yield Fault(entry.label, "empty_file", True, "no member in it"), Place(start.file + 1)


def clean(name: str) -> str:
    """A member's name as text, whatever bytes are in it, in one line."""
    return " ".join(text_of(name).split("\n"))


def _is_link(member: zipfile.ZipInfo) -> bool:
    return (member.external_attr >> 16) & 0o170000 == 0o120000


def _refused(where: str, name: str, is_special: bool, is_locked: bool) -> Fault | None:
    """Why a member is not read, if it is not."""
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or (len(name) > 1 and name[1] == ":"):
        return Fault(where, "unsafe_path", True)
    if is_special:
        return Fault(where, "not_a_file", True, "a link or device")
    if is_locked:
        return Fault(where, "encrypted", True)
    if any(part.startswith(".") for part in parts):
        return Fault(where, "hidden", True)
    kind = kind_of(os.path.basename(name))
    if kind is None:
        return Fault(where, "unknown_kind", True)
    if kind.form not in ("records", "text") or kind.compression:
        return Fault(where, "nested_archive", True)
    return None


def _member(file: IO[bytes], about: tuple[Entry, str], start: Place, limit: int) -> Reading:
    """The records of one member."""
    entry, name = about
    kind, label = kind_of(os.path.basename(name)), f"{entry.label}!{clean(name)}"
    after = Place(start.file, start.member + 1)
    found: bool = start.offset > 0
    if kind is not None and kind.form == "text":
        data = _read_most(file, limit + 1)
        if len(data) > limit:
            yield Fault(label, "too_long", False), after
        elif not data:
            yield Fault(label, "empty_file", True), after
        else:
            yield Item(label, data, False, kind.suffix, entry.domain), after
        return
    for line, offset, number in bounded_lines(_Past(file, start.offset), limit, start.line):
        place = Place(start.file, start.member, start.offset + offset, abs(number))
        found = True
        if number < 0:
            yield Fault(f"{label}:{-number}", "cut_off", False), place
        elif line is None:
            yield Fault(f"{label}:{number}", "too_long", False), place
        elif line.strip():
            yield Item(f"{label}:{number}", line, True, "", entry.domain), place
    if not found:
        yield Fault(label, "empty_file", True), after


class _Past:
    """A member's bytes after the first `skip`; what breaks in it is Damaged."""

    def __init__(self, file: Any, skip: int) -> None:
        self._file, self._skip = file, skip

    def read(self, size: int) -> bytes:
        try:
            while self._skip and (data := self._file.read(min(self._skip, size))):
                self._skip -= len(data)
            return self._file.read(min(size, MEMBER_BLOCK))
        except (tarfile.ReadError, EOFError) as error:
            raise Damaged("truncated", str(error)) from None
        except _BROKEN as error:
            raise Damaged("damaged", str(error)) from None


def _read_most(file: IO[bytes], limit: int) -> bytes:
    past, data = _Past(file, 0), b""
    while len(data) < limit and (block := past.read(min(limit - len(data), 1 << 20))):
        data += block
    return data
