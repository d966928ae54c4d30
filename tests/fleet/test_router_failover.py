"""A replica that fails: before the first token another one answers; behind it the stream ends with a clean error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from live_fleet import (
    CHAT,
    QUICK,
    STREAM,
    Act,
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
from live_server import parse_events

from openk3.config.fleet import FleetConfig, ProxyConfig
from openk3.fleet.affinity import read_features

PULSE = b": still here\n\n"
DONE = b"data: [DONE]\n\n"
GOOD = (chunk(), chunk("good"), DONE)
PATIENT = FleetConfig(fail_after=100, break_after=100)  # nothing here is to be left out after a few faults
RESPONSE = {"id": "resp_1", "object": "response", "status": "in_progress", "output": [], "model": "m"}
CREATED = b'event: response.created\ndata: {"type":"response.created","response":%s,"sequence_number":0}\n\n'
DELTA = b'event: response.x.delta\ndata: {"type":"response.x.delta","delta":"x","sequence_number":7}\n\n'
BEGIN = b'event: message_start\ndata: {"type":"message_start","message":{}}\n\n'
BLOCK = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"x"}}\n\n'


def streams(*events: bytes, end: bool = True) -> Act:
    """Sends these events; without the end, the connection breaks behind them."""

    async def act(_: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        for data in events:
            writer.write(piece(data))
            await writer.drain()
        if end:
            writer.write(piece(b""))

    return act


def says(data: bytes) -> Act:
    """Sends these bytes, and closes."""

    async def act(_: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return act


async def hangs(own: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
    """Takes the request and says nothing."""
    await own.until_gone(asked)


def error(status: int, code: str, **headers: str) -> bytes:
    """An error as a replica sends it."""
    body = {"error": {"message": f"it is {code}", "type": "t", "param": None, "code": code}}
    return answer(json.dumps(body).encode(), status, **headers)


def aimed(live: LiveRouter, url: str, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    """A body whose session has that replica as its primary."""
    for number in range(10_000):
        turns = [{"role": "user", "content": f"question {number}"}]
        body = {"model": "m", "messages": turns, "input": turns, "prompt": f"question {number}", **fields}
        key = read_features(path, body, "", live.router.policy.config).key
        if next(live.router.policy.placement.ring.owners(key)) == url:
            return body
    raise AssertionError("none found")


def ask(
    bad: Act, good: Act, path: str = CHAT, *, fleet: FleetConfig = PATIENT, proxy: ProxyConfig = QUICK, **fields: Any
):
    """(answer, what the bad one was asked, what the good one was asked)."""
    with scripted(bad, good) as (first, second), live_router([first.url, second.url], fleet=fleet, proxy=proxy) as live:
        response = live.post(path, aimed(live, first.url, path, **fields))
        live.wait_until_idle()
        return response, first.asked, second.asked


@pytest.mark.parametrize(
    "bad",
    [
        says(b""),
        says(b"HTTP/1.1 200 OK\r\ncontent-"),
        says(b"this is no HTTP\r\n\r\n"),
        says(STREAM),
        streams(chunk(), end=False),
        streams(chunk(), chunk("never seen")[:-1], end=False),
        streams(
            chunk(), b'data: {"error": {"message": "m", "type": "server_error", "code": "engine_failed"}}\n\n', DONE
        ),
        says(error(503, "draining")),
        says(error(503, "overloaded")),
        says(error(500, "engine_failed")),
        says(answer(b"<html>", 502, "text/html")),
    ],
)
def test_before_the_first_token_another_replica_answers(bad: Act) -> None:
    """The client gets the other one's bytes and nothing of the first one's."""
    response, first, second = ask(bad, streams(*GOOD), stream=True)
    assert (response.status_code, response.content) == (200, b"".join(GOOD))
    assert len(first) == len(second) == 1 and first[0].body == second[0].body


def test_pulses_take_nothing_back() -> None:
    """Comments were sent before the replica died: the same stream goes on with another one's events."""
    response, _, _ = ask(streams(PULSE, chunk(), PULSE, end=False), streams(*GOOD), stream=True)
    assert response.content == PULSE * 2 + b"".join(GOOD)
    response, _, _ = ask(streams(PULSE, end=False), says(error(400, "no_vision")), stream=True)
    assert response.status_code == 200
    wrong, done = parse_events(response.text)
    assert (wrong["error"]["code"], wrong["error"]["message"], done) == ("no_vision", "it is no_vision", "[DONE]")


