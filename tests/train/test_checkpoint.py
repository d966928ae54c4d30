"""Checkpoints: bit-exact, whole or absent, few, and never executed."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_models import random_batch, small_model, small_run

from openk3.config.train import BalanceConfig
from openk3.data.documents import DataError, Encoder
from openk3.data.loader import Loader
from openk3.data.sources import Records
from openk3.inputs.tokenizer import Tokenizer
from openk3.optim.quantile_balance import Histogram
from openk3.train import checkpoint
from openk3.train.checkpoint import CheckpointError
from openk3.train.state import TrainState
from openk3.train.step import train_step


def contents(state: TrainState) -> dict[str, torch.Tensor]:
    """Copies of every tensor of a state, by name."""
    named = [*state.model.named_parameters(), *state.model.named_buffers()]
    out = {f"model.{name}": value.detach().clone() for name, value in named}
    out |= {f"optimizer.{name}": value.clone() for name, value in state.optimizer.state_dict().items()}
    return out | {f"balance.{name}": value.clone() for name, value in state.balance.state_dict().items()}


def assert_same(one: TrainState, two: TrainState) -> None:
    """Bit for bit."""
    first, second = contents(one), contents(two)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype and torch.equal(value, second[name]), name
    assert (one.step, one.tokens, one.total_steps) == (two.step, two.tokens, two.total_steps)


def loader_of(text: str) -> Loader:
    """A loader of one document."""
    encoder = Encoder(Tokenizer({bytes([b]): b for b in range(256)}))
    return Loader([Records("r", [{"text": text}])], encoder, batch_tokens=64, micro_batch_tokens=64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_continues_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    """Save, load into a state of another seed, go on: weights, optimizer, biases and losses equal an unbroken run."""
    straight = TrainState.build(small_run(dtype=dtype))
    for seed in range(3):
        train_step(straight, [random_batch(seed, images=1)])
    path = checkpoint.save(straight, tmp_path)
    after = [train_step(straight, [random_batch(seed, images=1)]) for seed in range(3, 6)]
    resumed = TrainState.build(small_run(dtype=dtype, seed=9))
    checkpoint.load(resumed, path)
    again = [train_step(resumed, [random_batch(seed, images=1)]) for seed in range(3, 6)]
    assert after == again
    assert_same(straight, resumed)


def test_generators_go_on(tmp_path: Path) -> None:
    """torch, NumPy and Python draw what they would have drawn."""
    state = TrainState.build(small_run())
    random.gauss(0, 1)
    np.random.randn()
    path = checkpoint.save(state, tmp_path)

    def draw() -> tuple[Any, ...]:
        return random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(3).tolist()

    expected = draw()
    draw()
    checkpoint.load(state, path)
    assert draw() == expected


def test_histogram_inside_a_step(tmp_path: Path) -> None:
    """Counts taken before the save are there after the load, beside the bias."""
    state = TrainState.build(small_run())
    train_step(state, [random_batch(0)])
    state.balance.open()
    state.model.loss(random_batch(1), state.balance)
    path = checkpoint.save(state, tmp_path)
    other = TrainState.build(small_run(seed=5))
    checkpoint.load(other, path)
    assert_same(state, other)
    statistic = other.balance.statistics[1]
    assert isinstance(statistic, Histogram) and statistic.num_tokens == 64 and statistic.width > 0
    assert other.model.layers[1].ffn.router.bias.any()


def test_keeps_the_newest_few(tmp_path: Path) -> None:
    """Older checkpoints go once a newer one is complete; the same step is not written twice."""
    state = TrainState.build(small_run())
    for step in range(1, 5):
        state.step = step
        path = checkpoint.save(state, tmp_path, keep=2)
        assert checkpoint.latest(tmp_path) == path
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-00000004"]
    before = (tmp_path / "step-00000004" / "state.json").stat().st_mtime_ns
    checkpoint.save(state, tmp_path, keep=2)
    assert (tmp_path / "step-00000004" / "state.json").stat().st_mtime_ns == before
    assert checkpoint.latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("where", ["tensors", "json", "rename"])
def test_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """No space at any point of a save: one clear error, nothing half-written, the earlier checkpoint loads."""
    state = TrainState.build(small_run())
    train_step(state, [random_batch(0)])
    path = checkpoint.save(state, tmp_path)
    saved = contents(state)
    train_step(state, [random_batch(1)])

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = {
        "tensors": "torch.distributed.checkpoint.filesystem._write_item",
        "json": "openk3.train.checkpoint.json.dumps",
        "rename": "openk3.train.checkpoint.os.replace",
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(target, full)
        with pytest.raises(
            CheckpointError, match="step-00000002: cannot be written .*No space left on device"
        ) as caught:
            checkpoint.save(state, tmp_path)
    assert "\n" not in str(caught.value) and os.listdir(tmp_path) == ["step-00000001"]
    other = TrainState.build(small_run(seed=5))
    checkpoint.load(other, path)
    assert all(torch.equal(value, saved[name]) for name, value in contents(other).items())
    assert checkpoint.save(state, tmp_path).name == "step-00000002"


def test_a_kill_during_a_save_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process leaves has a name that is never taken for a checkpoint, and the next save removes it."""
    state = TrainState.build(small_run())
    leftover = tmp_path / ".step-00000007.abc"
    leftover.mkdir(parents=True)
    (leftover / "state.json").write_text("{}")
    assert checkpoint.latest(tmp_path) is None
    checkpoint.save(state, tmp_path)
    leftover.mkdir()
    checkpoint.save(state, tmp_path)
    assert os.listdir(tmp_path) == ["step-00000000"]  # also where there was nothing new to save
    shutil.rmtree(tmp_path / "step-00000000")

    def killed(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dcp, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(state, tmp_path)
    assert checkpoint.latest(tmp_path) is None
    checkpoint.save(state, tmp_path)
    assert os.listdir(tmp_path) == ["step-00000000"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(143)])
