"""/v1/messages by Anthropic's own client: blocks whole and streamed, tools, thinking, counting, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from live_server import CLOSE, MODEL, OPEN, SEP, TOKENIZER, Live, turn

from openk3.inputs.chat import parse

CALLS = [("get", [("city", "string", "Zürich"), ("n", "number", "2")]), ("put", [])]
TOOLS: list[Any] = [{"name": name, "input_schema": {"type": "object"}} for name in ("get", "put")]
USER: list[Any] = [{"role": "user", "content": "greet"}]


@pytest.fixture
def client(live: Live) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client without retries."""
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_blocks_whole_and_streamed(live: Live, client: anthropic.Anthropic) -> None:
    """Thinking, text and two tool uses; what the client collects from the stream is what comes whole."""
    live.say("greet", turn("Hi 👋", "hm", CALLS))
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": USER, "tools": TOOLS}
    whole = client.messages.create(**options)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (whole.content[0].thinking, whole.content[1].text) == ("hm", "Hi 👋")
    assert whole.content[2].input == {"city": "Zürich", "n": 2} and whole.content[3].input == {}
    assert whole.stop_reason == "tool_use" and whole.content[2].id != whole.content[3].id
    with client.messages.stream(**options) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"

    def plain(message: Any) -> list[dict[str, Any]]:
        return [block.model_dump(exclude={"id"}, exclude_none=True) for block in message.content]

    assert plain(streamed) == plain(whole) and streamed.stop_reason == "tool_use"
    assert whole.usage.cache_read_input_tokens + whole.usage.input_tokens == (
        streamed.usage.cache_read_input_tokens + streamed.usage.input_tokens
    )
    assert streamed.usage.cache_read_input_tokens > 0 and streamed.usage.output_tokens == whole.usage.output_tokens


def test_a_tools_loop(live: Live, client: anthropic.Anthropic, seen: list[list[int]]) -> None:
    """The answer's blocks go back as they came, results in any order, an error marked; thinking is kept (A06)."""
    live.say("greet", turn("", "ask", CALLS))
    options: dict[str, Any] = {"model": MODEL, "system": [{"type": "text", "text": "Be brief."}], "tools": TOOLS}
    first = client.messages.create(max_tokens=400, messages=USER, **options)
    uses = [block for block in first.content if block.type == "tool_use"]
    results: list[Any] = [
        {
            "type": "tool_result",
            "tool_use_id": uses[1].id,
            "content": [{"type": "text", "text": "two"}],
            "is_error": True,
        },
        {"type": "tool_result", "tool_use_id": uses[0].id, "content": "one"},
        {"type": "text", "text": "now?"},
    ]
    messages = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    live.says.clear()
    client.messages.create(max_tokens=2, messages=messages, **options)
    read = parse(seen[1], tokenizer=TOKENIZER).messages
    assert [message["role"] for message in read] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert read[0]["content"] == "Be brief." and read[2]["reasoning_content"] == "ask"
    assert [message["content"] for message in read[3:]] == ["one", "Error: two", "now?"]
    assert seen[1][: len(seen[0])] == seen[0]


def test_counting_equals_the_prompt(client: anthropic.Anthropic) -> None:
    """What count_tokens says is what the answer's usage says."""
    options: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": TOOLS, "system": "x"}
    usage = client.messages.create(max_tokens=1, **options).usage
    counted = client.messages.count_tokens(**options).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_stops_lengths_and_choices_of_tools(live: Live, client: anthropic.Anthropic) -> None:
    """stop_sequence is named; max_tokens; a tool that must be called is, by the grammar alone."""
    live.say("greet", turn("one own fox", "hm"))
    options: dict[str, Any] = {"model": MODEL, "messages": USER}
    stopped = client.messages.create(max_tokens=100, stop_sequences=["zz", "own"], **options)
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[-1].text) == ("stop_sequence", "own", "one ")
    assert client.messages.create(max_tokens=3, **options).stop_reason == "max_tokens"
    live.say("greet", f"{CLOSE}")
    tools: list[Any] = [
        TOOLS[0],
        {
            "name": "pick",
            "input_schema": {"type": "object", "properties": {"c": {"enum": ["r", "g"]}}, "required": ["c"]},
        },
    ]
    answer = client.messages.create(
        max_tokens=200,
        tools=tools,
        tool_choice={"type": "tool", "name": "pick", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
        messages=[{"role": "user", "content": "greet"}],
        model=MODEL,
    )
    (use,) = [block for block in answer.content if block.type == "tool_use"]
    assert use.name == "pick" and use.input["c"] in ("r", "g") and answer.stop_reason == "tool_use"


def test_arguments_that_are_no_object_come_under_a_key(live: Live, client: anthropic.Anthropic) -> None:
    """The interface wants an object; nothing is lost, and the stream says the same."""
    live.say("greet", f'{CLOSE}think{SEP}{OPEN}tools{SEP}{OPEN}call tool="f" index="1"{SEP}say "hi"{CLOSE}call{SEP}')
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "messages": USER, "stop_sequences": ["never"]}
    live.says["greet"] += TOKENIZER.encode_control(f"{CLOSE}tools{SEP}{CLOSE}message{SEP}")
    whole = client.messages.create(**options).content[-1]
    with client.messages.stream(**options) as stream:
        streamed = stream.get_final_message().content[-1]
    assert whole.input == streamed.input == {"raw_arguments": 'say "hi"'}


