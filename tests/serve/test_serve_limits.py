"""What a live server refuses and what it survives: keys, rates, sizes, slow and vanishing clients, draining."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from live_server import KEY, MODEL, TOKENIZER, Live, live_server, parse_events, turn
from waiting import wait_for

from openk3.serve.keys import Caller, Keys

ROUTE = "/v1/chat/completions"
OTHER = "sk-other-0123456789abcdef"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Live]:
    """With two keys, one of them limited, and small bodies."""
    keys = Keys([(KEY, Caller("ann")), (OTHER, Caller("bob", 2))])
    with live_server(keys, max_body_bytes=4096) as live:
        yield live
        live.wait_until_idle()


def bearer(key: str = KEY) -> dict[str, str]:
    """The header."""
    return {"authorization": f"Bearer {key}"}


def posted(body: bytes) -> bytes:
    """A whole request."""
    head = f"POST {ROUTE} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", f"content-length: {len(body)}"
    return "\r\n".join((*head, "", "")).encode() + body


def raw(live: Live, data: bytes, seconds: float = 60.0) -> bytes:
    """What the server answers to bytes on a connection."""
    with socket.create_connection(("127.0.0.1", live.server.port), timeout=seconds) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        return answer


def test_keys_guard_all_but_health(guarded: Live) -> None:
    """401 before a body is read; metrics and models too; a key in x-api-key counts."""
    assert guarded.post(ROUTE, BODY).status_code == 401
    assert guarded.post(ROUTE, BODY, headers=bearer("sk-wrong-0123456789")).json()["error"]["code"] == "invalid_api_key"
    assert guarded.post(ROUTE, BODY, headers=bearer()).status_code == 200
    assert guarded.post(ROUTE, BODY, headers={"x-api-key": KEY}).status_code == 200
    for path in ("/metrics", "/v1/models", f"/v1/models/{MODEL}"):
        assert httpx.get(guarded.url + path, timeout=60).status_code == 401
        assert httpx.get(guarded.url + path, headers=bearer(), timeout=60).status_code == 200
    assert httpx.get(f"{guarded.url}/health", timeout=60).json() == {"status": "ok"}


def test_rates_are_per_key(guarded: Live) -> None:
    """The third call in a minute is refused with the time to wait, for this key alone."""
    answers = [guarded.post(ROUTE, BODY, headers=bearer(OTHER)) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "1"
    assert (
        1 <= int(answers[2].headers["retry-after"]) <= 31 and answers[2].json()["error"]["type"] == "rate_limit_error"
    )
    assert guarded.post(ROUTE, BODY, headers=bearer()).status_code == 200
    assert (
        f'openk3_refused_total{{route="{ROUTE}",status="429"}} 1'
        in httpx.get(f"{guarded.url}/metrics", headers=bearer(), timeout=60).text
    )


def test_prefixes_are_shared_inside_one_key_only(guarded: Live) -> None:
    """Otherwise a client could tell from cached tokens, or the time, what others have asked."""
    body = {**BODY, "messages": [{"role": "user", "content": "a secret " * 12}]}

    def cached(key: str) -> int:
        answer = guarded.post(ROUTE, body, headers=bearer(key))
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    with live_server(Keys([(KEY, Caller("ann")), (OTHER, Caller("bob"))])) as live:
        guarded = live
        assert [cached(KEY), cached(OTHER)] == [0, 0] and cached(KEY) > 0 and cached(OTHER) > 0


def test_bodies_that_are_too_large(guarded: Live) -> None:
    """413 by the declared length and by what arrives; the server goes on."""
    large = json.dumps({**BODY, "user": "x" * 5000}).encode()
    for content in (large, (large[n : n + 100] for n in range(0, len(large), 100))):
        answer = httpx.post(
            guarded.url + ROUTE, content=content, headers={**bearer(), "content-type": "application/json"}, timeout=60
        )
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
    assert guarded.post(ROUTE, BODY, headers=bearer()).status_code == 200
    guarded.wait_until_idle()


def test_bodies_that_are_too_slow() -> None:
    """408 for what does not arrive."""
    head = f"POST {ROUTE} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    with live_server(body_seconds=0.2) as live:
        with socket.create_connection(("127.0.0.1", live.server.port), timeout=60) as connection:
            connection.sendall(f"{head}content-length: 100\r\n\r\n{{".encode())
            assert b" 408 " in connection.recv(65536)
        live.wait_until_idle()


def test_garbage_on_the_wire(guarded: Live) -> None:
    """What is no HTTP is answered by 400 or not at all, and harms nobody."""
    for data in (b"\0" * 100, b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"x" * 100_000):
        assert raw(guarded, data)[:15] in (b"", b"HTTP/1.1 400 Ba", b"HTTP/1.1 405 Me")
    assert guarded.post(ROUTE, BODY, headers=bearer()).status_code == 200


def test_pages_of_other_servers_are_refused_where_there_are_no_keys(live: Live, guarded: Live) -> None:
    """A browser on this machine must not be a way in: by Origin, by a name that resolves to us, by a form's type."""
    assert live.post(ROUTE, BODY, headers={"origin": "https://evil.example"}).json()["error"]["code"] == "wrong_origin"
    assert live.post(ROUTE, BODY, headers={"origin": "null"}).status_code == 403
    assert live.post(ROUTE, BODY, headers={"host": "evil.example"}).json()["error"]["code"] == "wrong_host"
    assert live.post(ROUTE, BODY, headers={"host": f"localhost:{live.server.port}"}).status_code == 200
    assert live.post(ROUTE, BODY, headers={"origin": live.url}).status_code == 200
    assert (
        httpx.post(
            live.url + ROUTE, content=json.dumps(BODY), headers={"content-type": "text/plain"}, timeout=60
        ).status_code
        == 415
    )
    assert guarded.post(ROUTE, BODY, headers={**bearer(), "host": "api.example"}).status_code == 200


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_away_is_cancelled(live: Live, is_stream: bool) -> None:
    """Within a few steps: its request ends and every page goes back."""
    live.slow_down(0.01)
    live.say("long", turn("x" * 2000))
    messages = [{"role": "user", "content": "long"}]
    body = json.dumps({**BODY, "messages": messages, "max_tokens": 1500, "stream": is_stream}).encode()
    connection = socket.create_connection(("127.0.0.1", live.server.port), timeout=60)
    connection.sendall(posted(body))
    wait_for(lambda: live.service.thread.num_live)
    connection.close()
    live.wait_until_idle()
    assert f'openk3_calls_total{{route="{ROUTE}",status="499"}}' in httpx.get(f"{live.url}/metrics", timeout=60).text


