"""XTML's words: markers, fixed texts of option messages, attribute escaping, media prompts."""

from __future__ import annotations

import re
from collections.abc import Iterable

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_PAD, MEDIA_END = (
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
)
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"  # stands for an image of unknown size; it has no token
EFFORTS = ("low", "high", "max")  # the released encoder names `medium` in its text and refuses it

TOOLS_TEXT = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
NEW_TOOLS_TEXT = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
TOOL_CHOICE_TEXT = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
FORMAT_TEXT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
SCHEMA_TEXT = "\nThe JSON data must match the following schema:\n"

TIME = r"\d\d:\d\d:\d\d\.\d{3}"
_IMAGE = rf"{re.escape(MEDIA_BEGIN)}image [1-9]\d*x[1-9]\d*{re.escape(MEDIA_CONTENT + MEDIA_PAD + MEDIA_END)}"
_CHUNK = rf"{TIME}{re.escape(MEDIA_BEGIN + 'video' + MEDIA_CONTENT + MEDIA_PAD + MEDIA_END)}"
MEDIA_PROMPT = re.compile(f"{_IMAGE}|(?:{_CHUNK})+")


class ChatError(ValueError):
    """Messages or options that cannot be rendered; one line naming the field and what to do."""


def image_prompt(width: int, height: int) -> str:
    """What an image becomes in the text: its ORIGINAL size and one placeholder token."""
    return f"{MEDIA_BEGIN}image {width}x{height}{MEDIA_CONTENT}{MEDIA_PAD}{MEDIA_END}"


def video_prompt(timestamps: Iterable[str]) -> str:
    """What a video becomes in the text: for each chunk the time (hh:mm:ss.fff) it starts at and one placeholder."""
    return "".join(f"{time}{MEDIA_BEGIN}video{MEDIA_CONTENT}{MEDIA_PAD}{MEDIA_END}" for time in timestamps)


def escape(value: str) -> str:
    """Attribute text: only & and the double quote are escaped."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """Inverse of `escape`."""
    return value.replace("&quot;", '"').replace("&amp;", "&")
