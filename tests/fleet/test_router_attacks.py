"""What clients and replicas do to a router that they should not: it answers, keeps calls apart, and forgets them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_fleet import (
    CHAT,
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

from openk3.config.fleet import CostClass, FleetConfig, ProxyConfig
from openk3.config.model import ConfigError
from openk3.fleet import affinity, app
from openk3.fleet.admission import IDLE_TENANTS, FairQueue
from openk3.fleet.answer import end_to_end, faults, is_own_lack
from openk3.fleet.checks import Checks
from openk3.fleet.policy import Policy
from openk3.fleet.replica_list import FixedList, Listed, ListFile, checked_url
from openk3.fleet.ticket import Features, Ticket
from openk3.serve.errors import ApiError
from openk3.serve.sse import event

PATIENT = FleetConfig(fail_after=100, break_after=100)


def says(data: bytes) -> Act:
    """Sends these bytes, and closes."""

    async def act(_: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return act


def streams(*events: bytes, end: bool = True) -> Act:
    """Sends these events; without the end, the connection breaks behind them."""

    async def act(_: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + b"".join(piece(data) for data in events) + (piece(b"") if end else b""))

    return act


async def told(_: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
    """Says what it was asked."""
    writer.write(answer(json.dumps({"path": asked.path, "headers": asked.headers}).encode()))


def send(live: LiveRouter, line: str, *headers: str, body: bytes = b"{}") -> tuple[int, Any]:
    """(status, JSON) of a request written byte for byte; the connection is read to its end."""
    rows = [line, "host: localhost", "content-type: application/json", "connection: close", *headers]
    with socket.create_connection(("127.0.0.1", live.server.port), timeout=60) as connection:
        connection.sendall("\r\n".join((*rows, f"content-length: {len(body)}", "", "")).encode("latin-1") + body)
        got = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, text = got.partition(b"\r\n\r\n")
    assert b"\r\n\r\nHTTP/1.1" not in text, "one answer to one request"
    return int(head.split(b" ")[1]), json.loads(text)


def test_a_target_passes_as_it_came_or_not_at_all() -> None:
    """Odd and long ones are no fault of the server; none leads to another route of the replica."""
    with scripted(told) as [replica], live_router([replica.url]) as live:
        for target in (
            f"{CHAT}?a=[]|{{}}%zz",
            f"{CHAT}?{'a' * 40_000}",
            "/v1/models/a%2Fb%00|",
            "/v1/models/" + "a" * 40_000,
        ):
            method = "POST" if target.startswith(CHAT) else "GET"
            status, got = send(live, f"{method} {target} HTTP/1.1")
            assert (status, got["path"]) == (200, target)
        for path in ("/v1/models/../../metrics", "/v1/models/%2e%2E/x", "/v1/models/a/..", "/v1/models/./x"):
            assert send(live, f"GET {path} HTTP/1.1")[0] == 404
        assert send(live, f"POST http://evil.example{CHAT} HTTP/1.1")[0] == 404
        for target in ("/?" + "a" * 50_000, "/v1/models/" + "a" * 50_000):
            assert send(live, f"GET {target} HTTP/1.1")[0] == 431
        assert send(live, "GET / HTTP/1.1", *(f"x-{n}: {'a' * 8000}" for n in range(7)))[0] == 431
        assert len(replica.asked) == 4
        live.wait_until_idle()


def test_headers_of_one_connection_stay_there() -> None:
    """Those that `Connection` names too, in both directions."""
    bad = answer(b"{}", x_named="1", x_kept="1").replace(b"connection: close", b"connection: close, X-Named")
    with scripted(told, says(bad)) as (first, second):
        with live_router([first.url]) as live:
            headers = ("connection: X-Mine, upgrade,http2-settings", "x-mine: 1", "upgrade: h2c", "http2-settings: AA")
            status, got = send(live, f"POST {CHAT} HTTP/1.1", *headers, "x-kept: 1")
            assert status == 200 and got["headers"]["x-kept"] == "1"
            assert not {"x-mine", "upgrade", "http2-settings"} & set(got["headers"])
        with live_router([second.url]) as live:
            response = live.post(CHAT, {})
            assert response.headers["x-kept"] == "1" and "x-named" not in response.headers
    assert end_to_end([(b"connection", b""), (b"a", b"1")], {b"b"}) == [(b"connection", b""), (b"a", b"1")]


def test_what_is_read_in_two_ways_is_refused() -> None:
    """A body with two lengths, an origin that is no address: 400 and 403, by a server too (the same doorman)."""
    with scripted(told) as [replica], live_router([replica.url]) as live:
        smuggled = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
        status, got = send(live, f"POST {CHAT} HTTP/1.1", "transfer-encoding: chunked", body=smuggled)
        assert status == 400 and got["error"]["param"] == "headers"
        for origin in ("http://[", "http://[::1", "null", ""):
            status, got = send(live, f"POST {CHAT} HTTP/1.1", f"origin: {origin}")
            assert (status, got["error"]["code"]) == (403, "wrong_origin")
        assert replica.asked == []


@contextmanager
def kept_connections(extra: bytes) -> Generator[tuple[str, list[int]]]:
    """A replica that keeps connections, counts its answers and sends `extra` behind each; calls by connection."""
    calls: list[int] = []

    def serve(connection: socket.socket, number: int) -> None:
        with connection, connection.makefile("rb") as lines:
            while first := lines.readline():
                size = 0
                while (line := lines.readline().strip().lower()) != b"":
                    size = int(line[15:]) if line.startswith(b"content-length:") else size
                lines.read(size)
                is_check = b"/health" in first
                if not is_check:
                    calls.append(number)
                body = b'{"call": %d}' % len(calls)
                head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
                connection.sendall(head + body + (b"" if is_check else extra))

    def accept() -> None:
        for number in range(1000):
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection, number), daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", calls
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_no_call_gets_what_was_sent_behind_anothers_answer() -> None:
    """A replica that miscounts its body, or answers twice; connections of those that do not are used again."""
    second = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    for extra, is_reused in ((b"", True), (second, False), (b"\n", False)):
        with kept_connections(extra) as (url, calls), live_router([url], fleet=PATIENT) as live:
            got = [live.post(CHAT, {}).json() for _ in range(4)]
            assert got == [{"call": number} for number in range(1, 5)]
            assert len(set(calls)) == (1 if is_reused else 4)
            live.wait_until_idle()


@pytest.mark.parametrize("status", [101, 199, 600, 999])
def test_a_status_that_is_none_is_the_replicas_fault(status: int) -> None:
    """Another one answers."""
    with (
        scripted(says(answer(b"x", status)), says(answer(b"{}"))) as replicas,
        live_router([one.url for one in replicas], fleet=PATIENT) as live,
    ):
        for number in range(8):
            response = live.post(CHAT, {"messages": [{"role": "user", "content": str(number)}]})
            assert (response.status_code, response.content) == (200, b"{}")
        assert replicas[0].asked and live.metric("left_total") == 0
        live.wait_until_idle()


def test_a_stream_of_a_stated_length_still_ends_with_its_error() -> None:
    """The length would forbid the last event."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 500\r\n\r\n"
    with scripted(says(head + chunk("one"))) as [replica], live_router([replica.url]) as live:
        response = live.post(CHAT, {"messages": [], "stream": True})
        assert "content-length" not in response.headers
        _, error, done = parse_events(response.text)
        assert (error["error"]["code"], done) == ("replica_lost", "[DONE]")
        live.wait_until_idle()


