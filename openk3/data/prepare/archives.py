"""Records of zip and tar archives, read in place: nothing is unpacked to disk, so that no name can lead anywhere."""

from __future__ import annotations

import lzma
import os
import struct
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
LONGEST_NAME = 300  # characters of a member's name that are shown
LONGEST_HEADER = 1 << 20  # bytes of a tar member's names and attributes, which are held in memory
SLOW_BLOCK = 32  # of bzip2 and LZMA, which zipfile unpacks without a bound on what comes out
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    RuntimeError,
)


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
                    slow = member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
                    if slow:
                        vars(file)["MIN_READ_SIZE"] = SLOW_BLOCK  # bytes that it takes in at once
                    past = _Past(file, place.offset, SLOW_BLOCK if slow else MEMBER_BLOCK)
                    yield from _member(past, (entry, member.filename), place, limit)
            except Damaged as error:
                yield error.fault(where), Place(start.file, number + 1)
            except _BROKEN as error:
                yield Fault(where, "damaged", True, str(error)), Place(start.file, number + 1)


def read_tar(entry: Entry, stream: Stream, start: Place, limit: int) -> Reading:
    """Members as they come; those before `start` are passed over. Raises Damaged where the archive is broken."""
    number = -1
    try:
        with tarfile.open(fileobj=stream, mode="r|", errorlevel=0, bufsize=1 << 18, tarinfo=_Header) as archive:
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
                yield from _member(_Past(file, place.offset, MEMBER_BLOCK), (entry, member.name), place, limit)
            _require_end(archive.fileobj)
    except tarfile.ReadError as error:
        reason = "truncated" if "unexpected end" in str(error) else "damaged"
        raise Damaged(reason, str(error)) from None
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise Damaged("damaged", str(error)) from None
    if number < 0:
        yield Fault(entry.label, "empty_file", True, "no member in it"), Place(start.file + 1)


def clean(name: str) -> str:
    """A member's name as text, whatever bytes are in it, in one line, and cut if it is long: each record names it."""
    if len(name) > LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}..."
    return " ".join(text_of(name).split("\n"))


class _Header(tarfile.TarInfo):
    """A tar member's header; one that the module would take for the archive's end, or hold however large, is damage."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Header:  # pyrefly: ignore[bad-override]
        """The next header. Raises ReadError where there is neither one nor the mark of the end."""
        try:
            return super().fromtarfile(archive)  # pyrefly: ignore[bad-return]
        except tarfile.EOFHeaderError:  # pyrefly: ignore[missing-attribute]
            raise
        except (tarfile.EmptyHeaderError, tarfile.TruncatedHeaderError):  # pyrefly: ignore[missing-attribute]
            raise tarfile.ReadError("unexpected end of data") from None
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _ABOUT_OTHERS and self.size > LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {self.size:,} bytes")
        return super()._proc_member(archive)  # pyrefly: ignore[missing-attribute]


_ABOUT_OTHERS = frozenset(
    (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
)


def _require_end(file: Any) -> None:
    """Nothing but zeros may come behind the mark of a tar file's end. Raises ReadError."""
    while data := file.read(1 << 18):
        if data.strip(b"\0"):
            raise tarfile.ReadError("more data behind its end, perhaps another archive")


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


def _member(file: _Past, about: tuple[Entry, str], start: Place, limit: int) -> Reading:
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
    for line, offset, number in bounded_lines(file, limit, start.line):
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
    """A member's bytes after the first `skip`, in blocks of at most `most`; what breaks in it is Damaged."""

    def __init__(self, file: IO[bytes], skip: int, most: int) -> None:
        self._file, self._skip, self._most = file, skip, most
        self._error: Damaged | None = None

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, and what came before the place where the member breaks."""
        if self._error is not None:
            raise self._error
        pieces: list[bytes] = []
        room = min(size, MEMBER_BLOCK)
        try:
            while self._skip and (data := self._file.read(min(self._skip, self._most))):
                self._skip -= len(data)
            while room and (data := self._file.read(min(room, self._most))):
                pieces.append(data)
                room -= len(data)
        except (tarfile.ReadError, EOFError) as error:
            self._error = Damaged("truncated", str(error))
        except _BROKEN as error:
            self._error = Damaged("damaged", str(error))
        if self._error is not None and not pieces:
            raise self._error
        return b"".join(pieces)


def _read_most(file: _Past, limit: int) -> bytes:
    data = bytearray()
    while len(data) < limit and (block := file.read(limit - len(data))):
        data += block
    return bytes(data)
