"""Chat parsing: generated text or tokens become events and a message, and whole prompts read back as messages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from openk3.config.json_file import JsonError, parse_json
from openk3.inputs.chat_turn import Event, Turn
from openk3.inputs.tokenizer import Tokenizer
from openk3.inputs.xtml import (
    CLOSE,
    EFFORT_TEXT,
    EFFORTS,
    END,
    FORMAT_TEXT,
    IMAGE_PLACEHOLDER,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    NEW_TOOLS_TEXT,
    OPEN,
    SCHEMA_TEXT,
    SEP,
    TIME,
    TOOL_CHOICE_TEXT,
    TOOLS_TEXT,
    ChatError,
    unescape,
)

Item = tuple[bool, str]  # (is a control token, text)

_MARKS = (OPEN, CLOSE, SEP, END)
_PROMPT_MARKS = (*_MARKS, MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_PAD, MEDIA_END, IMAGE_PLACEHOLDER)
_MESSAGE_END = [(True, CLOSE), (False, "message"), (True, SEP), (True, END)]
_ATTRIBUTE = re.compile(r' ([a-z]+)="([^"]*)"')
_IMAGE_HEAD = re.compile(r"image (\d+)x(\d+)")
_TIME_AT_END = re.compile(f"{TIME}$")


class Scanner:
    """Finds marker spellings in text that arrives in pieces, holding back what may be the start of one."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._find = re.compile("|".join(re.escape(mark) for mark in marks))
        self._heads = {mark[:n] for mark in marks for n in range(1, len(mark))}
        self._longest = max(len(head) for head in self._heads)
        self._held = ""

    def feed(self, text: str) -> list[Item]:
        """Items that no later text can change."""
        text, at = self._held + text, 0
        items: list[Item] = []
        for found in self._find.finditer(text):
            items += [(False, text[at : found.start()]), (True, found.group())]
            at = found.end()
        longest = min(self._longest, len(text) - at)
        keep = next((n for n in range(longest, 0, -1) if text[len(text) - n :] in self._heads), 0)
        items.append((False, text[at : len(text) - keep]))
        self._held = text[len(text) - keep :]
        return [item for item in items if item[1]]

    def finish(self) -> list[Item]:
        """The held text; a marker is one token, so a text that was cut short never ends inside one."""
        held, self._held = self._held, ""
        return [(False, held)] if held else []


class Parser:
    """Reads one assistant turn while it is generated; the joined events equal `message()` for every cut of the input.

    `channel` is what the prompt has opened: "think", "response", or "" when the input opens its channels itself.
    Feed text, where marker spellings count as markers, or token ids, where only real control tokens do: text that
    merely spells a marker then stays text. `Turn` lists what is recovered from a model's mistakes.
    """

    def __init__(self, channel: str = "think", *, tokenizer: Tokenizer | None = None, first_call: int = 0) -> None:
        if channel not in ("think", "response", ""):
            raise ValueError(f"channel: {channel!r} is unknown; use think, response or an empty string")
        self.turn = Turn(channel)
        self._scanner = Scanner(_MARKS)
        self._tokens = None if tokenizer is None else TokenReader(tokenizer)
        self._first_call = first_call

    def feed(self, text: str) -> list[Event]:
        """More generated text."""
        return self.feed_items(self._scanner.feed(text))

    def feed_ids(self, ids: Iterable[int]) -> list[Event]:
        """More generated token ids (needs the tokenizer)."""
        if self._tokens is None:
            raise ValueError("Parser: token ids need the tokenizer; pass tokenizer=")
        return self.feed_items(self._tokens.feed(ids))

    def feed_items(self, items: Iterable[Item]) -> list[Event]:
        """More input that is already split into control tokens and text."""
        for is_mark, text in items:
            if self.turn.channel == "done":
                break
            if is_mark:
                self.turn.mark(text)
            else:
                self.turn.text(text)
        return self.turn.draft.take()

    def finish(self) -> list[Event]:
        """The input is over: what was held back, and the ends of open arguments and calls."""
        rest = self._scanner.finish() + ([] if self._tokens is None else self._tokens.finish())
        events = self.feed_items(rest)
        self.turn.end()
        return events + self.turn.draft.take()

    def message(self) -> dict[str, Any]:
        """The assistant message so far; complete after `finish`."""
        return self.turn.draft.message(self._first_call)

    @property
    def complete(self) -> bool:
        """The message was ended by the model."""
        return self.turn.complete

    @property
    def finish_reason(self) -> str:
        """tool_calls, stop, or length for a message that was cut short."""
        return "tool_calls" if self.turn.draft.calls else "stop" if self.complete else "length"


