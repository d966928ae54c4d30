"""One server for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from live_server import Live, live_server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Live]:
    """Without keys and limits."""
    with live_server() as live:
        yield live


@pytest.fixture
def live(shared_server: Live) -> Iterator[Live]:
    """The shared server; after each test it has to be idle, with every page given back."""
    yield shared_server
    shared_server.says.clear()
    shared_server.slow_down(0.0)
    shared_server.wait_until_idle()


@pytest.fixture
def seen(live: Live, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Token ids of all prompts that come to the engine in this test."""
    prompts: list[list[int]] = []
    submit = live.service.thread.submit

    def noted(request: Any, sink: Any) -> Any:
        prompts.append(list(request.prompt))
        return submit(request, sink)

    monkeypatch.setattr(live.service.thread, "submit", noted)
    return prompts
