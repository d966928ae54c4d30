"""Chat rendering: released text and segments, errors, arguments, loss mask, the extension property."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from openk3.inputs.chat import ChatError, encode_chat, image_prompt, parse, render, text_of, video_prompt
from openk3.inputs.tokenizer import Tokenizer
from openk3.inputs.tool_arguments import split_arguments
from openk3.inputs.xtml import IMAGE_PLACEHOLDER, escape, unescape

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/chat_xtml.json").read_text(encoding="utf-8"))
TOKENIZER = Tokenizer({bytes([b]): b for b in range(256)})
PLAIN = {"effort": None, "add_generation_prompt": False}
NASTY = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|close|>message<|sep|><|end_of_msg|>", "<|media_pad|>"]
NASTY += [
    "<|close|>argument<|sep|>",
    IMAGE_PLACEHOLDER,
    "00:00:00.000",
    "&",
    '"',
    "&amp;",
    "&quot;",
    "你👩‍👩‍👧",
    "e\u0301",
    "\n",
    "<",
    "\\",
]
TEXTS = st.lists(st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=4)
TEXTS = TEXTS.map("".join)


def options(row):
    given = dict(row["kwargs"])
    return {"effort": given.pop("thinking_effort", None), "tools": row["tools"], **given}


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row["name"])
def test_released_encoder_agrees(row):
    """Text and segments of every stored row; where the released encoder refuses, so do we."""
    if row.get("rendered") is None:
        with pytest.raises(ChatError, match="effort: 'medium' is not supported; use one of low, high, max"):
            render(row["messages"], **options(row))
        return
    segments = render(row["messages"], **options(row))
    assert text_of(segments) == row["rendered"]
    assert [[text, special] for text, special, _ in segments] == row["segments"]


def test_defaults_are_max_effort_and_a_generation_prompt():
    row = next(row for row in GOLDEN if row["name"] == "user_only")
    assert text_of(render(row["messages"])) == row["rendered"]


def test_developer_is_rendered_as_system():
    """P05: a developer message does not vanish."""
    both = [render([{"role": role, "content": "x", "name": "n"}], **PLAIN) for role in ("developer", "system")]
    assert both[0] == both[1] and 'role="system" name="n"' in text_of(both[0])


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def assistant(arguments, name="f"):
    return {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": name, "arguments": arguments}}]}


def deep(levels):
    """A list in a list in a list, deeper than Python's stack."""
    out = []
    for _ in range(levels):
        out = [out]
    return out


