"""pretrain: a whole run, stopping at any point and going on bit for bit, planning by time, what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from small_models import small_run

from openk3.config.model import ConfigError
from openk3.config.train import CheckpointConfig, DataConfig, PretrainConfig, ValidationConfig
from openk3.data.documents import DataError
from openk3.data.sources import Records
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.k3 import K3
from openk3.ops.mxfp import fake_quantize_mxfp4
from openk3.runtime.metrics import read_metrics
from openk3.train import checkpoint
from openk3.train.checkpoint import CheckpointError
from openk3.train.pretrain import pretrain
from openk3.train.state import TrainState

TOKENIZER = Tokenizer({bytes([b]): b for b in range(256)})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty texts, two captioned images and a conversation."""
    folder = tmp_path_factory.mktemp("corpus")
    for n in range(20):
        (folder / f"{n}.txt").write_text(f"file {n} says " + "abcde "[n % 5 :] * (3 + n % 7))
    for color in ("red", "blue"):
        Image.new("RGB", (28, 28), color).save(folder / f"{color}.png")
    records = [{"image": f"{color}.png", "text": color} for color in ("red", "blue")]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    lines = [*records, {"messages": chat, "thinking": False}]
    (folder / "more.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return folder


def config_of(corpus: Path, out: Path, **changes: Any) -> PretrainConfig:
    """Six steps with a length step, validated and saved every second step."""
    data = DataConfig(
        paths=(str(corpus),),
        stages=((0.7, 32), (0.3, 64)),
        batch_tokens=128,
        micro_batch_tokens=64,
        held_out_percent=20,
    )
    parts = {
        "data": data,
        "checkpoint": CheckpointConfig(every=2, experts="float32"),
        "validation": ValidationConfig(every=3, max_tokens=200),
        "steps": 6,
        "out": str(out),
    }
    return small_run(**{**parts, **changes})


def weights(state: TrainState) -> dict[str, torch.Tensor]:
    """Every parameter and buffer."""
    return {n: v.detach() for n, v in [*state.model.named_parameters(), *state.model.named_buffers()]}


def same(one: TrainState, two: TrainState) -> bool:
    """Bit for bit."""
    return all(torch.equal(value, weights(two)[name]) for name, value in weights(one).items())


class Stop(Exception):
    """Stands for a crash."""


def crash_at(step: int, how: Any = Stop) -> Any:
    """An on_step that ends the run after `step`."""

    def on_step(state: TrainState, metrics: dict[str, float]) -> None:
        if state.step == step:
            if isinstance(how, signal.Signals):
                os.kill(os.getpid(), how)
            else:
                raise how

    return on_step


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainState:
    """The run that nothing interrupts."""
    return pretrain(config_of(corpus, tmp_path_factory.mktemp("whole") / "run"), tokenizer=TOKENIZER)


def test_run_folder(whole: TrainState) -> None:
    """Configuration, tokenizer, one metrics line per step, newest checkpoints, a model that loads and agrees."""
    run = Path(whole.config.out)
    assert sorted(os.listdir(run)) == ["checkpoints", "metrics.jsonl", "model", "run.json", "tokenizer"]
    assert PretrainConfig.from_json(run) == whole.config
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["seq_len"] for row in rows] == [32, 32, 32, 32, 32, 64]
    assert [row["step"] for row in rows if "val_bpb" in row] == [3, 6]
    assert {"loss", "lm", "mtp", "grad_norm", "lr", "max_load", "max_logit", "tokens", "seconds"} <= set(rows[0])
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["lr"] == pytest.approx(1e-3)
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000004", "step-00000006"]
    assert whole.step == 6 and not whole.interrupted and whole.tokens == sum(row["tokens"] for row in rows)
    assert Tokenizer.load(run / "model").vocab_size == TOKENIZER.vocab_size == whole.config.model.text.vocab_size
    model = K3.from_pretrained(run / "model")
    assert all(torch.equal(value, weights(whole)[name]) for name, value in model.named_parameters())


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_killed_runs_go_on_bit_for_bit(whole: TrainState, corpus: Path, tmp_path: Path, stop: int) -> None:
    """A crash between steps, with nothing saved since the last checkpoint: resumed, it ends in the same weights.

    Before the first checkpoint the run starts again; no step appears twice in the metrics.
    """
    config = config_of(corpus, tmp_path / "run")
    with pytest.raises(Stop):
        pretrain(config, tokenizer=TOKENIZER, on_step=crash_at(stop))
    resumed = pretrain(config, resume=True)
    assert same(whole, resumed)
    rows, expected = (read_metrics(path / "metrics.jsonl") for path in (tmp_path / "run", Path(whole.config.out)))
    exact = [{k: v for k, v in row.items() if "second" not in k} for row in rows]
    assert exact == [{k: v for k, v in row.items() if "second" not in k} for row in expected]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_and_stop(whole: TrainState, corpus: Path, tmp_path: Path, number: signal.Signals) -> None:
    """The step is finished, saved and reported; no model is written; resuming twice ends in the same weights."""
    config = config_of(corpus, tmp_path / "run", checkpoint=CheckpointConfig(every=0, experts="float32"))
    for step in (3, 5):
        state = pretrain(config, tokenizer=TOKENIZER, on_step=crash_at(step, number), resume=step > 3)
        assert state.interrupted and state.step == step
        assert checkpoint.latest(tmp_path / "run" / "checkpoints").name == f"step-{step:08d}"  # pyrefly: ignore
        assert not (tmp_path / "run" / "model").exists()
    resumed = pretrain(config, resume=True)
    assert not resumed.interrupted and same(whole, resumed) and (tmp_path / "run" / "model").is_dir()


