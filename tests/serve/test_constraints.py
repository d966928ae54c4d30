"""Constrained decoding: what a grammar lets through, and that a random model cannot but answer in form."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import BYTES, CLOSE, END, MODEL, OPEN, SEP, Live, turn

from openk3.serve.constraints import Constraints, GrammarError
from openk3.serve.grammar import TurnRules, turn_grammar, value_kinds

CONSTRAINTS = Constraints(BYTES)
HEAD = f"hm{CLOSE}think{SEP}{OPEN}response{SEP}"
CLOSED = f"{CLOSE}response{SEP}{CLOSE}message{SEP}{END}"
POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}
WEATHER = {
    "name": 'g"e&t',
    "parameters": {
        "type": "object",
        "$defs": {"point": POINT},
        "properties": {
            "city": {"type": "string"},
            "days": {"type": ["integer", "null"]},
            "unit": {"enum": ["C", "F", 3]},
            "at": {"$ref": "#/$defs/point"},
        },
        "required": ["city"],
    },
}
FREE = {"name": "free"}


def calls(*texts: str) -> str:
    """The tools channel behind an empty answer."""
    return f"{CLOSE}response{SEP}{OPEN}tools{SEP}{''.join(texts)}{CLOSE}tools{SEP}{CLOSE}message{SEP}{END}"


def call(name: str, *arguments: tuple[str, str, str]) -> str:
    """One call."""
    inner = "".join(f'{OPEN}argument key="{k}" type="{t}"{SEP}{v}{CLOSE}argument{SEP}' for k, t, v in arguments)
    return f'{OPEN}call tool="{name}" index="1"{SEP}{inner}{CLOSE}call{SEP}'


def refused_at(rules: TurnRules, text: str) -> str | None:
    """What of a turn comes before the first token that is not allowed; None if all are."""
    constraint, ids = CONSTRAINTS.follow(rules), BYTES.encode_control(text)
    for place, token in enumerate(ids):
        allowed_V = constraint.allowed(ids[:place])
        assert allowed_V.shape == (BYTES.vocab_size,) and allowed_V.dtype == torch.bool
        if not allowed_V[token]:
            return BYTES.decode(ids[:place])
    return None


CITY = ("city", "string", "Zü{} 'x'\n")
GET = "g&quot;e&amp;t"


@pytest.mark.parametrize(
    ("rules", "good", "bad"),
    [
        (TurnRules(True, answer={"type": "object"}), HEAD + '{"a": [1e2, "é"]}' + CLOSED, (HEAD, "no")),
        (TurnRules(True, answer=POINT), HEAD + '{"x": 2}' + CLOSED, (HEAD + "{", "}")),
        (TurnRules(False, answer=True), "[null]" + CLOSED, ("[null]", "x")),
        (TurnRules(False), "free text" + CLOSED, (f"free text{CLOSE}response{SEP}", OPEN)),
        (TurnRules(True, (FREE,), (0, None)), f"{HEAD}hi{CLOSED}", (HEAD, END)),
        (
            TurnRules(True, (FREE,), (1, None)),
            HEAD + calls(call("free")),
            (HEAD, "I"),
        ),
        (
            TurnRules(True, (WEATHER, FREE), (1, None)),
            HEAD
            + calls(
                call(GET, CITY, ("days", "null", "null"), ("at", "object", '{"x":1}')),
                call("free", ("k", "array", "[1]")),
            ),
            (HEAD + calls(call(GET)).partition(f"{CLOSE}call")[0], CLOSE),
        ),
        (
            TurnRules(True, (WEATHER,), (1, 1)),
            HEAD + calls(call(GET, CITY, ("days", "number", "2"), ("unit", "string", "F"))),
            (HEAD + calls(call(GET, CITY)).partition(f"{CLOSE}tools")[0], OPEN),
        ),
        (
            TurnRules(True, (WEATHER,), (1, 1)),
            HEAD + calls(call(GET, CITY, ("unit", "number", "3"))),
            (
                HEAD + calls(call(GET, CITY, ("unit", "string", ""))).partition(f"{CLOSE}argument{SEP}{CLOSE}call")[0],
                "K",
            ),
        ),
        (TurnRules(False, (FREE,), (0, None), answer={"type": "array"}), calls(call("free")), ("[", "x")),
        (TurnRules(False, (FREE,), (0, None), answer={"type": "array"}), "[1]" + CLOSED, ("[1]", "x")),
    ],
)
def test_turns_that_fit_and_the_first_token_that_does_not(rules: TurnRules, good: str, bad: tuple[str, str]) -> None:
    """Reasoning is free; markers are control tokens; strings are raw, other values JSON; order is as declared."""
    assert refused_at(rules, good) is None
    assert refused_at(rules, bad[0] + bad[1]) == bad[0]


def test_reasoning_holds_no_marker_but_its_end() -> None:
    """A call inside the think channel (P01) cannot even begin where calls are enforced."""
    rules = TurnRules(True, (FREE,), (1, None))
    for mark in (OPEN, SEP, END):
        assert refused_at(rules, f"hm{mark}") == "hm"


def test_white_space_is_bounded() -> None:
    """A model that is made to write JSON may not fill its answer with blanks."""
    assert refused_at(TurnRules(False, answer={"type": "array"}), "[" + " " * 41) == "[" + " " * 40


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "nope"}, "Invalid type: nope"),
        ({"not": {}}, "not"),
        (False, "not"),
        ({"$ref": "https://example.com/x"}, "not present"),
        ({"type": "string", "pattern": "(?=x)"}, "regex parse error"),
        ({"enum": ["x" * 2**20]}, "make it smaller"),
    ],
)
def test_schemas_that_cannot_be_followed(schema: Any, message: str) -> None:
    """Refused when asked for, in one line, without fetching anything."""
    with pytest.raises(GrammarError, match=message) as error:
        CONSTRAINTS.follow(TurnRules(False, answer=schema))
    assert "\n" not in str(error.value)


def test_an_answer_may_go_back_and_compiled_grammars_are_shared() -> None:
    """Tokens are tried and taken back, as by drafts; two answers of one grammar do not meet."""
    rules = TurnRules(True, answer={"type": "array"})
    one, two = CONSTRAINTS.follow(rules), CONSTRAINTS.follow(rules)
    ids = BYTES.encode_control(HEAD + "[1,2]" + CLOSED)
    at = len(BYTES.encode_control(HEAD))
    want = [one.allowed(ids[:place]) for place in range(len(ids))]
    for place in (at + 5, at + 2, at, 1, at + 1, at + 4, 0, at + 3):
        assert torch.equal(one.allowed(ids[:place]), want[place])
    other = ids[: at + 1] + BYTES.encode("[")
    assert one.allowed(other)[ord("[")] and torch.equal(one.allowed(ids[: at + 2]), want[at + 2])
    assert torch.equal(two.allowed(ids[: at + 1]), want[at + 1])
    with pytest.raises(GrammarError):
        two.allowed(ids[:at] + BYTES.encode("x"))


def test_kinds_of_values() -> None:
    """By type, by values, by references and unions; endless references are all kinds."""
    root = {"$defs": {"a": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}, "x/y": {"const": None}}}
    assert value_kinds({"type": "integer"}, root) == ["number"]
    assert value_kinds({"enum": [1, "a", True, None, [], {}]}, root) == [
        "string",
        "number",
        "boolean",
        "null",
        "object",
        "array",
    ]
    assert value_kinds({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, root) == ["string", "null"]
    assert value_kinds({"$ref": "#/$defs/x~1y"}, root) == ["null"]
    assert (
        len(value_kinds({"$ref": "#/$defs/loop"}, root))
        == len(value_kinds({}, root))
        == len(value_kinds(True, root))
        == 6
    )


def test_names_cannot_break_out_of_the_grammar() -> None:
    """Quotes, backslashes and line ends of names are text in the grammar's literals."""
    evil = 'a" | TEXT\nstart: TEXT //\\'
    tool = {"name": evil, "parameters": {"type": "object", "properties": {evil: {"const": evil}}, "required": [evil]}}
    rules = TurnRules(False, (tool,), (1, 1))
    assert turn_grammar(rules).count("start:") == 1 + turn_grammar(rules).count("\\nstart:")
    shown = evil.replace('"', "&quot;")
    assert refused_at(rules, calls(call(shown, (shown, "string", evil)))) is None
    assert refused_at(rules, calls(call("other"))) is not None


