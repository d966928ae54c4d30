"""Chat round trips: released prompts and any conversation read back from segments, tokens and text."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.inputs.chat import ChatError, encode_chat, parse, render, text_of
from openk3.inputs.tokenizer import Tokenizer
from openk3.inputs.xtml import TOOLS_TEXT

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/chat_xtml.json").read_text(encoding="utf-8"))
GOLDEN = [row for row in GOLDEN if row.get("rendered")]
TOKENIZER = Tokenizer({bytes([b]): b for b in range(256)})
END = "<|close|>message<|sep|><|end_of_msg|>"


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row["name"])
def test_released_prompts_read_back(row):
    """render(parse(x)) = x for every stored prompt, from its text, its segments and its tokens."""
    ids = TOKENIZER.encode_segments([tuple(segment) for segment in row["segments"]])
    for source in (row["rendered"], row["segments"], ids):
        if isinstance(source, list) and source is ids and "image_placeholder" in row["name"]:
            continue  # a placeholder has no token
        read_back = parse(source, tokenizer=TOKENIZER)
        segments = render(read_back.messages, **read_back.options())
        assert [[text, special] for text, special, _ in segments] == row["segments"]


NAMES = st.sampled_from(["f", 'g"&<', "h i", "你"])
NASTY = [
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    END,
    "<|media_begin|>image 2x2",
    "<|close|>argument<|sep|>",
    "00:00:00.000",
    "&",
    '"',
    "👩‍👩‍👧",
    "\n",
]
TEXTS = st.lists(
    st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=4
).map("".join)
SAFE = st.text(st.sampled_from('ab <|>&"\n你👩'), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | SAFE,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(SAFE, inner, max_size=2),
    max_leaves=3,
)
MEDIA = st.just({"type": "image", "size": [3, 4]}) | st.just(
    {"type": "video", "timestamps": ["00:00:00.000", "00:00:00.500"]}
)


@st.composite
def conversations(draw, texts):
    """Messages in the form `parse` gives: numbered call ids, results in order, no empty optional fields."""
    messages, num_calls = [], 0

    def content():
        parts = []
        for _ in range(draw(st.integers(0, 2))):
            if text := draw(texts):
                parts.append({"type": "text", "text": text})
            parts.append(draw(MEDIA))
        text = draw(texts)
        return parts + ([{"type": "text", "text": text}] if text else []) if parts else text

    for _ in range(draw(st.integers(0, 3))):
        role = draw(st.sampled_from(["user", "system", "assistant", "tools"]))
        named = {"name": draw(NAMES)} if draw(st.booleans()) else {}
        if role == "tools":
            messages.append({"role": "system", "tools": [{"name": draw(texts)}]})
        elif role != "assistant":
            messages.append({"role": role, "content": content(), **named})
        else:
            message = {"role": "assistant", "content": draw(texts), **named}
            if reasoning := draw(texts):
                message["reasoning_content"] = reasoning
            made = [
                (draw(NAMES), draw(st.dictionaries(SAFE, VALUES, max_size=2))) for _ in range(draw(st.integers(0, 2)))
            ]
            calls = [
                {
                    "id": f"call_{num_calls + n}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
                }
                for n, (name, arguments) in enumerate(made)
            ]
            num_calls += len(calls)
            messages.append({**message, "tool_calls": calls} if calls else message)
            for made_call in calls[: draw(st.integers(0, 2))]:
                result = {"role": "tool", "content": content(), "tool_call_id": made_call["id"]}
                messages.append({**result, "name": made_call["function"]["name"]})
    return messages


OPTIONS = st.fixed_dictionaries(
    {
        "tools": st.sampled_from(
            [None, [{"type": "function", "function": {"name": "f", "b": 1, "a": {"d": 1, "c": "é"}}}]]
        ),
        "effort": st.sampled_from([None, "low", "high", "max"]),
        "tool_choice": st.sampled_from([None, "required", "none"]),
        "response_format": st.sampled_from(
            [None, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"b": [1], "a": "x"}}}]
        ),
        "add_generation_prompt": st.booleans(),
    }
)


@given(conversations(TEXTS), OPTIONS)
@settings(max_examples=120, deadline=None)
def test_parse_inverts_render(messages, options):
    """P05: parse(render(m)) = m from segments and from tokens, whatever the texts spell; options come back too."""
    segments = render(messages, **options)
    ids, _ = encode_chat(TOKENIZER, segments)
    for source in (segments, ids):
        got = parse(source, tokenizer=TOKENIZER)
        assert got.messages == messages
        assert got.options() == {"thinking": True, **options}
        assert render(got.messages, **got.options()) == segments


@given(conversations(SAFE), OPTIONS)
@settings(max_examples=60, deadline=None)
def test_parse_inverts_render_from_text(messages, options):
    """The same from plain text, where contents do not spell markers."""
    got = parse(text_of(render(messages, **options)))
    assert got.messages == messages and got.options() == {"thinking": True, **options}


@given(conversations(SAFE))
@settings(max_examples=30, deadline=None)
def test_thinking_off_reads_back(messages):
    messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
    segments = render(messages, thinking=False)
    got = parse(segments)
    assert got.messages == messages and not got.thinking and got.add_generation_prompt
    assert render(got.messages, **got.options()) == segments


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello", "message 0: expected <|open|>message with a role"),
        ("<|open|>", "message 0: expected"),
        ('<|open|>message role="robot"<|sep|>', "message 0: expected"),
        ('<|open|>message role="user"<|sep|>x<|close|>message<|sep|>', "message 0: the user message has no end"),
        (f'<|open|>message role="system" type="odd"<|sep|>x{END}', "odd: unknown option message 'x'"),
        (
            f'<|open|>message role="system" type="tool-declare"<|sep|>{TOOLS_TEXT}x{END}',
            "tool-declare: not JSON",
        ),
    ],
)
def test_prompts_that_are_no_xtml_are_refused(text, words):
    with pytest.raises(ChatError) as error:
        parse(text)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_an_unfinished_answer_reads_as_far_as_it_goes():
    text = text_of(render([{"role": "user", "content": "q"}])) + "why<|close|>think<|sep|><|open|>response<|sep|>beca"
    got = parse(text)
    assert got.messages[-1] == {"role": "assistant", "content": "beca", "reasoning_content": "why"}
    assert not got.add_generation_prompt