class TokenReader:
    """Token ids as items: control tokens apart, everything else decoded without cutting characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._names = {i: name for name, i in tokenizer.special.items()}
        self._decoder = tokenizer.decoder()

    def feed(self, ids: Iterable[int]) -> Iterator[Item]:
        """Items of more ids."""
        for i in ids:
            name = self._names.get(i)
            text = self._decoder.feed(i) if name is None else self._decoder.finish()
            if text:
                yield False, text
            if name is not None:
                yield True, name

    def finish(self) -> list[Item]:
        """The replacement of a character that was cut short, if any."""
        rest = self._decoder.finish()
        return [(False, rest)] if rest else []


@dataclass
class Conversation:
    """A prompt read back: `render(c.messages, **c.options())` writes it again."""

    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    thinking: bool = True
    effort: str | None = None
    tool_choice: str | None = None
    response_format: dict[str, Any] | None = None
    add_generation_prompt: bool = False

    def options(self) -> dict[str, Any]:
        """Everything but the messages, as `render` takes it."""
        return {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self) if spec.name != "messages"}


def parse(source: str | Iterable[Any], *, tokenizer: Tokenizer | None = None) -> Conversation:
    """Read a rendered prompt: its text, its segments, or its token ids (with the tokenizer).

    Segments and ids are exact. In plain text a message's content must not spell the end of its message or a whole
    media prompt. Call ids are not part of a prompt: they are numbered call_0, call_1, ... and results take the id of
    the call they answer. Raises ChatError naming the message that is not XTML.
    """
    items = _joined(_items(source, tokenizer))
    conversation = Conversation()
    channels: set[bool] = set()
    calls: list[dict[str, Any]] = []
    num_calls = at = 0
    while at < len(items):
        attributes, body, at, ended = _next_message(items, at, len(conversation.messages))
        role = attributes.get("role")
        if role == "assistant":
            parser = Parser("", first_call=num_calls)
            parser.feed_items(body)
            channels.add(parser.turn.thought)
            if not ended and parser.turn.draft.empty and parser.turn.channel:
                conversation.add_generation_prompt = True
                break
            parser.finish()
            message = parser.message()
            calls = message.get("tool_calls", [])
            num_calls += len(calls)
            conversation.messages.append(_with_name(message, attributes))
        elif role == "system" and "type" in attributes:
            _read_option(conversation, attributes["type"], "".join(text for _, text in body))
        else:
            conversation.messages.append(_plain_message(attributes, _content(body), calls))
    conversation.thinking = True in channels or not channels
    return conversation


def _items(source: Any, tokenizer: Tokenizer | None) -> Iterator[Item]:
    if isinstance(source, str):
        scanner = Scanner(_PROMPT_MARKS)
        yield from scanner.feed(source)
        yield from scanner.finish()
        return
    reader = None if tokenizer is None else TokenReader(tokenizer)
    for piece in source:
        if not isinstance(piece, Integral):
            yield from _items(piece[0], None) if piece[1] else [(False, piece[0])]
        elif reader is None:
            raise ValueError("parse: token ids need the tokenizer; pass tokenizer=")
        else:
            yield from reader.feed([int(piece)])
    if reader is not None:
        yield from reader.finish()


def _joined(items: Iterable[Item]) -> list[Item]:
    out: list[Item] = []
    for is_mark, text in items:
        if out and not is_mark and not out[-1][0]:
            out[-1] = (False, out[-1][1] + text)
        elif text:
            out.append((is_mark, text))
    return out


def _next_message(items: list[Item], at: int, number: int) -> tuple[dict[str, str], list[Item], int, bool]:
    """Attributes, body, place after it and whether it ended, of the message element at `at`."""
    head = items[at + 1][1] if len(items) > at + 1 else ""
    attributes = {key: unescape(value) for key, value in _ATTRIBUTE.findall(head)}
    ok = items[at] == (True, OPEN) and head.startswith("message ") and items[at + 2 : at + 3] == [(True, SEP)]
    if not ok or attributes.get("role") not in ("system", "user", "assistant", "tool"):
        raise ChatError(f"message {number}: expected {OPEN}message with a role and {SEP}, got {items[at][1][:40]!r}")
    start = at + 3
    for end in range(start, len(items)):
        if items[end : end + 4] == _MESSAGE_END:
            return attributes, items[start:end], end + 4, True
    if attributes["role"] != "assistant":
        raise ChatError(f"message {number}: the {attributes['role']} message has no end")
    return attributes, items[start:], len(items), False


def _content(body: list[Item]) -> str | list[dict[str, Any]]:
    """A message's content: text, or a list of parts if it holds images or video."""
    parts: list[dict[str, Any]] = []
    text, at = "", 0
    while at < len(body):
        part, after = _media_part(body, at)
        time = _TIME_AT_END.search(text) if part and part["type"] == "video" else None
        if part is None or (part["type"] == "video" and time is None):
            text, at = text + body[at][1], at + 1
            continue
        if time is not None:
            text, part["timestamps"] = text[: time.start()], [time.group()]
        last = parts[-1] if parts and not text else None
        # chunks of one video follow each other in time
        if last and time and last["type"] == "video" and last["timestamps"][-1] < time.group():
            last["timestamps"].append(time.group())
        else:
            parts += ([{"type": "text", "text": text}] if text else []) + [part]
        text, at = "", after
    if not parts:
        return text
    return parts + ([{"type": "text", "text": text}] if text else [])


