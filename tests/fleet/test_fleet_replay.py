"""Replay and probe against servers that are not engines: what is sent, what is measured, what a dead server costs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from openk3.config.fleet import FleetConfig
from openk3.fleet.baselines import make_chooser
from openk3.fleet.pass_costs import PassCosts
from openk3.fleet.probe import FITTED, Sample, decode_counts, errors, first_token_counts, fit, probe
from openk3.fleet.replay import Replay, prompt_ids, refusal, replayed
from openk3.fleet.simulated_replica import ReplicaShape
from openk3.fleet.trace import Entry, TraceError

BLOCK = 16
SHAPE = ReplicaShape(step_tokens=512, block=16, page=8192)


class FakeServer(ThreadingHTTPServer):
    """Remembers prompts as an engine would, and may break a stream or refuse."""

    daemon_threads = True

    def __init__(self, fault: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fault, self.bodies, self.lock = fault, list[dict[str, Any]](), threading.Lock()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def cached(self, ids: list[int]) -> int:
        """The longest prefix of an earlier prompt, in blocks; the prompt is remembered."""
        with self.lock:
            best = 0
            for body in self.bodies:
                same = next((n for n, (a, b) in enumerate(zip(body["prompt"], ids)) if a != b), None)
                same = min(len(body["prompt"]), len(ids)) if same is None else same
                best = max(best, min(same, len(ids) - 1) // BLOCK * BLOCK)
            return best


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:  # noqa: N802  the name that http.server asks for
        self._send(200, b'{"data": [{"id": "fake"}]}')

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        cached = self.server.cached(body["prompt"])
        with self.server.lock:
            self.server.bodies.append(body)
        if self.server.fault == "refuse":
            self._send(503, b'{"error": {"message": "full"}}')
            return
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        events = [{"choices": [{"text": "a"}]}] * body["max_tokens"] + [{"choices": [], "usage": usage}]
        if self.server.fault == "cut":
            events = events[:1]
        if self.server.fault == "die":
            events = []
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        lines += ["data: [DONE]\n\n"] if not self.server.fault else []
        self._send(200, "".join(lines).encode(), "text/event-stream")

    def _send(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing is written."""


@contextmanager
def serving(*faults: str) -> Iterator[list[FakeServer]]:
    """Servers with these faults, until the block ends."""
    servers = [FakeServer(fault) for fault in faults]
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield servers
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def turns(session: str, count: int) -> list[Entry]:
    """Of one session with a system prompt."""
    return [Entry(0.0, session, n, "chat", "s", 32, 64 * n, 64, 3) for n in range(count)]


def test_prompts_have_in_common_what_the_trace_says() -> None:
    """A turn begins with the whole turn before it; sessions share the system prompt and nothing else."""
    first, second = (prompt_ids(entry) for entry in turns("a", 2))
    other = prompt_ids(turns("b", 1)[0])
    assert second[: len(first)] == first and len(second) == 160
    assert other[:32] == first[:32] and other[32:] != first[32:96]
    assert prompt_ids(turns("a", 1)[0], seed=1) != first
    long = Entry(0.0, "a", 9, "chat", "s", 32, 0, 5000, 1)
    assert prompt_ids(long)[:160] == second and set(prompt_ids(long)) <= set(range(256))


def test_a_trace_is_sent_in_order_and_measured() -> None:
    """Each session's turns one after the other, with the usage that the server counts."""
    with serving("") as (server,):
        outcomes = replayed(Replay([*turns("a", 3), *turns("b", 2)], {"only": server.address + "/"}))
        assert Counter(outcome.fate for outcome in outcomes) == {"done": 5}
        by_turn = {(one.entry.session, one.entry.turn): one for one in outcomes}
        assert by_turn["a", 1].cached == 96 and by_turn["a", 2].cached == 160
        for outcome in outcomes:
            assert outcome.ttft is not None and outcome.ended is not None and outcome.first is not None
            assert outcome.ttft > 0 and outcome.first <= outcome.ended and outcome.answered == 3
            assert outcome.prompt == outcome.entry.prompt_tokens
        assert all(body["user"] in "ab" and body["model"] == "fake" for body in server.bodies)


def test_a_policy_chooses_among_several() -> None:
    """With affinity every session stays where it began; one that goes to each in turn does not."""
    homes = dict[str, dict[str, set[str]]]()
    for policy, names in (("affinity+budgets", "abcdef"), ("round-robin", "a")):
        entries = [entry for name in names for entry in turns(name, 3)]
        with serving("", "") as servers:
            addresses = {f"r{n}": server.address for n, server in enumerate(servers)}
            chooser = make_chooser(policy, FleetConfig(), list(addresses))
            found = homes[policy] = {}
            for outcome in replayed(Replay(entries, addresses, chooser)):
                assert outcome.fate == "done" and outcome.replica is not None
                found.setdefault(outcome.entry.session, set()).add(outcome.replica)
    assert all(len(places) == 1 for places in homes["affinity+budgets"].values())
    assert len(homes["round-robin"]["a"]) == 2