@pytest.mark.parametrize("bad", [says(b""), says(answer(b"{" * 100)[:-50]), says(error(500, "engine_failed"))])
def test_a_whole_answer_is_sent_when_it_is_whole(bad: Act) -> None:
    """One that is cut short is not begun."""
    response, first, second = ask(bad, says(answer(b'{"fine": 1}', x_request_id="r")))
    assert (response.status_code, response.content) == (200, b'{"fine": 1}')
    assert response.headers["x-request-id"] == "r" and len(first) == len(second) == 1


@pytest.mark.parametrize(
    "status,code", [(400, "context_length_exceeded"), (401, "invalid_api_key"), (500, "request_failed")]
)
def test_what_is_wrong_with_the_call_is_said_once(status: int, code: str) -> None:
    """Another replica would say the same, so none is asked."""
    bad = error(status, code)
    response, first, second = ask(says(bad), streams(*GOOD), stream=True)
    assert response.status_code == status and bad.endswith(response.content)
    assert len(first) == 1 and second == []


def test_a_limit_of_a_key_is_passed_on() -> None:
    """Asking the next replica would evade it; the time to wait is the replica's."""
    response, first, second = ask(
        says(error(429, "rate_limit_exceeded", retry_after="17")), streams(*GOOD), stream=True
    )
    assert response.status_code == 429 and response.headers["retry-after"] == "17"
    assert len(first) == 1 and second == []


def test_if_all_refuse_the_last_refusal_is_passed_on() -> None:
    """With its own words."""
    bad = error(503, "overloaded", retry_after="3")
    response, first, second = ask(says(bad), says(bad), stream=True)
    assert response.status_code == 503 and response.headers["retry-after"] == "3" and bad.endswith(response.content)
    assert len(first) == len(second) == 1


@pytest.mark.parametrize("bad", [says(b""), says(error(500, "engine_failed"))])
def test_a_call_that_breaks_replicas_is_not_sent_to_all(bad: Act) -> None:
    """Two are enough; its client is told to ask again."""
    with scripted(bad, bad, bad) as replicas, live_router([one.url for one in replicas], fleet=PATIENT) as live:
        response = live.post(CHAT, aimed(live, replicas[0].url))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "replica_lost")
        assert "retry-after" in response.headers and sum(len(one.asked) for one in replicas) == 2
        assert live.metric('retries_total{reason="broken"}') + live.metric('retries_total{reason="refused"}') == 1


@pytest.mark.parametrize(
    "path,events",
    [
        (CHAT, (chunk(), chunk("one"), chunk("half an event")[:-9])),
        ("/v1/completions", (b'data: {"choices":[{"text":"one"}]}\n\n',)),
        ("/v1/messages", (BEGIN, BLOCK, BLOCK[:-1])),
        ("/v1/responses", (CREATED % json.dumps(RESPONSE).encode(), DELTA, DELTA[:30])),
    ],
)
def test_behind_the_first_token_a_stream_ends_with_its_error(path: str, events: tuple[bytes, ...]) -> None:
    """In the interface's own form, after whole events only, and no other replica is asked."""
    response, _, second = ask(streams(*events, end=False), streams(*GOOD), path, stream=True)
    assert response.status_code == 200 and second == []
    whole = b"".join(one for one in events if one.endswith(b"\n\n"))
    assert response.content.startswith(whole)
    last = response.content[len(whole) :].decode()
    if path == "/v1/messages":
        assert last.startswith("event: error\n")
        [data] = parse_events(last)
        assert data["type"] == "error" and data["error"]["type"] == "overloaded_error"
    elif path == "/v1/responses":
        assert last.startswith("event: response.failed\n")
        [data] = parse_events(last)
        assert data["sequence_number"] == 8 and data["response"]["status"] == "failed"
        assert data["response"]["id"] == "resp_1" and data["response"]["error"]["code"] == "replica_lost"
    else:
        data, done = parse_events(last)
        assert data["error"]["code"] == "replica_lost" and done == "[DONE]"


def test_a_long_answer_that_was_begun_is_cut() -> None:
    """Its client sees that bytes are missing."""
    bad = says(answer(b"[" + b"1," * 400_000)[:-1000])
    with pytest.raises(httpx.RemoteProtocolError):
        ask(bad, says(answer(b"[]")), proxy=ProxyConfig(check_every_seconds=0.05, hold_bytes=1000))


