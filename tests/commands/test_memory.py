"""A model that cannot fit is refused in one line before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from openk3 import recipes
from openk3.cli import main
from openk3.commands import memory
from openk3.commands.errors import UserError
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.k3 import K3

CPU = torch.device("cpu")


def test_memory_of_this_machine_is_plausible() -> None:
    """More than the tests need, less than any machine has."""
    total = memory.total_memory(CPU)
    assert total is None or 2**30 < total < 2**50


def test_limit_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte less than needed is refused, the need itself is not."""
    config = recipes.model("tiny")
    needed = 12 * sum(value.numel() for value in K3.empty(config, device="meta").state_dict().values())
    monkeypatch.setattr(memory, "total_memory", lambda device: needed)
    memory.require_memory("tiny", config, 12, CPU)
    monkeypatch.setattr(memory, "total_memory", lambda device: needed - 1)
    with pytest.raises(UserError, match=r"^tiny: needs at least .* at 12 bytes per parameter"):
        memory.require_memory("tiny", config, 12, CPU)
    monkeypatch.setattr(memory, "total_memory", lambda device: None)
    memory.require_memory("tiny", config, 12, CPU)


def test_training_the_released_model_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`openk3 pretrain k3` on a laptop: nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "k3", "--data", "x", "--out", "run", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("openk3: k3: needs at least 31,0") and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_loading_a_model_that_is_too_large_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only its configuration and tokenizer are read."""
    Tokenizer.train(["ab" * 40] * 3, 520).save(tmp_path)
    (tmp_path / "config.json").write_text(recipes.model("k3").to_json())
    for command in (["generate", "--prompt", "x"], ["chat", "--message", "x"]):
        assert main([command[0], str(tmp_path), *command[1:], "--device", "cpu"]) == 2
        assert "needs at least" in capsys.readouterr().err
