"""The quickstart command with a tiny model and a handful of steps: what it leaves, says, refuses and can resume."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from openk3.cli import main
from openk3.commands import quickstart
from openk3.data.sources import Files
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.k3 import K3
from openk3.recipes import quickstart as recipe
from openk3.recipes import tiny
from openk3.train import checkpoint

STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def small_and_short() -> object:
    """The tiny model, few steps, little of everything; the process keeps its own threads and matrix products."""
    with pytest.MonkeyPatch.context() as patch:
        plan, config = recipe.plan, quickstart.run_config

        def little(minutes: float) -> recipe.Plan:
            return dataclasses.replace(
                plan(minutes),
                tokenizer_bytes=60_000,
                num_images=40,
                num_conversations=12,
                held_out_bytes=6_000,
                num_captions=60,
                num_samples=2,
                sample_tokens=6,
                curve_seconds=0.0,
            )

        def short(*arguments: object) -> object:
            data = dataclasses.replace(
                config(*arguments).data,  # pyrefly: ignore
                stages=((0.5, 128), (0.5, 512)),
                batch_tokens=512,
                micro_batch_tokens=512,
            )
            return dataclasses.replace(config(*arguments), model=tiny.model(), data=data, minutes=0.0, steps=STEPS)

        patch.setattr(recipe, "plan", little)
        patch.setattr(recipe, "fitted", lambda plan, speed: plan)
        patch.setattr(recipe, "VOCAB", 900)
        patch.setattr(quickstart, "run_config", short)
        patch.setattr(quickstart, "tune_cpu", dict)
        patch.setattr(torch, "set_num_threads", lambda count: None)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 200 kB of Python."""
    folder = tmp_path_factory.mktemp("text")
    package = Path(recipe.__file__).parent.parent
    for path in sorted((package / "ops").rglob("*.py")) + sorted((package / "model").glob("*.py")):
        (folder / f"{path.parent.name}_{path.name}").write_text(path.read_text())
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, str]:
    """A finished run and what was printed."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("builtins.print", lambda *words, **options: said.append(" ".join(map(str, words))))
        assert main(["quickstart", "--text", str(text), "--out", str(folder), "--seed", "3"]) == 0
    return folder, "\n".join(said)


def test_it_leaves_a_whole_run(run):
    folder, _ = run
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "run.json",
        "metrics.jsonl",
        "report.json",
        "report.html",
        "data",
        "tokenizer",
        "checkpoints",
        "model",
    }
    model, tokenizer = K3.from_pretrained(folder / "model"), Tokenizer.load(folder / "model")
    assert model.config.text.vocab_size == tokenizer.vocab_size
    assert model.mtp is not None and model.vision is not None
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["seq_len"] for row in rows] == [128, 128, 512, 512]
    assert all(row["bias_spread"] > 0 and row["val_bpb"] > 0 for row in rows)
    assert json.loads((folder / "run.json").read_text())["seed"] == 3


def test_the_report_shows_every_part(run):
    folder, _ = run
    html = (folder / "report.html").read_text(encoding="utf-8")
    for title in ("Learning", "Images", "Samples", "Conversation", "Routing", "Depth and memory", "Cost"):
        assert f"<h2>{title}</h2>" in html
    assert "nothing recorded" not in html
    data = json.loads((folder / "report.json").read_text())
    assert [target["name"] for target in data["targets"]][0] == "held-out bits per byte"
    assert len(data["byte_model"]) == 6 and data["byte_model"][5] < data["byte_model"][1]
    stages = [name for name, _ in data["cost"]["seconds"]]
    assert stages[0] == "start" and "train" in stages and stages[-1] == "total so far"


def test_it_prints_results_against_targets_and_what_is_next(run):
    folder, said = run
    assert "held-out bits per byte" in said and "caption loss lower" in said
    for command in (f"openk3 chat {folder}", f"openk3 pretrain --resume {folder}", f"openk3 plan {folder}"):
        assert command in said
    assert str(folder / "report.html") in said


def test_five_percent_of_the_text_and_no_more_is_held_out_from_every_file_of_the_mix(run):
    folder, _ = run
    held_out = [line["text"] for line in map(json.loads, (folder / "data/held_out.jsonl").read_text().splitlines())]
    training = (folder / "data/text.jsonl").read_text()
    assert held_out and not any(json.dumps(text, ensure_ascii=False) in training for text in held_out)
    config = json.loads((folder / "run.json").read_text())
    assert [Path(path).name for path in config["data"]["paths"]] == ["text.jsonl", "captions.jsonl", "chat.jsonl"]
    assert config["data"]["weights"] == list(recipe.SHARES) and recipe.SHARES[2] >= 0.05
    assert all(len(Files(path)) for path in config["data"]["paths"] + config["data"]["held_out_paths"])


def test_a_finished_run_can_be_trained_on(run, monkeypatch):
    folder, _ = run
    monkeypatch.setattr("openk3.commands.pretrain.tune_cpu", dict)
    assert main(["pretrain", "--resume", str(folder), "--steps", str(STEPS + 2)]) == 0
    assert checkpoint.latest(folder / "checkpoints").name == f"step-{STEPS + 2:08d}"


def test_stopped_while_training_it_leaves_a_run_to_resume(tmp_path, text, monkeypatch, capsys):
    class Stop(quickstart.Curve):
        def __call__(self, state, values):
            super().__call__(state, values)
            if state.step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(quickstart, "Curve", Stop)
    monkeypatch.setattr("openk3.commands.pretrain.tune_cpu", dict)
    folder = tmp_path / "stopped"
    assert main(["quickstart", "--text", str(text), "--out", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"stopped at step 2 of {STEPS}" in said and f"openk3 pretrain --resume {folder}" in said
    assert not (folder / "report.html").exists()
    assert main(["pretrain", "--resume", str(folder)]) == 0
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, STEPS + 1))
    assert K3.from_pretrained(folder / "model").config.text.num_hidden_layers == 5


def test_what_the_user_can_mend_is_one_line(run, tmp_path, text, capsys):
    folder, _ = run
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "data").mkdir()
    (tmp_path / "full" / "data" / "mine.txt").write_text("keep")
    cases = (
        (["--out", str(folder)], "already holds a run"),
        (["--minutes", "0.1"], "--minutes: must be at least"),
        (["--minutes", "nan"], "--minutes: must be at least"),
        (["--text", str(tmp_path / "nowhere"), "--out", str(tmp_path / "a")], "no such file or folder"),
        (["--text", str(text), "--out", str(tmp_path / "full")], "holds other files"),
    )
    for arguments, message in cases:
        assert main(["quickstart", *arguments]) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in said, said
    assert (tmp_path / "full" / "data" / "mine.txt").read_text() == "keep"
    assert not (tmp_path / "a").exists() or not any((tmp_path / "a").iterdir())
