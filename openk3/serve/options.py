"""Options of a conversation: tools, tool choice, format, effort and thinking, checked, and as rules for the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openk3.serve.errors import bad_request
from openk3.serve.grammar import TurnRules
from openk3.serve.prompts import Options

MAX_TOOLS = 1024
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,256}")


@dataclass(frozen=True)
class Choice:
    """Which tools the answer may call: mode auto, none or required, and one tool's name if only that may be."""

    mode: str = "auto"
    name: str | None = None
    parallel: bool = True


def checked_tools(tools: Sequence[Mapping[str, Any]] | None, field: str = "tools") -> list[dict[str, Any]]:
    """OpenAI's nested declarations, names checked. Raises ApiError naming the tool."""
    checked: list[dict[str, Any]] = []
    if tools is not None and len(tools) > MAX_TOOLS:
        raise bad_request(field, f"at most {MAX_TOOLS} tools")
    for n, tool in enumerate(tools or ()):
        where = f"{field}[{n}]"
        if tool.get("type", "function") != "function":
            raise bad_request(f"{where}.type", f"{tool.get('type')!r} is not supported; use 'function'")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise bad_request(f"{where}.function", "missing; it must hold name, description and parameters")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise bad_request(f"{where}.function.name", "must be a text of 1 to 256 printable characters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise bad_request(f"{where}.function.parameters", "must be a JSON Schema object")
        if any(name == other["function"]["name"] for other in checked):
            raise bad_request(f"{where}.function.name", f"{name!r} is declared twice")
        checked.append({**tool, "type": "function", "function": dict(function)})
    return checked


def checked_choice(choice: Any, tools: Sequence[Mapping[str, Any]], parallel: bool | None) -> Choice:
    """OpenAI's tool_choice: auto, none, required, or one function. Raises ApiError for a choice among no tools."""
    found = Choice(parallel=parallel is not False)
    if choice is None:
        return found
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        inner = choice.get("function", choice)
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if not any(tool["function"]["name"] == name for tool in tools):
            raise bad_request("tool_choice", f"{name!r} is not among the tools")
        return replace(found, mode="required", name=str(name))
    if choice not in ("auto", "none", "required"):
        raise bad_request("tool_choice", "use auto, none, required, or {type: function, function: {name}}")
    if choice == "required" and not tools:
        raise bad_request("tool_choice", "required, but there are no tools")
    return replace(found, mode=choice)


def turn_rules(options: Options, choice: Choice) -> TurnRules | None:
    """What has to be enforced while the answer is written; None if nothing has to.

    Unless asked for by tool_choice, parallel_tool_calls false, `strict` or a format, the model writes freely.
    """
    functions = [tool["function"] for tool in options.tools or ()]
    if choice.name is not None:
        functions = [function for function in functions if function["name"] == choice.name]
    kind = (options.response_format or {}).get("type", "text")
    answer: Mapping[str, Any] | bool | None = None
    if kind == "json_object":
        answer = {"type": "object"}
    elif kind == "json_schema" and options.response_format is not None:
        answer = options.response_format["json_schema"]["schema"]
    is_strict = any(function.get("strict") is True for function in functions)
    bound = choice.mode != "auto" or (bool(functions) and (not choice.parallel or is_strict))
    if answer is None and not bound:
        return None
    least = 1 if choice.mode == "required" else 0
    most = 0 if choice.mode == "none" or not functions else None if choice.parallel else 1
    return TurnRules(options.thinking, tuple(functions), (least, most), answer)
