"""The parts of README.md that are made, not written: the tree from docstrings, tables of results from measurements."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
SUFFIXES = {".py", ".html", ".css", ".js"}
# Rows as in the layer contract, from the top down; a folder that is not named here fails the test.
FOLDERS = (
    "commands",
    "recipes",
    "fleet",
    "evals",
    "serve",
    "train",
    "engine",
    "optim",
    "data",
    "model",
    "ops",
    "inputs",
    "runtime",
    "config",
)
MODELS = {"shipped": "pocket"}  # folders without code


def purpose(path: Path) -> str:
    """The first line of a module's docstring, or the comment in a browser's file, without the full stop."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text.partition("\n")[0].strip("/*<!-> ").removesuffix(".")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0].removesuffix(".")


def tree(package: Path = ROOT / "openk3") -> str:
    """One line per module, folders in the order of the layers."""
    found = {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    if found != {*FOLDERS, *MODELS}:
        raise SystemExit(f"readme_tree.py: FOLDERS and the package differ in {sorted(found ^ {*FOLDERS, *MODELS})}")
    lines = ["```text", "openk3/"]
    lines += [entry(path, package) for path in sorted(package.glob("*.py")) if path.name != "__init__.py"]
    for folder in FOLDERS:
        lines += ["", f"{folder}/"]
        own = (path for path in (package / folder).rglob("*") if path.suffix in SUFFIXES)
        files = sorted(own, key=lambda path: (len(path.parts), path))
        lines += [entry(path, package / folder) for path in files if path.name != "__init__.py"]
    for folder, name in MODELS.items():
        lines += ["", f"{folder}/", f"  {name + '/':<22} A trained model: weights, tokenizer, card and licence notice"]
    return "\n".join([*lines, "```", ""])


def entry(path: Path, parent: Path) -> str:
    """`  name.py   purpose`."""
    return f"  {path.relative_to(parent).as_posix():<22} {purpose(path)}"


def quickstart() -> str:
    """What the longest measured quickstart reached, beside what it aimed at."""
    data = json.loads((RESULTS / "quickstart.json").read_text(encoding="utf-8"))
    run = max(data["runs"], key=lambda run: run["minutes"])
    facts = run["facts"]
    lines = [
        f"`openk3 quickstart --minutes {run['minutes']}` on {data['hardware']}: {facts['parameters']} parameters,",
        f"{facts['training tokens']} training tokens, {facts['tokens per second']} a second.",
        *("", "| | reached | aimed at |", "|---|---|---|"),
        *(f"| {row['name']} | {row['value']} | {row['target']} |" for row in run["targets"]),
    ]
    return "\n".join([*lines, ""])


def speed() -> str:
    """Ratios of times, forward and backward, from the last committed run of the benchmark."""
    data = json.loads((RESULTS / "cpu.json").read_text(encoding="utf-8"))
    sizes = {"kda": "KDA, 2,048 tokens, 8 heads of 128", "model": "text model, width 256, 9 layers, 4 x 512 tokens"}
    first = data["kda"]
    lines = [f"`benchmarks/cpu.py` on {first['cpu']}, {first['threads']} threads, minimum of five rounds:", ""]
    lines += ["| forward and backward | times as fast | aimed at |", "|---|---|---|"]
    for part, size in sizes.items():
        for names, row in data[part]["ratios"].items():
            slow, fast = names.split(" / ")
            lines.append(f"| {size}: {fast} against {slow} | {row['ratio']:.1f} | {row['target']:g} |")
    return "\n".join([*lines, ""])


def newest_gpu_run(folder: Path) -> dict[str, Any]:
    """The last of the whole runs of `benchmarks/kda.py` on a GPU; those on a CPU only try the script."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("kda-*.json"))]
    runs = [run for run in runs if not run["gpu"].startswith("none")]
    if not runs:
        raise SystemExit(f"readme_tree.py: no kda-GPU-DATE.json of a GPU in {folder}; run benchmarks/kda.py on one")
    return max(runs, key=lambda run: run["date"])


def kernels() -> str:
    """Times of the KDA kernels and their peers from the newest committed run on a GPU."""
    data = newest_gpu_run(RESULTS)
    peers = {"fla_ms": "fla-core", "flashkda_ms": "FlashKDA", "nemo_ms": "NeMo AutoModel"}
    rows = [row for row in data["rows"] if "+547" not in row["work"]]
    lines = [f"`benchmarks/kda.py` on one {data['gpu']}, {data['date']}; heads of 128, bfloat16, medians of 20:", ""]
    lines += [f"| KDA, ms | openk3 | {' | '.join(peers.values())} |", "|---|---|---|---|---|"]
    for row in rows:
        cells = [row["ours_ms"], *(row[name] for name in peers)]
        lines.append(f"| {row['work']} | {' | '.join('-' if x is None else f'{x:.3g}' for x in cells)} |")
    return "\n".join([*lines, ""])


SECTIONS = {"tree": tree, "quickstart": quickstart, "speed": speed, "kernels": kernels}


def filled(readme: str) -> str:
    """README's text with every made part made anew."""
    for name, make in SECTIONS.items():
        readme = replaced(readme, name, make())
    return readme


def replaced(readme: str, name: str, text: str) -> str:
    """README's text with the part between the marks of `name` replaced."""
    begin, end = f"<!-- {name}: written by `make tree` -->\n", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(readme)) != 1:
        raise SystemExit(f"README.md: the marks are missing: {begin!r} ... {end!r}")
    return pattern.sub(lambda _: begin + text + end, readme)


def main() -> None:
    """Write the made parts into README.md."""
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
