"""Page: the web chat's files at `/`, with headers that keep a browser from running or loading anything else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

# Model output is shown by building DOM nodes: with trusted types a browser refuses to make HTML or scripts of any text.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",  # kept, but asked for again each time: page and script are always of one version
}
# Names are written here, never taken from a request; `/chat.js` and its like are beside the API's own paths.
STYLES = ("chat.css", "messages.css", "narrow.css")
SCRIPTS = (
    "chat.js", "answers.js", "blocks.js", "call_card.js", "conversations.js", "disk.js", "export.js", "inline.js",
    "markdown.js", "message_box.js", "models.js", "nodes.js", "notices.js", "pictures.js", "request.js", "scheme.js",
    "scrolling.js", "server.js", "settings.js", "sidebar.js", "transcript.js", "turns.js", "values.js",
)  # fmt: skip
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    **{f"/{name}": (name, "text/css; charset=utf-8") for name in STYLES},
    **{f"/{name}": (name, "text/javascript; charset=utf-8") for name in SCRIPTS},
}


@dataclass(frozen=True)
class PageFile:
    """One file as it is served."""

    body: bytes
    media_type: str

    @property
    def etag(self) -> str:
        """Of its content."""
        return f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'

    def response(self, http: Request) -> Response:
        """200, or 304 for a browser that has it."""
        headers = {**HEADERS, "etag": self.etag}
        if _matches(http.headers.get("if-none-match", ""), self.etag):
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media_type)


def add_page(app: Starlette) -> None:
    """Serve the web chat. It needs no key: it holds nothing, and asks for one itself."""
    folder = files("openk3.serve") / "web"
    for path, (name, media_type) in FILES.items():
        _add(app, path, PageFile((folder / name).read_bytes(), media_type))


def _add(app: Starlette, path: str, file: PageFile) -> None:
    async def page(http: Request) -> Response:
        return file.response(http)

    app.add_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)


def _matches(header: str, etag: str) -> bool:
    """If-None-Match compares weakly: a proxy that compresses marks what it sends as W/."""
    return any(part.strip().removeprefix("W/") in ("*", etag) for part in header.split(","))
