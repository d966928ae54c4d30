"""Images by data URL, allowed file and address: what comes in, what never does, and what the network never sees."""

from __future__ import annotations

import base64
import http.server
import io
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import MODEL, TOKENIZER, Live, live_server
from PIL import Image

from openk3.config.http import ServerConfig
from openk3.inputs.images import MediaConfig, preprocess_image
from openk3.serve import fetch as fetching
from openk3.serve.errors import ApiError
from openk3.serve.fetch import FetchError, fetch, is_public, public_address
from openk3.serve.image_sources import ImageSources


def png(color: str = "red", size: tuple[int, int] = (56, 28)) -> bytes:
    """A picture."""
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, "PNG")
    return out.getvalue()


def data_url(data: bytes) -> str:
    """As clients send it."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def sources(**config: Any) -> ImageSources:
    """With a limit of 100 tokens."""
    return ImageSources(ServerConfig("k3", **config), MediaConfig(), 100)


def part(url: str) -> dict[str, Any]:
    """A message's part."""
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def test_every_way_gives_one_tensor(tmp_path: Path) -> None:
    """Base64, percent-encoded, a file by its URL."""
    (tmp_path / "a b.png").write_bytes(png())
    want = preprocess_image(png(), MediaConfig())
    allowed = sources(image_folders=(tmp_path,))
    plain = "data:image/png," + "".join(f"%{byte:02x}" for byte in png())
    for url in (data_url(png()), plain, f"file://{tmp_path}/a%20b.png", f"file://localhost{tmp_path}/a b.png"):
        got = allowed.read(url, "url")
        assert (got.pixels == want.pixels).all() and got.grid_thw == want.grid_thw


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("data:image/png;base64", 400),
        ("data:image/png;base64,@@@", 400),
        ("data:image/png;base64,aGVsbG8=", 400),
        ("picture.png", 400),
        ("ftp://example.com/x.png", 400),
        ("https://example.com/x.png", 403),
        ("HTTP://example.com/x.png", 403),
        (data_url(b"x" * 5000), 413),
        (data_url(png(size=(2000, 2000))), 400),
    ],
)
def test_what_is_refused(url: str, status: int) -> None:
    """With the field's name; nothing is fetched unless that is enabled; pixels count before they are decoded."""
    small = ImageSources(
        ServerConfig("k3", max_image_bytes=20_000 if len(url) > 8000 else 4000), MediaConfig(max_pixels=10**6), 100
    )
    with pytest.raises(ApiError) as error:
        small.read(url, "messages[0].content[0].image_url.url")
    assert error.value.status == status and error.value.message.startswith("messages[0].content[0].image_url.url: ")


def test_files_outside_of_the_folders_are_as_if_they_did_not_exist(tmp_path: Path) -> None:
    """By name, by dots, by links, by another host, as a pipe or a folder; the answer is always the same."""
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret.png").write_bytes(png())
    (inside / "link.png").symlink_to(outside / "secret.png")
    (inside / "door").symlink_to(outside)
    (inside / "own.png").write_bytes(png())
    (inside / "same.png").symlink_to(inside / "own.png")
    os.mkfifo(inside / "pipe.png")
    allowed = sources(image_folders=(inside,))
    messages = set()
    for name in (
        f"{outside}/secret.png",
        f"{inside}/../out/secret.png",
        f"{inside}/%2e%2e/out/secret.png",
        f"{inside}/link.png",
        f"{inside}/door/secret.png",
        f"{inside}/none.png",
        f"{inside}/pipe.png",
        f"{inside}",
        f"{inside}x/own.png",
        f"{inside}/own.png%00.txt",
        "/etc/passwd",
    ):
        with pytest.raises(ApiError) as error:
            allowed.read(f"file://{name}", "url")
        messages.add((error.value.status, error.value.message))
    with pytest.raises(ApiError):
        allowed.read(f"file://evil.example{inside}/own.png", "url")
    assert len(messages) == 1 and messages.pop()[0] == 403
    assert allowed.read(f"file://{inside}/same.png", "url").num_tokens == 2