@pytest.mark.slow
def test_a_client_that_does_not_read_is_cut_off() -> None:
    """Its buffers fill, the write takes too long, and the request is given up; others are served meanwhile."""
    with live_server(write_seconds=0.3, unread_tokens=100) as live:
        live.say("flood", [TOKENIZER.encode("x")[0]] * 1900)
        rows = {"logprobs": True, "top_logprobs": 20, "thinking": {"type": "disabled"}}
        message = {"role": "user", "content": "flood"}
        body = {**BODY, **rows, "messages": [message], "max_tokens": 1900, "stream": True}
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.connect(("127.0.0.1", live.server.port))
            connection.sendall(posted(json.dumps(body).encode()))
            wait_for(lambda: live.service.thread.num_live)
            assert live.chat("hi").status_code == 200
            live.wait_until_idle(60)
            text = httpx.get(f"{live.url}/metrics", timeout=60).text
        (tokens,) = re.findall(r'openk3_tokens_total.kind="answer". (\d+)', text)
        assert f'openk3_calls_total{{route="{ROUTE}",status="499"}} 1' in text and int(tokens) < 1500


def test_a_full_server_says_so() -> None:
    """503 with a time to come back, at once."""
    with live_server(max_open=1) as live:
        live.say("long", turn("x" * 2000))
        body = {**BODY, "messages": [{"role": "user", "content": "long"}], "stream": True, "max_tokens": 300}
        with live.held(), httpx.stream("POST", live.url + ROUTE, json=body, timeout=60) as response:
            answer = live.chat("hi")
            assert response.status_code == 200 and answer.status_code == 503 and answer.headers["retry-after"]
            assert answer.json()["error"]["code"] == "overloaded"
        live.wait_until_idle()
        assert live.chat("hi").status_code == 200


def drained(live: Live, *, is_late: bool) -> list[Any]:
    """Events of a stream during which the server is told to stop, and, if `is_late`, its time to drain passes."""
    live.say("long", turn("x" * 2000))
    body = {**BODY, "messages": [{"role": "user", "content": "long"}], "stream": True, "max_tokens": 60}
    with ExitStack() as stack:
        with live.held():
            response = stack.enter_context(httpx.stream("POST", live.url + ROUTE, json=body, timeout=60))
            live.server.drain()
            assert httpx.get(f"{live.url}/health", timeout=60).json() == {"status": "draining"}
            refused = live.chat("hi")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            if is_late:
                live.server._drain_until = time.monotonic()
                wait_for(lambda: live.server.should_exit)
        return parse_events(response.read().decode())


def test_draining_lets_answers_end() -> None:
    """Health turns red, new calls are refused, the running one ends as it should, and then the server stops."""
    with live_server(drain_seconds=600) as live:
        events = drained(live, is_late=False)
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
        wait_for(lambda: live.server.should_exit)


def test_draining_has_an_end() -> None:
    """What does not end in time gets an error event and is cancelled."""
    with live_server(drain_seconds=600) as live:
        events = drained(live, is_late=True)
        assert events[-2]["error"]["code"] == "draining" and events[-1] == "[DONE]"


def test_many_clients_at_once(live: Live) -> None:
    """Streams of mixed length: none lost, none mixed up, and nothing held afterwards."""
    words = {f"w{n:02d}": turn(f"answer {n} " * (1 + n % 5)) for n in range(24)}
    for word, answer in words.items():
        live.say(word, answer)
    found: dict[str, str] = {}

    def ask(word: str) -> None:
        events = live.events(ROUTE, {**BODY, "messages": [{"role": "user", "content": word}], "max_tokens": 200})
        found[word] = "".join(e["choices"][0]["delta"].get("content") or "" for e in events[:-1])

    threads = [threading.Thread(target=ask, args=(word,)) for word in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {f"w{n:02d}": f"answer {n} " * (1 + n % 5) for n in range(24)}
