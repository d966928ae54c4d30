"""Grammars of an assistant's turn: JSON answers by schema, and tool calls by the tools' declarations, as Lark text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openk3.inputs.xtml import CLOSE, OPEN, SEP, escape

_KINDS = ("string", "number", "boolean", "null", "object", "array")
_SPACE = {"x-guidance": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,40}"}}  # a model may not fill an answer with it
_DEFINITIONS = ("$defs", "definitions", "$schema")


@dataclass(frozen=True)
class TurnRules:
    """What a turn may hold. `calls` is how many tool calls: (0, 0) none, (0, None) any, (1, 1) exactly one.

    `answer` is the schema of the content, None for free text. Calls that have to be, or that stand in place of an
    answer with a schema, come with no content before them.
    """

    thinking: bool
    tools: tuple[Mapping[str, Any], ...] = ()  # their `function` objects
    calls: tuple[int, int | None] = (0, 0)
    answer: Mapping[str, Any] | bool | None = None


def turn_grammar(rules: TurnRules) -> str:
    """The grammar of what follows the think channel's closing marker, or the response channel's opening.

    Markers are control tokens: text that spells one is text. The end of the message is the grammar's end.
    """
    out = _Lark()
    lead = f'"think" {SEP} {OPEN} "response" {SEP} ' if rules.thinking else ""
    tail = f'{CLOSE} "message" {SEP}'
    least, most = rules.calls
    tools = "" if most == 0 else _tools(out, rules)
    alone = f'{CLOSE} "response" {SEP} {tools}'
    if least:
        turns = [alone]
    elif rules.answer is None:
        turns = [f'TEXT {CLOSE} "response" {SEP} {tools and f"{tools}?"}']
    else:
        turns = [f'{out.json(rules.answer)} {CLOSE} "response" {SEP}', *([alone] if tools else [])]
    out.rules["turn"] = " | ".join(turns)
    return "\n".join(
        [f"start: {lead}turn {tail}", *(f"{name}: {body}" for name, body in out.rules.items()), "TEXT: /(.|\\n)*/", ""]
    )


def value_kinds(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """The JSON types that a value may have; all if the schema does not say."""
    found = _kinds(schema, root, {})
    return [kind for kind in _KINDS if kind in found] or list(_KINDS)


def _kinds(schema: Any, root: Mapping[str, Any], known: dict[str, set[str]]) -> set[str]:
    """Each reference is followed once: one that leads back to itself adds nothing."""
    if not isinstance(schema, Mapping):
        return set(_KINDS)
    if "$ref" in schema:
        reference = str(schema["$ref"])
        if reference not in known:
            known[reference] = set()
            known[reference] = _kinds(_referred(reference, root), root, known)
        return known[reference]
    if isinstance(schema.get("enum"), list) or "const" in schema:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]]
        return {_kind(value) for value in values}
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return {"number" if name == "integer" else str(name) for name in types}
    members = _members(schema)
    return set().union(*(_kinds(member, root, known) for member in members)) if members else set(_KINDS)


def _members(schema: Mapping[str, Any]) -> list[Any]:
    """Of a union."""
    members = schema.get("anyOf") or schema.get("oneOf")
    return members if isinstance(members, list) else []


class _Lark:
    """Rules by name; equal bodies are one rule."""

    def __init__(self) -> None:
        self.rules: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def rule(self, body: str) -> str:
        """The name of a rule with this body."""
        if body not in self._names:
            self._names[body] = f"r{len(self._names)}"
            self.rules[self._names[body]] = body
        return self._names[body]

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        """A rule for JSON that fits a schema."""
        given = {} if schema is True else {"not": {}} if schema is False else dict(schema)
        return self.rule("%json " + json.dumps({**_SPACE, **given}))


def _tools(out: _Lark, rules: TurnRules) -> str:
    call = out.rule(" | ".join(_call(out, tool) for tool in rules.tools))
    least, most = rules.calls
    number = "" if most == 1 else "+"
    return out.rule(f'{OPEN} "tools" {SEP} {call}{number} {CLOSE} "tools" {SEP}')


def _call(out: _Lark, tool: Mapping[str, Any]) -> str:
    head = json.dumps(f'call tool="{escape(str(tool["name"]))}" index="')
    arguments = _arguments(out, tool.get("parameters"))
    body = f'{OPEN} {head} /[1-9][0-9]{{0,3}}/ "\\"" {SEP} {arguments} {CLOSE} "call" {SEP}'
    return out.rule(" ".join(body.split()))


def _arguments(out: _Lark, schema: Any) -> str:
    """Declared arguments in their order; any arguments where nothing is declared and others are not forbidden."""
    if not isinstance(schema, Mapping) or not isinstance(schema.get("properties"), Mapping) or not schema["properties"]:
        closed = isinstance(schema, Mapping) and schema.get("additionalProperties") is False
        return "" if closed else f"{_any_argument(out)}*"
    required = schema.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    parts = []
    for key, value in schema["properties"].items():
        argument = out.rule(" | ".join(_argument(out, key, kind, value, schema) for kind in value_kinds(value, schema)))
        parts.append(argument if key in names else f"{argument}?")
    return " ".join(parts)


def _argument(out: _Lark, key: str, kind: str, schema: Any, root: Mapping[str, Any]) -> str:
    head = json.dumps(f'argument key="{escape(key)}" type="{kind}"')
    return out.rule(f'{OPEN} {head} {SEP} {_value(out, kind, schema, root)} {CLOSE} "argument" {SEP}')


def _value(out: _Lark, kind: str, schema: Any, root: Mapping[str, Any]) -> str:
    """Strings are written raw, everything else as JSON."""
    plain = schema if isinstance(schema, Mapping) else {}
    if kind == "string":
        choices = plain.get("enum", [plain["const"]] if "const" in plain else None)
        texts = [json.dumps(text) for text in choices if isinstance(text, str)] if isinstance(choices, list) else []
        return out.rule(" | ".join(texts)) if texts else "TEXT"
    if kind == "null":
        return '"null"'
    defs = {name: root[name] for name in _DEFINITIONS if name in root}
    kinds = value_kinds(schema, root)
    if len(kinds) == 1:
        return out.json({**defs, **plain})
    if isinstance(plain.get("enum"), list):
        return out.json({"enum": [value for value in plain["enum"] if _kind(value) == kind]})
    members = [member for member in _members(plain) if kind in value_kinds(member, root)]
    if members:
        return out.json({**defs, "anyOf": members})
    rest = {name: value for name, value in plain.items() if name != "$ref"}
    return out.json({**defs, **rest, "type": kind})


def _any_argument(out: _Lark) -> str:
    kinds = []
    for kind in _KINDS:
        value = "TEXT" if kind == "string" else out.json({"type": kind})
        kinds.append(f'"{kind}\\"" {SEP} {value}')
    return out.rule(
        f'{OPEN} "argument key=\\"" /[^"&<>\\n]{{1,64}}/ "\\" type=\\"" ({" | ".join(kinds)}) {CLOSE} "argument" {SEP}'
    )


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    place: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        if not isinstance(place, Mapping):
            return None
        place = place.get(name.replace("~1", "/").replace("~0", "~"))
    return place


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds: Sequence[tuple[type, str]] = ((str, "string"), (int, "number"), (float, "number"), (dict, "object"))
    return "null" if value is None else next((name for kind, name in kinds if isinstance(value, kind)), "array")
