"""Chat rendering: messages, tools and options become XTML segments, token ids and a loss mask."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from openk3.inputs.chat_parse import Conversation, Event, Parser, parse
from openk3.inputs.tokenizer import Tokenizer
from openk3.inputs.tool_arguments import split_arguments
from openk3.inputs.xtml import (
    CLOSE,
    EFFORT_TEXT,
    EFFORTS,
    END,
    FORMAT_TEXT,
    IMAGE_PLACEHOLDER,
    MEDIA_PROMPT,
    NEW_TOOLS_TEXT,
    OPEN,
    SCHEMA_TEXT,
    SEP,
    TOOL_CHOICE_TEXT,
    TOOLS_TEXT,
    ChatError,
    escape,
    image_prompt,
    video_prompt,
)

__all__ = [
    "ChatError",
    "Conversation",
    "Event",
    "Parser",
    "Segment",
    "encode_chat",
    "image_prompt",
    "in_call_order",
    "parse",
    "render",
    "text_of",
    "video_prompt",
]


class Segment(NamedTuple):
    """A piece of prompt that is tokenised by itself.

    Only `allow_special` segments may become control tokens; `is_assistant` ones are what the model has to produce.
    """

    text: str
    allow_special: bool
    is_assistant: bool


def render(
    messages: Sequence[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    thinking: bool = True,
    effort: str | None = "max",
    tool_choice: str | None = None,
    response_format: dict[str, Any] | None = None,
    image_prompts: Sequence[str] | None = None,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """OpenAI-style messages to XTML (report appendix F; text and segments as the released encoder gives them).

    Order: tool declaration, thinking effort (thinking mode only), messages, tool choice, response format, generation
    prefix. `developer` renders as `system`. An image part {"type": "image" | "image_url", ...} takes "size":
    (width, height) of the ORIGINAL image or the next of `image_prompts`; with neither it renders as a placeholder,
    which `encode_chat` refuses. A video part {"type": "video", ...} takes "timestamps" or the next prompt. Rendering a
    longer conversation with the same options extends the shorter one, unless it ends inside a run of tool results
    given out of call order. Raises ChatError naming the message and field.
    """
    if effort is not None and effort not in EFFORTS:
        raise ChatError(f"effort: {effort!r} is not supported; use one of {', '.join(EFFORTS)}, or None")
    writer = _Writer(None if image_prompts is None else list(image_prompts))
    if tools:
        writer.system("tool-declare", TOOLS_TEXT + _fenced(_objects(tools, "tools")))
    if thinking and effort is not None:
        writer.system("thinking-effort", EFFORT_TEXT.format(effort))
    calls: list[Any] = []
    tool_index = 0
    for where, message in in_call_order(messages):
        role = message["role"]
        if role == "assistant":
            calls, tool_index = message.get("tool_calls") or [], 0
            _assistant(writer, message, where, thinking)
        elif role == "tool":
            tool_index += 1
            name = _tool_name(message, calls, tool_index, where)
            writer.message([("role", "tool"), ("tool", name), ("index", tool_index)], message, where)
        elif role != "user" and message.get("tools"):
            writer.system("tool-declare", NEW_TOOLS_TEXT + _fenced(_objects(message["tools"], f"{where}.tools")))
        else:
            writer.message(_named("system" if role == "developer" else role, message, where), message, where)
    _one_shot_options(writer, tool_choice, response_format)
    if add_generation_prompt:
        writer.open("message", [("role", "assistant")])
        writer.open("think" if thinking else "response")
    if writer.prompts:
        raise ChatError(f"image_prompts: {len(writer.prompts)} more than there are image parts in the messages")
    return writer.segments


def text_of(segments: Iterable[Segment]) -> str:
    """The prompt as one string, for reading; token ids come from `encode_chat`."""
    return "".join(segment.text for segment in segments)


def encode_chat(tokenizer: Tokenizer, segments: Iterable[Segment]) -> tuple[list[int], list[bool]]:
    """Token ids of segments and, for each id, whether the loss counts it.

    Raises ChatError for an image whose size was not given.
    """
    ids: list[int] = []
    mask: list[bool] = []
    for segment in segments:
        if segment.allow_special and segment.text == IMAGE_PLACEHOLDER:
            raise ChatError('image: its size is unknown; give the part "size": [width, height], or pass image_prompts')
        piece = tokenizer.encode_segments([(segment.text, segment.allow_special)])
        ids += piece
        mask += [segment.is_assistant] * len(piece)
    return ids, mask


class _Writer:
    """Collects segments; `assistant` says whether the model has to produce what is being written."""

    def __init__(self, prompts: list[str] | None) -> None:
        self.segments: list[Segment] = []
        self.prompts = prompts
        self.assistant = False

    def control(self, text: str) -> None:
        """A piece that may be control tokens."""
        self.segments.append(Segment(text, True, self.assistant))

    def text(self, text: str) -> None:
        """A piece of ordinary text; nothing if empty."""
        if text:
            self.segments.append(Segment(text, False, self.assistant))

    def open(self, tag: str, attributes: Sequence[tuple[str, Any]] = ()) -> None:
        """An opening tag."""
        self.control(OPEN)
        self.text(tag)
        for key, value in attributes:
            self.text(f" {key}")
            self.text('="')
            self.text(escape(str(value)))
            self.text('"')
        self.control(SEP)

    def close(self, tag: str) -> None:
        """A closing tag."""
        self.control(CLOSE)
        self.text(tag)
        self.control(SEP)

    def system(self, kind: str, body: str) -> None:
        """A whole option message."""
        self.open("message", [("role", "system"), ("type", kind)])
        self.text(body)
        self.close("message")
        self.control(END)

    def message(self, attributes: Sequence[tuple[str, Any]], message: dict[str, Any], where: str) -> None:
        """A whole message that is not the assistant's."""
        self.open("message", attributes)
        self.content(message.get("content"), where)
        self.close("message")
        self.control(END)

    def content(self, content: Any, where: str) -> None:
        """Text, or a list of text and media parts."""
        if content is None or isinstance(content, str):
            self.text(content or "")
            return
        if not isinstance(content, (list, tuple)):
            raise ChatError(f"{where}.content: expected text or a list of parts, got {type(content).__name__}")
        for n, part in enumerate(content):
            place = f"{where}.content[{n}]"
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                self.text(part["text"])
            elif kind in ("image", "image_url", "video"):
                produced, self.assistant = self.assistant, False
                self.control(self._media(part, place))
                self.assistant = produced
            else:
                raise ChatError(f"{place}: expected a text part with its text, or an image, image_url or video part")

    def _media(self, part: dict[str, Any], where: str) -> str:
        if "size" in part and part["type"] != "video":
            size = part["size"]
            if not isinstance(size, (list, tuple)) or len(size) != 2 or any(type(s) is not int or s < 1 for s in size):
                raise ChatError(f"{where}.size: expected [width, height] of the original image, got {size!r}")
            return image_prompt(*size)
        if "timestamps" in part and part["type"] == "video":
            if not isinstance(part["timestamps"], (list, tuple)):
                raise ChatError(f"{where}.timestamps: expected a list of times hh:mm:ss.fff, one for each chunk")
            prompt = video_prompt(part["timestamps"])
        elif self.prompts is None:
            return IMAGE_PLACEHOLDER
        elif not self.prompts:
            raise ChatError(f"{where}: image_prompts holds no prompt for this part; give one per image part")
        else:
            prompt = self.prompts.pop(0)
        if not isinstance(prompt, str) or not MEDIA_PROMPT.fullmatch(prompt):
            raise ChatError(f"{where}: {prompt!r} is not a media prompt; make it with image_prompt or video_prompt")
        return prompt


