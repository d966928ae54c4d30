"""Everything at once on a live server: guesses, a tier, images, tools, schemas, keys, and clients that leave."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import random
import re
import resource
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import MODEL, TOKENIZER, Live, Slow, live_server, parse_events, tiny_engine, tiny_model, turn
from PIL import Image

from openk3 import Packed
from openk3.config.outer_tier import TierConfig
from openk3.config.serve import SpeculationConfig
from openk3.engine.request import Token
from openk3.engine.stream import Stream, Update
from openk3.serve.keys import Caller, Keys
from openk3.serve.turn_reader import TextReader, TurnReader

CLIENTS, QUESTIONS, WAVES = 300, 60, 3
KEYS = [f"sk-{n}-0123456789abcdef" for n in range(4)]
TIE = 1e-4  # of two logits in float32
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
PLAIN, PICTURE, WHOLE, CALLS, FORM = range(5)  # kinds of questions


class Recorder(Slow):
    """Keeps, for each question whose answer is free, its prompt and all different answers."""

    prompts: dict[int, Packed]
    answers: dict[int, set[tuple[int, ...]]]
    streams: dict[Stream, list[int]]

    def step(self) -> list[Update]:
        """One step."""
        updates = super().step()
        for update in updates:
            job = update.stream.job
            if job.request.constraint is None:
                self.streams[update.stream] += [token.id for token in update.tokens]
                if update.finish is not None:
                    assert update.finish.error is None, update.finish
                    ids = job.prompt.token_ids
                    text = TOKENIZER.decode(token for token in job.request.prompt if token < TOKENIZER.num_ranks)
                    question = int(re.findall(r"<q(\d+)>", text)[-1])
                    packed = self.prompts.setdefault(question, Packed.join([ids], job.prompt.images))
                    assert packed.token_ids_T.tolist() == list(ids)
                    self.answers[question].add(tuple(self.streams.pop(update.stream)))
        return updates


def recorder(folder: Path, draft: str) -> Recorder:
    """Few pages, so that requests give way and prefixes are evicted all the time."""
    guesses = SpeculationConfig(draft, most_drafts=4, adaptive=draft == "ngram")  # those of random weights do not pay
    config = tiny_engine(num_pages=170, max_requests=40, speculation=guesses).config
    tier = TierConfig(2**20, str(folder), 2**24, swap="always", load="always")
    engine = Recorder(tiny_model(), dataclasses.replace(config, tier=tier))
    engine.prompts, engine.answers, engine.streams = {}, defaultdict(set), defaultdict(list)
    return engine


def picture(n: int) -> str:
    """A picture of its own as a data URL."""
    out = io.BytesIO()
    Image.new("RGB", (28 * (1 + n % 3), 28), (n * 4 % 256, 90, 200)).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def question(n: int) -> tuple[str, dict[str, Any]]:
    """Route and body; greedy. Questions of a kind begin with the same words."""
    kind, text = n % 5, "what was said before is this: " * (1 + n % 7) + f"<q{n}> and now?"
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12 + n % 31}
    if kind == PLAIN:
        return "/v1/completions", {**body, "prompt": text, "stream": True, "stream_options": {"include_usage": True}}
    content: Any = text
    if kind == PICTURE:
        content = [{"type": "image_url", "image_url": {"url": picture(n)}}, {"type": "text", "text": text}]
    messages = [{"role": "system", "content": "You look up. " * 9}, {"role": "user", "content": content}]
    body |= {"messages": messages}
    body |= {} if kind == CALLS else {"thinking": {"type": "disabled"}}
    if kind == WHOLE:
        return "/v1/chat/completions", body
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if kind == CALLS:
        body |= {"tools": [TOOL], "max_tokens": 400}
    if kind == FORM:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        body |= {"response_format": form, "max_tokens": 60}
    return "/v1/chat/completions", body


def arguments(n: int) -> dict[str, Any]:
    """Of the call that question n is answered by."""
    return {"city": f"Zürich {n} 👋", "n": n}


async def send(port: int, key: str, n: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A question on its way."""
    path, body = question(n)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1", "host: 127.0.0.1", "connection: close", "content-type: application/json"
    head = *head, f"authorization: Bearer {key}", f"content-length: {len(data)}", "", ""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join(head).encode() + data)
    return reader, writer


async def ask(port: int, key: str, n: int) -> tuple[int, bytes]:
    """The whole answer."""
    reader, writer = await send(port, key, n)
    data = await reader.read(-1)
    writer.close()
    return n, data


async def leave(port: int, key: str, n: int, wants: int) -> None:
    """Go away after so many bytes of the answer, or before it begins."""
    reader, writer = await send(port, key, n)
    if wants:
        await reader.read(wants)
    writer.transport.abort()


async def wave(port: int, chance: random.Random) -> list[tuple[int, bytes]]:
    """All clients at once; every fifth leaves."""
    asking, leaving = [], []
    for client in range(CLIENTS):
        n, key = client % QUESTIONS, KEYS[chance.randrange(4)]
        if chance.random() < 0.2:
            leaving.append(leave(port, key, n, chance.choice((0, 1, 900, 2000))))
        else:
            asking.append(ask(port, key, n))
    found = await asyncio.gather(*asking, *leaving)
    return found[: len(asking)]


