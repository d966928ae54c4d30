"""Records of the listed files, one after another, each with the place behind it, from which reading can go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from openk3.config.prepare import MIB, PrepareConfig
from openk3.data.prepare.archives import read_tar, read_zip
from openk3.data.prepare.inputs import Entry
from openk3.data.prepare.items import Fault, Item, Place
from openk3.data.prepare.streams import BOMB_FLOOR, Damaged, Stream, bounded_lines

Reading = Iterator[tuple[Item | Fault, Place]]
START = Place()
ROWS = 64  # of a Parquet file held at once
ROWS_BYTES = 256 * MIB  # that they may have, if all were the longest that the file can hold


class Reader:
    """Reads the listed files from any place on; `consumed` is about how many of their bytes have been read."""

    def __init__(self, entries: Sequence[Entry], config: PrepareConfig) -> None:
        self.entries, self.config = entries, config
        self.limit = config.max_document_mib * MIB
        self._ends = [0]
        for entry in entries:
            self._ends.append(self._ends[-1] + entry.size)
        self._file = 0
        self._stream: Stream | None = None
        self._share = 0.0  # of a file without a stream

    @property
    def total(self) -> int:
        """Bytes of all files, as they lie on disk."""
        return self._ends[-1]

    @property
    def consumed(self) -> int:
        """Bytes of the files read so far."""
        if self._stream is not None and not self._stream.closed:
            return self._ends[self._file] + self._stream.consumed()
        size = self.entries[self._file].size if self._file < len(self.entries) else 0
        return self._ends[self._file] + round(self._share * size)

    def _at(self, share: float) -> None:
        self._share = share

    def read(self, start: Place = START) -> Reading:
        """Every record and fault from `start` on, with the place behind each."""
        for number in range(start.file, len(self.entries)):
            self._file, self._share = number, 0.0
            place = start if number == start.file else Place(number)
            try:
                yield from self._read_file(number, place)
            except Damaged as error:
                yield error.fault(self.entries[number].label), Place(number + 1)
            except OSError as error:
                yield Fault(self.entries[number].label, "unreadable", True, str(error)), Place(number + 1)
        self._file = len(self.entries)

    def _read_file(self, number: int, start: Place) -> Reading:
        entry = self.entries[number]
        if entry.kind.form == "parquet":
            yield from self._parquet(entry, start)
            return
        if entry.kind.form == "zip":
            yield from read_zip(entry, start, self.limit, self.config.max_ratio, self._at)
            return
        with Stream(entry.path, entry.kind.compression, self.config.max_ratio) as stream:
            self._stream = stream
            if entry.kind.form == "records":
                yield from self._lines(entry, stream, start)
            elif entry.kind.form == "tar":
                yield from read_tar(entry, stream, start, self.limit)
            else:
                yield self._text(entry, stream), Place(number + 1)

    def _lines(self, entry: Entry, stream: Stream, start: Place) -> Reading:
        stream.skip(start.offset)
        found = False
        for line, offset, number in bounded_lines(stream, self.limit, start.line):
            found = True
            after = Place(start.file, 0, start.offset + offset, abs(number))
            made = line_item(line, f"{entry.label}:{abs(number)}", number < 0, entry.domain)
            if made is not None:
                yield made, after
        if not found and not start.offset:
            yield Fault(entry.label, "empty_file", True), Place(start.file + 1)

    def _text(self, entry: Entry, stream: Stream) -> Item | Fault:
        data = b"".join(iter_blocks(stream, self.limit + 1))
        return text_item(data, entry.label, entry.kind.suffix, entry.domain, self.limit)

    def _parquet(self, entry: Entry, start: Place) -> Reading:
        """Rows by groups; those before `start` are skipped by their numbers alone."""
        try:
            with pq.ParquetFile(entry.path, memory_map=False, pre_buffer=False) as file:
                column = _text_column(file.schema_arrow, self.config.text_field)
                if column is None:
                    yield Fault(entry.label, "no_text_column", True, self.config.text_field), Place(start.file + 1)
                    return
                first, total = 0, max(file.metadata.num_rows, 1)
                for group in range(file.num_row_groups):
                    rows = file.metadata.row_group(group).num_rows
                    self._require_small(file, group, column, entry.size)
                    if first + rows > start.offset:
                        yield from self._rows(file, group, column, first, (entry, start))
                    first += rows
                    self._at(first / total)
        except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
            raise Damaged("damaged", " ".join(str(error).split())[:200]) from None

    def _require_small(self, file: Any, group: int, column: str, size: int) -> None:
        """Raise Damaged if a row group says that it holds too much for a file of this size."""
        most = max(BOMB_FLOOR, self.config.max_ratio * size)
        if _unpacked_size(file, group, column) > most:
            raise Damaged("bomb", f"a row group of more than {most:,} bytes in a file of {size:,}")

    def _rows(self, file: Any, group: int, column: str, first: int, about: tuple[Entry, Place]) -> Reading:
        entry, start = about
        row, grown, most = first, 0, max(BOMB_FLOOR, self.config.max_ratio * entry.size)
        # A dictionary may repeat one value that is as long as all of it.
        held = max(1, min(ROWS, ROWS_BYTES // max(_unpacked_size(file, group, column), 1)))
        for batch in file.iter_batches(batch_size=held, row_groups=[group], columns=[column], use_threads=False):
            values = batch.column(0)
            if pa.types.is_dictionary(values.type):
                values = values.dictionary_decode()
            for value in values.cast(pa.large_binary()).to_pylist():  # bytes: what is in there may not be UTF-8
                row, grown = row + 1, grown + len(value or b"")
                if grown > most:
                    raise Damaged("bomb", f"more than {most:,} bytes have come out of one row group")
                if row > start.offset:
                    where, after = f"{entry.label}:{row}", Place(start.file, 0, row, row)
                    if value is None:
                        value = b""
                    yield text_item(value, where, "", entry.domain, self.limit), after


def _unpacked_size(file: Any, group: int, column: str) -> int:
    """Bytes of a column's pages in a row group, unpacked, as the file declares them."""
    about = file.metadata.row_group(group)
    chunks = map(about.column, range(about.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)


def _text_column(schema: Any, name: str) -> str | None:
    """The column's name if there is one of that name and it holds strings or bytes."""
    if schema.names.count(name) != 1:
        return None
    kind = schema.field(name).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return name if any(check(kind) for check in checks) else None


def iter_blocks(stream: Any, limit: int) -> Iterator[bytes]:
    """The first `limit` bytes of a stream."""
    while limit > 0 and (data := stream.read(min(limit, 1 << 20))):
        limit -= len(data)
        yield data


def line_item(line: bytes | None, where: str, is_cut: bool, domain: str) -> Item | Fault | None:
    """The record or fault of one line of JSONL; None for a blank one."""
    if is_cut:
        return Fault(where, "cut_off", False)
    if line is None:
        return Fault(where, "too_long", False)
    return Item(where, line, True, "", domain) if line.strip() else None


def text_item(data: bytes, where: str, suffix: str, domain: str, limit: int) -> Item | Fault:
    """The record or fault of one text."""
    if len(data) > limit:
        return Fault(where, "too_long", False)
    return Item(where, data, False, suffix, domain)
