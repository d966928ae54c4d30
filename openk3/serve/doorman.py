"""Doorman: what is checked of every request before its route, and what an unexpected error becomes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openk3.config.http import LOOPBACK, ServerConfig
from openk3.serve.errors import ApiError

LOG = logging.getLogger(__name__)
MOST_HEAD_BYTES = 48 * 1024  # the HTTP library takes 64 KiB, or more if it comes at once


class Doorman:
    """ASGI middleware. A server without keys is open to whatever runs on its machine, web pages included.

    So where there are no keys, a browser's request must come from a page of this server (Origin), and on the loopback
    interface it must name this machine (Host): a name of somebody else's that resolves to 127.0.0.1 is refused.
    """

    def __init__(
        self, app: ASGIApp, config: ServerConfig, has_keys: bool, render: Callable[[str, ApiError], JSONResponse]
    ) -> None:
        self._app, self._config, self._has_keys, self._render = app, config, has_keys, render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def watched(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        headers = Headers(scope=scope)
        error = _no_request(scope, headers) or (None if self._has_keys else self._foreign(headers))
        if error is None:
            try:
                await self._app(scope, receive, watched)
                return
            except Exception:  # a fault of ours: the client gets an error object, the log gets the traceback
                LOG.exception("%s %r failed", scope["method"], scope["path"])
                if has_started:
                    raise
                error = ApiError(500, "the server failed on this request; its log says more", code="internal_error")
        await self._render(scope["path"], error)(scope, receive, send)

    def _foreign(self, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        if self._config.is_loopback and _name(host) not in LOOPBACK:
            message = f"host: {host[:80]!r} is not this machine; set API keys to serve under other names"
            return ApiError(421, message, param="host", code="wrong_host")
        origin = headers.get("origin")
        if origin is not None and _netloc(origin) != host:
            return ApiError(
                403, "origin: pages of other servers may not ask this one", param="origin", code="wrong_origin"
            )
        return None


def _no_request(scope: Scope, headers: Headers) -> ApiError | None:
    """A body whose length is told in two ways may be two requests to a proxy before this server; and a head that one
    server takes, because it came at once, may break the one behind it.
    """
    size = sum(len(name) + len(value) + 4 for name, value in headers.raw)
    if size + len(scope.get("raw_path", b"")) + len(scope["query_string"]) > MOST_HEAD_BYTES:
        return ApiError(431, f"headers: more than {MOST_HEAD_BYTES:,} bytes with the address", param="headers")
    if "content-length" in headers and "transfer-encoding" in headers:
        return ApiError(400, "headers: Content-Length and Transfer-Encoding exclude each other", param="headers")
    return None


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _name(host: str) -> str:
    """Of HOST, HOST:PORT or [HOST]:PORT."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
