"""Conversations made from docstrings: questions about functions, classes and modules, answered by their own authors."""

from __future__ import annotations

import ast
import random
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from openk3.data.local_text import TextFile

MAX_ANSWER = 240  # characters of an answer: a sentence or two
# How `openk3 chat` asks by default comes most often; the other forms keep every setting usable.
_MODES: tuple[tuple[int, dict[str, Any]], ...] = (
    (7, {"thinking": True, "effort": "max"}),
    (1, {"thinking": True, "effort": "high"}),
    (1, {"thinking": True, "effort": "low"}),
    (3, {"thinking": False}),
)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Exchange:
    """One question, what is known before answering, and the answer."""

    question: str
    reasoning: str
    answer: str


def exchanges(file: TextFile) -> list[Exchange]:
    """The questions that a Python file's docstrings answer; none for other files and for code that does not parse."""
    if not file.name.partition("#")[0].endswith(".py"):
        return []
    try:
        with warnings.catch_warnings():  # an invalid escape in somebody's string is not our business
            warnings.simplefilter("ignore")
            tree = ast.parse(file.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    module = _module_name(file.name)
    found: list[Exchange] = []
    summary = _summary(tree)
    if summary:
        found.append(Exchange(f"What is the module `{module}` for?", f"`{module}` is a module.", summary))
    for name, node, owner in _definitions(tree, module):
        found += _about(name, node, owner)
    return found


def conversations(files: Iterable[TextFile], seed: int = 0, max_turns: int = 4) -> Iterator[dict[str, Any]]:
    """Chat records, each of 1..max_turns exchanges about one file, in a fixed order for a seed.

    A record holds `messages` (user and assistant in turn, the last one assistant) and the template's `thinking` and
    `effort`; with thinking on, every answer comes after its `reasoning_content`. Every exchange is used once.
    """
    rng = random.Random(f"docstrings:{seed}")
    weights = [weight for weight, _ in _MODES]
    for file in files:
        rest = exchanges(file)
        rng.shuffle(rest)
        while rest:
            turns = [rest.pop() for _ in range(min(len(rest), rng.randint(1, max_turns)))]
            mode = rng.choices(_MODES, weights)[0][1]
            yield {"messages": _messages(turns, mode["thinking"]), **mode}


def _messages(turns: list[Exchange], thinking: bool) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn.question})
        reasoning = {"reasoning_content": turn.reasoning} if thinking else {}
        messages.append({"role": "assistant", "content": turn.answer, **reasoning})
    return messages


def _about(name: str, node: Definition, owner: str) -> list[Exchange]:
    """What can be asked about one definition."""
    summary = _summary(node)
    if isinstance(node, ast.ClassDef):
        kind, verb = "class", "is"
    else:
        kind, verb = "function", "does"
    known = f"`{name}` is a {kind} in `{owner}`."
    if summary is None:
        return []
    found = [Exchange(f"What {verb} `{name}`{' do' if verb == 'does' else ''}?", known, summary)]
    if not isinstance(node, ast.ClassDef):
        arguments = ast.unparse(node.args)
        if len(arguments) <= MAX_ANSWER:
            answer = f"`{node.name}({arguments})`"
            found.append(Exchange(f"How is `{name}` called?", known, answer))
    return found


def _definitions(tree: ast.Module, module: str) -> Iterator[tuple[str, Definition, str]]:
    """(dotted name, node, dotted owner) of module-level definitions and methods that are not private."""
    pending: list[tuple[str, ast.Module | ast.ClassDef]] = [(module, tree)]
    while pending:
        owner, parent = pending.pop(0)
        for node in parent.body:
            if isinstance(node, Definition) and not node.name.startswith("_"):
                name = f"{owner}.{node.name}"
                yield name, node, owner
                if isinstance(node, ast.ClassDef):
                    pending.append((name, node))


def _summary(node: ast.Module | Definition) -> str | None:
    """The docstring's first paragraph on one line, cut after a sentence to fit; None if it says too little."""
    text = ast.get_docstring(node)
    if not text:
        return None
    paragraph = " ".join(re.split(r"\n\s*\n", text.strip())[0].split())
    if len(paragraph) > MAX_ANSWER:
        cut = max(paragraph.rfind(end, 0, MAX_ANSWER) for end in (". ", "; ", ": "))
        if cut < 0:
            return None
        paragraph = paragraph[: cut + 1].rstrip(";:") if paragraph[cut] != "." else paragraph[: cut + 1]
    return paragraph if len(paragraph) >= 12 and " " in paragraph else None


def _module_name(path: str) -> str:
    """The dotted name of a file in a source tree: json/decoder.py is json.decoder."""
    return path.partition("#")[0].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
