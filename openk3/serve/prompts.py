"""Prompts: messages as clients send them become token ids, images and turn ends; text never becomes a control token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openk3.inputs.chat import ChatError, in_call_order, render
from openk3.inputs.tokenizer import Tokenizer
from openk3.inputs.xtml import END
from openk3.serve.errors import bad_request, from_value_error
from openk3.serve.image_sources import ImageSources

_KEPT = (
    "role",
    "content",
    "name",
    "tool_call_id",
    "id",
    "tool_calls",
    "reasoning_content",
    "reasoning",
    "tool",
    "tools",
)
_REFUSED = ("function_call", "audio")  # of a message: what it holds would be lost


@dataclass(frozen=True)
class Options:
    """Everything about a conversation that is not a message; as `inputs/chat.py: render` takes it."""

    tools: Sequence[dict[str, Any]] | None = None
    thinking: bool = True
    effort: str | None = None
    tool_choice: str | None = None
    response_format: dict[str, Any] | None = None


@dataclass(frozen=True)
class Prompt:
    """What the engine is asked with, and the channel in which the answer begins."""

    token_ids: list[int]
    images: tuple[Any, ...]
    turn_ends: tuple[int, ...]
    channel: str


def chat_prompt(
    tokenizer: Tokenizer, sources: ImageSources | None, messages: Sequence[dict[str, Any]], options: Options
) -> Prompt:
    """Render a conversation. `sources` is None for a model without vision. Raises ApiError naming the field."""
    if not messages:
        raise bad_request("messages", "at least one message is needed")
    try:
        # Images are numbered in the order in which they are rendered.
        ordered = in_call_order([_cleaned(message, f"messages[{n}]") for n, message in enumerate(messages)])
        images: list[Any] = []
        ready = [_with_images(message, where, sources, images) for where, message in ordered]
        segments = render(
            ready,
            tools=options.tools,
            thinking=options.thinking,
            effort=(options.effort or "max") if options.thinking else None,
            tool_choice=options.tool_choice,
            response_format=options.response_format,
        )
    except ChatError as error:
        raise from_value_error(error) from None
    ids: list[int] = []
    ends: list[int] = []
    for segment in segments:
        ids += tokenizer.encode_segments([(segment.text, segment.allow_special)])
        if segment.allow_special and segment.text == END:
            ends.append(len(ids))
    return Prompt(ids, tuple(images), tuple(ends), "think" if options.thinking else "response")


def _cleaned(message: dict[str, Any], where: str) -> dict[str, Any]:
    """What a message says, without fields that say nothing; null is the same as absent."""
    for name in _REFUSED:
        if message.get(name):
            raise bad_request(f"{where}.{name}", "is not supported")
    if message.get("tools") and message.get("content"):
        raise bad_request(f"{where}.tools", "a message declares tools or has content, not both; make it two messages")
    kept = {name: message[name] for name in _KEPT if message.get(name) is not None}
    if isinstance(message.get("refusal"), str) and not kept.get("content"):
        kept["content"] = message["refusal"]
    return kept


def _with_images(
    message: dict[str, Any], where: str, sources: ImageSources | None, images: list[Any]
) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = []
    for n, part in enumerate(content):
        place = f"{where}.content[{n}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image", "video"):
            raise bad_request(place, f"a part of type {kind!r} is not supported; pictures are image_url parts")
        if kind == "refusal":
            parts.append({"type": "text", "text": part.get("refusal")})
        elif kind == "image_url":
            parts.append(_image(part.get("image_url"), place, sources, images))
        else:
            parts.append(part)
    return {**message, "content": parts}


def _image(given: Any, where: str, sources: ImageSources | None, images: list[Any]) -> dict[str, Any]:
    param = f"{where}.image_url.url" if isinstance(given, dict) else f"{where}.image_url"
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str):
        raise bad_request(param, "expected the picture's URL, a text")
    if sources is None:
        raise bad_request(param, "this model has no vision tower, so it cannot see images", "no_vision")
    if len(images) >= sources.config.max_images:
        raise bad_request(param, f"at most {sources.config.max_images} images in one request", "too_many_images")
    image = sources.read(url, param)
    images.append(image.media)
    return {"type": "image", "size": list(image.size)}