def test_no_server_behind_an_address() -> None:
    """A refused connection costs no more than the attempt, and is no death of a replica."""
    with scripted(streams(*GOOD)) as [good]:
        gone = ["http://127.0.0.1:9", "http://127.0.0.1:10"]
        with live_router([*gone, good.url]) as live:
            for name in gone:  # found well once, gone since
                live.router.policy.replicas[name].is_up = True
            for name in gone:
                assert live.post(CHAT, aimed(live, name, stream=True)).content == b"".join(GOOD)
            live.wait_until_idle()


def test_a_silent_replica_is_left_by_a_time_limit() -> None:
    """It takes the request and its health checks are well, but no byte comes."""
    proxy = ProxyConfig(check_every_seconds=0.05, silence_seconds=2)
    response, first, second = ask(hangs, streams(*GOOD), stream=True, proxy=proxy)
    assert response.content == b"".join(GOOD) and len(first) == len(second) == 1


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_hung_replica_is_left_when_its_checks_fail(is_stream: bool) -> None:
    """Also where an answer may take its time: calls that have got nothing are sent elsewhere at once."""
    proxy = ProxyConfig(check_every_seconds=0.05, check_seconds=1)
    good = streams(*GOOD) if is_stream else says(answer(b'{"fine": 1}'))
    with scripted(hangs, good) as (bad, other), live_router([bad.url, other.url], proxy=proxy) as live:
        body = aimed(live, bad.url, stream=is_stream)
        with httpx.Client(timeout=60) as client:
            bad.hangs = True
            response = client.post(live.url + CHAT, json=body)
        assert response.status_code == 200 and response.content in (b"".join(GOOD), b'{"fine": 1}')
        assert live.router.policy.replicas[bad.url].state == "failed" and bad.num_gone >= 1
        bad.hangs = False
        wait_for(lambda: live.router.policy.replicas[bad.url].state == "healthy")
        live.wait_until_idle()


def test_a_client_that_leaves_is_gone_from_the_replica_at_once() -> None:
    """While nothing has come, and in the middle of a stream; neither is the replica's fault."""

    async def half(own: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + piece(chunk("one")))
        await own.until_gone(asked)

    for act in (hangs, half):
        with scripted(act) as [replica], live_router([replica.url]) as live:
            with httpx.Client(timeout=60) as client:
                request = client.build_request("POST", live.url + CHAT, json={"messages": [], "stream": True})
                if act is half:
                    response = client.send(request, stream=True)
                    assert next(response.iter_raw()) == chunk("one")
                    response.close()
                else:
                    live.abandon({"messages": []}, lambda one=replica: one.asked)
            wait_for(lambda one=replica: one.num_gone == 1)
            live.wait_until_idle()
            wait_for(lambda one=live: one.metric("left_total") == 1)
            assert live.router.policy.replicas[replica.url].num_broken == 0


def test_a_slow_client_holds_its_replica_back() -> None:
    """What the client does not take is not read: the replica's sending stops, and the router holds a bounded part."""
    sent = 0

    async def endless(own: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(STREAM)
        while not writer.is_closing():
            writer.write(piece(chunk("x" * 60_000)))
            sent += 60_000
            await writer.drain()

    with scripted(endless) as [replica], live_router([replica.url]) as live:
        with httpx.stream("POST", live.url + CHAT, json={"messages": [], "stream": True}, timeout=60) as response:
            pieces = response.iter_raw()
            next(pieces)
            before = -1
            while before != sent < 64 * 2**20:  # until the buffers of three sockets are full
                before = sent
                wait_for(lambda: live.metric("calls_open") == 1)
                for _ in range(8):
                    live.metric("calls_open")
            assert sent < 64 * 2**20
        live.wait_until_idle()


def test_a_client_that_takes_nothing_is_cut_off() -> None:
    """After the time that it has for each write."""

    async def endless(own: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        while not writer.is_closing():
            writer.write(piece(chunk("x" * 60_000)))
            await writer.drain()

    body = {"messages": [], "stream": True}
    with (
        scripted(endless) as [replica],
        live_router([replica.url], write_seconds=0.3) as live,
        httpx.stream("POST", live.url + CHAT, json=body, timeout=60) as response,
    ):
        pieces = response.iter_raw()
        next(pieces)
        live.wait_until_idle()
        assert live.metric("left_total") == 1
