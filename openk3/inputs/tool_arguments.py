"""Tool call arguments both ways: JSON to typed XTML arguments, and back piece by piece, keeping original bytes."""

from __future__ import annotations

import json
import re
from typing import Any

from openk3.inputs.xtml import ChatError

_SPACE = re.compile(r"[ \t\n\r]*")
_JSON_TYPES = ("number", "boolean", "null", "object", "array")


def split_arguments(arguments: Any, where: str = "arguments") -> list[tuple[str, str, str]] | None:
    """Tool arguments as (key, type, text) in the given order, or None if a string does not hold a JSON object.

    Numbers, objects and arrays of a JSON string keep their original bytes, strings are decoded, text after the object
    is ignored; a dict's values are written by json.dumps. Raises ChatError for arguments that are no dict or string.
    """
    if arguments is None:
        return []
    if isinstance(arguments, dict):
        return [(_key(key, where), _type(value), _literal(value, f"{where}.{key}")) for key, value in arguments.items()]
    if not isinstance(arguments, str):
        raise ChatError(f"{where}: expected a JSON object or its text, got {type(arguments).__name__}")
    if not arguments.strip():
        return []
    try:
        return _split_object(arguments)
    except (ValueError, RecursionError):  # any text that is no JSON object is passed on as it is
        return None


class ArgumentJoiner:
    """The JSON text of one call's arguments, built as they arrive; each method returns the text that became certain.

    Strings flow at once; other values are kept until complete and, if they are no JSON, passed on as strings. A call
    without arguments takes the text given to `raw` (a `json` block, or text written directly into the call).
    """

    def __init__(self) -> None:
        self._count = 0
        self._kind = ""
        self._value: list[str] = []
        self._raw: list[str] = []

    def start(self, key: str, kind: str) -> str:
        """Begin an argument."""
        self._kind, self._value = kind, []
        self._count += 1
        head = ("{" if self._count == 1 else ", ") + _quoted(key) + ": "
        return head if kind in _JSON_TYPES else head + '"'

    def add(self, text: str) -> str:
        """More of the current argument's value."""
        if self._kind in _JSON_TYPES:
            self._value.append(text)
            return ""
        return _quoted(text)[1:-1]

    def end(self) -> str:
        """The current argument's value is complete."""
        if self._kind not in _JSON_TYPES:
            return '"'
        text = "".join(self._value)
        return text if _is_json(text) else _quoted(text)

    def raw(self, text: str) -> None:
        """Text of the call that is no argument."""
        self._raw.append(text)

    def finish(self) -> str:
        """The call is complete."""
        raw = "".join(self._raw)
        if self._count:
            return "}"
        return raw if raw.strip() else "{}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _split_object(text: str) -> list[tuple[str, str, str]]:
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    parts: list[tuple[str, str, str]] = []
    at = _expect(text, "{", _skip(text, 0))
    if text[at : at + 1] == "}":
        return parts
    while True:
        key, at = decoder.raw_decode(text, at)
        start = _expect(text, ":", _skip(text, at))
        value, end = decoder.raw_decode(text, start)
        if not isinstance(key, str):
            raise ValueError("a key must be a string")
        literal = value if isinstance(value, str) else text[start:end]
        (key + literal).encode()  # half a surrogate pair has no UTF-8
        parts.append((key, _type(value), literal))
        at = _skip(text, end)
        if text[at : at + 1] == "}":
            return parts
        at = _expect(text, ",", at)


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _expect(text: str, char: str, at: int) -> int:
    if text[at : at + 1] != char:
        raise ValueError(f"expected {char}")
    return _skip(text, at + 1)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {int: "number", float: "number", str: "string", dict: "object", list: "array", tuple: "array"}
    return "null" if value is None else kinds.get(type(value), "object")


def _literal(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"{where}: not JSON ({error})") from None


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise ChatError(f"{where}: keys must be text, got {key!r}")
    return key
