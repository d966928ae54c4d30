"""`openk3 generate`: the prompt and its continuation, the same for the same seed."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch

from openk3.cli import main
from openk3.commands import generate
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.k3 import K3


def text(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> str:
    """Standard output of one call."""
    assert main(["generate", str(run), *words]) == 0
    return capsys.readouterr().out


def test_same_seed_same_text_and_other_seed_other_text(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The prompt comes first and is printed once."""
    words = ("--prompt", "import ", "--max-tokens", "12")
    first, again, other = (text(capsys, tiny_run, *words, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again != other
    assert first.startswith("import ") and first.endswith("\n")


def test_zero_temperature_needs_no_seed(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The most likely token each time."""
    words = ("--prompt", "x", "--max-tokens", "5", "--temperature", "0")
    assert text(capsys, tiny_run, *words, "--seed", "1") == text(capsys, tiny_run, *words, "--seed", "2")


def test_prompt_from_standard_input_and_from_a_model_directory(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-` is the default; RUN/model is as good as RUN."""
    monkeypatch.setattr("sys.stdin", io.StringIO("from os"))
    piped = text(capsys, tiny_run / "model", "--max-tokens", "4")
    assert piped == text(capsys, tiny_run, "--prompt", "from os", "--max-tokens", "4")


def test_control_tokens_end_the_text_and_are_not_printed(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only text reaches the reader, and a cut character becomes U+FFFD at the end."""
    tokenizer = Tokenizer.load(tiny_run / "model")
    ids = [*tokenizer.encode("ab"), 0xC3, tokenizer.special["[EOS]"]]  # the first byte of a two-byte character
    monkeypatch.setattr(generate, "generate", lambda *args, **kwargs: iter(ids))
    assert text(capsys, tiny_run, "--prompt", "x") == "xab\ufffd\n"


def test_bfloat16_runs(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other number format."""
    assert text(capsys, tiny_run, "--prompt", "x", "--max-tokens", "2", "--dtype", "bfloat16").startswith("x")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-tokens", "0"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--top-k", "-2"),
        ("--top-p", "0"),
        ("--top-p", "nan"),
        ("--seed", str(2**64)),
        ("--seed", str(-(2**63) - 1)),
    ],
)
def test_sampling_flags_are_checked_by_name(
    flag: str, value: str, tiny_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the model is loaded."""
    assert main(["generate", str(tiny_run), "--prompt", "x", flag, value]) == 2
    assert capsys.readouterr().err.startswith(f"openk3: {flag}: must")


def test_missing_gpu_is_one_line(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked for by name, a GPU is not replaced silently."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["generate", str(tiny_run), "--prompt", "x", "--device", "cuda"]) == 2
    error = capsys.readouterr().err
    assert "cuda" in error and error.count("\n") == 1


def test_damaged_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory with a broken configuration."""
    (tmp_path / "config.json").write_text("{")
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path) in error and error.count("\n") == 1


def test_a_prompt_longer_than_the_context_is_refused(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the model is loaded."""
    assert main(["generate", str(tiny_run), "--prompt", "\x01" * 4096]) == 2
    assert "the prompt: has 4,097 tokens, and the model's context holds 4,096" in capsys.readouterr().err


def test_another_models_tokenizer_is_refused(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would write rubbish."""
    model = shutil.copytree(tiny_run / "model", tmp_path / "model")
    Tokenizer.train(["ab" * 40] * 3, 520).save(model)
    for words in (["generate", str(model), "--prompt", "x"], ["chat", str(model), "--message", "x"]):
        assert main(words) == 2
        assert "its tokenizer has 51" in capsys.readouterr().err


def test_a_model_without_numbers_is_one_line(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damaged weights are no fault of the program."""
    model = K3.from_pretrained(tiny_run / "model")
    torch.nn.init.constant_(model.norm.weight, float("nan"))
    model.save_pretrained(tmp_path / "m", also=Tokenizer.load(tiny_run / "model").save)
    assert main(["generate", str(tmp_path / "m"), "--prompt", "x", "--temperature", "0"]) == 2
    error = capsys.readouterr().err
    assert "logits are not finite" in error and error.count("\n") == 1


def test_a_terminal_is_not_steered_and_a_pipe_gets_every_byte(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the model writes, and the prompt too."""
    ids = Tokenizer.load(tiny_run / "model").encode("a\x1b[2Jb")
    monkeypatch.setattr(generate, "generate", lambda *args, **kwargs: iter(ids))
    assert text(capsys, tiny_run, "--prompt", "\x07") == "\x07a\x1b[2Jb\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert text(capsys, tiny_run, "--prompt", "\x07") == "\ufffda\ufffd[2Jb\n"