def test_a_signal_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException) -> None:
    """DCP wraps what stops it as it wraps an error; nobody should remove a sound checkpoint for it."""
    state = TrainState.build(small_run())
    path = checkpoint.save(state, tmp_path)

    def stopped(*_: Any) -> Any:
        raise stop

    monkeypatch.setattr(dcp.FileSystemReader, "read_data", stopped)
    with pytest.raises(type(stop)):
        checkpoint.load(state, path)
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", stopped)
    with pytest.raises(type(stop)):
        checkpoint.save(state, tmp_path / "other")
    assert os.listdir(tmp_path / "other") == []


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    """Cut tensors, a missing index or file, another format: the folder is named, with what to do."""
    state = TrainState.build(small_run())
    for name, cut in (("__0_0.distcp", 1000), (".metadata", 100), ("state.json", 20), ("gone", 0)):
        folder = tmp_path / name
        path = checkpoint.save(state, folder)
        if name == "gone":
            (path / "__0_0.distcp").unlink()
        else:
            (path / name).write_bytes((path / name).read_bytes()[:cut])
        with pytest.raises(CheckpointError, match="step-00000000: .*damaged"):
            checkpoint.load(TrainState.build(small_run()), path)
    path = checkpoint.save(state, tmp_path / "format")
    extra = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**extra, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99; this version reads format 1"):
        checkpoint.load(state, path)


WRONG_RECORDS = [
    "null",
    "[1]",
    "[" * 100_000,
    {"step": "3"},
    {"step": -1},
    {"total_steps": 0},
    {"tokens": 1.5},
    {"seconds": None},
    {"seconds": -1.0},
    {"generators": {}},
    {"generators": None},
    {"generators": {"python": [3, [1, 2], None]}},
    {"loader": {"streams": [{}], "pending": []}},
    {"loader": {"streams": [], "pending": [[9, 9, 9, 9, 9, 9]]}},
]


