"""The system's Chromium for tests of the web chat: it reaches this machine alone, and its requests are noted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from live_server import Live

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
LIMIT_MS = 60_000  # of each wait for a condition: machines may be slow


def chromium() -> str:
    """Where it is. Fails with what to install, for a browser test that passes without a browser says nothing."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail("Chromium is missing: install it (Debian: `apt-get install chromium`), then run this again")
    if find_spec("playwright") is None:
        pytest.fail(
            "playwright is missing: `pip install 'openk3[harness]'`, or run `make test-slow`, which installs it"
        )
    return found


@contextmanager
def started() -> Generator[Any]:
    """A browser with a new, empty profile."""
    path = chromium()
    from playwright.sync_api import expect, sync_playwright  # an extra of its own: this file is collected without it

    expect.set_options(timeout=LIMIT_MS)
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS, *root])
        yield browser
        browser.close()


class Chat:
    """The page in one browser context, by what a person would call its parts."""

    def __init__(self, live: Live, browser: Any, **options: Any) -> None:
        self.live = live
        self.context = browser.new_context(**{"viewport": {"width": 1180, "height": 800}, **options})
        self.context.set_default_timeout(LIMIT_MS)
        self.requests: list[Any] = []
        self.complaints: list[str] = []
        self.may_complain: tuple[str, ...] = ()  # of these, on the console
        self.context.on("request", lambda one: self.requests.append(one))
        self.page = self.tab()

    def tab(self) -> Any:
        """One more."""
        page = self.context.new_page()
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("dialog", self._on_dialog)
        page.on("console", self._on_console)
        return page

    def _on_dialog(self, dialog: Any) -> None:
        if dialog.type != "confirm":
            self.complaints.append(f"dialog: {dialog.message}")
        dialog.accept()

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not any(one in message.text for one in self.may_complain):
            self.complaints.append(message.text)

    def open(self) -> Chat:
        """Load the page, and wait until it knows its model."""
        self.page.goto(self.live.url)
        self.page.wait_for_selector("#model:not(:empty)", state="attached")
        return self

    def send(self, text: str) -> None:
        """Type and press Enter."""
        self.page.fill("#input", text)
        self.page.press("#input", "Enter")

    def ask(self, text: str) -> Any:
        """Send, and wait for the end of the answer; the article of it."""
        self.send(text)
        return self.ended()

    def ended(self) -> Any:
        """The last answer, when nothing is written any more."""
        self.page.wait_for_selector("#messages[aria-busy=false] > .assistant:last-child .stats", state="attached")
        return self.page.locator(".assistant").last

    def bodies(self) -> list[Any]:
        """What was sent to be answered."""
        return [one.post_data_json for one in self.requests if one.method == "POST"]

    def kept(self) -> list[Any]:
        """Conversations in localStorage."""
        code = (
            "Object.keys(localStorage).filter(k => k.startsWith('openk3.chat.')).map(k => JSON.parse(localStorage[k]))"
        )
        return self.page.evaluate(code)

    def seed(self, *conversations: dict[str, Any]) -> None:
        """Put conversations into localStorage, as if they had been kept there, open the first one."""
        code = """(all) => { for (const one of all) localStorage[`openk3.chat.${one.id}`] = JSON.stringify(one);
            sessionStorage['openk3.open'] = all[0].id; }"""
        self.page.evaluate(code, list(conversations))
        self.open()

    def shot(self, name: str) -> None:
        """A picture of the page, if the environment names a folder for them (OPENK3_SHOTS)."""
        folder = os.environ.get("OPENK3_SHOTS")
        if folder:
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"))

    def close(self) -> None:
        """Close; nothing may have been asked of another server, and the browser must not have complained."""
        self.context.close()
        foreign = [one.url for one in self.requests if not one.url.startswith((self.live.url, "data:", "blob:"))]
        assert not foreign, foreign
        assert not self.complaints, self.complaints


def conversation(*messages: dict[str, Any], name: str = "c0", title: str = "kept", **more: Any) -> dict[str, Any]:
    """As the page keeps it."""
    return {"id": name, "title": title, "updated": 1, "settings": {}, "messages": list(messages), **more}


def said(content: str = "", reasoning: str = "", **more: Any) -> dict[str, Any]:
    """An answer as the page keeps it."""
    return {"role": "assistant", "content": content, "reasoning": reasoning, "calls": [], "finish": "stop", **more}


def asked(text: str) -> dict[str, Any]:
    """A question as the page keeps it."""
    return {"role": "user", "text": text, "pictures": []}