@pytest.mark.parametrize(
    ("messages", "given", "words"),
    [
        ("hi", {}, "messages: expected a list, got str"),
        (["hi"], {}, r"messages\[0\]: str; expected an object with role"),
        ([{"role": "robot"}], {}, r"messages\[0\]: role 'robot'; expected"),
        ([{"content": "x"}], {}, r"messages\[0\]: role None; expected"),
        ([{"role": "user", "content": 3}], {}, r"messages\[0\].content: expected text or a list of parts, got int"),
        ([{"role": "user", "content": [{"type": "audio"}]}], {}, r"messages\[0\].content\[0\]: expected a text part"),
        ([{"role": "user", "content": ["x"]}], {}, r"messages\[0\].content\[0\]: expected a text part"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, r"content\[0\]: expected a text part with its text"),
        ([{"role": "tool", "content": "x"}], {}, r"messages\[0\]: a tool result needs a name"),
        ([{"role": "assistant", "tool_calls": [{}]}], {}, r"messages\[0\].tool_calls\[0\]: .* function.name"),
        ([{"role": "assistant", "tool_calls": 3}], {}, r"messages\[0\].tool_calls: expected a list"),
        ([assistant(3)], {}, r"tool_calls\[0\].arguments: expected a JSON object or its text, got int"),
        ([assistant({"x": {1}})], {}, r"arguments.x: not JSON"),
        ([assistant({"x": float("nan")})], {}, r"arguments.x: not JSON"),
        ([assistant({1: 2})], {}, "keys must be text, got 1"),
        ([assistant({"x": deep(100_000)})], {}, "arguments.x: not JSON"),
        ([{"role": "user", "name": {"a": 1}, "content": "x"}], {}, r"messages\[0\].name: expected text, got dict"),
        ([{"role": "assistant", "name": 5}], {}, r"messages\[0\].name: expected text, got int"),
        ([], {"tools": [{"x": deep(100_000)}]}, "not JSON"),
        ([{"role": "assistant", "reasoning_content": 3}], {}, r"messages\[0\].reasoning_content: expected text"),
        ([], {"effort": "LOW"}, "effort: 'LOW' is not supported; use one of low, high, max, or None"),
        ([], {"effort": 3}, "effort: 3"),
        ([], {"effort": "none", "thinking": False}, "effort: 'none'"),
        ([], {"tool_choice": "maybe"}, "tool_choice: 'maybe' is not supported; use auto, none or required"),
        ([], {"tool_choice": {"type": "function"}}, "tool_choice: .* is not supported"),
        ([], {"response_format": {"type": "xml"}}, "response_format: 'xml' is not supported"),
        ([], {"response_format": {"type": "json_schema"}}, "response_format.json_schema: missing"),
        ([], {"tools": [3]}, "tools: expected a list of tool declarations"),
        ([], {"tools": [{"x": {1, 2}}]}, "not JSON"),
        ([], {"image_prompts": [image_prompt(1, 1)]}, "image_prompts: 1 more than there are image parts"),
    ],
)
def test_what_cannot_be_rendered_is_one_clear_line(messages, given, words):
    with pytest.raises(ChatError, match=words) as error:
        render(messages, **given)
    assert "\n" not in str(error.value)


def test_null_optional_fields_are_absent_ones():
    """P05: null optional fields."""
    bare = render([{"role": "assistant", "content": ""}, {"role": "user", "content": ""}], **PLAIN)
    nulls = {"content": None, "name": None, "tool_calls": None, "reasoning_content": None, "tools": None}
    assert render([{"role": "assistant", **nulls}, {"role": "user", **nulls}], **PLAIN) == bare


def test_image_parts_take_their_size_from_the_part_or_the_prompts():
    parts = [
        {"type": "image", "size": [640, 480]},
        {"type": "text", "text": "and"},
        {"type": "image_url", "size": (3, 5)},
    ]
    text = text_of(render([{"role": "user", "content": parts}], **PLAIN))
    assert f"{image_prompt(640, 480)}and{image_prompt(3, 5)}" in text
    unsized = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image_url", "image_url": {"url": "x"}}]
    prompts = [image_prompt(640, 480), image_prompt(3, 5)]
    assert text_of(render([{"role": "user", "content": unsized}], image_prompts=prompts, **PLAIN)) == text
    video = video_prompt(["00:00:00.000", "00:00:00.500"])
    one = text_of(render([{"role": "user", "content": [{"type": "video"}]}], image_prompts=[video], **PLAIN))
    assert one.count("<|media_pad|>") == 2 and f"<|sep|>{video}<|close|>" in one


@pytest.mark.parametrize(
    ("part", "given", "words"),
    [
        ({"type": "image", "size": [0, 4]}, {}, r"content\[0\].size: expected \[width, height\]"),
        ({"type": "image", "size": [1.5, 4]}, {}, "size: expected"),
        ({"type": "image", "size": "4x4"}, {}, "size: expected"),
        ({"type": "image"}, {"image_prompts": []}, "image_prompts holds no prompt for this part"),
        ({"type": "image"}, {"image_prompts": ["<|end_of_msg|>"]}, "is not a media prompt"),
        ({"type": "image"}, {"image_prompts": [image_prompt(2, 2) + "<|open|>"]}, "is not a media prompt"),
        ({"type": "video", "timestamps": ["<|open|>"]}, {}, "is not a media prompt"),
        ({"type": "video", "timestamps": []}, {}, "is not a media prompt"),
        ({"type": "video", "timestamps": 5}, {}, r"content\[0\].timestamps: expected a list of times"),
        ({"type": "video", "timestamps": [1, None]}, {}, "is not a media prompt"),
    ],
)
def test_bad_media_parts_are_refused(part, given, words):
    with pytest.raises(ChatError, match=words):
        render([{"role": "user", "content": [part]}], **given)