@pytest.mark.parametrize("text", ['{"n": 1e999}', '{"n": NaN}', '{"s": "\\ud800"}'])
def test_arguments_that_json_cannot_say_again(live: Live, text: str) -> None:
    """Infinite numbers and half characters are no reason for a 5xx."""
    live.say("greet", f'{CLOSE}think{SEP}{OPEN}tools{SEP}{OPEN}call tool="f" index="1"{SEP}{text}{CLOSE}call{SEP}')
    live.says["greet"] += TOKENIZER.encode_control(f"{CLOSE}tools{SEP}{CLOSE}message{SEP}")
    answer = live.post("/v1/messages", {"model": MODEL, "max_tokens": 80, "messages": USER})
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"][-1]["input"] == {"raw_arguments": text}


def test_thinking_and_effort(live: Live) -> None:
    """Absent is max; budgets become efforts in order; an unknown effort is refused; disabled is disabled."""

    def prompt(**fields: Any) -> int:
        body = {"model": MODEL, "messages": USER, **fields}
        answer = live.post("/v1/messages/count_tokens", body)
        assert answer.status_code == 200, answer.text
        return answer.json()["input_tokens"]

    def effort(word: str) -> int:
        return prompt(output_config={"effort": word})

    budgets = [prompt(thinking={"type": "enabled", "budget_tokens": n}) for n in (1024, 10_000, 100_000)]
    assert budgets == [effort("low"), effort("high"), effort("max")] and prompt() == effort("max")
    assert prompt(thinking={"type": "adaptive"}) == prompt() > prompt(thinking={"type": "disabled"})
    for word in ("medium", "xhigh", 3):
        answer = live.post(
            "/v1/messages", {"model": MODEL, "messages": USER, "max_tokens": 1, "output_config": {"effort": word}}
        )
        assert answer.status_code == 400 and "output_config.effort" in answer.json()["error"]["message"]


def test_a_schema_is_followed(live: Live, client: anthropic.Anthropic) -> None:
    """output_config.format, by the grammar alone."""
    schema = {
        "type": "object",
        "properties": {"c": {"enum": ["r", "g"]}},
        "required": ["c"],
        "additionalProperties": False,
    }
    answer = client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=USER,
        thinking={"type": "disabled"},
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert json.loads(answer.content[0].text)["c"] in ("r", "g")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages: at least one"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "messages: must not end"),
        ({"messages": [{"role": "tool", "content": "I"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages[0].foo"),
        ({"system": 3}, "system"),
        ({"temperature": 1.5}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [{"name": ""}]}, "tools[0].function.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_errors_are_anthropics(live: Live, fields: dict[str, Any], message: str) -> None:
    """{"type": "error"}, a request id, and a message that begins with the field."""
    body = {"model": MODEL, "max_tokens": 2, "messages": USER, **fields}
    answer = live.post("/v1/messages", {name: value for name, value in body.items() if value is not None})
    error = answer.json()
    assert answer.status_code == 400 and error["type"] == "error" and error["request_id"]
    assert error["error"]["type"] == "invalid_request_error" and error["error"]["message"].startswith(message), error


def test_errors_reach_the_client(live: Live, client: anthropic.Anthropic) -> None:
    """By the classes that it knows."""
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client.messages.create(model="claude", max_tokens=1, messages=USER)
    assert httpx.get(f"{live.url}/v1/messages", timeout=60).json()["type"] == "error"
