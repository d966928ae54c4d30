"""All routes tell the same answer, whole and streamed, whatever the model writes and however the engine makes it."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import CLOSE, END, MODEL, OPEN, SEP, TOKENIZER, Live, live_server, tiny_engine, turn
from PIL import Image

from openk3.config.serve import SpeculationConfig
from openk3.inputs.chat import Parser, parse

Told = tuple[str, str, list[tuple[str, str]]]
MESSAGES = [{"role": "user", "content": "garbage"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES, "max_tokens": 300},
    "/v1/responses": {"model": MODEL, "input": "garbage", "max_output_tokens": 300},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 300},
}


def from_chat(answer: Any) -> Told:
    """Reasoning, content and calls of a chat completion."""
    message = answer["choices"][0]["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    return message.get("reasoning_content", ""), message["content"] or "", calls


def from_chunks(events: list[Any]) -> Told:
    """Of its stream."""
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    calls: dict[int, tuple[str, str]] = {}
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        name, arguments = calls.get(part["index"], ("", ""))
        function = part["function"]
        calls[part["index"]] = (name + function.get("name", ""), arguments + function["arguments"])
    texts = ["".join(delta.get(key) or "" for delta in deltas) for key in ("reasoning_content", "content")]
    return texts[0], texts[1], [calls[n] for n in sorted(calls)]


def from_items(response: Any) -> Told:
    """Of a response."""
    items = response["output"]

    def text(kind: str) -> str:
        return "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])

    calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    return text("reasoning"), text("message"), calls


def from_blocks(message: Any) -> Told:
    """Of an Anthropic message."""
    blocks = message["content"]
    texts = ["".join(block[kind] for block in blocks if block["type"] == kind) for kind in ("thinking", "text")]
    return texts[0], texts[1], [(b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"]


def from_block_events(events: list[Any]) -> Told:
    """Of its stream."""
    found: dict[str, str] = {"thinking": "", "text": ""}
    calls: list[list[str]] = []
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls.append([event["content_block"]["name"], ""])
        delta = event.get("delta", {})
        for kind in found:
            found[kind] += delta.get(kind, "") if event["type"] == "content_block_delta" else ""
        if delta.get("type") == "input_json_delta":
            calls[-1][1] += delta["partial_json"]
    return found["thinking"], found["text"], [(name, json.dumps(json.loads(text))) for name, text in calls]


def as_json(told: Told) -> Told:
    """With arguments as Anthropic's interface has them."""
    calls = []
    for name, arguments in told[2]:
        try:
            value = json.loads(arguments)
        except ValueError:
            value = None
        calls.append((name, json.dumps(value if isinstance(value, dict) else {"raw_arguments": arguments})))
    return told[0], told[1], calls


def check_all_routes(live: Live, script: str, want: Told) -> None:
    """Three routes, whole and streamed."""
    live.say("garbage", script)
    assert from_chat(live.post("/v1/chat/completions", BODIES["/v1/chat/completions"]).json()) == want
    assert from_chunks(live.events("/v1/chat/completions", BODIES["/v1/chat/completions"])) == want
    assert from_items(live.post("/v1/responses", BODIES["/v1/responses"]).json()) == want
    assert from_items(live.events("/v1/responses", BODIES["/v1/responses"])[-1]["response"]) == want
    assert from_blocks(live.post("/v1/messages", BODIES["/v1/messages"]).json()) == as_json(want)
    assert from_block_events(live.events("/v1/messages", BODIES["/v1/messages"])) == as_json(want)


PIECES = (OPEN, CLOSE, SEP, OPEN, CLOSE, SEP, "think", "response", "tools", 'call tool="f" index="1"', "call")
WORDS = (*PIECES, 'argument key="a" type="number"', 'argument key="b" type="string"', "argument", " 7", "é👋", '"x"')


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
def test_broken_markup_is_recovered_the_same_by_every_route(live: Live, seed: int) -> None:
    """P01, P03: what the documented rules make of it, in each form of the answer."""
    chance = random.Random(seed)
    script = "".join(chance.choice(WORDS) for _ in range(16)) + f"{CLOSE}message{SEP}{END}"
    parser = Parser("think", tokenizer=TOKENIZER)
    parser.feed_ids(TOKENIZER.encode_control(script))
    parser.finish()
    message = parser.message()
    named = [call["function"] for call in message.get("tool_calls", []) if call["function"]["name"]]
    calls = [(call["name"], call["arguments"]) for call in named]
    check_all_routes(live, script, (message.get("reasoning_content", ""), message["content"], calls))