def test_half_a_surrogate_pair_in_a_replicas_words_breaks_no_last_event() -> None:
    """JSON can hold what UTF-8 cannot."""
    created = {"type": "response.created", "response": {"id": "r", "instructions": "\ud800"}, "sequence_number": 0}
    said = {"type": "response.x", "sequence_number": 1}
    cut = streams(*(b"data: " + json.dumps(one).encode() + b"\n\n" for one in (created, said)), end=False)
    with scripted(cut) as [replica], live_router([replica.url]) as live:
        last = parse_events(live.post("/v1/responses", {"input": "x", "stream": True}).text)[-1]
        assert last["response"]["instructions"] == "\ud800" and last["sequence_number"] == 2
    error = ApiError(400, "m \ud800", code="c\ud800")
    assert (error.message, error.code) == ("m \\ud800", "c\\ud800")
    assert json.loads(event({"a": "\\\ud800"})[6:]) == {"a": "\\\ud800"}


def test_what_is_held_back_of_a_stream_is_bounded() -> None:
    """A replica that only promises an answer, without end."""
    ping = b'data: {"type":"ping","x":"%s"}\n\n' % (b"y" * 1000)

    async def endless(own: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        while not writer.is_closing():
            writer.write(piece(ping))
            await writer.drain()

    proxy = ProxyConfig(check_every_seconds=0.05, event_bytes=5000)
    with scripted(endless) as [replica], live_router([replica.url], proxy=proxy) as live:
        body = {"messages": [], "stream": True}
        with httpx.stream("POST", live.url + "/v1/messages", json=body, timeout=60) as response:
            assert next(response.iter_raw()).startswith(ping)
        live.wait_until_idle()


def test_callers_that_come_once_are_forgotten() -> None:
    """Where the router has no keys, any header makes a tenant; those that wait or had most stay."""
    queue = FairQueue()
    waiting = Ticket(Features(b"", "waits", 1, 0), 0.0, 0)
    queue.push(waiting)
    for number in range(1, 3 * IDLE_TENANTS):
        ticket = Ticket(Features(b"", f"t{number}", 1, 0), 0.0, number)
        queue.push(ticket)
        queue.charge(ticket, number)
        queue.remove(ticket)
    assert len(queue._tenants) <= IDLE_TENANTS
    assert list(queue.in_turn()) == [waiting] and f"t{number}" in queue._tenants
    queue.remove(waiting)
    assert list(queue.in_turn()) == []
    policy = Policy(FleetConfig((CostClass("all", 0, 10**6),)))
    policy.add("a", is_up=True)
    for number in range(IDLE_TENANTS + 10):
        got = policy.choose(Features(b"", f"t{number}", 10, 0), 0.0)
        assert isinstance(got, Ticket) and got.replica == "a"
        policy.finished(got, 0.0)
    assert len(policy.waiting.queues[0]._tenants) <= IDLE_TENANTS and policy.budgets.used("a") == 0


def lack() -> httpx.ConnectError:
    """As httpx raises it: the cause is some errors down."""
    error = httpx.ConnectError("All connection attempts failed")
    error.__cause__ = OSError("All connection attempts failed")
    error.__cause__.__cause__ = OSError(errno.EMFILE, "Too many open files")
    return error


def test_a_router_without_files_blames_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a call nor a check that finds no file for its connection counts against a replica."""
    assert is_own_lack(lack()) and not is_own_lack(httpx.ConnectError("refused"))
    with pytest.raises(ApiError, match="full"), faults():
        raise lack()
    with scripted(told) as [replica], live_router([replica.url]) as live:

        def fails(*_: Any, **__: Any) -> Any:
            raise lack()

        monkeypatch.setattr(httpx.AsyncClient, "stream", fails)
        checks = Checks(live.router, FixedList([]))
        checks._client = httpx.AsyncClient()
        for _ in range(9):
            asyncio.run(checks._check(replica.url))
        assert live.router.policy.replicas[replica.url].state == "healthy"


def test_a_check_ends_whatever_a_replica_says_of_its_health() -> None:
    """Without end, compressed, no JSON, no object: bad checks, and the others go on."""
    words = (b"200 " + b"x" * 10**6, b"503 [1]", b"503 {", b'503 {"status": "draining"}', b"500 x", b"999 x", b"20 x")
    states = ("healthy", "new", "new", "draining", "new", "new", "new")
    with scripted(*[told] * len(words)) as replicas:
        for one, word in zip(replicas, words):
            one.health = word
        urls = [one.url for one in replicas]
        with live_router([*urls, "http://" + "a" * 70]) as live:
            known = live.router.policy.replicas
            assert tuple(known[url].state for url in urls) == states
            assert live.get("/health").json() == {"status": "ok"}


def test_a_list_that_is_being_written_takes_nobody_out(tmp_path: Path) -> None:
    """Emptied, gone, unreadable, a folder: what was there stays, and what comes next is read."""
    file = tmp_path / "fleet.txt"
    file.write_text("# nobody yet\n")
    listed = ListFile(file)
    assert listed.changed() == [] and listed.changed() is None

    def write(data: bytes) -> None:
        (tmp_path / "new").write_bytes(data)
        os.replace(tmp_path / "new", file)

    write(b"http://a:1\n")
    assert listed.changed() == [Listed("http://a:1")]
    for data in (b"", b"# nothing\n", b"\xff\xfe", b"http://a:1 http://b:1\n", b"http://\n", b"\x00"):
        write(data)
        assert listed.changed() is None and listed.changed() is None
    file.unlink()
    assert listed.changed() is None
    file.mkdir()
    assert listed.changed() is None
    file.rmdir()
    write(b"http://a:1 drain\n")
    assert listed.changed() == [Listed("http://a:1", is_held=True)] and listed.changed() is None
    write(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        ListFile(file)


def test_a_list_that_could_not_be_read_is_read_when_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few files for a moment: the change is not lost."""
    file = tmp_path / "fleet.txt"
    file.write_text("http://a:1\n")
    listed = ListFile(file)
    listed.changed()
    file.write_text("http://a:1\nhttp://b:1\n")

    def fails(*_: Any, **__: Any) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fails)
        assert listed.changed() is None
    found = listed.changed()
    assert found is not None and len(found) == 2


