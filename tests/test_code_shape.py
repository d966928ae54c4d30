"""Files stay small, functions stay short, names say something, and no word is left that belongs elsewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = ("openk3", "examples", "benchmarks")
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "base", "core"}
# The order of KDA's arguments is public: five tensors of the recurrence, the gate, and a step's state.
STABLE_SIGNATURES = {"recurrent_kda", "chunk_kda", "fused_kda", "step_kda"}
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".html", ".css", ".js", ".json", ""}
# Spelled in two parts, so that this file does not contain what it looks for.
FORBIDDEN_WORDS = re.compile(
    "|".join(("/wo" + "rk/", r"\.lib" + "rary/", "sub" + "agent", "/ro" + "ot/", "localhost:" + r"\d+/simple")),
    re.IGNORECASE,
)
STUBS = re.compile(
    "|".join(("NotImplemented" + "Error", "TO" + "DO", "FIX" + "ME", r"\bXX" + "X", "mark.sk" + "ip", "xf" + "ail"))
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parsed(path: Path) -> tuple[str, ast.Module]:
    """A source file's text and syntax tree."""
    text = path.read_text(encoding="utf-8")
    return text, ast.parse(text)


def sources(*folders: str) -> list[Path]:
    """Every Python file below the named folders."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert files, f"no sources under {folders}"
    return files


def functions(tree: ast.Module) -> Iterator[Function]:
    """Every function and method of a file, nested ones included."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def is_kernel(function: Function) -> bool:
    """Whether a decorator compiles the function for a GPU."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def num_lines(node: Function | ast.ClassDef) -> int:
    """Lines from the `def` or `class` line to the end."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def parameters(function: Function) -> tuple[int, int]:
    """(positional, all) parameters without `self` or `cls`."""
    positional = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    if positional[:1] in (["self"], ["cls"]):
        positional = positional[1:]
    return len(positional), len(positional) + len(function.args.kwonlyargs)