def test_a_server_without_a_first_token_is_left() -> None:
    """Its requests are answered by the other one; in the middle of an answer they have failed."""
    with serving("die", "") as servers:
        addresses = {f"r{n}": server.address for n, server in enumerate(servers)}
        outcomes = replayed(Replay(turns("a", 4), addresses, make_chooser("round-robin", FleetConfig(), ["r0", "r1"])))
        assert [outcome.fate for outcome in outcomes] == ["done"] * 4
        assert {outcome.replica for outcome in outcomes} == {"r1"} and max(one.tries for one in outcomes) == 2
    with serving("cut") as (server,):
        (outcome,) = replayed(Replay(turns("a", 1), {"only": server.address}))
        assert outcome.fate == "failed" and outcome.first is not None and outcome.why == "the stream ended early"
    with serving("refuse") as (server,):
        (outcome,) = replayed(Replay(turns("a", 1), {"only": server.address}))
        assert outcome.fate == "refused" and outcome.why == "503 full"


def test_no_server_is_said() -> None:
    """By its address; several need a policy."""
    with serving("") as (server,):
        gone = server.address
    with pytest.raises(TraceError, match=f"{gone}: no server that lists its models"):
        replayed(Replay(turns("a", 1), {"only": gone}))
    with pytest.raises(TraceError, match="2 servers: one address, or a policy"):
        Replay(turns("a", 1), {"a": gone, "b": gone})


def test_the_fit_finds_constants_that_made_the_samples() -> None:
    """Exactly, where nothing was measured wrongly; a constant that would be negative is left out."""
    costs = PassCosts(0.01, 1e-4, 1e-8, 1e-7, 0.0, 0.004, 2e-6)
    values = [getattr(costs, name) for name in FITTED]
    rows = [first_token_counts(n, cached, SHAPE) for n in (100, 1000, 4000, 9000) for cached in (0, n // 2, n - 10)]
    rows += [decode_counts(length, 32, at_once) for length in (100, 9000) for at_once in (1, 4)]
    samples = [Sample("", row, sum(a * b for a, b in zip(values, row, strict=True))) for row in rows]
    found = fit(samples)
    assert all(getattr(found, name) == pytest.approx(getattr(costs, name), rel=1e-6) for name in FITTED)
    assert all(row["fitted_s"] == pytest.approx(row["seconds"]) for row in errors(found, samples))
    assert first_token_counts(9000, 4500, SHAPE)[0] == SHAPE.num_passes(9000, 4500) == 11
    odd = [Sample("", row, 0.02 * row[0] + 1e-4 * row[1] - 1e-6 * row[5] * (row[4] > 0)) for row in rows]
    assert fit(odd).parse_s == 0.0 and fit(odd).token_s > 0
    assert decode_counts(100, 3, 2) == (2, 4, 0, 2 * (100 + 101), 0, 0)


def test_a_probe_asks_cold_and_behind_a_prefix() -> None:
    """Two samples for each length, four of answers; costs come out of them."""
    told = list[str]()
    with serving("") as (server,):
        samples = probe(server.address, (64, 256), SHAPE, rounds=1, progress=told.append)
    assert [sample.counts[5] for sample in samples[:4]] == [64, 68, 256, 272]
    assert samples[0].counts == first_token_counts(64, 0, SHAPE)
    assert samples[3].counts == first_token_counts(272, 256, SHAPE)
    assert len(samples) == 8 and len(told) == 6 and fit(samples).pass_s >= 0
    for fault, said in (("refuse", "refused a prompt of 64 tokens"), ("cut", "did not answer a prompt of 64 tokens")):
        with serving(fault) as (server,), pytest.raises(TraceError, match=f"^{server.address} {said} and 1 of answer"):
            probe(server.address, (64,), SHAPE, rounds=1)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            b'{"error": {"message": "9000 tokens:\\n too  long", "type": "invalid_request_error"}}',
            "400 9000 tokens: too long",
        ),
        (b'{"error": "no"}', '400 {"error": "no"}'),
        (b"<p>\n\xff", "400 <p> \ufffd"),
        (b"", "400"),
    ],
)
def test_a_refusal_is_one_line(body: bytes, said: str) -> None:
    """The message of the server's error; of anything else what was sent."""
    assert refusal(400, body) == said


def test_waiting_requests_go_on_when_there_is_room() -> None:
    """Budgets of one request at a time: all are answered, none at the same time as another."""
    tight = FleetConfig(tuple(one.__class__(one.name, one.most_tokens, 1) for one in FleetConfig().classes))
    with serving("") as (server,):
        chooser = make_chooser("affinity+budgets", tight, ["only"])
        entries = [Entry(0.0, name, 0, "chat", "", 0, 0, 40, 2) for name in "abcdefgh"]
        outcomes = asyncio.run(Replay(entries, {"only": server.address}, chooser).run())
    spans = sorted((one.routed, one.ended) for one in outcomes if one.routed is not None and one.ended is not None)
    assert len(spans) == 8 and all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:]))