def test_second_ctrl_c_stops_at_once(corpus: Path, tmp_path: Path) -> None:
    """Two signals in one step: KeyboardInterrupt, and the earlier checkpoint is what is left."""

    def twice(state: TrainState, metrics: dict[str, float]) -> None:
        if state.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()

    with pytest.raises(KeyboardInterrupt):
        pretrain(config_of(corpus, tmp_path / "run"), tokenizer=TOKENIZER, on_step=twice)
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step-00000002"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_killed_process_can_be_resumed(whole: TrainState, corpus: Path, tmp_path: Path) -> None:
    """SIGKILL of a real process after step 5: another process's state continues to the same weights."""
    config = config_of(corpus, tmp_path / "run")
    code = f"""
        import json, os, signal
        from openk3.config.train import PretrainConfig
        from openk3.inputs.tokenizer import Tokenizer
        from openk3.train.pretrain import pretrain
        config = PretrainConfig.from_dict(json.loads({json.dumps(config.to_dict())!r}))
        def on_step(state, metrics):
            if state.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
        pretrain(config, tokenizer=Tokenizer({{bytes([b]): b for b in range(256)}}), on_step=on_step)
    """
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert same(whole, pretrain(config, resume=True))


def test_full_disk_stops_the_run_and_keeps_the_last_checkpoint(
    whole: TrainState, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of step 4 fails: a clear error; once there is room, the run goes on from step 2."""
    config = config_of(corpus, tmp_path / "run")
    write = checkpoint._write

    def full(state: TrainState, staging: Path) -> None:
        if state.step == 4:
            raise OSError(28, "No space left on device")
        write(state, staging)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            pretrain(config, tokenizer=TOKENIZER)
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step-00000002"]
    assert same(whole, pretrain(config, resume=True))


def test_more_steps_after_the_end(whole: TrainState, corpus: Path, tmp_path: Path) -> None:
    """A finished run resumes at once and writes its model again; with more steps it trains on."""
    config = config_of(corpus, tmp_path / "run", steps=2)
    first = pretrain(config, tokenizer=TOKENIZER)
    again = pretrain(config, resume=True)
    assert again.step == 2 and same(first, again)
    longer = pretrain(dataclasses.replace(config, steps=4), resume=True)
    assert longer.step == 4 and [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
    ]


def test_minutes_plan_the_steps(corpus: Path, tmp_path: Path) -> None:
    """A run of three seconds fits as many steps as there is time for, and goes through every stage."""
    config = config_of(corpus, tmp_path / "run", minutes=0.05, validation=ValidationConfig(every=0), steps=100000)
    state = pretrain(config, tokenizer=TOKENIZER)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert state.step == state.total_steps == len(rows) < 1000  # of 100,000
    assert rows[0]["seq_len"] == 32 and rows[-1]["seq_len"] == 64
    assert rows[-1]["lr"] < 0.5 * max(row["lr"] for row in rows)
    longer = pretrain(dataclasses.replace(config, minutes=state.seconds / 60 + 0.03), resume=True)
    assert longer.step > state.step


def test_tokenizer_is_trained_on_the_training_documents(corpus: Path, tmp_path: Path) -> None:
    """Without one, a tokenizer of the model's vocabulary size is learnt and the model takes its size and ids."""
    config = config_of(corpus, tmp_path / "run", steps=1)
    config = dataclasses.replace(config, model=config.model.replace_text(vocab_size=540))
    state = pretrain(config)
    tokenizer = Tokenizer.load(tmp_path / "run" / "tokenizer")
    assert 512 < tokenizer.vocab_size <= 540 and state.config.model.text.vocab_size == tokenizer.vocab_size
    assert state.config.model.media_placeholder_token_id == tokenizer.special["<|media_pad|>"]


def test_records_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sources and held-out records may be handed over; a single document is all for training."""
    config = config_of(Path("unused"), tmp_path / "run", steps=1)
    texts = [{"text": f"word {n}"} for n in range(9)]
    state = pretrain(config, sources=[Records("a", texts)], held_out=[Records("b", texts[:2])], tokenizer=TOKENIZER)
    assert "val_bpb" in read_metrics(tmp_path / "run" / "metrics.jsonl")[-1] and state.step == 1
    single = dataclasses.replace(config, out=str(tmp_path / "single"))
    single = dataclasses.replace(single, data=dataclasses.replace(single.data, held_out_percent=0))
    pretrain(single, sources=[Records("a", [{"text": "alone " * 9}])], tokenizer=TOKENIZER)
    assert "val_bpb" not in read_metrics(tmp_path / "single" / "metrics.jsonl")[-1]


def test_what_is_refused(whole: TrainState, corpus: Path, tmp_path: Path) -> None:
    """No folder, no data, a run in the way, nothing to resume, changed documents: one line each."""
    config = config_of(corpus, tmp_path / "run")
    with pytest.raises(ConfigError, match="out: name the run folder"):
        pretrain(dataclasses.replace(config, out=""))
    with pytest.raises(ConfigError, match=r"data\.paths: nothing to train on"):
        pretrain(dataclasses.replace(config, data=dataclasses.replace(config.data, paths=())))
    with pytest.raises(ConfigError, match="already holds a run"):
        pretrain(dataclasses.replace(config, out=whole.config.out))
    with pytest.raises(ConfigError, match="no run to resume there"):
        pretrain(dataclasses.replace(config, out=str(tmp_path / "gone")), resume=True)
    with pytest.raises(Stop):
        pretrain(config, tokenizer=TOKENIZER, on_step=crash_at(3))
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("something else entirely")
    changed = dataclasses.replace(config, data=dataclasses.replace(config.data, paths=(str(other),)))
    with pytest.raises(DataError, match="the training documents, weights or seed changed"):
        pretrain(changed, resume=True)


@pytest.mark.parametrize("how", ["gone", "shorter", "other bytes"])
def test_a_document_lost_while_training_costs_nothing_learnt(
    whole: TrainState, corpus: Path, tmp_path: Path, how: str
) -> None:
    """Somebody edits the corpus: one line, and once it is as before the run goes on bit for bit."""
    mine = tmp_path / "corpus"
    shutil.copytree(corpus, mine)
    config = config_of(mine, tmp_path / "run")
    config = dataclasses.replace(config, checkpoint=CheckpointConfig(every=0, experts="float32"))

    def spoil(state: TrainState, values: dict[str, float]) -> None:
        for file in mine.glob("*.txt") if state.step == 1 else ():
            if how == "gone":
                file.unlink()
            else:
                file.write_bytes(b"\xff" * (file.stat().st_size - (how == "shorter")))

    with pytest.raises((DataError, FileNotFoundError), match=r"\.txt"):
        pretrain(config, tokenizer=TOKENIZER, on_step=spoil)
    saved = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert saved is not None and saved.name != "step-00000006"
    shutil.copytree(corpus, mine, dirs_exist_ok=True)
    assert same(pretrain(config, resume=True), whole)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]


def test_held_out_documents_without_text(corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run is not lost at its end because there is nothing to validate on."""
    config = dataclasses.replace(config_of(corpus, tmp_path / "run"), steps=2)
    held_out = [Records("held", [{"text": ""}] * 3)]
    assert pretrain(config, held_out=held_out, tokenizer=TOKENIZER).step == 2
    assert "val_bpb" not in read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert "no text to predict: no validation" in caplog.text


def test_exported_mxfp4_experts_are_the_fake_quantised_ones(whole: TrainState, tmp_path: Path) -> None:
    """M04: what an MXFP4 export loads as is what fake quantisation of the trained weights computes, bit for bit."""
    whole.model.save_pretrained(tmp_path / "mxfp4", experts="mxfp4")
    loaded = K3.from_pretrained(tmp_path / "mxfp4")
    for name, value in whole.model.named_parameters():
        if ".experts." in name:
            assert torch.equal(loaded.get_parameter(name), fake_quantize_mxfp4(value.detach(), "even")), name
