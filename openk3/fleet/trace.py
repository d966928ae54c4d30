"""The trace of a fleet: who asked when, and how much of each prompt was there before, one JSON object a line.

A prompt is a system prompt that many sessions share, the session's history, and new tokens: prompts of a session begin
with the same tokens, as far as they reach, and so do those that name the same system prompt. The new tokens of a turn
hold the answer of the turn before it, which is counted as never seen: what an engine reuses of answers comes on top.

A turn is sent at its second, or when the answer before it in its session has ended, whichever is later.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openk3.runtime.run_folder import write_atomic

MOST = 2**40  # tokens, and seconds
MOST_REQUESTS = 10_000_000  # all of a trace are in memory
LONGEST_LINE = 1 << 20  # bytes


class TraceError(ValueError):
    """A trace that cannot be read, or a mix that cannot be made; the message names file and line, or the field."""


@dataclass(frozen=True)
class Entry:
    """One request. Tokens of the prompt in their order: system, history, new."""

    at: float  # seconds since the trace began
    session: str
    turn: int  # from 0
    kind: str  # population, by which figures are told apart; a router does not know it
    system: str  # name of the shared system prompt; "" for none
    system_tokens: int
    history_tokens: int
    new_tokens: int
    answer_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Of the whole prompt."""
        return self.system_tokens + self.history_tokens + self.new_tokens


_FIELDS = {field.name: field.type for field in dataclasses.fields(Entry)}


def write_trace(path: Path, entries: Iterable[Entry]) -> None:
    """One object a line, in order."""
    lines = (json.dumps(dataclasses.asdict(entry), ensure_ascii=False) + "\n" for entry in entries)
    write_atomic(path, lambda temporary: temporary.write_text("".join(lines), encoding="utf-8"))


def read_trace(path: Path) -> list[Entry]:
    """Every request, checked. Raises TraceError naming file and line, OSError."""
    entries, turns = list[Entry](), dict[str, Entry]()
    for number, line in enumerate(_lines(path), 1):
        try:
            if not line.strip() and len(line) <= LONGEST_LINE:
                continue
            if len(line) > LONGEST_LINE or len(entries) == MOST_REQUESTS:
                raise TraceError(f"more than {LONGEST_LINE:,} bytes in a line, or {MOST_REQUESTS:,} requests")
            entry = _entry(json.loads(line))
            _check_order(entry, entries[-1] if entries else None, turns.get(entry.session))
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}:{number}: {_reason(error)}") from None
        entries.append(entry)
        turns[entry.session] = entry
    if not entries:
        raise TraceError(f"{path}: no requests in it; each line is one JSON object with {', '.join(_FIELDS)}")
    return entries


def scaled(entries: Sequence[Entry], tokens: float = 1.0, seconds: float = 1.0) -> list[Entry]:
    """The same trace with prompts and answers of so many times their tokens (at least one new), and such times.

    Parts keep their ends in common: a history still ends where it did in every prompt of its session. Raises
    TraceError for factors that are not positive, and for more tokens or seconds than a trace may have.
    """
    for name, factor in (("tokens", tokens), ("seconds", seconds)):
        if not 0 < factor < MOST:
            raise TraceError(f"scale of {name}: must be positive and less than {MOST:,}, got {factor:g}")
    found = [_scaled(entry, tokens, seconds) for entry in entries]
    largest = max((max(entry.prompt_tokens, entry.answer_tokens, entry.at) for entry in found), default=0)
    if largest > MOST:
        raise TraceError(f"a trace with {largest:,.0f} tokens in a request, or seconds; at most {MOST:,}")
    return found


def ceiling(entries: Iterable[Entry]) -> float:
    """The largest hit rate: cached over prompt tokens if nothing was ever lost and all replicas were one."""
    known, cached, total = dict[str, int](), 0, 0
    systems = dict[str, int]()
    for entry in entries:
        shared = min(entry.system_tokens, systems.get(entry.system, 0)) if entry.system else 0
        if shared == entry.system_tokens:
            shared += min(entry.history_tokens, known.get(entry.session, 0))
        cached, total = cached + shared, total + entry.prompt_tokens
        known[entry.session] = entry.history_tokens + entry.new_tokens
        systems[entry.system] = max(systems.get(entry.system, 0), entry.system_tokens)
    return cached / total if total else 0.0


def _lines(path: Path) -> Iterator[bytes]:
    """Lines of a file; the first that is too long comes cut, and is the last: nothing larger is ever in memory."""
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE + 1):
            yield line
            if len(line) > LONGEST_LINE:
                return


def _scaled(entry: Entry, tokens: float, seconds: float) -> Entry:
    ends = (entry.system_tokens, entry.system_tokens + entry.history_tokens, entry.prompt_tokens)
    system, history, prompt = (round(end * tokens) for end in ends)
    return dataclasses.replace(
        entry,
        at=entry.at * seconds,
        system_tokens=system,
        history_tokens=history - system,
        new_tokens=max(1, prompt - history),
        answer_tokens=max(1, round(entry.answer_tokens * tokens)),
    )


def _entry(found: Any) -> Entry:
    if not isinstance(found, dict):
        raise TraceError("is no JSON object")
    missing, unknown = _FIELDS.keys() - found.keys(), found.keys() - _FIELDS.keys()
    if missing or unknown:
        names = ", ".join(sorted(missing or unknown))
        raise TraceError(f"{'lacks' if missing else 'has unknown'} {names[:80]}")
    for name, kind in _FIELDS.items():
        _check_value(name, kind, found[name])
    if not found["system"] and found["system_tokens"]:
        raise TraceError("system_tokens: there is no system prompt; name it in `system`, or say 0")
    return Entry(**found | {"at": float(found["at"])})


def _check_value(name: str, kind: Any, value: Any) -> None:
    if kind == "str":
        if not isinstance(value, str) or (not value and name != "system"):
            raise TraceError(f"{name}: must be a text, got {str(value)[:40]!r}")
        return
    is_number = type(value) is int or (kind == "float" and type(value) is float and math.isfinite(value))
    least = 1 if name in ("new_tokens", "answer_tokens") else 0
    if not is_number or not least <= value <= MOST:
        whole = "" if kind == "float" else "whole "
        raise TraceError(f"{name}: must be a {whole}number of at least {least}, got {str(value)[:40]}")


def _check_order(entry: Entry, before: Entry | None, last: Entry | None) -> None:
    if before is not None and entry.at < before.at:
        raise TraceError(f"at: {entry.at:g} comes before the line above ({before.at:g}); sort the lines by `at`")
    if last is None:
        return
    if entry.turn <= last.turn:
        raise TraceError(f"turn: session {entry.session[:40]!r} is at turn {last.turn} already, got {entry.turn}")
    if (entry.system, entry.system_tokens, entry.kind) != (last.system, last.system_tokens, last.kind):
        raise TraceError(f"system: session {entry.session[:40]!r} has another system prompt or kind in its turn before")


def _reason(error: Exception) -> str:
    if isinstance(error, TraceError):
        return str(error)
    return "is no JSON object" + (" in UTF-8" if isinstance(error, UnicodeDecodeError) else "")