@pytest.mark.parametrize("url", ["http://a\x7f:1", "http://a:99999", "http://[::1", "http://a:0", "http://[x]:1"])
def test_addresses_that_no_client_would_take(url: str) -> None:
    """Are refused when they are read, not at their first check."""
    with pytest.raises(ConfigError):
        checked_url(url, "list:1")


def test_a_whole_answer_that_trickles_is_left_by_a_time_limit() -> None:
    """Each byte comes soon enough, but there is no end of them."""

    async def trickles(own: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.01)

    proxy = ProxyConfig(check_every_seconds=0.05, answer_seconds=1)
    with (
        scripted(trickles, trickles) as replicas,
        live_router([one.url for one in replicas], fleet=PATIENT, proxy=proxy) as live,
    ):
        response = live.post(CHAT, {})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "replica_lost")
        live.wait_until_idle()


def test_names_of_routes_are_not_the_clients_to_choose() -> None:
    """Neither by Host nor by how a path is written: /metrics would grow without end."""
    with scripted(told) as [replica], live_router([replica.url]) as live:
        for path in ("/%63hat.js", "/cha%74.js", "/chat.js"):
            assert send(live, f"GET {path} HTTP/1.1")[0] == 200
        assert send(live, "GET /v1/models/%61 HTTP/1.1")[0] == 200
        live.wait_until_idle()
        assert live.metric('calls_total{route="/chat.js",status="200"}') == 3
        assert live.metric('calls_total{route="/v1/models/",status="200"}') == 1
        assert "%" not in live.get("/metrics").text