def _assistant(writer: _Writer, message: dict[str, Any], where: str, thinking: bool) -> None:
    writer.open("message", _named("assistant", message, where))
    writer.assistant = True
    if thinking:
        writer.open("think")
        writer.text(_reasoning(message, where))
        writer.close("think")
    writer.open("response")
    writer.content(message.get("content"), where)
    writer.close("response")
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, (list, tuple)):
            raise ChatError(f"{where}.tool_calls: expected a list")
        writer.open("tools")
        for index, call in enumerate(calls, start=1):
            _call(writer, call, index, f"{where}.tool_calls[{index - 1}]")
        writer.close("tools")
    writer.close("message")
    writer.control(END)
    writer.assistant = False


def _call(writer: _Writer, call: Any, index: int, where: str) -> None:
    function = _function(call, where)
    writer.open("call", [("tool", function["name"]), ("index", index)])
    arguments = function.get("arguments")
    parts = split_arguments(arguments, f"{where}.arguments")
    if parts is None:  # kept for the reader, but nothing the model should learn to write
        writer.assistant = False
        writer.open("json", [("type", "object")])
        writer.text(str(arguments))
        writer.close("json")
        writer.assistant = True
    for key, kind, text in parts or ():
        writer.open("argument", [("key", key), ("type", kind)])
        writer.text(text)
        writer.close("argument")
    writer.close("call")


