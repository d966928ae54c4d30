"""The router's routes before real servers: the same bytes, conversations on one replica, keys, lists, draining."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from live_fleet import (
    CHAT,
    STREAM,
    Asked,
    LiveRouter,
    Scripted,
    answer,
    chunk,
    live_router,
    piece,
    scripted,
    wait_for,
)
from live_server import KEY, MODEL, Live, live_server, parse_events, turn

from openk3.config.fleet import CostClass, FleetConfig, ProxyConfig
from openk3.config.model import ConfigError
from openk3.fleet.affinity import read_features
from openk3.fleet.app import merged_models
from openk3.fleet.replica_list import Listed, ListFile, read_lines
from openk3.serve.keys import Caller, Keys
from openk3.serve.page import FILES

HI = [{"role": "user", "content": "hi"}]
NAMES = re.compile(r"\b(chatcmpl-|cmpl-|resp_|msg_|rs_|fc_|call_|req_)[0-9a-f]{16,}|\"created(_at)?\": ?\d+")
SAID = ("content", "reasoning_content", "text", "thinking", "delta", "finish_reason", "stop_reason")


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[LiveRouter, list[Live]]]:
    """A router before two servers of the same model."""
    with live_server() as one, live_server() as two, live_router([one.url, two.url]) as live:
        yield live, [one, two]


def test_every_route_says_what_a_server_says(fleet: tuple[LiveRouter, list[Live]]) -> None:
    """Whole and streamed, good and bad; only names and times of creation differ."""
    live, [server, _] = fleet
    chat = {"model": MODEL, "messages": HI, "max_tokens": 6, "temperature": 0, "reasoning_effort": "low"}
    calls: list[tuple[str, Any]] = [
        (CHAT, {**chat, "max_tokens": "many"}),
        (CHAT, {**chat, "model": "another"}),
        ("/v1/messages", {"model": MODEL, "messages": HI}),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": HI}),
        ("/tokenize", {"model": MODEL, "prompt": "hello"}),
        ("/detokenize", {"model": MODEL, "tokens": [40, 41]}),
        (
            "/v1/completions",
            {"model": MODEL, "prompt": "a message", "max_tokens": 3, "seed": 1, "logprobs": 2, "echo": True},
        ),
    ]
    for is_stream in (False, True):
        calls += [
            (CHAT, {**chat, "stream": is_stream}),
            (
                "/v1/completions",
                {"model": MODEL, "prompt": "ab", "max_tokens": 4, "temperature": 0, "stream": is_stream},
            ),
            (
                "/v1/responses",
                {"model": MODEL, "input": HI, "max_output_tokens": 6, "temperature": 0, "stream": is_stream},
            ),
            ("/v1/messages", {"model": MODEL, "messages": HI, "max_tokens": 6, "temperature": 0, "stream": is_stream}),
        ]
    for path, body in calls:
        direct, routed = server.post(path, body), live.post(path, body)
        assert direct.status_code == routed.status_code
        assert NAMES.sub("", plain(direct.text)) == NAMES.sub("", plain(routed.text)), path
        headers = {"content-type", "cache-control", "x-accel-buffering", "retry-after"}
        assert {n: direct.headers.get(n) for n in headers} == {n: routed.headers.get(n) for n in headers}
    for path in ("/v1/models/" + MODEL, "/tokenizer_info", "/v1/models/none", "/openapi.json", *FILES):
        direct, routed = httpx.get(server.url + path, timeout=60), live.get(path)
        assert (direct.status_code, NAMES.sub("", direct.text)) == (routed.status_code, NAMES.sub("", routed.text)), (
            path
        )
    assert live.post("/v1/nothing", {}).status_code == 404 and live.get(CHAT).status_code == 405
    live.wait_until_idle()


def plain(text: str) -> str:
    """Without what depends on the cache; of a stream what it says, for how it is cut depends on time."""
    if not text.startswith(("data:", "event:")):
        return re.sub(r'"(cached_tokens|cache_read_input_tokens|input_tokens)": ?\d+', "", text)
    said = ""
    rest = parse_events(text)[::-1]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            said += "".join(str(value.get(name)) for name in SAID if isinstance(value.get(name), str))
            value = list(value.values())
        rest += value[::-1] if isinstance(value, list) else []
    return said


def test_bytes_pass_unchanged_both_ways() -> None:
    """Odd chunks, odd JSON, headers of the client's own; what belongs to one connection stays behind."""
    events = (
        chunk("é\u2028") + b"event: x\ndata: 1\r\n\r\n" + b": pulse\n\n" + b"data: [DONE]\n\n" + b"tail without end"
    )

    async def odd(_: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        for index in range(0, len(events), 3):
            writer.write(piece(events[index : index + 3]))
            await writer.drain()
        writer.write(piece(b""))

    body = b'{ "messages" : [ ] , "stream":true, "x": "\\u0000", "n": 1e2 }'
    headers = {
        "content-type": "application/json; charset=utf-8",
        "authorization": f"Bearer {KEY}",
        "x-mine": "1",
        "te": "trailers",
        "origin": "http://ORIGIN",
    }
    with scripted(odd) as [replica], live_router([replica.url]) as live:
        own = live.url.removeprefix("http://")
        headers["origin"] = live.url
        response = httpx.post(f"{live.url}{CHAT}?a=b%20c", content=body, headers=headers, timeout=60)
        assert response.content == events and response.headers["content-type"] == "text/event-stream; charset=utf-8"
        [asked] = replica.asked
        assert (asked.path, asked.body) == (f"{CHAT}?a=b%20c", body)
        assert asked.headers["authorization"] == f"Bearer {KEY}" and asked.headers["x-mine"] == "1"
        assert asked.headers["content-type"] == headers["content-type"]
        assert asked.headers["host"] != own and not {"te", "origin", "connection"} & set(asked.headers) - {"connection"}


def test_clients_of_both_interfaces(fleet: tuple[LiveRouter, list[Live]]) -> None:
    """Their own libraries, streaming and not, with a call of a tool."""
    live, servers = fleet
    for server in servers:
        server.say("weather", turn("", "hm", [("get", [("city", "string", "Rome")])]))
        server.say("story", turn("Once upon a time.", "let me see"))
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
    tools: Any = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
    called = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "weather?"}], tools=tools, max_tokens=200
    )
    assert called.choices[0].message.tool_calls[0].function.arguments == '{"city": "Rome"}'  # pyrefly: ignore
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a story"}], stream=True, max_tokens=200
    )
    assert "".join(part.choices[0].delta.content or "" for part in stream) == "Once upon a time."
    other = anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0)
    with other.messages.stream(
        model=MODEL, messages=[{"role": "user", "content": "a story"}], max_tokens=200
    ) as events:
        assert "".join(events.text_stream) == "Once upon a time."
    assert {one.id for one in client.models.list()} == {MODEL}
    live.wait_until_idle()


