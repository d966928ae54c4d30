"""`openk3 data`: from raw text to a trained step, what it prints, and its errors in one line."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from openk3 import cli
from openk3.commands import data
from openk3.commands.flags import parse
from openk3.data.prepare.report import EXPLAINED
from openk3.data.prepare.rules import NAMES, RULES

JOINTS = ("of the", "and the", "is in", "was near", "keeps a", "with", "has seen the", "that", "over", "to the")


def prose(seed: int) -> str:
    """English-like text that no rule drops."""
    rng = random.Random(seed)

    def word() -> str:
        return "".join(rng.choice("bdflmnprst") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))

    return " ".join(f"The {' '.join(f'{word()} {rng.choice(JOINTS)}' for _ in range(6))} {word()}." for _ in range(12))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """JSONL with a duplicate and a broken line, and a module."""
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"text": prose(n)}) for n in (*range(60), 0)] + ["{broken"]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "in" / "m.py").write_text("import os\n\n\ndef here():\n    return os.getcwd()\n")
    return tmp_path / "in"


def run(*words: object) -> int:
    """The command line's exit code."""
    return cli.main([str(word) for word in words])


def test_prepared_text_trains(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Prepare, then a few steps on all of it; again on a mixture of two domains with weights."""
    out = tmp_path / "out"
    assert run("data", "prepare", corpus, "--out", out, "--quality", "off", "--workers", 1) == 0
    said = capfd.readouterr()
    assert "61 documents" in said.out and "exact_duplicate" in said.out and "report.html" in said.out
    assert "reading: 100%" in said.err and "writing shards: 100%" in said.err
    small = ["--steps", 2, "--data.batch-tokens", 512, "--data.micro-batch-tokens", 256, "--data.stages", 1.0, 128]
    small += ["--validation.max-tokens", 512]
    assert run("pretrain", "tiny", "--data", out, "--out", tmp_path / "run", *small) == 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2] and metrics[-1]["val_bpb"] > 0
    mixture = ["--data", out / "web", out / "code", "--data.weights", 0.5, 0.5, "--data.held-out-percent", 0]
    mixture += ["--data.tokenizer", tmp_path / "run" / "tokenizer"]
    assert run("pretrain", "tiny", *mixture, "--out", tmp_path / "mixed", *small) == 0


def test_the_same_command_again_says_the_same(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished folder is left alone."""
    words = ("data", "prepare", corpus, "--out", tmp_path / "out", "--quality", "off", "--workers", 1)
    assert run(*words) == 0
    first = capsys.readouterr().out
    assert run(*words) == 0
    assert capsys.readouterr().out == first


def test_ctrl_c_says_how_to_go_on(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 130."""

    def stop(*rest: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "prepare_data", stop)
    assert run("data", "prepare", corpus, "--out", tmp_path / "out") == 130
    assert "the same command goes on where it was" in capsys.readouterr().err


def test_a_quality_model_of_ones_own(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Train on the corpus against made debris, then filter with it."""
    model = tmp_path / "q.safetensors"
    assert run("data", "train-quality", "--good", corpus, "--out", model) == 0
    assert "prose: trained on" in capsys.readouterr().out
    assert run("data", "prepare", corpus, "--out", tmp_path / "out", "--quality", model, "--workers", 1) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert sum(report["quality"]["tenths"]) >= 50 and report["quality"]["not_judged"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("prepare", "IN", "--out", "IN"), "holds other files and is left alone"),
        (("prepare", "nowhere.jsonl", "--out", "OUT"), "nowhere.jsonl: no such file or folder"),
        (("prepare", "IN", "--out", "OUT", "--similarity", "2"), "--similarity: 0 (off) or 0.3..1, got 2"),
        (("prepare", "IN", "--out", "OUT", "--workers", "0"), "--workers: must lie in 1..256"),
        (("prepare", "IN", "--out", "OUT", "--quality", "none.bin"), "none.bin: no such file"),
        (("prepare", "IN", "--out", "OUT", "--skip-rules", "no"), "--skip-rules: no rule 'no'"),
        (("prepare", "IN", "--out", "OUT", "--tokenizer", "none"), "none"),
        (
            ("prepare", "IN", "--out", "OUT", "--strict", "--text-field", "x", "--quality", "IN"),
            "IN: not a quality model",
        ),
        (("prepare", "IN"), "--out"),
        (("train-quality", "--good", "nowhere", "--out", "q"), "nowhere: no such file or folder"),
        (("train-quality", "--good", "IN", "--out", "IN"), "is a folder; name a file"),
        (("train-quality", "--good", "IN/m.py", "--out", "q"), "too few texts"),
    ],
)
def test_errors_are_one_line(
    corpus: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They name what is wrong, and leave nothing behind."""
    monkeypatch.chdir(tmp_path)
    names = {"IN": str(corpus), "OUT": str(tmp_path / "out"), "IN/m.py": str(corpus / "m.py")}
    try:
        code = run("data", *(names.get(word, word) for word in words))
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1 and message.replace("IN:", f"{corpus}:") in said
    assert not (tmp_path / "out").exists() and not (tmp_path / "q").exists()


def test_a_missing_package_is_named(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to install."""
    monkeypatch.setattr(data, "missing", "rensa")
    assert run("data", "prepare", corpus, "--out", "x") == 2
    assert "pip install 'openk3[data]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["prepare", "train-quality"])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An example, and every flag with its meaning."""
    with pytest.raises(SystemExit):
        parse("data", [command, "--help"])
    said = capsys.readouterr().out
    assert f"example: openk3 data {command}" in " ".join(said.split()) and "None" not in said


def test_the_page_names_every_rule_and_reason() -> None:
    """docs/data.md explains each counter, in the words of the report; its flags exist."""
    text = (Path(__file__).resolve().parent.parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
    for name, says in EXPLAINED.items():
        assert f"| `{name}` |" in text, name
        if name not in ("near_duplicate", *NAMES):
            assert f"| `{name}` | {says} |" in text, name
    for rule in RULES:
        assert f"| `{rule.name}` | {rule.source} | {rule.says} |" in text, rule.name
    source = (Path(data.__file__).parent / "data_flags.py").read_text(encoding="utf-8")
    for flag in set(re.findall(r"--([a-z][a-z-]+)", text)) - {"data", "help", "books", "rust"}:
        assert re.search(rf"^    {flag.replace('-', '_')}\b", source, re.MULTILINE), flag
