"""Chat parsing: every cut of the stream, and recovery from a model's mistakes."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from openk3.inputs.chat import Parser, encode_chat, parse, render, text_of
from openk3.inputs.tokenizer import Tokenizer

TOKENIZER = Tokenizer({bytes([b]): b for b in range(256)})
THINK_END, RESPONSE_END, TOOLS_END = (f"<|close|>{tag}<|sep|>" for tag in ("think", "response", "tools"))
THINK, RESPONSE, TOOLS = (f"<|open|>{tag}<|sep|>" for tag in ("think", "response", "tools"))
END = "<|close|>message<|sep|><|end_of_msg|>"


def argument(key, kind, value):
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def call(name, *arguments, index=1):
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{"".join(arguments)}<|close|>call<|sep|>'


CITY = call("get_weather", argument("city", "string", "Par\nis 你"), argument("days", "number", "1e2"))
PING = call("ping", index=2)
GOOD = f"think 你 👩‍👩‍👧{THINK_END}{RESPONSE}answer e\u0301 <|x{RESPONSE_END}{TOOLS}{CITY}{PING}{TOOLS_END}{END}"
SPACED = GOOD.replace("<|sep|>", " <|sep|>").replace("<|open|>", "<|open|> ").replace("<|close|>", "<|close|>\n")
WANT = {
    "role": "assistant",
    "content": "answer e\u0301 <|x",
    "reasoning_content": "think 你 👩‍👩‍👧",
    "tool_calls": [
        {
            "id": "call_0",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Par\\nis 你", "days": 1e2}'},
        },
        {"id": "call_1", "type": "function", "function": {"name": "ping", "arguments": "{}"}},
    ],
}


def read(pieces, channel="think"):
    """The message, and the one its joined events give; they must agree, and no event may be empty."""
    parser = Parser(channel)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    return check(parser, events)


def check(parser, events):
    message = parser.message()
    assert all(event.text or event.kind == "call" for event in events)
    for kind, key in (("reasoning", "reasoning_content"), ("content", "content")):
        assert "".join(e.text for e in events if e.kind == kind) == message.get(key, "")
    calls = [event for event in events if event.kind == "call"]
    assert [event.index for event in calls] == list(range(len(calls)))
    for n, made in enumerate(message.get("tool_calls", [])):
        assert made["function"]["name"] == calls[n].text
        got = "".join(e.text for e in events if e.kind == "arguments" and e.index == n)
        assert got == made["function"]["arguments"]
        first = next(i for i, e in enumerate(events) if e.kind == "arguments" and e.index == n)
        assert first > events.index(calls[n])
    return message


def test_a_good_answer():
    parser = Parser()
    events = parser.feed(GOOD) + parser.finish()
    assert check(parser, events) == WANT and parser.complete and parser.finish_reason == "tool_calls"
    kinds = ["reasoning", "content", "call", "arguments", "call", "arguments"]
    assert [event.kind for event in events] == kinds


@pytest.mark.parametrize("text", [GOOD, SPACED, GOOD.replace(RESPONSE_END, ""), GOOD.replace(TOOLS_END, "")])
def test_every_single_cut_and_every_character(text):
    """P03: cut at every position, each character alone, one delta; with spaces in tags, without close-response."""
    want = read([text])
    assert want == WANT
    assert read(list(text)) == want
    for cut in range(len(text)):
        assert read([text[:cut], text[cut:]]) == want


MISTAKES = [
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    "think",
    "response",
    "tools",
    "call",
    "argument",
    "message",
    "json",
]
MISTAKES += [
    " ",
    "a",
    "<",
    "<|",
    ' tool="f"',
    ' key="k" type="number"',
    "{",
    "1",
    "foo",
    "你",
    THINK_END,
    RESPONSE,
    TOOLS,
    CITY,
    PING,
    TOOLS_END,
]


@given(
    st.lists(st.sampled_from(MISTAKES), max_size=14).map("".join), st.data(), st.sampled_from(["think", "response", ""])
)
@example(GOOD, None, "think")
@example('<|open|>think tool="f"', None, "think")
@settings(max_examples=400, deadline=None)
def test_any_text_gives_one_result_for_every_cut(text, data, channel):
    """P03: random three-way cuts and single characters, on right and wrong markup; no event is ever taken back."""
    want = read([text], channel)
    assert read(list(text), channel) == want
    cuts = sorted(data.draw(st.integers(0, len(text))) for _ in range(2)) if data else [7, 30]
    assert read([text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]], channel) == want


@given(st.lists(st.sampled_from(MISTAKES), max_size=14).map("".join))
@settings(max_examples=200, deadline=None)
def test_tokens_and_text_agree(text):
    """The same markup as control tokens, one id at a time, gives what the text gives."""
    parser = Parser(tokenizer=TOKENIZER)
    events = [event for i in TOKENIZER.encode_control(text) for event in parser.feed_ids([i])] + parser.finish()
    assert check(parser, events) == read([text])


PROSE = "I should look."
LOOK = {"name": "f", "arguments": '{"q": "x"}'}
F = call("f", argument("q", "string", "x"))


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (f"{PROSE}{TOOLS}{F}{TOOLS_END}{END}", "", PROSE, [LOOK]),
        (f"{PROSE}{RESPONSE}Hi{RESPONSE_END}{TOOLS}{F}{TOOLS_END}{END}", "Hi", PROSE, [LOOK]),
        (f"{PROSE}<|close|>think{RESPONSE}Hi{RESPONSE_END}{END}", "Hi", PROSE, []),
        (f"{PROSE}<|close|>think{TOOLS}{F}{TOOLS_END}{END}", "", PROSE, [LOOK]),
        (f"{PROSE}{RESPONSE_END}{TOOLS}{F}{TOOLS_END}{END}", "", PROSE, [LOOK]),
        (f"{PROSE}{TOOLS}{F}", "", PROSE, [LOOK]),
        (f"{PROSE}{TOOLS}{F.removesuffix('<|close|>call<|sep|>')}", "", PROSE, [LOOK]),
        (
            f'{PROSE}{TOOLS}<|open|>call tool="f" index="1"<|sep|><|open|>argument key="q" type="string"<|sep|>x',
            "",
            PROSE,
            [LOOK],
        ),
        (f"{PROSE}{F}{END}", "", PROSE, [LOOK]),
        (f"{PROSE}{THINK_END}{F}{F}{END}", "", PROSE, [LOOK, LOOK]),
        (f"{PROSE}{THINK_END}{TOOLS}{F.replace('<|close|>argument<|sep|>', '')}{END}", "", PROSE, [LOOK]),
        (f"{PROSE}{TOOLS}{F.split('<|close|>')[0]}{F}{TOOLS_END}{END}", "", PROSE, [LOOK, LOOK]),
        (f"I should <|close|>thinking<|sep|>look.<|open|>toolset<|sep|>{THINK_END}{RESPONSE}Hi{END}", "Hi", PROSE, []),
        (f"{PROSE}<|close|>think\nHi<|sep|>{END}", "Hi", PROSE, []),
        (f"{PROSE}{THINK_END}Hi{END}", "Hi", PROSE, []),
        (f"{PROSE}{THINK_END}\n\n{RESPONSE}Hi{RESPONSE_END}\n{END}", "Hi", PROSE, []),
        (f"{PROSE}<|close|>think\nHi{END}", "Hi", PROSE, []),
        (f"{PROSE}{THINK_END}<|open|>responseHi{RESPONSE_END}{END}", "Hi", PROSE, []),
        (f"{PROSE}{THINK_END}{RESPONSE}Hi", "Hi", PROSE, []),
        (f"{PROSE}{THINK_END}{RESPONSE}Hi<|end_of_msg|>never", "Hi", PROSE, []),
        (f"{PROSE}{THINK_END}{RESPONSE}Hi{END}never", "Hi", PROSE, []),
        (f"{PROSE}{THINK_END}{RESPONSE}Hi<|close|>thi", "Hi", PROSE, []),
        (f"{PROSE}{THINK_END}{RESPONSE}Hi{RESPONSE_END}{TOOLS}<|open|>call to", "Hi", PROSE, []),
        (f'{PROSE}{THINK_END}{RESPONSE}Hi{RESPONSE_END}<|open|>message role="user"<|sep|>me', "Hi", PROSE, []),
        (
            f'<|open|>message role="assistant"<|sep|>{THINK}{PROSE}{THINK_END}{RESPONSE}Hi{RESPONSE_END}{END}',
            "Hi",
            PROSE,
            [],
        ),
        (f"{PROSE}{THINK_END}{THINK}{PROSE}{THINK_END}{RESPONSE}Hi{END}", "Hi", PROSE * 2, []),
        (f"{PROSE}<|sep|><|open|>zoo<|sep|><|close|>zoo<|sep|>{THINK_END}{RESPONSE}Hi{END}", "Hi", PROSE, []),
        (f"{PROSE}{THINK_END}{TOOLS}{call('f', '{}')}{END}".replace("{}", '{"q": "x"}'), "", PROSE, [LOOK]),
        (f"{PROSE}{THINK_END}{TOOLS}{F.replace('<|sep|><|open|>', '<|open|>')}{END}", "", PROSE, [LOOK]),
        (
            f"{PROSE}{THINK_END}{TOOLS}{F.replace('string' + chr(34) + '<|sep|>', 'string' + chr(34))}{END}",
            "",
            PROSE,
            [LOOK],
        ),
        ("", "", "", []),
    ],
)
def test_missing_markers_are_recovered(text, content, reasoning, calls):
    """P01: tool calls are present, reasoning holds only the prose, no marker is left; streaming gives the same."""
    message = read([text])
    assert message == read(list(text))
    assert message["content"] == content and message.get("reasoning_content", "") == reasoning
    assert [made["function"] for made in message.get("tool_calls", [])] == calls
    assert "<|" not in json.dumps(message)


def test_a_tag_without_separator_does_not_hold_the_text_back():
    """P01: what follows a dropped separator streams on; P03: a tag that never ends is given up at one place."""
    parser = Parser()
    assert parser.feed("why<|close|>think\nHi") == [("reasoning", "why", -1), ("content", "Hi", -1)]
    assert parser.feed(" you") == [("content", " you", -1)]
    text = '<|open|>call tool="f"' + "x" * 10_000 + "<|open|>think<|sep|>" + " " * 5000 + "y"
    want = read([text], "")
    assert Parser("").feed(text[:5000]) == [("call", "f", 0)]
    assert want == read(list(text), "") == read([text[:4096], text[4096:]], "")
    function = want["tool_calls"][0]["function"]
    assert function == {"name": "f", "arguments": "x" * 10_000} and want["reasoning_content"] == " " * 5000 + "y"


def test_thinking_off_is_parsed_from_the_response_channel():
    assert read([f"Hi{RESPONSE_END}{END}"], "response") == {"role": "assistant", "content": "Hi"}
    late = read([f"{PROSE}{THINK_END}{RESPONSE}Hi{RESPONSE_END}{END}"], "response")
    assert late == {"role": "assistant", "content": PROSE + "Hi"}


@pytest.mark.parametrize(
    ("text", "complete", "reason"),
    [
        (f"a{THINK_END}{RESPONSE}b{RESPONSE_END}{END}", True, "stop"),
        (f"a{THINK_END}{RESPONSE}b", False, "length"),
        (f"a{THINK_END}{RESPONSE}b<|end_of_msg|>", True, "stop"),
        (f"a{TOOLS}{F}", False, "tool_calls"),
    ],
)
def test_finish_reasons(text, complete, reason):
    """P01: a turn with calls finishes for its tool calls."""
    parser = Parser()
    parser.feed(text)
    parser.finish()
    assert (parser.complete, parser.finish_reason) == (complete, reason)


@pytest.mark.parametrize(
    ("kind", "value", "want"),
    [
        ("number", "3", "3"),
        ("string", "007", '"007"'),
        ("string", "true", '"true"'),
        ("object", '{"x":1e2}', '{"x":1e2}'),
        ("string", "", '""'),
        ("string", '" & < >\n👩', '"\\" & < >\\n👩"'),
        ("boolean", "true", "true"),
        ("null", "null", "null"),
        ("array", "[1,2]", "[1,2]"),
        ("number", "oops", '"oops"'),
        ("number", "NaN", '"NaN"'),
        ("object", "[" * 100_000, '"' + "[" * 100_000 + '"'),
        ("number", "", '""'),
        ("", "x", '"x"'),
        ("date", "x", '"x"'),
    ],
)
def test_argument_types_and_bytes(kind, value, want):
    """P05: a string stays a string, other values keep their bytes, what is no JSON arrives as a string."""
    text = TOOLS + call("f", argument("k", kind, value)) + TOOLS_END + END
    pieces = [text] if len(text) > 10_000 else list(text)
    message = read(pieces, "")
    assert message == read([text], "")
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert arguments == f'{{"k": {want}}}' and "k" in json.loads(arguments)


def test_names_with_quotes_and_brackets():
    """P05: a quote or < in a name does not break parsing."""
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": 'a"<b>&c', "arguments": {'k"&': 1}}}]}
    ]
    text = text_of(render(messages, effort=None, add_generation_prompt=False))
    for source in (text, render(messages, effort=None, add_generation_prompt=False)):
        function = parse(source).messages[0]["tool_calls"][0]["function"]
        assert function == {"name": 'a"<b>&c', "arguments": '{"k\\"&": 1}'}


def test_values_may_hold_other_markers_in_text_and_any_in_tokens():
    """P05: a value that contains the close marker is exact when tokens are read, for text only spells it."""
    text = TOOLS + call("f", argument("k", "string", "a<|sep|>b<|open|>think<|sep|><|close|>x")) + END
    arguments = read(list(text), "")["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"k": "a<|sep|>b<|open|>think<|sep|><|close|>x"}
    value = "a<|close|>argument<|sep|><|close|>call<|sep|><|end_of_msg|>b"
    messages = [
        {
            "role": "assistant",
            "content": value,
            "reasoning_content": value,
            "tool_calls": [{"function": {"name": "f", "arguments": {"k": value}}}],
        }
    ]
    segments = render(messages, effort=None, add_generation_prompt=False)
    ids, _ = encode_chat(TOKENIZER, segments)
    for source in (segments, ids):
        got = parse(source, tokenizer=TOKENIZER).messages[0]
        assert got["content"] == got["reasoning_content"] == value
        assert json.loads(got["tool_calls"][0]["function"]["arguments"]) == {"k": value}


def test_token_ids_of_cut_characters():
    """A05: a character cut by a control token or by the end gives one replacement, and no exception."""
    parser = Parser(tokenizer=TOKENIZER)
    ids = list("你".encode()[:2]) + TOKENIZER.encode_control(THINK_END + RESPONSE) + list("👩".encode()[:3])
    events = parser.feed_ids(ids) + parser.finish()
    assert [(event.kind, event.text) for event in events] == [("reasoning", "�"), ("content", "�")]


def test_parser_refusals():
    with pytest.raises(ValueError, match="channel: 'x' is unknown"):
        Parser("x")
    with pytest.raises(ValueError, match="token ids need the tokenizer"):
        Parser().feed_ids([1])
    with pytest.raises(ValueError, match="token ids need the tokenizer"):
        parse([1, 2])