def test_a_conversation_stays_where_its_prefix_is(fleet: tuple[LiveRouter, list[Live]]) -> None:
    """Every turn after the first hits the cache, of each of several conversations that run in turn."""
    live, servers = fleet
    for server in servers:
        server.say("number", turn("yes", "ok"))
    talks: list[list[Any]] = []
    for number in range(100):  # two of each replica
        talk = [{"role": "user", "content": f"conversation number {number} " + "the message " * 80}]
        key = read_features(CHAT, {"messages": talk}, "", live.router.policy.config).key
        if len(talks) < 4 and next(live.router.policy.placement.ring.owners(key)) == servers[len(talks) % 2].url:
            talks.append(talk)
    assert len(talks) == 4
    for round_number in range(2):
        for talk in talks:
            answered = live.post(CHAT, {"model": MODEL, "messages": talk, "max_tokens": 100}).json()
            usage = answered["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]  # the frame is the same in all of them
            assert (cached > usage["prompt_tokens"] / 2) == (round_number > 0), usage
            talk += [answered["choices"][0]["message"], {"role": "user", "content": "number?"}]
    assert live.metric('placed_total{class="short",place="home"}') >= 4


def test_what_the_router_itself_refuses() -> None:
    """Bodies too large or of another kind, wrong keys, too much of one key; in the interface's own form."""

    async def fine(_: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"{}"))

    keys = Keys([(KEY, Caller("me", requests_per_minute=2))])
    with scripted(fine) as [replica], live_router([replica.url], keys=keys, max_body_bytes=1000) as live:
        good = {"authorization": f"Bearer {KEY}"}
        assert live.post("/v1/messages", {}).json()["error"]["type"] == "authentication_error"
        assert live.post(CHAT, {"x": "y" * 1000}, headers=good).json()["error"]["code"] == "body_too_large"
        assert httpx.post(live.url + CHAT, content=b"hi", headers=good, timeout=60).status_code == 415
        limited = live.post(CHAT, {}, headers=good)
        assert limited.status_code == 429 and "retry-after" in limited.headers
        assert replica.asked == []
        for path in ("/metrics", "/v1/models", "/tokenizer_info"):
            assert live.get(path).status_code == 401
            assert live.get(path, headers=good).status_code == 200 or path == "/v1/models"
        assert live.get("/health").json() == {"status": "ok"}
        text = live.get("/metrics", headers=good).text
        assert KEY not in text and f'openk3_router_refused_total{{route="{CHAT}",status="413"}} 1' in text
        live.wait_until_idle()


