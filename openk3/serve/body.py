"""read_body: the bytes of a request, within size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from openk3.config.http import ServerConfig
from openk3.serve.errors import ApiError


async def read_body(http: Request, config: ServerConfig) -> bytes:
    """Raises ApiError: 415 unless it is JSON by name, 413 for too much of it (before it is read), 408 for too slowly.

    A page in a browser cannot send application/json to another origin without asking first, which nobody here answers.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "content-type: must be application/json", param="content-type")
    most = config.max_body_bytes
    too_large = ApiError(413, f"body: more than {most:,} bytes; make it smaller", code="body_too_large")
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > most):
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_seconds):
            async for piece in http.stream():
                body += piece
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"body: did not arrive within {config.body_seconds:g} s", code="body_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "body: cut short", code="body_cut_short") from None
    return bytes(body)