@pytest.mark.parametrize("wrong", WRONG_RECORDS)
def test_a_wrong_record_beside_the_tensors_is_one_error(tmp_path: Path, wrong: Any) -> None:
    """Whatever its JSON holds, from nothing to nonsense."""
    state = TrainState.build(small_run())
    state.loader = loader_of("one")
    path = checkpoint.save(state, tmp_path)
    extra = json.loads((path / "state.json").read_text())
    if isinstance(wrong, dict) and "loader" in wrong:
        wrong = {"loader": extra["loader"] | wrong["loader"] | {"fingerprint": state.loader.fingerprint}}
    (path / "state.json").write_text(json.dumps(extra | wrong) if isinstance(wrong, dict) else wrong)
    with pytest.raises(CheckpointError, match=r"step-00000000: damaged \(.*remove it to resume from an earlier one"):
        checkpoint.load(state, path)


def test_other_documents_are_no_damage(tmp_path: Path) -> None:
    """The loader's own error says what to do."""
    state = TrainState.build(small_run())
    state.loader = loader_of("one")
    path = checkpoint.save(state, tmp_path)
    state.loader = loader_of("two")
    with pytest.raises(DataError, match="the training documents, weights or seed changed"):
        checkpoint.load(state, path)


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"dtype": "bfloat16"}, r"optimizer\.master\."), ({"balance": BalanceConfig(bins=7)}, r"balance\.1\.counts")],
)
def test_other_settings_are_no_damage(tmp_path: Path, changes: dict[str, Any], name: str) -> None:
    """Nobody should remove a sound checkpoint because a flag changed; nothing is loaded half-way."""
    path = checkpoint.save(TrainState.build(small_run()), tmp_path)
    other = TrainState.build(small_run(**changes))
    before = contents(other)
    with pytest.raises(CheckpointError, match=rf"was saved under another configuration: {name}"):
        checkpoint.load(other, path)
    assert all(torch.equal(value, before[name]) for name, value in contents(other).items())


def test_an_index_may_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    """Nor be anything but an index."""
    path = checkpoint.save(TrainState.build(small_run()), tmp_path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../../elsewhere"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="outside the folder"):
        checkpoint.load(TrainState.build(small_run()), path)
    (path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="its index is a dict"):
        checkpoint.load(TrainState.build(small_run()), path)


def test_another_model_is_refused(tmp_path: Path) -> None:
    """A checkpoint of other shapes is not loaded half-way."""
    path = checkpoint.save(TrainState.build(small_run()), tmp_path)
    other = TrainState.build(small_run(model=small_model(moe_intermediate_size=64)))
    before = contents(other)
    with pytest.raises(CheckpointError, match="holds another model"):
        checkpoint.load(other, path)
    assert all(torch.equal(value, before[name]) for name, value in contents(other).items())


class _Evil:
    """Unpickles to a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (EVIL_PATH,)


EVIL_PATH = "owned-by-a-checkpoint"


def test_nothing_in_a_checkpoint_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that would call a function, and a stored object in place of a tensor, are refused unexecuted."""
    monkeypatch.chdir(tmp_path)
    state = TrainState.build(small_run())
    path = checkpoint.save(state, tmp_path / "index")
    (path / ".metadata").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(CheckpointError, match="its index names posix.mkdir|damaged"):
        checkpoint.load(state, path)
    path = checkpoint.save(state, tmp_path / "object")
    extra = (path / "state.json").read_text()
    tensors = {**checkpoint._tensors(state), "balance": state.balance.state_dict()}
    tensors["model"]["norm.weight"] = _Evil()
    shutil.rmtree(path)
    with checkpoint._quiet():
        dcp.save(tensors, checkpoint_id=path, no_dist=True)
    (path / "state.json").write_text(extra)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(state, path)
    assert not (tmp_path / EVIL_PATH).exists()
