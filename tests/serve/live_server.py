"""A live server on loopback with a tiny random model, which says what a test wants where the test wants it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import httpx
import torch
from small_models import small_model
from torch import Tensor

from openk3.config.http import ServerConfig
from openk3.config.serve import CacheConfig, EngineConfig, PageShape, SpeculationConfig
from openk3.engine.engine import Engine
from openk3.engine.request import Constraint, Request
from openk3.engine.stream import Update
from openk3.inputs.images import MediaConfig
from openk3.inputs.tokenizer import Tokenizer
from openk3.inputs.xtml import EFFORT_TEXT, FORMAT_TEXT, SCHEMA_TEXT, TOOL_CHOICE_TEXT, TOOLS_TEXT
from openk3.model.k3 import K3
from openk3.serve.app import make_app
from openk3.serve.engine_thread import EngineThread
from openk3.serve.keys import Keys
from openk3.serve.mail import News, Ticket
from openk3.serve.server import DrainingServer
from openk3.serve.service import Service

MODEL = "tiny-k3"
KEY = "sk-test-0123456789abcdef"
BYTES = Tokenizer({bytes([byte]): byte for byte in range(256)})  # a token is a byte
OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"


def turn(
    content: str = "", reasoning: str = "", calls: Sequence[tuple[str, Sequence[tuple[str, str, str]]]] = ()
) -> str:
    """What a model that makes no mistake says after its think channel was opened."""
    text = f"{reasoning}{CLOSE}think{SEP}{OPEN}response{SEP}{content}{CLOSE}response{SEP}"
    if calls:
        text += f"{OPEN}tools{SEP}"
        for index, (name, arguments) in enumerate(calls, start=1):
            text += f'{OPEN}call tool="{name}" index="{index}"{SEP}'
            for key, kind, value in arguments:
                text += f'{OPEN}argument key="{key}" type="{kind}"{SEP}{value}{CLOSE}argument{SEP}'
            text += f"{CLOSE}call{SEP}"
        text += f"{CLOSE}tools{SEP}"
    return f"{text}{CLOSE}message{SEP}{END}"


def learnt_tokenizer() -> Tokenizer:
    """Knows the words of the markup, so that prompts and answers are short."""
    frame = turn("", "", [("get", [("city", "string", ""), ("n", "number", ""), ("b", "object", "")])] * 2)
    words = [EFFORT_TEXT.format("max"), *TOOL_CHOICE_TEXT.values(), TOOLS_TEXT, FORMAT_TEXT, SCHEMA_TEXT]
    return Tokenizer.train(
        [*words, frame.replace("<|", " ").replace("|>", " "), "message role user system type"] * 2, 1024
    )


TOKENIZER = learnt_tokenizer()


@cache
def tiny_model(context: int = 2048) -> K3:
    """Random weights."""
    config = small_model(vocab_size=TOKENIZER.vocab_size, max_position_embeddings=context)
    special = TOKENIZER.special
    ids = {
        "bos_token_id": special["[BOS]"],
        "eos_token_id": special[END],
        "pad_token_id": special["[PAD]"],
        "media_placeholder_token_id": special["<|media_pad|>"],
    }
    model = K3.build(replace(config, **ids), seed=0, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.randn(model.lm_head.weight.shape, generator=generator) * 0.3)
    return model.requires_grad_(False)


class Slow(Engine):
    """Waits in each step as long as a test wants, and before it while a test holds it."""

    delay = 0.0
    may_step: threading.Event | None = None

    def step(self) -> list[Update]:
        """One step."""
        if self.may_step is not None:
            self.may_step.wait(60)
        if self.delay:
            time.sleep(self.delay)
        return super().step()


def tiny_engine(
    num_pages: int = 2048,
    max_requests: int = 64,
    speculation: SpeculationConfig | None = None,
    context: int = 2048,
) -> Slow:
    """Pages of 32 tokens."""
    model = tiny_model(context)
    shape = PageShape.of(model.config, page_tokens=32, hash_tokens=8, value_bytes=4)
    cache_config = CacheConfig(shape, num_pages, max_requests, max_tokens=context)
    return Slow(model, EngineConfig(cache_config, step_tokens=512, speculation=speculation))


@dataclass
class Live:
    """A running server. `says` maps a text of the prompt to what is answered; beyond it the model goes on by itself."""

    service: Service
    server: DrainingServer
    says: dict[str, list[int]] = field(default_factory=dict)

    def slow_down(self, seconds: float) -> None:
        """Of each step."""
        self.service.thread._engine.delay = seconds  # pyrefly: ignore

    @contextmanager
    def held(self) -> Generator[None]:
        """No step begins inside."""
        engine: Any = self.service.thread._engine
        engine.may_step = threading.Event()
        try:
            yield
        finally:
            engine.may_step.set()

    @property
    def url(self) -> str:
        """http://127.0.0.1:PORT."""
        return f"http://127.0.0.1:{self.server.port}"

    def say(self, word: str, answer: str | list[int]) -> None:
        """Whoever's prompt holds `word` is answered so; marker spellings are control tokens."""
        self.says[word] = TOKENIZER.encode_control(answer) if isinstance(answer, str) else answer

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """A POST of JSON."""
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        """One user message."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}
        return self.post("/v1/chat/completions", body)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of all events of a streamed answer, [DONE] as it is."""
        with httpx.stream("POST", self.url + path, json={**body, "stream": True}, timeout=60) as response:
            assert response.status_code == 200, response.read()
            return parse_events(response.read().decode())

    def wait_until_idle(self, seconds: float = 60.0) -> None:
        """Nothing runs and no page is held."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stats = self.service.thread.stats()
            if self.service.gate.num_open == self.service.thread.num_live == 0 and stats and not stats.num_pages_held:
                self.service.thread._engine.check()  # pyrefly: ignore
                return
            time.sleep(0.01)
        raise AssertionError(f"still busy: {self.service.gate.num_open} calls, {self.service.thread.stats()}")


def parse_events(text: str) -> list[Any]:
    """`data:` of each event, JSON read."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@contextmanager