def _one_shot_options(writer: _Writer, tool_choice: Any, response_format: Any) -> None:
    if tool_choice not in (None, "auto", *TOOL_CHOICE_TEXT):
        raise ChatError(f"tool_choice: {tool_choice!r} is not supported; use auto, none or required")
    if tool_choice in TOOL_CHOICE_TEXT:
        writer.system("tool-choice", TOOL_CHOICE_TEXT[tool_choice])
    if response_format is None:
        return
    kind = response_format.get("type") if isinstance(response_format, dict) else response_format
    if kind not in ("text", "json_object", "json_schema"):
        raise ChatError(f"response_format: {kind!r} is not supported; use text, json_object or json_schema")
    body = FORMAT_TEXT.format(kind)
    if kind == "json_schema":
        given = response_format.get("json_schema") if isinstance(response_format, dict) else None
        if not isinstance(given, dict):
            raise ChatError("response_format.json_schema: missing; it must hold the schema object")
        body += SCHEMA_TEXT + _fenced(given.get("schema", given))
    if kind != "text":
        writer.system("response-format", body)


def in_call_order(messages: Any) -> list[tuple[str, dict[str, Any]]]:
    """Checked (place, message) pairs, each run of tool results sorted into the order of the calls it answers.

    Images are numbered in this order. Raises ChatError naming a message that is none.
    """
    if not isinstance(messages, (list, tuple)):
        raise ChatError(f"messages: expected a list, got {type(messages).__name__}")
    out: list[tuple[str, dict[str, Any]]] = []
    run: list[tuple[str, dict[str, Any]]] = []
    places: dict[str, tuple[int, str]] = {}
    for n, message in enumerate(messages):
        where = f"messages[{n}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "developer", "user", "assistant", "tool"):
            got = f"role {role!r}" if isinstance(message, dict) else type(message).__name__
            raise ChatError(f"{where}: {got}; expected an object with role system, developer, user, assistant or tool")
        if role == "tool":
            run.append((where, message))
            continue
        out += _by_call(run, places)
        run = []
        if role == "assistant":
            places = _call_places(message.get("tool_calls"), where)
        out.append((where, message))
    return out + _by_call(run, places)


def _by_call(
    run: list[tuple[str, dict[str, Any]]], places: dict[str, tuple[int, str]]
) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for where, message in run:
        call_id = message.get("tool_call_id", message.get("id"))
        place = None if call_id is None else places.get(str(call_id))
        if place is None:
            return run
        # the call it answers has the authority over a result's name
        found.append((place[0], where, {**message, "name": place[1], "tool": place[1]}))
    found.sort(key=lambda item: item[0])
    return [(where, message) for _, where, message in found]


def _call_places(calls: Any, where: str) -> dict[str, tuple[int, str]]:
    places: dict[str, tuple[int, str]] = {}
    for index, call in enumerate(calls if isinstance(calls, (list, tuple)) else ()):
        function = _function(call, f"{where}.tool_calls[{index}]")
        if call.get("id") is not None:
            places.setdefault(str(call["id"]), (index, function["name"]))
    return places


def _function(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ChatError(f"{where}: expected a tool call with function.name")
    return function


def _tool_name(message: dict[str, Any], calls: Sequence[Any], index: int, where: str) -> str:
    name = message.get("tool") or message.get("name")
    if name is None and index <= len(calls):
        name = _function(calls[index - 1], where)["name"]
    if not isinstance(name, str):
        raise ChatError(f"{where}: a tool result needs a name, or a tool call before it that it answers")
    return name


def _reasoning(message: dict[str, Any], where: str) -> str:
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise ChatError(f"{where}.reasoning_content: expected text, got {type(reasoning).__name__}")
    return reasoning


def _named(role: str, message: dict[str, Any], where: str) -> list[tuple[str, Any]]:
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise ChatError(f"{where}.name: expected text, got {type(name).__name__}")
    return [("role", role), ("name", name)] if name else [("role", role)]


def _objects(value: Any, where: str) -> Any:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, dict) for item in value):
        raise ChatError(f"{where}: expected a list of tool declarations (JSON objects)")
    return list(value)


def _fenced(value: Any) -> str:
    """Compact JSON with keys sorted at every depth, in a fence."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"tools or schema: not JSON ({error})") from None
    return f"```json\n{text}\n```"
