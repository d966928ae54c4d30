"""Every example runs, small, and is short enough to read at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from warm_cli import warm_openk3

import openk3

ROOT = Path(openk3.__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Standard output of a command that finds this checkout's package."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def test_examples_are_short_and_all_are_tested_here() -> None:
    """At most 60 lines each, and no example without a test."""
    files = sorted(path for path in EXAMPLES.iterdir() if path.is_file())
    assert [path.name for path in files if path.read_text().count("\n") > 60] == []
    assert [path.name for path in files if path.name not in Path(__file__).read_text()] == []


def test_whole_story(tmp_path: Path) -> None:
    """whole_story.sh: from text to a packed model."""
    command = [str(EXAMPLES / "whole_story.sh"), str(ROOT / "openk3" / "model"), "run"]
    (tmp_path / "bin").mkdir()
    with warm_openk3(tmp_path / "bin") as programs:
        text = run(command, tmp_path, STEPS="4", PATH=f"{programs}:{os.environ['PATH']}")
    assert "5 steps" in text and "def " in text and "Memory of the weights" in text
    assert (tmp_path / "run-mxfp4" / "model.safetensors").is_file()


def test_kda_two_ways(tmp_path: Path) -> None:
    """kda_two_ways.py: float64 differences at rounding level."""
    text = run([sys.executable, str(EXAMPLES / "kda_two_ways.py"), "100"], tmp_path)
    differences = [float(number) for number in re.findall(r"\d\.\de[+-]\d+", text)]
    assert len(differences) == 4 and max(differences) < 1e-11


def test_look_inside(tmp_path: Path, tiny_run: Path) -> None:
    """look_inside.py: a row per MoE layer and per KDA layer, shares that add up to one."""
    text = run([sys.executable, str(EXAMPLES / "look_inside.py"), str(tiny_run)], tmp_path)
    assert len(re.findall(r"^  layer \d+: \d+\.\d+  \[", text, re.MULTILINE)) == 5
    assert len(re.findall(r"^  layer \d+: \d+\.\d+$", text, re.MULTILINE)) == 3
    shares = text.split("running sum)\n")[1].splitlines()[0].split()
    assert sum(map(float, shares)) == pytest.approx(1, abs=0.03)


def test_train_by_hand(tmp_path: Path) -> None:
    """train_by_hand.py: the loss falls."""
    files = [str(path) for path in sorted((ROOT / "openk3" / "config").glob("*.py"))]
    text = run([sys.executable, str(EXAMPLES / "train_by_hand.py"), *files, "--steps", "20"], tmp_path)
    losses = [float(number) for number in re.findall(r"loss (\d+\.\d+)", text)]
    assert len(losses) == 2 and losses[1] < losses[0] < 7


def test_many_requests(tmp_path: Path, tiny_run: Path) -> None:
    """many_requests.py: four answers in fewer passes than tokens, the shared beginning from the cache."""
    text = run([sys.executable, str(EXAMPLES / "many_requests.py"), str(tiny_run)], tmp_path)
    found = re.findall(r" 24 tokens, \d+\.\d bits each, (\d+) of (\d+) prompt tokens from the cache", text)
    assert len(found) == 4 and all(32 <= int(cached) < int(prompt) for cached, prompt in found)
    assert re.search(r"tokens in \d\d passes, 0 pages still held", text)


def test_serve_and_call(tmp_path: Path, tiny_run: Path) -> None:
    """serve_and_call.py: any model answers by the schema and calls the tool."""
    text = run([sys.executable, str(EXAMPLES / "serve_and_call.py"), str(tiny_run)], tmp_path)
    assert re.search(r"by schema: \{'larger': '(sun|moon)', 'sure': (True|False)\}", text)
    assert re.search(r"by tool: look_up \{'body': '(sun|moon)'\}", text)


def test_pocket_data(tmp_path: Path) -> None:
    """pocket_data.py: says what it reads, and in one line what is missing; tests/data runs what it calls."""
    script = str(EXAMPLES / "pocket_data.py")
    assert "--wordnet" in run([sys.executable, script, "--help"], tmp_path)
    command = [sys.executable, script, "--books", str(tmp_path), "--wordnet", str(tmp_path)]
    failed = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert failed.returncode and "no books; expected folders" in failed.stderr.splitlines()[-1]


def test_quality_data(tmp_path: Path) -> None:
    """quality_data.py: chapters, pages, topics, and code of this environment as files."""
    (tmp_path / "books" / "one").mkdir(parents=True)
    (tmp_path / "books" / "one" / "chapter-1.xhtml").write_text("<p>It was a dark night.</p>")
    (tmp_path / "rust" / "book").mkdir(parents=True)
    (tmp_path / "rust" / "book" / "ch01.html").write_text("<p>A program is <b>compiled</b> first.</p>")
    command = [sys.executable, str(EXAMPLES / "quality_data.py"), "--books", "books", "--rust", "rust", "--out", "good"]
    run(command, tmp_path)
    good = tmp_path / "good"
    assert (good / "books" / "one" / "chapter-1.txt").read_text() == "It was a dark night."
    assert (good / "prose" / "rust" / "book_ch01.txt").read_text() == "A program is compiled first."
    assert (good / "code" / "python" / "argparse.py").is_file() and not (good / "code" / "python" / "test").exists()
    assert any((good / "code" / "torch").rglob("*.h")) and (good / "prose" / "topics" / "lambda.txt").is_file()
