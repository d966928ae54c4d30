"""What /v1/messages takes: Anthropic's form of a conversation, and how it becomes ours."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator

from openk3.inputs.xtml import EFFORTS
from openk3.serve.errors import bad_request
from openk3.serve.schema import MAX_STOP_CHARS, MAX_STOPS, Objects, Strict

BUDGETS = ((4096, "low"), (16384, "high"))  # thinking tokens up to which an effort stands for a budget; above: max
_BLOCKS = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})


class ThinkingConfig(Strict):
    """Whether to reason. A budget becomes the effort whose answers are about that long, in order."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None

    @property
    def effort(self) -> str | None:
        """The effort that a budget stands for."""
        if self.budget_tokens is None or self.type != "enabled":
            return None
        return next((effort for most, effort in BUDGETS if self.budget_tokens <= most), EFFORTS[-1])


class OutputFormat(Strict):
    """A schema for the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """Effort and form of the answer."""

    effort: Annotated[Any, WithJsonSchema({"enum": [*EFFORTS, None]})] = None
    format: OutputFormat | None = None


class ToolChoice(Strict):
    """Which tools may be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(Strict):
    """Body of POST /v1/messages/count_tokens."""

    model: str
    messages: Objects
    system: Annotated[Any, _BLOCKS] = None
    tools: Objects | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None  # prefixes are cached anyway


class MessagesRequest(CountRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    @field_validator("stop_sequences")
    @classmethod
    def _usable_stops(cls, value: list[str] | None) -> list[str] | None:
        if value and (len(value) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in value)):
            raise ValueError(f"at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters")
        return value


def conversation(body: CountRequest) -> list[dict[str, Any]]:
    """The messages in OpenAI's form. Raises ApiError naming the block at fault."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for n, message in enumerate(body.messages):
        where, role = f"messages[{n}]", message.get("role")
        unknown = sorted(set(message) - {"role", "content"})
        if unknown:
            raise bad_request(f"{where}.{unknown[0]}", "this server does not know the field; remove it")
        if role == "assistant":
            messages.append(_assistant(message.get("content"), where))
        elif role == "user":
            messages += _user(message.get("content"), where)
        elif role == "system":
            messages.append({"role": "system", "content": _text(message.get("content"), f"{where}.content")})
        else:
            raise bad_request(f"{where}.role", f"{role!r} is not supported; use user or assistant")
    if messages and messages[-1]["role"] == "assistant":
        raise bad_request("messages", "must not end with the assistant's turn: an answer cannot be begun for the model")
    return messages


def openai_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Declarations in OpenAI's form. Raises ApiError for tools that a server of Anthropic's would run itself."""
    found = []
    for n, tool in enumerate(tools or ()):
        if tool.get("type", "custom") not in ("custom", None):
            raise bad_request(f"tools[{n}].type", f"{tool['type']!r} is not supported; use 'custom'")
        names = (("name", "name"), ("description", "description"), ("parameters", "input_schema"), ("strict", "strict"))
        function = {ours: tool[theirs] for ours, theirs in names if tool.get(theirs) is not None}
        found.append({"type": "function", "function": function})
    return found or None


def openai_choice(choice: ToolChoice | None) -> Any:
    """tool_choice in OpenAI's form."""
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_request(f"{where}.content", "expected a text or a list of blocks")
    return content


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(b, dict) and isinstance(b.get("text"), str) for b in content):
        return "\n\n".join(block["text"] for block in content)
    raise bad_request(where, "expected a text or a list of text blocks")


def _user(content: Any, where: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own here; what stands between them is the user's."""
    messages: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for n, block in enumerate(_blocks(content, where)):
        place = f"{where}.content[{n}]"
        if block.get("type") != "tool_result":
            parts.append(_part(block, place))
            continue
        if parts:
            messages.append({"role": "user", "content": parts})
            parts = []
        messages.append(_result(block, place))
    if parts or not messages:
        messages.append({"role": "user", "content": parts})
    return messages


def _part(block: dict[str, Any], where: str) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "text" and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    if kind != "image":
        raise bad_request(where, f"a block of type {kind!r} is not supported here, or lacks its text")
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    if source.get("type") == "base64" and isinstance(source.get("data"), str):
        url = f"data:{source.get('media_type', 'image')};base64,{source['data']}"
    elif source.get("type") == "url" and isinstance(source.get("url"), str):
        url = source["url"]
    else:
        raise bad_request(f"{where}.source", "expected {type: base64, media_type, data} or {type: url, url}")
    return {"type": "image_url", "image_url": {"url": url}}


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    call_id, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(call_id, str):
        raise bad_request(f"{where}.tool_use_id", "missing; it names the call that this answers")
    blocks = _blocks([] if content is None else content, where)
    parts = [_part(inner, f"{where}.content[{n}]") for n, inner in enumerate(blocks)]
    if block.get("is_error"):
        parts.insert(0, {"type": "text", "text": "Error: "})  # the markup has no other place for it
    return {"role": "tool", "tool_call_id": call_id, "content": parts}


def _assistant(content: Any, where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for n, block in enumerate(_blocks(content, where)):
        place, kind = f"{where}.content[{n}]", block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use" and isinstance(block.get("input"), dict):
            arguments = json.dumps(block["input"], ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            raise bad_request(place, f"a block of type {kind!r} is not supported here, or lacks what it holds")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message
