"""/v1/responses by OpenAI's client: items whole and as typed events, tools, schemas, efforts, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from live_server import MODEL, TOKENIZER, Live, live_server, turn
from pydantic import BaseModel

from openk3.inputs.chat import parse

CALLS = [("get", [("city", "string", "Zürich"), ("n", "number", "1e2")]), ("put", [])]
ARGUMENTS = '{"city": "Zürich", "n": 1e2}'
TOOLS: list[Any] = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("get", "put")]


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    """Without retries."""
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_items_whole_and_streamed(live: Live, client: openai.OpenAI) -> None:
    """Reasoning, a message and two calls; the last event holds what comes whole, and deltas join to it."""
    live.say("greet", turn("Hi 👋", "hm", CALLS))
    options: dict[str, Any] = {
        "model": MODEL,
        "input": "greet",
        "tools": TOOLS,
        "include": ["message.output_text.logprobs"],
    }
    whole = client.responses.create(**options)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.status == "completed" and whole.output_text == "Hi 👋" and whole.output[0].content[0].text == "hm"
    assert [item.arguments for item in whole.output[2:]] == [ARGUMENTS, "{}"]
    events = list(client.responses.create(stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    last = events[-1].response
    assert last.output_text == whole.output_text and last.usage.output_tokens == whole.usage.output_tokens
    assert bytes(b for row in last.output[1].content[0].logprobs for b in row.bytes) == "Hi 👋".encode()
    for kind, want in (
        ("reasoning_text", "hm"),
        ("output_text", "Hi 👋"),
        ("function_call_arguments", f"{ARGUMENTS}{{}}"),
    ):
        assert "".join(event.delta for event in events if event.type == f"response.{kind}.delta") == want
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in added] == [item.id for item in done] == [item.id for item in last.output]
    assert [item.call_id for item in done[2:]] == [item.call_id for item in last.output[2:]]


def test_a_tools_loop(live: Live, client: openai.OpenAI, seen: list[list[int]]) -> None:
    """All items go back as they came; the prompt holds reasoning, calls byte for byte, and results in order (P05)."""
    live.say("greet", turn("", "ask", CALLS))
    options: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "instructions": "Be brief."}
    first = client.responses.create(input="greet", **options)
    calls = [item for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": call.name} for call in calls]
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "greet"}]}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    live.says.clear()
    answer = client.responses.create(input=[*items, *reversed(results)], max_output_tokens=2, **options)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    read = parse(seen[1], tokenizer=TOKENIZER).messages
    assert [message["role"] for message in read] == ["system", "user", "assistant", "tool", "tool"]
    assert read[2]["reasoning_content"] == "ask" and read[2]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert [message["content"] for message in read[3:]] == ["get", "put"] and seen[1][: len(seen[0])] == seen[0]


class Pick(BaseModel):
    """What the model is made to answer."""

    colour: Literal["r", "g"]
    is_dark: bool


def test_a_schema_is_followed(client: openai.OpenAI) -> None:
    """The client's own parse() of a class, with nothing but the grammar to make the model do it."""
    options: dict[str, Any] = {"model": MODEL, "extra_body": {"thinking": {"type": "disabled"}}}
    answer = client.responses.parse(input="pick", text_format=Pick, **options)
    assert isinstance(answer.output_parsed, Pick)


@pytest.mark.parametrize("effort", ["medium", "none", "LOW", "minimal", 3])
def test_other_efforts_are_refused(live: Live, effort: object) -> None:
    """A06, by this route too."""
    answer = live.post("/v1/responses", {"model": MODEL, "input": "hi", "reasoning": {"effort": effort}})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "reasoning.effort"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nope"}}}}, "text.format.schema"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"foo": 1}, "foo"),
    ],
)
def test_errors_name_the_field(live: Live, fields: dict[str, Any], param: str) -> None:
    """400, OpenAI's error object."""
    answer = live.post("/v1/responses", {"model": MODEL, "input": "x", "max_output_tokens": 2, **fields})
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["param"] or "").startswith(param), answer.json()


def test_a_models_own_sampling_is_the_default() -> None:
    """As the server was told; what a request says comes first, also where it says 0."""
    with live_server(temperature=0.3, top_p=0.9) as live:
        body = {"model": MODEL, "input": "hi", "max_output_tokens": 4}
        for fields, want in (({}, (0.3, 0.9)), ({"temperature": 0}, (0.0, 0.9)), ({"top_p": 0.5}, (0.3, 0.5))):
            answer = live.post("/v1/responses", {**body, **fields}).json()
            assert (answer["temperature"], answer["top_p"]) == want