def _media_part(body: list[Item], at: int) -> tuple[dict[str, Any] | None, int]:
    """The image or video chunk at `at`, with one placeholder or one per token, and the place after it."""
    if body[at] == (True, IMAGE_PLACEHOLDER):
        return {"type": "image"}, at + 1
    if body[at] != (True, MEDIA_BEGIN) or body[at + 2 : at + 4] != [(True, MEDIA_CONTENT), (True, MEDIA_PAD)]:
        return None, at
    end = at + 4
    while body[end : end + 1] == [(True, MEDIA_PAD)]:
        end += 1
    image = _IMAGE_HEAD.fullmatch(body[at + 1][1])
    if body[end : end + 1] != [(True, MEDIA_END)] or not (image or body[at + 1] == (False, "video")):
        return None, at
    if image:
        return {"type": "image", "size": [int(image.group(1)), int(image.group(2))]}, end + 1
    return {"type": "video"}, end + 1


def _plain_message(attributes: dict[str, str], content: Any, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": attributes["role"], "content": content}
    if attributes["role"] != "tool":
        return _with_name(message, attributes)
    index = attributes.get("index", "")
    if index.isdecimal() and 0 < int(index) <= len(calls):
        message["tool_call_id"] = calls[int(index) - 1]["id"]
    return {**message, "name": attributes.get("tool", "")}


def _with_name(message: dict[str, Any], attributes: dict[str, str]) -> dict[str, Any]:
    return {**message, "name": attributes["name"]} if "name" in attributes else message


def _read_option(conversation: Conversation, kind: str, body: str) -> None:
    efforts = {EFFORT_TEXT.format(effort): effort for effort in EFFORTS}
    choices = {text: choice for choice, text in TOOL_CHOICE_TEXT.items()}
    schema_head = FORMAT_TEXT.format("json_schema") + SCHEMA_TEXT
    if kind == "thinking-effort" and body in efforts:
        conversation.effort = efforts[body]
    elif kind == "tool-choice" and body in choices:
        conversation.tool_choice = choices[body]
    elif kind == "response-format" and body == FORMAT_TEXT.format("json_object"):
        conversation.response_format = {"type": "json_object"}
    elif kind == "response-format" and body.startswith(schema_head):
        schema = _unfenced(body.removeprefix(schema_head), kind)
        conversation.response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
    elif kind == "tool-declare" and body.startswith(NEW_TOOLS_TEXT):
        tools = _unfenced(body.removeprefix(NEW_TOOLS_TEXT), kind)
        conversation.messages.append({"role": "system", "tools": tools})
    elif kind == "tool-declare" and body.startswith(TOOLS_TEXT):
        conversation.tools = _unfenced(body.removeprefix(TOOLS_TEXT), kind)
    else:
        raise ChatError(f"{kind}: unknown option message {body[:60]!r}")


def _unfenced(text: str, kind: str) -> Any:
    try:
        return parse_json(text.removeprefix("```json\n").removesuffix("\n```"))
    except JsonError as error:
        raise ChatError(f"{kind}: not JSON ({error})") from None