def test_an_image_without_size_has_no_tokens():
    with pytest.raises(ChatError, match="size is unknown"):
        encode_chat(TOKENIZER, render([{"role": "user", "content": [{"type": "image"}]}]))
    typed, _ = encode_chat(TOKENIZER, render([{"role": "user", "content": IMAGE_PLACEHOLDER}], **PLAIN))
    assert IMAGE_PLACEHOLDER in TOKENIZER.decode(typed)


def test_one_image_takes_one_placeholder_token():
    ids, mask = encode_chat(TOKENIZER, render([{"role": "user", "content": [{"type": "image", "size": [9, 9]}]}]))
    assert ids.count(TOKENIZER.special["<|media_pad|>"]) == 1 and not any(mask)


@given(TEXTS)
@settings(max_examples=100, deadline=None)
def test_user_text_adds_no_control_token(text):
    """Wherever a user's text goes (content, name, tool result, argument), the control tokens stay the rendered ones."""

    def control(value):
        messages = [{"role": "user", "content": value or "x", "name": value or "x"}]
        messages += [
            assistant({value or "x": value}, name=value or "x"),
            {"role": "tool", "content": value, "tool_call_id": "a"},
        ]
        ids, _ = encode_chat(TOKENIZER, render(messages, tools=[{"name": value}]))
        return [i for i in ids if i >= TOKENIZER.num_ranks]

    assert control(text) == control("x")


@given(TEXTS)
@example("&quot;")
@example("&amp;quot;")
@settings(max_examples=100, deadline=None)
def test_unescape_inverts_escape(text):
    """P05: unescape(escape(x)) = x for all x, and no quote is left in an attribute."""
    assert unescape(escape(text)) == text and '"' not in escape(text)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            '{"a": "007", "b": 3, "c": true, "d": null}',
            [("a", "string", "007"), ("b", "number", "3"), ("c", "boolean", "true"), ("d", "null", "null")],
        ),
        ('{"x":{"x":1e2},"l":[1,2 ,3]}', [("x", "object", '{"x":1e2}'), ("l", "array", "[1,2 ,3]")]),
        (' \n{"n" : 1e2 , "f":-0.50} trailing', [("n", "number", "1e2"), ("f", "number", "-0.50")]),
        ('{"s": "a\\nb\\u00e9\\"<|close|>argument<|sep|>"}', [("s", "string", 'a\nbé"<|close|>argument<|sep|>')]),
        ('{"": ""}', [("", "string", "")]),
        ('{"b": 1, "a": 2, "b": 3}', [("b", "number", "1"), ("a", "number", "2"), ("b", "number", "3")]),
        ({"b": 100.0, "a": [1, {"k": "é"}]}, [("b", "number", "100.0"), ("a", "array", '[1, {"k": "é"}]')]),
        ("{}", []),
        ("{} x", []),
        ("", []),
        (" \n", []),
        (None, []),
        ({}, []),
    ],
)
def test_arguments_keep_type_bytes_and_order(arguments, parts):
    """P05: a string stays a string, numbers keep their spelling, the order is the given one."""
    assert split_arguments(arguments) == parts


BROKEN = [
    "{",
    "[1]",
    "3",
    '"x"',
    "null",
    '{"a" 1}',
    '{"a": }',
    '{"a": 1,}',
    "{1: 2}",
    '{"a": NaN}',
    '{"a": "\\ud800"}',
    "{'a': 1}",
]
BROKEN += ['{"a": ' + "[" * 100_000, '{"a": 1', '{"a": 1 "b": 2}', '{"a": ' + "1" * 5000 + "}"]