def told(n: int, data: bytes) -> tuple[str, str, list[tuple[str, str]], str, int]:
    """Reasoning, content, calls, why it ended and how many tokens it has, of a streamed or a whole answer."""
    head, _, rest = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), data[:400]
    if n % 5 == WHOLE:
        (choice,) = json.loads(rest)["choices"]
        message, count = choice["message"], json.loads(rest)["usage"]["completion_tokens"]
        return message.get("reasoning_content") or "", message["content"] or "", [], choice["finish_reason"], count
    text = b"".join(re.findall(rb"^[0-9a-f]+\r\n(data: .*?\n\n)\r\n", rest, re.MULTILINE | re.DOTALL)).decode()
    events = parse_events(text)
    assert events.pop() == "[DONE]" and all("error" not in each for each in events), events[-1]
    usage = events.pop()["usage"]["completion_tokens"]
    content = reasoning = ""
    calls: dict[int, list[str]] = {}
    for event in events:
        (choice,) = event["choices"]
        delta = choice.get("delta", {})
        content += choice.get("text") or delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            entry = calls.setdefault(call["index"], ["", ""])
            entry[0] += call["function"].get("name") or ""
            entry[1] += call["function"].get("arguments") or ""
    return reasoning, content, [(a, b) for a, b in calls.values()], events[-1]["choices"][0]["finish_reason"], usage


def read(n: int, answer: tuple[int, ...]) -> tuple[str, str]:
    """Reasoning and content of tokens."""
    tokens = [Token(token, 0.0) for token in answer]
    if n % 5 == PLAIN:
        reader = TextReader(TOKENIZER)
        return "", reader.feed(tokens).text + reader.finish().text
    turns = TurnReader(TOKENIZER, "response")
    deltas = [*turns.feed(tokens), *turns.finish()]
    return tuple("".join(d.text for d in deltas if d.kind == kind) for kind in ("reasoning", "content"))  # pyrefly: ignore


def true_share(engine: Recorder) -> tuple[int, int]:
    """Asserts that every token is the plain model's best one; (tokens, those of a tie that went the other way)."""
    model, count, ties = tiny_model(), 0, 0
    for n, answers in engine.answers.items():
        longest = sorted(answers, key=len, reverse=True)
        for place, answer in enumerate(longest):
            if not answer or any(other[: len(answer)] == answer for other in longest[:place]):
                continue
            prompt = engine.prompts[n]
            packed = Packed.join([[*prompt.token_ids_T.tolist(), *answer[:-1]]], prompt.images)
            with torch.no_grad():
                logits_TV = model(packed)[len(prompt.token_ids_T) - 1 :]
            gap_T = logits_TV.amax(1) - logits_TV[torch.arange(len(answer)), torch.tensor(answer)]
            assert gap_T.max() <= TIE, f"question {n}: token {int(gap_T.argmax())} is wrong by {float(gap_T.max())}"
            count, ties = count + len(answer), ties + int((gap_T > 0).sum())
    return count, ties


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def check_answers(engine: Recorder, results: list[tuple[int, bytes]]) -> None:
    """Each answer is one that the engine gave, or the one that was dictated, or has its form."""
    readings = {n: {read(n, answer) for answer in answers} for n, answers in engine.answers.items()}
    sizes = {n: {len(answer) for answer in answers} for n, answers in engine.answers.items()}
    for n, data in results:
        reasoning, content, calls, reason, count = told(n, data)
        if n % 5 == CALLS:
            assert [(name, json.loads(text)) for name, text in calls] == [("get", arguments(n))] * (1 + n % 2)
            assert (reasoning, content, reason) == ("So.", f"I look {n} up", "tool_calls")
        elif n % 5 == FORM:
            assert reason == "length" or isinstance(json.loads(content)["n"], int)
        else:
            assert (reasoning, content) in readings[n] and count in sizes[n] and reason in ("stop", "length")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("draft", ["ngram", "mtp"])
def test_everything_at_once(draft: str, tmp_path: Path) -> None:
    """None lost, none wrong: greedy answers are the plain model's; pages go back, memory stays flat, nothing fails."""
    keys = Keys([(key, Caller(f"key{n}")) for n, key in enumerate(KEYS)])
    engines: list[Recorder] = []

    def make() -> Recorder:
        engines.append(recorder(tmp_path / "tier", draft))
        return engines[-1]

    with live_server(keys, engine=make, max_open=CLIENTS + 10) as live:
        dictate(live)
        sizes, chance = [], random.Random(draft)
        for _ in range(WAVES):
            results = asyncio.run(wave(live.server.port, chance))
            live.wait_until_idle()
            check_answers(engines[0], results)
            sizes.append(resident_bytes())
        stats = live.service.thread.stats()
        assert stats is not None and stats.outer is not None and stats.drafts is not None
        assert len(engines) == 1 and stats.num_failed_passes == 0 and stats.num_pages_held == 0
        assert not engines[0].streams and len(engines[0].answers) == QUESTIONS * 3 // 5
        assert stats.num_preempted and stats.num_hit and stats.drafts.num_drafts and stats.outer.num_loaded
        assert draft == "mtp" or stats.drafts.num_accepted
        assert stats.outer.num_corrupt == stats.outer.num_failed == 0
    count, ties = true_share(engines[0])
    print(f"{count} tokens are the plain model's, {ties} of them from ties; {stats}")
    print("MiB resident:", *(size >> 20 for size in sizes))
    assert sizes[-1] - sizes[-2] < 32 * 2**20


def dictate(live: Live) -> None:
    """Answers of the questions that call tools."""
    for n in range(CALLS, QUESTIONS, 5):
        call = ("get", [("city", "string", arguments(n)["city"]), ("n", "number", str(n))])
        live.say(f"<q{n}>", turn(f"I look {n} up", "So.", [call] * (1 + n % 2)))
