"""Segments: the runs of one kind that an answer is made of, as dialects with blocks or items tell it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from openk3.engine.request import Token
from openk3.serve.turn_reader import Delta


@dataclass
class Segment:
    """One run: reasoning, content, or a call with its name, its id and the JSON text of its arguments."""

    index: int
    kind: str
    name: str = ""
    call_id: str = ""
    text: str = ""
    logprobs: list[Token] = field(default_factory=list)


class Change(NamedTuple):
    """A segment begins, has more text (that of `delta`), or has ended."""

    what: Literal["begin", "more", "end"]
    segment: Segment
    delta: Delta | None = None


class Segments:
    """All segments of one answer so far; the same ones however the deltas are cut."""

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self._key: tuple[str, int] | None = None

    def add(self, deltas: Iterable[Delta]) -> Iterator[Change]:
        """What changes with more deltas."""
        for delta in deltas:
            is_call = delta.kind in ("call", "arguments")
            key = ("call" if is_call else delta.kind, delta.index)
            if key != self._key:
                yield from self.end()
                self._key = key
                name = delta.text if is_call else ""
                self.all.append(Segment(len(self.all), key[0], name, delta.call_id))
                yield Change("begin", self.all[-1])
            if delta.kind != "call":
                self.all[-1].text += delta.text
                self.all[-1].logprobs += delta.logprobs
                yield Change("more", self.all[-1], delta)

    def end(self) -> Iterator[Change]:
        """The last segment has ended; nothing if there is none."""
        if self._key is not None:
            self._key = None
            yield Change("end", self.all[-1])
