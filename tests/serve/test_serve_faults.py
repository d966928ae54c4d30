"""What clients see when the engine fails under them, and what a scraper sees afterwards."""

from __future__ import annotations

import re
from typing import Any

import httpx
from live_server import MODEL, Live, Slow, live_server, tiny_engine, turn
from waiting import wait_for

from openk3.engine.stats import Stats
from openk3.serve.answers import Usage
from openk3.serve.metrics import Metrics

ROUTE = "/v1/chat/completions"


class Fragile(Slow):
    """Fails once, in the step that a test chooses."""

    fails_after = -1

    def step(self) -> Any:
        """One step."""
        Fragile.fails_after -= 1
        if Fragile.fails_after == 0:
            raise KeyError("page table")
        return super().step()


def fragile() -> Fragile:
    """A tiny engine of that kind."""
    plain = tiny_engine()
    return Fragile(plain._loop.runner.model, plain.config)


def fail_in(steps: int) -> None:
    """From now on."""
    Fragile.fails_after = steps


def test_an_engine_that_fails_under_its_clients() -> None:
    """A stream ends with an error event, a whole answer is a 500, both by a code of their own; then it works."""
    with live_server(engine=fragile) as live:
        live.say("long", turn("x" * 30))
        body = {"model": MODEL, "messages": [{"role": "user", "content": "long"}], "max_tokens": 400}
        fail_in(6)
        events = live.events(ROUTE, body)
        assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "engine_failed"
        fail_in(6)
        answer = live.post(ROUTE, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
        fail_in(6)
        with httpx.stream("POST", f"{live.url}/v1/messages", json={**body, "stream": True}, timeout=30) as response:
            assert "event: error" in response.read().decode()
        wait_for(lambda: httpx.get(f"{live.url}/health", timeout=60).json() == {"status": "ok"})  # it is being replaced
        assert live.post(ROUTE, body).status_code == 200
        text = httpx.get(f"{live.url}/metrics", timeout=60).text
        assert "openk3_engine_restarts_total 3" in text
        assert f'openk3_calls_total{{route="{ROUTE}",status="500"}} 2' in text
        live.wait_until_idle()


def test_a_server_whose_engine_always_fails_stops() -> None:
    """After the last restart health is red and the server ends by itself, as failed: its supervisor has to know."""

    class Broken(Slow):
        def step(self) -> Any:
            raise KeyError("page table")

    def broken() -> Broken:
        plain = tiny_engine()
        return Broken(plain._loop.runner.model, plain.config)

    with live_server(engine=broken) as live:
        statuses = [live.chat("hi").status_code for _ in range(4)]
        assert set(statuses) <= {500, 503} and statuses[0] == 500
        wait_for(lambda: live.server.should_exit)
        assert live.server.failed and live.server.should_exit


def test_metrics_are_prometheus_text() -> None:
    """Every sample has its help and type before it; buckets count up to the total."""
    metrics = Metrics()
    metrics.ended(ROUTE, 200, 0.3, 0.02, Usage(10, 4, 7))
    metrics.ended(ROUTE, 499, 700.0, None, Usage(1, 0, 0))
    metrics.refused(ROUTE, 429)
    stats = Stats(1, 2, 100, 3, 4, 5, 6, 7, 8, 9, 10)
    text = metrics.text(stats, {"calls_open": ("Open.", 3), "engine_restarts_total": ("Restarts.", 1.0)})
    known: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            known[line.split()[2]] = line.split()[3]
        elif not line.startswith("#"):
            found = re.fullmatch(r'(\w+)(?:\{(\w+="[^"\\\n]*",?)+\})? [0-9.e+-]+', line)
            assert found, line
            name = re.sub(r"_(bucket|sum|count)$", "", found[1])
            assert name in known or found[1] in known, line
            assert (known.get(found[1]) == "counter") == found[1].endswith("_total"), line
    assert f'openk3_calls_total{{route="{ROUTE}",status="200"}} 1' in text and "openk3_pages_held 3" in text
    buckets = [int(n) for n in re.findall(r"openk3_call_seconds_bucket.* (\d+)", text)]
    assert buckets == sorted(buckets) and buckets[-1] == 2 and buckets[-2] == 1
    assert "openk3_first_token_seconds_count 1" in text and 'openk3_tokens_total{kind="cached"} 4' in text
    assert "openk3_pages " not in Metrics().text(None, {})


def test_live_metrics_move(live: Live) -> None:
    """Tokens of answers, calls that are open, passes."""
    before = httpx.get(f"{live.url}/metrics", timeout=60).text
    live.chat("hi", max_tokens=5)
    live.wait_until_idle()
    after = httpx.get(f"{live.url}/metrics", timeout=60).text

    def value(text: str, name: str) -> float:
        return float(re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[0])

    assert value(after, 'openk3_tokens_total{kind="answer"}') - value(
        before, 'openk3_tokens_total{kind="answer"}'
    ) in range(1, 6)
    assert value(after, "openk3_steps_total") > value(before, "openk3_steps_total")
    assert value(after, "openk3_calls_open") == 0 and value(after, "openk3_healthy") == 1
