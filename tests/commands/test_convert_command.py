"""`openk3 convert`: training checkpoints, released layout and MXFP4, both ways, without losing a value."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch

from openk3.cli import main
from openk3.config.train import PretrainConfig
from openk3.inputs.packed import Packed
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.hf_files import CheckpointReader
from openk3.model.k3 import K3
from openk3.runtime.metrics import read_metrics

PACKED = Packed.join([[1, 2, 3, 4, 5], [6, 7]])


def logits(directory: Path) -> torch.Tensor:
    """What the model in a directory says about two short sequences."""
    with torch.no_grad():
        return K3.from_pretrained(directory)(PACKED)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Every stored tensor by name."""
    with CheckpointReader(directory) as reader:
        return {name: reader.read(name) for name in reader.index}


def test_training_checkpoint_becomes_the_exported_model(tiny_run: Path, tmp_path: Path) -> None:
    """The recipe exports float32, so both paths from the last state give the same numbers, tokenizer included."""
    assert main(["convert", str(tiny_run), str(tmp_path / "out")]) == 0
    ours, exported = weights(tmp_path / "out"), weights(tiny_run / "model")
    assert ours.keys() == exported.keys() and all(torch.equal(ours[name], exported[name]) for name in ours)
    assert Tokenizer.load(tmp_path / "out").encode("import os") == Tokenizer.load(tiny_run / "model").encode(
        "import os"
    )


def test_a_single_step_folder_can_be_named(tiny_run: Path, tmp_path: Path) -> None:
    """An older state of the run."""
    step = tiny_run / "checkpoints" / "step-00000002"
    assert main(["convert", str(step), str(tmp_path / "out"), "--experts", "float32"]) == 0
    assert torch.equal(logits(tmp_path / "out"), logits(tiny_run / "model"))


def test_mxfp4_packs_and_unpacks_without_a_second_loss(tiny_run: Path, tmp_path: Path) -> None:
    """Packed -> float32 -> packed is byte for byte the same, and each loads to the same logits."""
    model = tiny_run / "model"
    packed, plain, again = tmp_path / "packed", tmp_path / "plain", tmp_path / "again"
    assert main(["convert", str(model), str(packed), "--experts", "mxfp4"]) == 0
    assert main(["convert", str(packed), str(plain), "--experts", "float32"]) == 0
    assert main(["convert", str(plain), str(again), "--experts", "mxfp4"]) == 0
    assert not torch.equal(logits(model), logits(packed))
    assert torch.equal(logits(packed), logits(plain)) and torch.equal(logits(packed), logits(again))
    assert any(name.endswith("weight_packed") for name in weights(packed))
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(packed).items())


def test_packed_experts_are_kept_byte_for_byte(tiny_run: Path, tmp_path: Path) -> None:
    """With another dtype for the rest."""
    packed, other = tmp_path / "packed", tmp_path / "other"
    assert main(["convert", str(tiny_run), str(packed), "--experts", "mxfp4", "--rule", "floor"]) == 0
    assert main(["convert", str(packed), str(other), "--dtype", "bf16"]) == 0
    before, after = weights(packed), weights(other)
    names = [name for name in before if ".experts." in name and name.rpartition("_")[2] in ("packed", "scale")]
    assert names and all(torch.equal(before[name], after[name]) for name in names)


def test_shards_are_bounded(tiny_run: Path, tmp_path: Path) -> None:
    """A small limit gives several files and an index; the model is the same."""
    out = tmp_path / "out"
    assert main(["convert", str(tiny_run), str(out), "--experts", "float32", "--shard-mib", "1"]) == 0
    assert len(list(out.glob("model-*.safetensors"))) > 1 and (out / "model.safetensors.index.json").is_file()
    assert torch.equal(logits(out), logits(tiny_run / "model"))


def test_released_weights_become_a_run_that_trains_on(
    tiny_run: Path, tmp_path: Path, small_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other way: a run at step 0 around existing weights, continued by `pretrain --resume`."""
    run = tmp_path / "run"
    assert main(["convert", str(tiny_run / "model"), str(run), "--to", "run"]) == 0
    assert main(["convert", str(run), str(tmp_path / "back"), "--experts", "float32"]) == 0
    assert torch.equal(logits(tmp_path / "back"), logits(tiny_run / "model"))
    words = ["--data", str(small_text), "--steps", "1", "--data.stages", "1.0", "128", "--optim.lr", "1e-4"]
    words += ["--data.batch-tokens", "512", "--data.micro-batch-tokens", "512", "--optim.min-lr", "1e-5"]
    assert main(["pretrain", "--resume", str(run), *words]) == 0
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1]
    assert PretrainConfig.from_json(run).model == K3.from_pretrained(run / "model").config


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["nowhere", "out"], "nowhere: no such file"),
        (["{model}", "{model}"], "onto itself"),
        (["{model}", "{full}"], "holds other files"),
        (["{model}", "{full}", "--to", "run"], "holds other files"),
        (["{model}", "new", "--to", "run", "--experts", "mxfp4"], "--experts: a run holds full-precision weights"),
        (["{model}", "new", "--to", "run", "--shard-mib", "7"], "--shard-mib: a run holds"),
        (["{model}", "out", "--shard-mib", "0"], "--shard-mib"),
        (["{full}", "out"], "holds neither model.safetensors"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_leaves_nothing(
    words: list[str],
    part: str,
    tiny_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No half-written target."""
    monkeypatch.chdir(tmp_path)
    full = tmp_path / "full"
    full.mkdir()
    (full / "note.txt").write_text("mine")
    words = [word.format(model=tiny_run / "model", full=full) for word in words]
    assert main(["convert", *words]) == 2
    error = capsys.readouterr().err
    assert part in error and error.strip().count("\n") == 0
    assert not Path("out").exists() and [path.name for path in full.iterdir()] == ["note.txt"]


def test_a_run_is_written_whole_or_not_at_all(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk while the checkpoint is written: the target's name, and nothing left of it."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("openk3.train.checkpoint._write", full)
    assert main(["convert", str(tiny_run / "model"), str(tmp_path / "run"), "--to", "run"]) == 2
    assert capsys.readouterr().err == f"openk3: {tmp_path / 'run'}: cannot be written (No space left on device)\n"
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_of_another_size_is_refused(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run needs the model's own tokenizer."""
    model = shutil.copytree(tiny_run / "model", tmp_path / "model")
    Tokenizer.train(["ab" * 40] * 3, 520).save(model)
    assert main(["convert", str(model), str(tmp_path / "run"), "--to", "run"]) == 2
    assert "tokenizer" in capsys.readouterr().err and not (tmp_path / "run").exists()