@pytest.fixture(scope="module", params=["ngram", pytest.param("mtp", marks=pytest.mark.slow)])
def drafting(request: pytest.FixtureRequest) -> Iterator[Live]:
    """A server that guesses ahead."""
    speculation = SpeculationConfig(request.param, most_drafts=4, adaptive=False)
    with live_server(engine=lambda: tiny_engine(speculation=speculation)) as live:
        yield live
        live.wait_until_idle()


def test_drafts_change_no_answer(live: Live, drafting: Live) -> None:
    """Several tokens in one step: stops, markup, constraints and seeds give what they give without drafts."""
    whole = ("hm hm hm", "one two one two one two", [("get", '{"city": "Rome"}')])
    script = turn(whole[1], whole[0], [("get", [("city", "string", "Rome")])])
    check_all_routes(drafting, script, whole)
    form = {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 4}},
    }
    options = {"response_format": form, "thinking": {"type": "disabled"}, "max_tokens": 300, "seed": 3}
    answers = [one.chat("list", **options).json()["choices"][0]["message"]["content"] for one in (live, drafting)]
    assert answers[0] == answers[1] and isinstance(json.loads(answers[0]), list)
    for one in (live, drafting):
        one.say("story", turn("abababab end of it " * 3))
    stopped = [one.chat("story", stop=["end of"], max_tokens=200).json()["choices"][0] for one in (live, drafting)]
    assert stopped[0]["message"] == stopped[1]["message"] and stopped[0]["message"]["content"] == "abababab "


def test_images_come_in_by_every_route(live: Live) -> None:
    """The same picture, the same prompt: the second and third route hit what the first has computed."""
    out = io.BytesIO()
    Image.new("RGB", (84, 56), "green").save(out, "PNG")
    data = base64.b64encode(out.getvalue()).decode()
    url, text = f"data:image/png;base64,{data}", "what is it? " * 4
    chat = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    items = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": text}]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    first = live.chat(chat, max_tokens=1).json()["usage"]
    response = live.post(
        "/v1/responses", {"model": MODEL, "input": [{"role": "user", "content": items}], "max_output_tokens": 1}
    )
    second = response.json()["usage"]
    body = {"model": MODEL, "messages": [{"role": "user", "content": blocks}]}
    third = live.post("/v1/messages", {**body, "max_tokens": 1}).json()["usage"]
    assert first["prompt_tokens"] == second["input_tokens"] == third["input_tokens"] + third["cache_read_input_tokens"]
    assert (
        second["input_tokens_details"]["cached_tokens"]
        == third["cache_read_input_tokens"]
        > first["prompt_tokens"] - 16
    )
    assert live.post("/v1/messages/count_tokens", body).json() == {"input_tokens": first["prompt_tokens"]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    assert live.post("/v1/messages", {"model": MODEL, "max_tokens": 1, "messages": turns}).status_code == 200


def test_odd_history_is_kept(live: Live, seen: list[list[int]]) -> None:
    """P05: malformed and non-object arguments, results out of order, empty and null fields: no 5xx, nothing lost."""
    arguments = [
        '{"a": 3, "b": "007", "c": "true", "d": {"x":1e2}, "e": "", "f": "\\" & < >\\n👋 <|close|>"}',
        "{bad",
        "[1]",
        "",
    ]
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": f"f{n}", "arguments": text}}
        for n, text in enumerate(arguments)
    ]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": f"r{n}"} for n in (3, 1, 0, 2)]
    messages = [
        {"role": "developer", "content": "D", "name": None},
        {"role": "user", "content": "u", "name": None, "tool_calls": None},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": None,
            "refusal": None,
            "audio": None,
            "tool_calls": calls,
        },
        *results,
        {"role": "assistant", "content": "", "refusal": "no"},
        {"role": "user", "content": []},
    ]
    body = {"model": MODEL, "messages": messages, "max_tokens": 1, "tools": None, "stop": None, "tool_choice": None}
    answer = live.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    read = parse(seen[0], tokenizer=TOKENIZER).messages
    assert [m["role"] for m in read] == ["system", "user", "assistant", *["tool"] * 4, "assistant", "user"]
    assert [m["content"] for m in read[3:7]] == ["r0", "r1", "r2", "r3"] and read[7]["content"] == "no"
    kept = [call["function"]["arguments"] for call in read[2]["tool_calls"]]
    assert kept == [arguments[0], "{bad", "[1]", "{}"]
