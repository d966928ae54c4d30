"""JSON from outside: what is damaged, nested too deeply, too large or no ordinary file is refused in one line."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 30  # the largest file there is, the released checkpoint's index, has less than a tenth of it


class JsonError(ValueError):
    """Text or a file that is not the JSON it should be; the message names the file if there is one."""


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text (bytes: UTF-8). Raises JsonError, also for nesting that Python cannot follow."""
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except RecursionError:
        raise JsonError("nested too deeply") from None
    except ValueError as error:
        raise JsonError(str(error)) from None


def read_json(path: str | Path) -> Any:
    """The value of a JSON file. Raises as `read_file`, and JsonError naming the file if it is damaged."""
    data = read_file(path)
    try:
        return parse_json(data)
    except JsonError as error:
        raise JsonError(f"{path}: not valid JSON ({error})") from None


def read_file(path: str | Path) -> bytes:
    """The bytes of an ordinary file of at most MAX_BYTES.

    Raises JsonError naming a pipe or device, which might never end, a folder or a larger file; OSErrors as `open` does.
    """
    status = Path(path).stat()
    if not stat.S_ISREG(status.st_mode):
        raise JsonError(f"{path}: not an ordinary file")
    if status.st_size > MAX_BYTES:
        raise JsonError(f"{path}: {status.st_size:,} bytes are more than such a file ever has")
    return Path(path).read_bytes()