PICK = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bern"]}}, "required": ["city"]}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from(["string", "#/$defs/a", "#", "a", "(", '"', "x\n"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "required", "enum", "const", "anyOf", "oneOf", "$ref", "$defs", "a", "items"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(
    st.dictionaries(st.sampled_from(["type", "properties", "required", "$defs", "anyOf", "enum"]), VALUES, max_size=4)
)
def test_any_schema_is_followed_or_refused(schema: dict[str, Any]) -> None:
    """As a tool's parameters and as the answer's: a grammar or one line, never another error."""
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"p": schema}, **schema}}
    for rules in (TurnRules(False, answer=schema), TurnRules(False, (tool,), (1, 1))):
        try:
            constraint = CONSTRAINTS.follow(rules)
            constraint.allowed([])
        except GrammarError as error:
            assert "\n" not in str(error)


def test_references_that_multiply_or_never_end() -> None:
    """Each is followed once, so that ten to the tenth are no more than ten; a chain that is too long is refused."""
    many = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 10} for n in range(10)}
    root = {"$defs": {**many, "a10": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a0"}]}}}
    assert value_kinds({"$ref": "#/$defs/a0"}, root) == ["string"]
    chain = {f"c{n}": {"$ref": f"#/$defs/c{n + 1}"} for n in range(5000)}
    parameters = {"type": "object", "properties": {"p": {"$ref": "#/$defs/c0"}}, "$defs": chain}
    with pytest.raises(GrammarError):
        CONSTRAINTS.follow(TurnRules(False, ({"name": "f", "parameters": parameters},), (1, 1)))


@pytest.mark.parametrize(
    "schema",
    [{"enum": []}, {"type": "string", "minLength": 5, "maxLength": 2}, {"type": "integer", "minimum": 5, "maximum": 3}],
)
def test_schemas_that_nothing_fits_are_the_clients_fault(live: Live, schema: dict[str, Any]) -> None:
    """400 at once or when it shows, whole and streamed; never a 5xx, and the engine goes on."""
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = live.chat("x", response_format=form, **OFF)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_schema", answer.text


TOOL: list[Any] = [{"type": "function", "function": {"name": "get", "parameters": PICK}}]
CHOICE = {"type": "function", "function": {"name": "get"}}
OFF = {"thinking": {"type": "disabled"}, "max_tokens": 600}


def test_a_schema_makes_any_model_answer_in_form(live: Live) -> None:
    """json_schema and json_object, whole and streamed, with and without reasoning before it."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["u", "v"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["a", "n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    message = live.chat("x", response_format=form, **OFF).json()["choices"][0]
    value = json.loads(message["message"]["content"])
    assert value["a"] in ("u", "v") and 0 <= value["n"] <= 9 and message["finish_reason"] == "stop"
    live.say("reason", f"because{CLOSE}")
    answer = live.chat("reason", response_format=form, max_tokens=600).json()["choices"][0]["message"]
    assert answer["reasoning_content"] == "because" and set(json.loads(answer["content"])) == {"a", "n"}
    live.say("object", turn('{"free": [1]}'))
    assert json.loads(
        live.chat("object", response_format={"type": "json_object"}, max_tokens=100).json()["choices"][0]["message"][
            "content"
        ]
    )


def test_a_tool_that_must_be_called_is(live: Live) -> None:
    """required and a named function, whole and streamed; exactly one where calls may not be parallel; none at all."""
    live.say("weather", f"{CLOSE}")
    for choice in ("required", CHOICE):
        fields = {"tools": TOOL, "tool_choice": choice, "parallel_tool_calls": False, "seed": 1, **OFF}
        answer = live.chat("weather", **fields).json()["choices"][0]
        (made,) = answer["message"]["tool_calls"]
        assert made["function"]["name"] == "get" and answer["finish_reason"] == "tool_calls"
        assert json.loads(made["function"]["arguments"])["city"] in ("Rome", "Bern")
        body = {"model": MODEL, "messages": [{"role": "user", "content": "weather"}], **fields}
        deltas = [event["choices"][0]["delta"] for event in live.events("/v1/chat/completions", body)[:-1]]
        pieces = [part["function"]["arguments"] for delta in deltas for part in delta.get("tool_calls", ())]
        assert "".join(pieces) == made["function"]["arguments"]
    whole = turn("", "", [("get", [])])
    live.say("never", whole[: whole.index(f"{OPEN}tools")])
    answer = live.chat("never", tools=TOOL, tool_choice="none", max_tokens=100).json()["choices"][0]
    assert "tool_calls" not in answer["message"] and answer["finish_reason"] == "stop"


def test_a_broken_schema_is_named(live: Live) -> None:
    """By the field that holds it."""
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}
    error = live.chat("x", response_format=form).json()["error"]
    assert (error["param"], error["code"]) == ("response_format", "invalid_schema")
    tool = [
        {
            "type": "function",
            "function": {
                "name": "f",
                "strict": True,
                "parameters": {"properties": {"a": {"not": {}, "type": "object"}}},
            },
        }
    ]
    assert live.chat("x", tools=tool).json()["error"]["param"] == "tools"
