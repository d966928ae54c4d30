"""ApiError: what a client did wrong or met, as a status and the error objects of both dialects."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

# (type, Anthropic's type) by status
_KINDS = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("request_too_large", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    421: ("permission_error", "permission_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    431: ("request_too_large", "request_too_large"),
    500: ("server_error", "api_error"),
    503: ("overloaded_error", "overloaded_error"),
}
_FIELD = re.compile(r"([a-z_]+(?:\[\d+\]|\.[A-Za-z_]\w*)*): ")
_MOST = 600  # characters of a message: it may quote what the client sent


class ApiError(Exception):
    """An answer that is an error. `param` names the field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.retry_after = status, param, retry_after
        self.code = None if code is None else _sendable(code)
        text = _sendable(" ".join(message.split()))
        self.message = text if len(text) <= _MOST else text[:_MOST] + " ..."

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer: when to try again; how to show a key."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after + 0.5)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def openai(self) -> dict[str, Any]:
        """{"error": {...}} as OpenAI's clients read it."""
        kind = _KINDS.get(self.status, _KINDS[500])[0]
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """{"type": "error", ...} as Anthropic's clients read it."""
        kind = _KINDS.get(self.status, _KINDS[500])[1]
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def _sendable(text: str) -> str:
    """Half a surrogate pair, which JSON can hold and UTF-8 cannot, becomes its escape."""
    return text.encode(errors="backslashreplace").decode()


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400 that names a field; the message begins with it."""
    return ApiError(400, message if param is None else f"{param}: {message}", param=param, code=code)


def from_value_error(error: ValueError) -> ApiError:
    """400 from an error of ours whose line begins with the field (ChatError, ImageError, the engine's)."""
    found = _FIELD.match(str(error))
    return ApiError(400, str(error), param=found.group(1) if found else None)


def from_validation(error: ValidationError) -> ApiError:
    """400 that names the first field at fault and says what is wrong with it."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, message = first["type"], first["msg"]
    param = ""
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif re.fullmatch(r"[A-Za-z_]\w*", part):  # others are pydantic's names of a union's members
            param += f".{part}" if param else part
    if kind == "extra_forbidden":
        message = "this server does not know the field; remove it"
    elif kind == "missing":
        message = "the field is required"
    return bad_request(param or None, message.removeprefix("Value error, "))
