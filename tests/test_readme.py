"""README.md is true: its commands run (at tiny size), its Python runs, its tree and figures are the code's."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from readme_tree import README, ROOT, filled, newest_gpu_run, replaced
from warm_cli import warm_openk3

from openk3 import recipes
from openk3.commands.flags import Quickstart
from openk3.model.accounting import account

TEXT = README.read_text(encoding="utf-8")
PROSE = replaced(TEXT, "tree", "")
# Commands of the README that run here in a smaller form; all others run as they stand.
TINY = {
    "make demo": "openk3 quickstart --minutes 0.5",
    "openk3 chat": "openk3 chat --max-tokens 8 --message hello",
    'openk3 generate --prompt "def main("': 'openk3 generate --prompt "def main(" --max-tokens 8',
    "openk3 pretrain tiny --data src/ --out runs/mine": "openk3 pretrain tiny --data src/ --out runs/mine --steps 3",
    "openk3 pretrain --resume runs/mine --steps 80": "openk3 pretrain --resume runs/mine --steps 4",
    "openk3 tokenizer train --text src/ --out tok/ --vocab-size 2048": (
        "openk3 tokenizer train --text src/ --out tok/ --vocab-size 600"
    ),
}

SERVE = "openk3 serve runs/mine --port 8000"


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def run(command: list[str], folder: Path) -> str:
    """Standard output of a command, in a folder whose bin/openk3 is this checkout's."""
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=550)
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


@pytest.fixture
def newcomer(tmp_path: Path) -> Path:
    """An empty folder with some text of one's own in src/."""
    for name in ("config", "model"):
        shutil.copytree(ROOT / "openk3" / name, tmp_path / "src" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_every_command_runs_in_order(newcomer: Path) -> None:
    """As a newcomer would type them, each in its tiny form; then the Python of the page."""
    commands = [line for block in blocks("sh") for line in block.splitlines() if line != SERVE]
    assert set(TINY) <= set(commands)
    (newcomer / "bin").mkdir()
    with warm_openk3(newcomer / "bin"):
        outputs = {command: run(shlex.split(TINY.get(command, command)), newcomer) for command in commands}
    assert "openk3 chat runs/" in outputs["make demo"]
    (started,) = (path for path in (newcomer / "runs").iterdir() if path.name != "mine")
    assert {path.name for path in started.iterdir()} >= {"model", "metrics.jsonl", "report.html"}
    assert outputs['openk3 generate --prompt "def main("'].startswith("def main(")
    assert "weight_packed" in (newcomer / "out" / "model.safetensors").read_bytes()[:200000].decode("latin-1")
    code = "\n".join(block for block in blocks("python") if "OpenAI" not in block)
    code += "\nprint(tuple(logits.shape), tuple(o.shape), tuple(state.shape))"
    assert run([sys.executable, "-c", code], newcomer).strip().startswith("(5, ")
    assert (newcomer / "copy" / "config.json").is_file()


def test_the_server_of_the_page_answers_its_client(newcomer: Path, tiny_run: Path) -> None:
    """The command starts, under the run's name, and the page's Python streams from it; then SIGTERM ends it."""
    (client,) = (block for block in blocks("python") if "OpenAI" in block)
    assert SERVE in TEXT and "127.0.0.1:8000" in client
    shutil.copytree(tiny_run, newcomer / "runs" / "mine")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *shlex.split(SERVE.replace("8000", "0 --cache-gib 0.05"))]
    server = subprocess.Popen(command, cwd=newcomer, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        greeting = server.stderr.readline()
        port = greeting.rpartition(":")[2].partition("/")[0]
        assert greeting.startswith("mine at ") and port.isdecimal(), greeting + server.stderr.read()
        assert run([sys.executable, "-c", client.replace("8000", port)], newcomer)
        server.terminate()
        assert server.wait(120) == 0
    finally:
        server.kill()
        server.wait()


def test_make_targets_of_the_page_exist() -> None:
    """`make demo` runs the quickstart, `make test` the whole suite."""
    targets = set(re.findall(r"(?:^|`)make ([a-z]+)", TEXT, re.MULTILINE))
    assert {"demo", "test", "check", "bench", "tree"} <= targets
    for target in targets:
        listed = subprocess.run(["make", "-n", target, "VENV=nowhere"], cwd=ROOT, capture_output=True, text=True)
        assert listed.returncode == 0, listed.stderr
        wanted = {"demo": "nowhere/bin/openk3 quickstart", "test": "-m pytest -n 2"}.get(target, "")
        assert wanted in listed.stdout


def test_tree_and_results_are_made_from_docstrings_and_measurements() -> None:
    """`make tree` would change nothing."""
    assert filled(TEXT) == TEXT


def test_the_table_of_kernels_is_of_a_gpu(tmp_path: Path) -> None:
    """Of the runs in the folder the last whole one on a GPU counts, whatever newer ones on a CPU or of some rows."""
    runs = {"h200-2026-11-29": "NVIDIA H200", "a100-2026-11-30": "NVIDIA A100", "none-2026-12-01": "none (CPU)"}
    for name, gpu in runs.items():
        (tmp_path / f"kda-{name}.json").write_text(json.dumps({"gpu": gpu, "date": name[-10:]}))
    (tmp_path / "kda_rows_decode-h200-2026-12-02.json").write_text('{"gpu": "NVIDIA H200", "date": "2026-12-02"}')
    assert newest_gpu_run(tmp_path)["gpu"] == "NVIDIA A100"
    for name in list(runs)[:2]:
        (tmp_path / f"kda-{name}.json").unlink()
    with pytest.raises(SystemExit, match="no kda-GPU-DATE.json of a GPU"):
        newest_gpu_run(tmp_path)


def test_figures_are_computed_ones() -> None:
    """Sizes of the released model, and the default time of the quickstart."""
    books = account(recipes.model("k3"))
    assert f"{books.total:,} parameters, {books.activated:,} activated" in TEXT
    assert f"one latent of {books.latent_values_per_layer} values per token" in TEXT
    assert f"`openk3 quickstart`: {Quickstart().minutes:g} minutes on 2 cores" in TEXT


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "docs/gpu.md", "docs/serving.md"])
def test_files_and_names_that_are_mentioned_exist(name: str) -> None:
    """Paths with a folder, and `file.py: name` pairs."""
    text = PROSE if name == "README.md" else (ROOT / name).read_text(encoding="utf-8")
    paths = set(re.findall(r"\b((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|md|toml))\b", text))
    assert paths
    found = {path: next((p for p in (ROOT / "openk3" / path, ROOT / path) if p.is_file()), None) for path in paths}
    assert [path for path, file in found.items() if file is None] == []
    for path, symbol in re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py): ([a-z_A-Z0-9]+)", text):
        file = found[path]
        assert file is not None and re.search(rf"\b(def|class) {symbol}\b", file.read_text()), f"{path}: {symbol}"


def test_flags_that_are_mentioned_exist() -> None:
    """Every --flag in README and in the pages on serving is one of the command's own (`--data`, `--help` and so on)."""
    files = [*(ROOT / "openk3" / "commands").glob("*flag*.py"), ROOT / "openk3" / "config" / "train.py"]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    pages = ("serving", "fleet", "fleet_simulation", "serving_cache", "serving_speed", "speculation")
    text = TEXT + "".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in pages)
    for flag in set(re.findall(r"--([a-z][a-z-]+)", text)) - {"help"}:
        assert re.search(rf"^    {flag.replace('-', '_')}\b", source, re.MULTILINE), flag
