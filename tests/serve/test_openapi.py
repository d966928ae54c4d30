"""/openapi.json: it says what the routes take, and nothing that a fuzzer makes of it gets a 5xx."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from live_server import MODEL, Live, live_server

ROUTES = {
    "/v1/chat/completions": "ChatRequest",
    "/v1/completions": "CompletionRequest",
    "/v1/responses": "ResponsesRequest",
    "/v1/messages": "MessagesRequest",
    "/v1/messages/count_tokens": "CountRequest",
}
SHORT = {
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
    "/v1/messages": {"max_tokens": 2},
    "/v1/completions": {"max_tokens": 2},
}


def test_routes_and_bodies_are_described(live: Live) -> None:
    """Every POST names its schema, every schema is there, and the errors that a client may meet."""
    document = httpx.get(f"{live.url}/openapi.json", timeout=60).json()
    schemas = document["components"]["schemas"]
    for path, name in ROUTES.items():
        route = document["paths"][path]["post"]
        reference = route["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert reference == f"#/components/schemas/{name}"
        assert {"200", "400", "401", "413", "429", "503"} <= set(route["responses"])
        assert "model" in schemas[name]["required"]
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert set(schemas["ChatRequest"]["properties"]["reasoning_effort"]["enum"]) == {"low", "high", "max", None}
    assert {"/v1/models", "/v1/models/{name}", "/health", "/metrics"} <= set(document["paths"])


def fuzz(live: Live, examples: int, paths: Collection[str] = ()) -> dict[int, int]:
    """Answers by status, of so many generated calls to each route (or those of `paths`); most name the right model."""
    document: Any = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    found: dict[int, int] = {}
    quick = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for entry in document.get_all_operations():
        operation = entry.ok()
        if paths and operation.path not in paths:
            continue

        @quick
        @given(operation.as_strategy(), st.integers(0, 7))
        def check(case: Any, number: int) -> None:
            if isinstance(case.body, dict) and number:
                case.body |= {"model": MODEL, **SHORT.get(case.operation.path, {})}
            response = case.call(timeout=60)
            found[response.status_code] = found.get(response.status_code, 0) + 1
            assert response.status_code < 500, (case.body, response.text)

        check()
    return found


def test_a_short_fuzz() -> None:
    """Some calls to each route that takes a body: no 5xx, nothing left behind."""
    with live_server(max_prompts=4) as live:
        found = fuzz(live, 2, ROUTES)
        live.wait_until_idle()
    assert sum(found.values()) >= 2 * len(ROUTES) and found[400] > 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_long_fuzz() -> None:
    """Hundreds of calls to each route."""
    with live_server(max_prompts=4) as live:
        found = fuzz(live, 200)
        live.wait_until_idle()
    print(found)
    assert found[400] > 0 and found[200] > 0