def test_a_body_that_is_no_request_is_the_replicas_to_judge(fleet: tuple[LiveRouter, list[Live]]) -> None:
    """Not JSON, not an object, nested without end."""
    live, _ = fleet
    for body in (b"{", b"[1]", b"[" * 100_000, b'"\\ud800"'):
        response = httpx.post(live.url + CHAT, content=body, headers={"content-type": "application/json"}, timeout=60)
        assert response.status_code == 400 and "error" in response.json()
    live.wait_until_idle()


def test_no_replica_is_a_clean_refusal() -> None:
    """With a time to come back, in /health too."""
    with live_router(["http://127.0.0.1:9"]) as live:
        for path in (CHAT, "/v1/models"):
            response = live.post(path, {}) if path == CHAT else live.get(path)
            assert response.status_code == 503 and response.json()["error"]["code"] == "no_replica"
            assert "retry-after" in response.headers
        assert live.get("/health").json() == {"status": "no_replica"}
        assert live.metric('replica_state{replica="http://127.0.0.1:9",state="new"}') == 1


class Gated:
    """Begins a stream with one word and ends it when it is told to."""

    def __init__(self) -> None:
        self.may_end = False

    async def __call__(self, own: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
        """The act."""
        writer.write(STREAM + piece(chunk("one ")))
        while not self.may_end:
            await asyncio.sleep(0.01)
        writer.write(piece(chunk("two")) + piece(b"data: [DONE]\n\n") + piece(b""))


def test_the_list_changes_while_calls_run(tmp_path: Path) -> None:
    """A replica joins; one is drained, then removed: what it has begun ends well, and nothing new is sent to it."""
    file = tmp_path / "fleet.txt"
    first_act, second_act = Gated(), Gated()
    with scripted(first_act, second_act) as (first, second):

        def write(text: str) -> None:
            (tmp_path / "new").write_text(text)
            os.replace(tmp_path / "new", file)

        def states() -> dict[str, str]:
            return {name: one.state for name, one in live.router.policy.replicas.items()}

        write(f"{first.url}  # the only one\n")
        with live_router(ListFile(file)) as live, httpx.Client(timeout=60) as client:
            body = {"messages": HI, "stream": True}
            with client.stream("POST", live.url + CHAT, json=body) as response:
                pieces = response.iter_raw()
                assert next(pieces) == chunk("one ")
                write(f"{first.url} drain\n{second.url} 2.5\n")
                wait_for(lambda: states() == {first.url: "draining", second.url: "healthy"})
                assert live.router.policy.replicas[second.url].weight == 2.5
                second_act.may_end = True
                assert live.post(CHAT, body).content.endswith(b"data: [DONE]\n\n")
                write("this is no list\n")
                write(f"{second.url}\n")
                wait_for(lambda: live.router.policy.replicas[first.url].is_leaving)
                first_act.may_end = True
                assert b"".join(pieces) == chunk("two") + b"data: [DONE]\n\n"
            wait_for(lambda: list(states()) == [second.url])
            assert len(first.asked) == 1 and len(second.asked) == 1
            write(f"{first.url}\n{second.url} nonsense\n")
            wait_for(lambda: live.router.gate.num_open == 0)
            write(f"{first.url}\n")
            wait_for(lambda: states() == {first.url: "healthy"})


@pytest.mark.parametrize(
    "text,error",
    [
        ("http://a:1\nhttp://a:1/\n", "list:2: http://a:1 is there twice"),
        ("ftp://a:1\n", "list:1: a replica is http"),
        ("http://a:1/v1\n", "list:1: a replica is http"),
        ("http://me:pass@a:1\n", "list:1"),
        ("http://a:1 0\n", "list:1: a weight"),
        ("http://a:1 nan\n", "list:1: a weight"),
        ("\nhttp://a:1 1 2 drain\n", "list:2: expected URL"),
    ],
)
def test_lists_name_the_line_at_fault(text: str, error: str) -> None:
    """In one line."""
    with pytest.raises(ConfigError, match=error):
        read_lines(text, "list")


def test_lists_are_read() -> None:
    """Remarks and empty lines apart."""
    text = "# fleet\n\nhttp://a:1/\nhttps://b.example 0.5 # small\nhttp://[::1]:2 drain\n"
    listed = [Listed("http://a:1"), Listed("https://b.example", 0.5), Listed("http://[::1]:2", 1.0, True)]
    assert read_lines(text, "list") == listed


def test_draining_lets_calls_end_and_takes_no_more() -> None:
    """As a server does at SIGTERM."""
    act = Gated()
    body = {"messages": HI, "stream": True}
    with (
        scripted(act) as [replica],
        live_router([replica.url]) as live,
        httpx.stream("POST", live.url + CHAT, json=body, timeout=60) as response,
    ):
        pieces = response.iter_raw()
        next(pieces)
        live.server.drain()
        assert live.get("/health").json() == {"status": "draining"}
        refused = live.post(CHAT, {"messages": HI})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        act.may_end = True
        assert b"".join(pieces).endswith(b"data: [DONE]\n\n")


def test_what_still_runs_at_the_end_gets_a_last_event() -> None:
    """A second signal, or a drain that takes too long."""
    with scripted(Gated()) as [replica], live_router([replica.url]) as live:
        body = {"messages": HI, "stream": True}
        with httpx.stream("POST", live.url + CHAT, json=body, timeout=60) as response:
            pieces = response.iter_raw()
            next(pieces)
            live.server.should_exit = True
            data, done = parse_events(b"".join(pieces).decode())
            assert data["error"]["code"] == "draining" and done == "[DONE]"


def test_calls_wait_for_their_class_and_leave_the_queue_with_their_client() -> None:
    """One call fills the budget; the next waits, one leaves while it waits, one more is too many; then all go on."""
    act = Gated()
    fleet = FleetConfig((CostClass("short", 2000, 1), CostClass("huge", 0, 10**6, queue=1)))
    with (
        scripted(act) as [replica],
        live_router([replica.url], fleet=fleet) as live,
        httpx.Client(timeout=60) as client,
    ):
        body = {"messages": HI, "stream": True}
        with client.stream("POST", live.url + CHAT, json=body) as running:
            pieces = running.iter_raw()
            next(pieces)
            live.abandon(body, lambda: live.metric('waiting{class="short"}') == 1)
            wait_for(lambda: live.metric('waiting{class="short"}') == 0 and live.metric("calls_open") == 1)
            assert len(replica.asked) == 1
            huge = {"messages": [{"role": "user", "content": "x" * 40_000}], "stream": True}
            act.may_end = True
            assert live.post(CHAT, huge).status_code == 200  # another class does not wait
            b"".join(pieces)
        live.wait_until_idle()
        assert live.metric("waited_seconds_total") > 0


def test_bodies_under_way_are_bounded_together() -> None:
    """They are kept for another replica: a call whose body may have no room is refused before it is read."""
    act = Gated()
    proxy = ProxyConfig(check_every_seconds=0.05, body_bytes=3000)
    with scripted(act) as [replica], live_router([replica.url], proxy=proxy, max_body_bytes=2000) as live:
        body = {"messages": [{"role": "user", "content": "x" * 1500}], "stream": True}
        with httpx.stream("POST", live.url + CHAT, json=body, timeout=60) as response:
            pieces = response.iter_raw()
            next(pieces)
            refused = live.post(CHAT, body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            act.may_end = True
            b"".join(pieces)
        live.wait_until_idle()
        assert live.router.num_held == 0 and live.post(CHAT, body).status_code == 200


def test_models_are_merged() -> None:
    """Each once, with the smallest context."""
    one = [{"id": "a", "max_model_len": 10}, {"id": "b", "max_model_len": 7}]
    two = [{"id": "c"}, {"id": "a", "max_model_len": 5}]
    assert merged_models([one, two]) == [{"id": "a", "max_model_len": 5}, {"id": "b", "max_model_len": 7}, {"id": "c"}]
    assert json.loads(json.dumps(merged_models([]))) == []
