"""Events: server-sent events cut where they end, those that say nothing yet, and the last one of a lost replica."""

from __future__ import annotations

import json
import re
from typing import Any

from openk3.serve.errors import ApiError
from openk3.serve.sse import event

ANTHROPIC, RESPONSES = "/v1/messages", "/v1/responses"
_END = re.compile(rb"\n\r?\n")
_PREFACES = ("message_start", "ping", "response.created", "response.in_progress")
_SAY_AGAIN = ("engine_failed", "engine_down", "draining", "overloaded")  # codes of errors that another replica mends


class Splitter:
    """Cuts a stream of bytes after each event, so that nobody is ever sent half of one. Changes no byte."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rest = bytearray()

    def add(self, data: bytes) -> list[bytes]:
        """What came; returns the events that are whole, and what is too long to be kept as it is."""
        start = max(0, len(self._rest) - 3)
        self._rest += data
        events, begin = [], 0
        for end in _END.finditer(self._rest, start):
            events.append(bytes(self._rest[begin : end.end()]))
            begin = end.end()
        del self._rest[:begin]
        if len(self._rest) > self._most:
            events.append(self.rest())
        return events

    def rest(self) -> bytes:
        """What has no end yet; it is handed over with this."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest


def is_pulse(data: bytes) -> bool:
    """Whether an event is a comment."""
    return data.startswith(b":")


def is_preface(data: bytes) -> bool:
    """Whether an event says only that an answer will come: it can be taken back as long as it is not sent."""
    body = read_event(data)
    if body.get("type") in _PREFACES:
        return True
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or body.get("usage"):
        return False
    return all(
        isinstance(choice, dict)
        and isinstance(choice.get("delta"), dict)
        and not any(value for name, value in choice["delta"].items() if name != "role")
        and choice.get("finish_reason") is None
        for choice in choices
    )


def is_lost_cause(data: bytes) -> bool:
    """Whether an event is an error that another replica would not have."""
    body = read_event(data)
    error = body.get("error")
    if body.get("type") == "response.failed" and isinstance(body.get("response"), dict):
        error = body["response"].get("error")
    if not isinstance(error, dict):
        return False
    return error.get("code") in _SAY_AGAIN or error.get("type") == "overloaded_error"


def read_event(data: bytes) -> dict[str, Any]:
    """The JSON object of an event; empty if it holds none."""
    lines = [line[5:].strip() for line in data.splitlines() if line.startswith(b"data:")]
    try:
        body = json.loads(b"\n".join(lines)) if lines else {}
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


class LastWord:
    """Follows a stream as far as is needed to end it properly when its replica is lost."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._created: bytes = b""
        self._last: bytes = b""

    def follow(self, data: bytes) -> None:
        """An event was sent on."""
        if self._path == RESPONSES:
            self._created = self._created or data
            self._last = data

    def error(self, error: ApiError) -> bytes:
        """The interface's own last event, or events (OpenAI's clients wait for [DONE])."""
        if self._path.startswith(ANTHROPIC):
            return event(error.anthropic(), "error")
        if self._path != RESPONSES:
            return event(error.openai()) + event("[DONE]")
        response = read_event(self._created).get("response")
        number = read_event(self._last).get("sequence_number")
        failed = {
            **(response if isinstance(response, dict) else {"object": "response", "output": []}),
            "status": "failed",
            "error": {"code": error.code or "server_error", "message": error.message},
        }
        last = number + 1 if isinstance(number, int) else 0
        return event({"type": "response.failed", "response": failed, "sequence_number": last}, "response.failed")
