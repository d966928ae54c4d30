"""What readers hand on: a record with its place, or a fault that is counted; and the place to go on from."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Where reading goes on: file of the list, member of an archive, byte or row inside it, and lines before that."""

    file: int = 0
    member: int = 0
    offset: int = 0
    line: int = 0


class Item(NamedTuple):
    """One record as it was read: a JSON object or a text, not yet decoded."""

    where: str  # file, member and line, as errors and the report name it
    payload: bytes
    is_json: bool
    suffix: str = ""  # of the file, which may say what language it is in
    domain: str = ""  # given on the command line, else empty


class Fault(NamedTuple):
    """What could not be read, and why; `whole`: all of a file or member, or all that is left of it."""

    where: str
    reason: str
    whole: bool
    detail: str = ""


# Reasons for which no record is made, as the report explains them.
FAULTS = {
    "unknown_kind": "the file's suffix is none that is read",
    "not_a_file": "a device, a pipe, a link that leads nowhere, or a link inside an archive",
    "linked_folder": "a link to a folder, which is not followed",
    "same_file": "another name of a file that is read already",
    "hidden": "its name begins with a dot, or it is a cache of tools",
    "output": "the folder that is being made",
    "unreadable": "may not be opened",
    "empty_file": "no bytes in it",
    "truncated": "compressed data or an archive that ends too early; what came before is used",
    "damaged": "not the format that its name says, or broken inside; what came before is used",
    "bomb": "grows too much when unpacked; what came before is used",
    "unsafe_path": "a member of an archive whose name leads out of it",
    "encrypted": "a member of an archive under a password",
    "nested_archive": "an archive or Parquet file inside an archive; unpack it first",
    "no_text_column": "a Parquet file without a column of text of that name, or with two",
    "too_long": "a line, record or file longer than --max-document-mib",
    "cut_off": "the record in which damaged data ends",
}