PRIVATE = [
    *(
        "127.0.0.1",
        "127.9.9.9",
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "169.254.169.254",
        "0.0.0.0",
    ),
    *("100.64.0.1", "224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1", "203.0.113.9", "::1", "::"),
    *("fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1"),
    *("::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2001:0:0:0:0:0:f5ff:fffe", "x"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    """Loopback, private, link-local (a cloud's metadata), shared, reserved, and each wrapped in IPv6."""
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"]
)
def test_public_addresses(address: str) -> None:
    """And a public one wrapped."""
    assert is_public(address)


class Resolver:
    """Stands for the network's resolver: names to addresses, each look-up counted."""

    def __init__(self, names: dict[str, list[list[str]]]) -> None:
        self.names, self.asked = names, list[str]()

    def __call__(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked.append(host)
        answers = self.names.get(host, [[host]])
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An HTTP server that stands for the internet at 8.8.8.8, and a count of connections to anything else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        answers: dict[str, tuple[int, dict[str, str], bytes]] = {}
        hosts: list[str] = []

        def do_GET(self) -> None:
            Handler.hosts.append(self.headers["host"])
            status, headers, body = self.answers[self.path]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    connect = socket.socket.connect
    others: list[Any] = []

    def connected(self: socket.socket, address: Any) -> None:
        if address[0] != "8.8.8.8":
            others.append(address)
            raise OSError("no such network")
        connect(self, server.server_address)

    Handler.answers, Handler.hosts = {}, []
    monkeypatch.setattr(socket.socket, "connect", connected)
    monkeypatch.setattr(Handler, "others", others, raising=False)
    yield Handler
    monkeypatch.undo()
    server.shutdown()
    server.server_close()


def test_a_picture_is_fetched_under_its_name(outside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One look-up; the connection goes to the address that was checked; at most so many bytes are read."""
    resolver = Resolver({"pictures.example": [["8.8.8.8"], ["127.0.0.1"]]})
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    outside.answers["/a.png?x=1"] = (200, {}, png())
    assert fetch("http://pictures.example/a.png?x=1", 10_000) == png()
    assert resolver.asked == ["pictures.example"] and outside.hosts == ["pictures.example"] and outside.others == []
    outside.answers["/big"] = (200, {}, b"x" * 200_000)
    resolver.names["pictures.example"] = [["8.8.8.8"]]
    assert len(fetch("http://pictures.example/big", 1000)) == 1001


def test_a_name_that_resolves_to_the_inside_is_not_fetched(outside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only one of its addresses does, if it does so the second time, and if a redirect leads there."""
    names = {"in.example": [["10.0.0.7"]], "both.example": [["8.8.8.8", "127.0.0.1"]], "out.example": [["8.8.8.8"]]}
    rebound = {"turns.example": [["8.8.8.8"], ["169.254.169.254"]]}
    monkeypatch.setattr(socket, "getaddrinfo", Resolver({**names, **rebound}))
    outside.answers["/in"] = (302, {"location": "http://in.example/secret"}, b"")
    outside.answers["/meta"] = (301, {"location": "http://169.254.169.254/latest"}, b"")
    outside.answers["/again"] = (307, {"location": "http://turns.example/x"}, b"")
    outside.answers["/file"] = (302, {"location": "file:///etc/passwd"}, b"")
    outside.answers["/port"] = (302, {"location": "http://out.example:22/"}, b"")
    outside.answers["/loop"] = (302, {"location": "/loop"}, b"")
    outside.answers["/gone"] = (404, {}, b"")
    for url in (
        "http://in.example/",
        "http://both.example/",
        "http://127.0.0.1/",
        "http://[::1]/",
        "http://2130706433/",
    ):
        with pytest.raises(FetchError):
            fetch(url, 1000)
    for path in ("/in", "/meta", "/file", "/port", "/loop", "/gone"):
        with pytest.raises(FetchError):
            fetch(f"http://out.example{path}", 1000)
    with pytest.raises(FetchError):
        fetch("http://turns.example/again", 1000)
    for url in (
        "http://user@out.example/",
        "http://out.example:8080/",
        "http:///x",
        "http://out.example:99999/",
        "gopher://x/",
    ):
        with pytest.raises(FetchError):
            fetch(url, 1000)
    assert outside.others == []


def test_a_refusal_tells_nothing_of_the_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that does not exist and one that is private are answered alike."""
    messages = set()
    for address in ("10.0.0.1", "not a name", "127.0.0.1"):
        with pytest.raises(FetchError) as error:
            public_address(address, 80)
        messages.add(str(error.value))
    assert len(messages) == 1


def test_a_fetch_has_an_end(outside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All redirects and reads together have so much time."""
    monkeypatch.setattr(socket, "getaddrinfo", Resolver({"out.example": [["8.8.8.8"]]}))
    monkeypatch.setattr(fetching, "SECONDS", -1.0)
    with pytest.raises(FetchError, match="not fetched within"):
        fetch("http://out.example/", 1000)


def test_a_model_sees_images(live: Live) -> None:
    """Tokens of images count; the same image hits the cache, another of the same size does not past its place (S05)."""
    text = {"type": "text", "text": "what is it? " * 4}

    def usage(color: str) -> dict[str, Any]:
        answer = live.chat([part(data_url(png(color))), text], max_tokens=1)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]

    first = usage("red")
    assert first["prompt_tokens_details"]["cached_tokens"] < usage("red")["prompt_tokens_details"]["cached_tokens"]
    before = first["prompt_tokens"] - len(TOKENIZER.encode(text["text"]))
    assert usage("blue")["prompt_tokens_details"]["cached_tokens"] < before
    larger = live.chat([part(data_url(png(size=(56, 56)))), text], max_tokens=1).json()["usage"]
    assert larger["prompt_tokens"] - first["prompt_tokens"] == 2


def test_images_of_tool_results_keep_their_order(live: Live) -> None:
    """Results are rendered in the order of the calls, and each result keeps its own picture."""
    call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    tall, wide = png(size=(28, 84)), png(size=(140, 28))
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", **call}, {"id": "b", **call}]},
        {"role": "tool", "tool_call_id": "b", "content": [part(data_url(wide))]},
        {"role": "tool", "tool_call_id": "a", "content": [part(data_url(tall))]},
    ]
    seen: list[Any] = []
    submit = live.service.thread.submit
    live.service.thread.submit = lambda request, sink: (seen.append(request), submit(request, sink))[1]  # pyrefly: ignore
    answer = live.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 1})
    del live.service.thread.submit
    assert answer.status_code == 200, answer.text
    assert [grid for _, grid in seen[0].images] == [(1, 6, 2), (1, 2, 10)]
    text = TOKENIZER.decode(seen[0].prompt)
    assert text.index("image 28x84") < text.index("image 140x28")


def test_limits_of_images(tmp_path: Path) -> None:
    """So many in one call; a model without vision says so."""
    with live_server(max_images=1, image_folders=(tmp_path,)) as live:
        (tmp_path / "a.png").write_bytes(png())
        assert live.chat([part(f"file://{tmp_path}/a.png")], max_tokens=1).status_code == 200
        error = live.chat([part(data_url(png()))] * 2).json()["error"]
        assert (error["code"], error["param"]) == ("too_many_images", "messages[0].content[1].image_url.url")
        assert live.chat([part("https://example.com/x.png")]).status_code == 403
        assert (
            live.chat([{"type": "image_url", "image_url": 3}]).json()["error"]["param"]
            == "messages[0].content[0].image_url"
        )
        live.service.sources = None
        assert live.chat([part(data_url(png()))]).json()["error"]["code"] == "no_vision"