def live_server(
    keys: Keys | None = None, engine: Any = tiny_engine, context: int = 2048, **config: Any
) -> Generator[Live]:
    """Start on a free port, stop afterwards; nothing may be left behind in the engine."""
    thread = TestedThread(engine)
    model, settings = tiny_model(context).config, ServerConfig(**{"model_name": MODEL, "port": 0, **config})
    service = Service(settings, thread, TOKENIZER, model, MediaConfig(), keys or Keys())
    server = DrainingServer(make_app(service), service)
    live = Live(service, server)
    thread.live = live
    runner = threading.Thread(target=server.run, daemon=True)
    runner.start()
    while not server.started:
        assert runner.is_alive()
        time.sleep(0.005)
    try:
        yield live
    finally:
        server.should_exit = True
        runner.join(60)
        assert not runner.is_alive()


class Script:
    """A constraint that allows one token at each place, and behind its end what another constraint allows."""

    def __init__(self, answer: list[int], inner: Constraint | None) -> None:
        self._answer, self._inner = answer, inner

    def allowed(self, answer: Sequence[int]) -> Tensor | None:
        """bool [V], or None."""
        allowed_V = None if self._inner is None else self._inner.allowed(answer)
        if len(answer) >= len(self._answer):
            return allowed_V
        only_V = torch.zeros(TOKENIZER.vocab_size, dtype=torch.bool)
        only_V[self._answer[len(answer)]] = True
        return only_V if allowed_V is None else only_V & allowed_V


class TestedThread(EngineThread):
    """Gives requests their script, and steps slowly if told to."""

    __test__ = False
    live: Live

    def submit(self, request: Request, sink: Callable[[News], None]) -> Ticket:
        """Take a request, from any thread."""
        text = TOKENIZER.decode(token for token in request.prompt if token < TOKENIZER.num_ranks)
        answer = next((ids for word, ids in self.live.says.items() if word in text), None)
        if answer is not None:
            request = replace(request, constraint=Script(answer, request.constraint))
        return super().submit(request, sink)
