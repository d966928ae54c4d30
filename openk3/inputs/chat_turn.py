"""One assistant turn as a state machine: control tokens and text in, events and a message out, mistakes recovered."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from openk3.inputs.tool_arguments import ArgumentJoiner
from openk3.inputs.xtml import CLOSE, END, OPEN, SEP, unescape

_TAG = re.compile(r"\s*(think|response|tools|call|argument|json|message)")
_MAYBE_TAG = re.compile(r"\s*(?:[A-Za-z_][\w-]{0,31}\s*)?")
_ATTRIBUTE_TAG = re.compile(r"\s*(?:call|argument|json|message)\s")
_ATTRIBUTE = re.compile(r'\s+([\w.-]+)\s*=\s*"([^"]*)"')
_MAX_HEADER = 4096  # a tag's text longer than this is no tag
_CHANNELS = ("think", "response")
_VALUES = ("argument", "json")
_ENDS_VALUE = {(OPEN, "argument"), (OPEN, "call")} | {(CLOSE, tag) for tag in (*_VALUES, "call", "tools", "message")}


class Event(NamedTuple):
    """What became certain: `kind` is reasoning, content, call (text = the tool's name) or arguments (JSON text).

    `index` numbers the calls of this message from 0; it is -1 for reasoning and content.
    """

    kind: str
    text: str
    index: int = -1


class Draft:
    """The message as far as it is known, and the events since `take` was last called."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self.calls: list[dict[str, str]] = []
        self._events: list[Event] = []

    @property
    def empty(self) -> bool:
        """Nothing was written yet."""
        return not (self.calls or any(self.texts.values()))

    def add(self, kind: str, text: str) -> None:
        """More reasoning, content or arguments; or a new call with its name."""
        if not text and kind != "call":
            return
        if kind == "call":
            self.calls.append({"name": text, "arguments": ""})
        elif kind == "arguments":
            self.calls[-1]["arguments"] += text
        else:
            self.texts[kind].append(text)
        index = len(self.calls) - 1 if kind in ("call", "arguments") else -1
        last = self._events[-1] if self._events else None
        if last and kind != "call" and (last.kind, last.index) == (kind, index):
            self._events[-1] = last._replace(text=last.text + text)
        else:
            self._events.append(Event(kind, text, index))

    def take(self) -> list[Event]:
        """Events since the last time, neighbours of one kind joined."""
        events, self._events = self._events, []
        return events

    def message(self, first_call: int) -> dict[str, Any]:
        """An assistant message; calls get ids numbered from `first_call`, for ids are not part of the text."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.texts["content"])}
        if self.texts["reasoning"]:
            message["reasoning_content"] = "".join(self.texts["reasoning"])
        if self.calls:
            message["tool_calls"] = [
                {"id": f"call_{first_call + n}", "type": "function", "function": dict(call)}
                for n, call in enumerate(self.calls)
            ]
        return message


class Turn:
    """Follows the channels of one assistant message. What a model gets wrong is recovered, never raised:

    - opening a channel or tools ends the open channel, and so does closing any channel (also by the other one's name);
    - a tag whose separator is missing ends where its name or attributes end;
    - a call may open anywhere; tools, calls and arguments left open end with the message or the input;
    - inside an argument only the tags that can end it count, any other marker stays part of the value;
    - elsewhere stray markers and unknown tags are dropped, and text between channels is content.

    The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, channel: str) -> None:
        self.channel = channel  # think, response, call, argument, json, done, or "" between channels
        self.thought = channel == "think"  # a think channel was opened
        self.complete = False
        self.draft = Draft()
        self._tag: tuple[str, str] | None = None  # the marker of an unfinished tag and its text so far
        self._joiner: ArgumentJoiner | None = None

    @property
    def in_tag(self) -> bool:
        """A tag has begun and is not over yet."""
        return self._tag is not None

    def mark(self, mark: str) -> None:
        """A control token."""
        tag, self._tag = self._tag, None
        if tag is not None:
            self._resolve(*tag, ended=mark == SEP)
        if mark in (OPEN, CLOSE):
            self._tag = (mark, "")
        elif mark == END:
            self._end_message()
        elif self.channel in _VALUES and not (tag and mark == SEP):
            self._body(mark)

    def text(self, text: str) -> None:
        """Ordinary text: of a tag that is not over yet, or of whatever is open."""
        if self._tag is None:
            self._body(text)
            return
        mark, head = self._tag[0], self._tag[1] + text
        head, rest = head[:_MAX_HEADER], head[_MAX_HEADER:]
        may_go_on = _MAYBE_TAG.fullmatch(head) or (mark == OPEN and _ATTRIBUTE_TAG.match(head))
        if may_go_on and not rest:
            self._tag = (mark, head)
            return
        self._tag = None
        self._resolve(mark, head, ended=False)
        self._body(rest)

    def end(self) -> None:
        """The input is over: a tag that was cut short is dropped, open arguments and calls end."""
        tag, self._tag = self._tag, None
        if tag is not None and _TAG.match(tag[1]) and not (tag[0] == OPEN and _ATTRIBUTE_TAG.match(tag[1] + " ")):
            self._resolve(*tag, ended=False)
        self._end_call()

    def _resolve(self, mark: str, head: str, *, ended: bool) -> None:
        """A tag's text is over, by its separator (`ended`) or because it cannot go on."""
        found = _TAG.match(head)
        name, at = (found.group(1), found.end()) if found else ("", 0)
        attributes: dict[str, str] = {}
        has_attributes = mark == OPEN and bool(_ATTRIBUTE_TAG.match(head))
        while has_attributes and (attribute := _ATTRIBUTE.match(head, at)):
            attributes[attribute.group(1)] = unescape(attribute.group(2))
            at = attribute.end()
        in_value = self.channel in _VALUES
        if ended and head[at:].strip() and not has_attributes:
            name = ""
        if not name or (in_value and (mark, name) not in _ENDS_VALUE):
            if in_value:
                self._body(mark + head + (SEP if ended else ""))
            elif not ended:
                self._body(head)
            return
        if mark == OPEN:
            self._open(name, attributes)
        else:
            self._close(name)
        if not ended:
            self._body(head[at:])

    def _open(self, name: str, attributes: dict[str, str]) -> None:
        if name in _VALUES:
            self._end_value()
            if self._joiner is not None:
                self.channel = name
                if name == "argument":
                    start = self._joiner.start(attributes.get("key", ""), attributes.get("type", ""))
                    self.draft.add("arguments", start)
            return
        self._end_call()
        if name == "call":
            self.draft.add("call", attributes.get("tool", ""))
            self._joiner, self.channel = ArgumentJoiner(), "call"
        elif name == "message" and not self.draft.empty:
            self.channel = "done"
        else:
            self.channel = name if name in _CHANNELS else ""
            self.thought = self.thought or name == "think"

    def _close(self, name: str) -> None:
        if name == "message":
            self._end_message()
        elif name in _VALUES:
            self._end_value()
        elif name not in _CHANNELS:
            self._end_call()
        elif self.channel in _CHANNELS:
            self.channel = ""

    def _body(self, text: str) -> None:
        if self.channel == "" and text.strip():
            self.channel, text = "response", text.lstrip()
        if self.channel in _CHANNELS:
            self.draft.add("reasoning" if self.channel == "think" else "content", text)
        elif self._joiner is not None and self.channel == "argument":
            self.draft.add("arguments", self._joiner.add(text))
        elif self._joiner is not None:
            self._joiner.raw(text)

    def _end_value(self) -> None:
        if self._joiner is not None:
            if self.channel == "argument":
                self.draft.add("arguments", self._joiner.end())
            self.channel = "call"

    def _end_call(self) -> None:
        if self._joiner is not None:
            self._end_value()
            self.draft.add("arguments", self._joiner.finish())
            self._joiner, self.channel = None, ""

    def _end_message(self) -> None:
        self._end_call()
        self.channel, self.complete = "done", True