def where(path: Path, node: Function | ast.ClassDef) -> str:
    """A place in the sources, as a compiler would name it."""
    return f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def public_definitions(tree: ast.Module) -> Iterator[tuple[Function | ast.ClassDef, Function | ast.ClassDef]]:
    """(definition, definition or its class) for each module-level public name and each public method."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node, node
            if isinstance(node, ast.ClassDef):
                yield from ((m, node) for m in node.body if isinstance(m, Function) and not m.name.startswith("_"))


def test_files_are_short() -> None:
    """400 lines, 500 for operators."""
    rows = [(str(p.relative_to(ROOT)), parsed(p)[0].count("\n")) for p in sources(*CODE)]
    assert [row for row in rows if row[1] > (500 if row[0].startswith("openk3/ops/") else 400)] == []


def web_files() -> list[Path]:
    """What the package holds for browsers."""
    files = sorted(path for path in (ROOT / "openk3").rglob("*") if path.suffix in (".js", ".css", ".html"))
    assert {path.suffix for path in files} == {".js", ".css", ".html"}
    return files


def test_files_for_browsers_are_short_and_say_their_purpose() -> None:
    """400 lines, of at most 120 characters in scripts and styles; the first one is a comment of one sentence."""
    comments = {".js": r"// (.*)", ".css": r"/\* (.*) \*/", ".html": r"<!-- (.*) -->"}
    bad = []
    for path in web_files():
        lines = path.read_text(encoding="utf-8").split("\n")
        first = re.fullmatch(comments[path.suffix], lines[0])
        if first is None or not re.fullmatch(r"[A-Z](?:[^.]|\.(?! ))*\.", first[1]):
            bad.append(f"{path.name}: no purpose in one sentence")
        if len(lines) > 401 or (path.suffix != ".html" and max(map(len, lines)) > 120):
            bad.append(f"{path.name}: {len(lines)} lines, the longest has {max(map(len, lines))} characters")
    assert bad == []


def test_functions_and_classes_are_short() -> None:
    """Functions 60 lines (kernels 200), classes 150."""
    too_long = []
    for path in sources(*CODE):
        tree = parsed(path)[1]
        too_long += [where(path, f) for f in functions(tree) if num_lines(f) > (200 if is_kernel(f) else 60)]
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        too_long += [where(path, node) for node in classes if num_lines(node) > 150]
    assert too_long == []


def test_parameters_are_few() -> None:
    """At most 8 parameters, and past 5 only by keyword; KDA takes seven by position, kernels up to 32."""
    too_many = []
    for path in sources(*CODE):
        for function in functions(parsed(path)[1]):
            positional, total = parameters(function)
            most_positional, most = (7 if function.name in STABLE_SIGNATURES else 5), 8
            if is_kernel(function):
                most_positional = most = 32
            if positional > most_positional or total > most:
                too_many.append(f"{where(path, function)} ({positional} positional, {total} in all)")
    assert too_many == []


def test_every_module_says_its_purpose_in_one_sentence() -> None:
    """The first line of the docstring: one sentence, closed by a full stop or by a colon clause that ends in one."""
    bad = []
    for path in sources(*CODE, "tests"):
        first, _, rest = (ast.get_docstring(parsed(path)[1]) or "").partition("\n")
        one_sentence = first.endswith((".", "?")) and not re.search(r"[a-z0-9)`]\. [A-Z]", first)
        if not one_sentence or (rest and not rest.startswith("\n")):
            bad.append(str(path.relative_to(ROOT)))
    assert bad == []


def test_names_of_files_and_depth_of_folders() -> None:
    """No file is named after nothing in particular, and no file lies deeper than three folders."""
    paths = [path.relative_to(ROOT) for path in sources(*CODE)]
    assert [p for p in paths if {p.stem, *p.parent.parts} & FORBIDDEN_NAMES] == []
    assert [p for p in paths if len(p.parent.parts) > 3] == []


def test_names_of_test_files_differ() -> None:
    """Also between folders: two of one name cannot be collected together."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert {name for name in names if names.count(name) > 1} == set()


def test_public_names_are_documented_and_annotated() -> None:
    """Each public function and class has a docstring; each public function and method has a full signature.

    A kernel's pointers have no type that Python knows.
    """
    bad = []
    for path in sources("openk3"):
        for node, owner in public_definitions(parsed(path)[1]):
            if node is owner and not ast.get_docstring(node):
                bad.append(f"{where(path, node)}: no docstring")
            if isinstance(node, ast.ClassDef) or is_kernel(node):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            named = [a for a in arguments if a.arg not in ("self", "cls")]
            if any(a.annotation is None for a in named) or node.returns is None:
                bad.append(f"{where(path, node)}: not annotated")
    assert bad == []


def text_files() -> list[Path]:
    """Every file of the project that a reader may open, without caches and reference data."""
    ignored = {"golden", "__pycache__"}
    top = [p for p in ROOT.iterdir() if p.is_file()]
    own = (".ci", "benchmarks", "docs", "examples", "openk3", "tests")  # a user's runs and text may lie beside them
    inside = [p for folder in own for p in (ROOT / folder).rglob("*")]
    files = [p for p in top + inside if p.is_file() and p.suffix in TEXT_SUFFIXES and not set(p.parts) & ignored]
    assert len(files) > 30
    return files


def test_no_word_that_belongs_elsewhere() -> None:
    """No absolute path of somebody's machine."""
    hits = [str(p.relative_to(ROOT)) for p in text_files() if FORBIDDEN_WORDS.search(p.read_text(encoding="utf-8"))]
    assert hits == []


def test_nothing_is_left_for_later() -> None:
    """No stub, no note to oneself, no test that is passed over."""
    hits = [str(p.relative_to(ROOT)) for p in sources(*CODE, "tests") if STUBS.search(parsed(p)[0])]
    assert hits == []