def test_open_routes_have_a_bound_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no key, and take two connections each."""
    monkeypatch.setattr(app, "MOST_GETS", 0)

    async def hangs(own: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
        await own.until_gone(asked)

    with scripted(hangs) as [replica], live_router([replica.url], max_open=1) as live:
        with socket.create_connection(("127.0.0.1", live.server.port), timeout=60) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            wait_for(lambda: replica.asked)
            assert live.get("/").status_code == 503
        live.wait_until_idle()


def test_a_body_of_unknown_length_holds_what_it_has() -> None:
    """Not what it might have had, for as long as its answer takes."""
    may_end = threading.Event()

    async def waits(_: Scripted, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + piece(chunk("one")))
        while not may_end.is_set():
            await asyncio.sleep(0.01)
        writer.write(piece(b""))

    proxy = ProxyConfig(check_every_seconds=0.05, body_bytes=2500)
    with scripted(waits) as [replica], live_router([replica.url], proxy=proxy, max_body_bytes=2000) as live:
        json_type = {"content-type": "application/json"}
        with httpx.stream("POST", live.url + CHAT, content=iter([b"{}"]), headers=json_type, timeout=60) as response:
            pieces = response.iter_raw()  # the connection ends with its iterator
            first = next(pieces)
            assert (response.status_code, live.router.num_held) == (200, 2), first
            may_end.set()
            assert httpx.post(live.url + CHAT, content=iter([b"{}"]), headers=json_type, timeout=60).status_code == 200
        live.wait_until_idle()
        assert live.router.num_held == 0


def test_replicas_that_list_no_models_break_nothing() -> None:
    """No JSON, no list, rows that are none: what the others list is told; of none, that there is none."""
    words = (
        b"{",
        b"[]",
        b'{"data": 1}',
        b'{"data": [1, {"id": []}, {"id": "a", "max_model_len": "x"}]}',
        b"[" * 100_000,
    )
    acts = [says(answer(word)) for word in words]
    with scripted(*acts, says(answer(b"", 302, location="http://evil.example/"))) as replicas:
        with live_router([one.url for one in replicas]) as live:
            assert live.get("/v1/models").json()["data"] == [{"id": "a", "max_model_len": "x"}]
        with live_router([replicas[0].url, replicas[-1].url]) as live:
            response = live.get("/v1/models")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "no_replica")


def test_a_body_of_millions_of_values_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on as it is; the router would stand still while it makes objects of it."""
    monkeypatch.setattr(affinity, "MOST_VALUES", 100)
    assert affinity.read_json(b'{"a": [1, 2]}') == {"a": [1, 2]}
    body = b'{"messages": [' + b",".join([b"{}"] * 60) + b"]}"
    with pytest.raises(ValueError, match="values"):
        affinity.read_json(body)
    with scripted(told) as [replica], live_router([replica.url]) as live:
        json_type = {"content-type": "application/json"}
        assert httpx.post(live.url + CHAT, content=body, headers=json_type, timeout=60).status_code == 200
        assert replica.asked[0].body == body and live.metric("sessions") == 0
