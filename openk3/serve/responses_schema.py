"""What /v1/responses takes: OpenAI's items, and how they become messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator

from openk3.inputs.xtml import EFFORTS
from openk3.serve.errors import bad_request
from openk3.serve.schema import MAX_LOGPROBS, Objects, Strict, Thinking

LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (LOGPROBS, "reasoning.encrypted_content")  # reasoning comes in the clear, so the second adds nothing


class Format(Strict):
    """What the answer has to look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    """Form of the answer's text."""

    format: Format | None = None


class Reasoning(Strict):
    """How long to reason. Summaries are not made: the reasoning itself is in the answer."""

    effort: Annotated[Any, WithJsonSchema({"enum": [*EFFORTS, None]})] = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(Strict):
    """Accepted; the stream is never padded."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Strict):
    """Body of POST /v1/responses. Nothing is stored: a conversation is sent whole each time."""

    model: str
    input: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})
    ]
    instructions: str | None = None
    tools: Objects | None = None
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    # OpenAI's fields that change nothing about an answer.
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # What this server does not do.
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    max_tool_calls: int | None = None

    @field_validator("previous_response_id", "conversation", "background", "prompt", "max_tool_calls")
    @classmethod
    def _refused(cls, value: Any) -> Any:
        if value:
            raise ValueError("is not supported: nothing is stored here; send the whole conversation as input")
        return value

    @field_validator("include")
    @classmethod
    def _known(cls, value: list[str] | None) -> list[str] | None:
        unknown = [name for name in value or () if name not in _INCLUDES]
        if unknown:
            raise ValueError(f"{unknown[0][:80]!r} is not supported; use {' or '.join(_INCLUDES)}")
        return value


def conversation(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The messages in the chat route's form. Raises ApiError naming the item at fault."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not isinstance(body.input, list):
        raise bad_request("input", "expected a text or a list of items")
    if not body.input:
        raise bad_request("input", "at least one item is needed")
    for n, item in enumerate(body.input):
        _add(messages, item, f"input[{n}]")
    return messages


def nested_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Declarations in the chat route's form. Raises ApiError for tools that OpenAI's server would run itself."""
    found = []
    for n, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            raise bad_request(f"tools[{n}].type", f"{tool.get('type')!r} is not supported; use 'function'")
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        found.append({"type": "function", "function": function})
    return found or None


def _add(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """An item; what the assistant said, thought and called in a row is one message."""
    if not isinstance(item, dict):
        raise bad_request(where, "expected an item, an object")
    kind, role = item.get("type", "message"), item.get("role")
    if kind == "message" and role in ("user", "system", "developer"):
        messages.append({"role": role, "content": _parts(item.get("content"), f"{where}.content")})
    elif kind == "message" and role == "assistant":
        answer = _assistant(messages)
        answer["content"] += _plain(item.get("content"), f"{where}.content")
    elif kind == "reasoning":
        thoughts = item.get("content") or item.get("summary") or []
        answer = _assistant(messages)
        answer["reasoning_content"] = answer.get("reasoning_content", "") + _plain(thoughts, f"{where}.content")
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise bad_request(f"{where}.call_id", "missing; it names the call that this answers")
        content = _parts(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    else:
        raise bad_request(where, f"an item of type {kind!r} and role {role!r} is not supported")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _parts(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(where, "expected a text or a list of parts")
    parts: list[dict[str, Any]] = []
    for n, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            raise bad_request(f"{where}[{n}]", f"a part of type {kind!r} is not supported, or lacks what it holds")
    return parts


def _plain(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise bad_request(where, "expected a text or a list of parts")
    texts = [part.get("text", part.get("refusal")) for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise bad_request(where, "expected parts that hold text")
    return "".join(str(text) for text in texts)
