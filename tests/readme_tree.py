"""The tree in README.md, made from the first line of every module's docstring; run as a program it writes the tree."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- tree: written by `make tree` -->\n```text\n", "```\n<!-- end of tree -->"
# Rows as in the layer contract, from the top down; a folder that is not named here fails the test.
FOLDERS = ("commands", "recipes", "evals", "train", "optim", "data", "model", "ops", "inputs", "runtime", "config")


def purpose(path: Path) -> str:
    """The first line of a module's docstring, without the full stop."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0].removesuffix(".")


def tree(package: Path) -> str:
    """One line per module, folders in the order of the layers."""
    found = {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    if found != set(FOLDERS):
        raise SystemExit(f"readme_tree.py: FOLDERS and the package differ in {sorted(found ^ set(FOLDERS))}")
    lines = ["openk3/"]
    lines += [entry(path, package) for path in sorted(package.glob("*.py")) if path.name != "__init__.py"]
    for folder in FOLDERS:
        lines += ["", f"{folder}/"]
        files = sorted((package / folder).rglob("*.py"), key=lambda path: (len(path.parts), path))
        lines += [entry(path, package / folder) for path in files if path.name != "__init__.py"]
    return "\n".join(lines) + "\n"


def entry(path: Path, parent: Path) -> str:
    """`  name.py   purpose`."""
    return f"  {path.relative_to(parent).as_posix():<22} {purpose(path)}"


def with_tree(readme: str, text: str) -> str:
    """README's text with its tree replaced."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(readme)) != 1:
        raise SystemExit(f"README.md: the marks around the tree are missing: {BEGIN!r} ... {END!r}")
    return pattern.sub(lambda _: BEGIN + text + END, readme)


def main() -> None:
    """Write the tree into README.md."""
    README.write_text(with_tree(README.read_text(encoding="utf-8"), tree(ROOT / "openk3")), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
