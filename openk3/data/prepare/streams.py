"""Compressed bytes as a stream that is bounded: it stops at a bomb, says what is damaged, and cuts lines to a limit."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, Any

import pyarrow as pa

from openk3.data.prepare.items import Fault

BLOCK = 1 << 20
_STEPS = {"": BLOCK, "gzip": BLOCK, "zstd": 1 << 12}  # bytes asked for at once
BOMB_FLOOR = 64 << 20  # bytes that may come out of anything, whatever the ratio


class Damaged(Exception):
    """Input that cannot be read on; `reason` is one of items.FAULTS."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail

    def fault(self, where: str) -> Fault:
        """The same, about a file or member."""
        return Fault(where, self.reason, True, self.detail)


class Stream(io.RawIOBase):
    """What comes out of a file, decompressed; raises Damaged where it is truncated, broken or grows too much.

    The ratio is that of the bytes that came out to those that had to be read, so it does not depend on where a
    resumed run starts: such a run reads what comes before again.
    """

    def __init__(self, path: str, compression: str, max_ratio: int) -> None:
        super().__init__()
        self._closing = ExitStack()
        self._raw = self._closing.enter_context(io.FileIO(path))
        self._bytes = self._closing.enter_context(_decompressed(self._raw, compression))
        self._compressed, self._max_ratio, self.position = bool(compression), max_ratio, 0
        self._take, self._step = getattr(self._bytes, "read1", self._bytes.read), _STEPS[compression]
        self._error: Damaged | None = None

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes, fewer only at the end."""
        wanted = BLOCK if size is None or size < 0 else size
        data = self._pieces(wanted)
        self.position += len(data)
        if self._compressed and self.position > BOMB_FLOOR:
            ratio = self.position / max(self._raw.tell(), 1)
            if ratio > self._max_ratio:
                raise Damaged("bomb", f"{self.position:,} bytes have come out of {self._raw.tell():,}")
        return data

    def _pieces(self, wanted: int) -> bytes:
        """Up to `wanted` bytes, taken in steps so small that little is lost before the place where data is damaged."""
        if self._error is not None:
            raise self._error
        pieces, size = [], 0
        try:
            while size < wanted and (piece := self._take(min(wanted - size, self._step))):
                pieces.append(piece)
                size += len(piece)
        except EOFError as error:
            self._error = Damaged("truncated", str(error))
        except (OSError, zlib.error) as error:
            self._error = Damaged("truncated" if "runcated" in str(error) else "damaged", str(error))
        if self._error is not None and not pieces:
            raise self._error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readable(self) -> bool:
        """Yes."""
        return True

    def consumed(self) -> int:
        """Bytes of the file that have been read, for the progress bar."""
        return self._raw.tell()

    def skip(self, size: int) -> None:
        """Go on `size` bytes later."""
        if not self._compressed:
            self._raw.seek(size, os.SEEK_CUR)
            self.position += size
            return
        while size and (data := self.read(min(size, BLOCK))):
            size -= len(data)

    def close(self) -> None:
        """Close the file."""
        self._closing.close()
        super().close()


def _decompressed(raw: IO[bytes], compression: str) -> Any:
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if compression == "zstd":
        return pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
    return raw


def bounded_lines(stream: Any, limit: int, number: int = 0) -> Iterator[tuple[bytes | None, int, int]]:
    """(line without its end, bytes up to its end, its number) of a stream; None for a line of more than `limit` bytes.

    At most `limit` bytes and a block are held, however long a line is. Blank lines count, and come as b"". Where the
    stream raises Damaged, so does this, after a last (None, bytes, -number) if a line was begun.
    """
    rest, offset, is_long = b"", 0, False
    while True:
        try:
            block = stream.read(BLOCK)
        except Damaged:
            if rest or is_long:
                yield None, offset + len(rest), -(number + 1)
            raise
        if not block:
            break
        parts = (rest + block).split(b"\n")
        rest = parts.pop()
        for part in parts:
            number += 1
            offset += len(part) + 1
            yield None if is_long or len(part) > limit else part, offset, number
            is_long = False
        if is_long or len(rest) > limit:
            offset += len(rest)
            rest, is_long = b"", True
    if rest or is_long:
        yield None if is_long else rest, offset + len(rest), number + 1