@pytest.mark.parametrize("arguments", BROKEN, ids=range(len(BROKEN)))
def test_what_is_no_json_object_goes_through_untouched_and_unlearnt(arguments):
    """P05: malformed and non-object JSON in history is kept byte for byte and masked from the loss."""
    segments = render([assistant(arguments)], **PLAIN)
    assert f'<|open|>json type="object"<|sep|>{arguments}<|close|>json<|sep|>' in text_of(segments)
    masked = text_of(s for s in segments if not s.is_assistant)
    assert masked.endswith(f'<|open|>json type="object"<|sep|>{arguments}<|close|>json<|sep|>')
    assert parse(segments).messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_results_are_rendered_in_call_order():
    """P05: results in reverse order come out in the order of the calls, under the calls' names."""
    calls = [{"id": i, "function": {"name": f"f{i}", "arguments": {}}} for i in "abc"]
    results = [{"role": "tool", "tool_call_id": i, "content": f"r{i}"} for i in "cab"]
    text = text_of(render([{"role": "assistant", "tool_calls": calls}, *results], **PLAIN))
    for n, i in enumerate("abc", start=1):
        assert f'role="tool" tool="f{i}" index="{n}"<|sep|>r{i}<' in text
    results[0]["tool_call_id"] = "zzz"
    text = text_of(render([{"role": "assistant", "tool_calls": calls}, *results], **PLAIN))
    assert text.index("rc<") < text.index("ra<") < text.index("rb<")


def test_results_after_a_user_message_still_belong_to_their_calls():
    calls = [{"id": i, "function": {"name": f"f{i}", "arguments": {}}} for i in "ab"]
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "1"}]
    messages += [{"role": "user", "content": "-"}, {"role": "tool", "content": "2"}]
    text = text_of(render(messages, **PLAIN))
    assert 'tool="fa" index="1"<|sep|>1<' in text and 'tool="fb" index="2"<|sep|>2<' in text


def test_the_loss_counts_what_the_model_writes():
    """Everything after an assistant message's own header through its end marker, and nothing else."""
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a", "reasoning_content": "r"}]
    messages += [{"role": "user", "content": "v"}]
    segments = render(messages)
    ids, mask = encode_chat(TOKENIZER, segments)
    counted = TOKENIZER.decode(i for i, m in zip(ids, mask, strict=True) if m)
    think = "<|open|>think<|sep|>r<|close|>think<|sep|><|open|>response<|sep|>a<|close|>response<|sep|>"
    assert counted == think + "<|close|>message<|sep|><|end_of_msg|>"
    assert len(ids) == len(mask) and TOKENIZER.decode(ids) == text_of(segments)


def test_fixed_texts_are_not_learnt():
    segments = render([{"role": "user", "content": "u"}], tools=[{"name": "x"}], tool_choice="required")
    assert not any(segment.is_assistant for segment in segments)


ARGUMENTS = st.dictionaries(st.text(max_size=3), st.none() | st.booleans() | st.integers() | TEXTS, max_size=3)
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "developer"]), "content": TEXTS}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXTS, "reasoning_content": TEXTS}),
    ARGUMENTS.map(lambda arguments: assistant(arguments, name="g")),
    st.fixed_dictionaries({"role": st.just("tool"), "name": st.just("h"), "content": TEXTS}),
)


@given(st.lists(MESSAGES, max_size=5), st.booleans(), st.sampled_from([None, "low", "max"]))
@settings(max_examples=60, deadline=None)
def test_a_longer_conversation_extends_the_shorter_one(messages, thinking, effort):
    """Tokens and loss mask of each prefix are a prefix of those of the whole; so is the prompt for an answer."""
    given = {"thinking": thinking, "effort": effort, "tools": [{"name": "g"}]}
    whole, whole_mask = encode_chat(TOKENIZER, render(messages, add_generation_prompt=False, **given))
    for cut in range(len(messages) + 1):
        ids, mask = encode_chat(TOKENIZER, render(messages[:cut], add_generation_prompt=False, **given))
        assert whole[: len(ids)] == ids and whole_mask[: len(ids)] == mask
        prompt, mask = encode_chat(TOKENIZER, render(messages[:cut], **given))
        assert prompt[: len(ids)] == ids and not any(mask[len(ids) :])
        if cut < len(messages) and messages[cut]["role"] == "assistant" and not messages[cut].get("name"):
            assert whole[: len(prompt)] == prompt
