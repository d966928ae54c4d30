"""Opening a run folder: one process at a time, nothing left of a run that never started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from small_models import small_model, small_run

from openk3.config.model import ConfigError
from openk3.data.documents import DataError
from openk3.data.sources import Records
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.k3 import K3
from openk3.runtime.run_folder import RunFolder, write_json
from openk3.train.opening import open_run
from openk3.train.pretrain import pretrain

TOKENIZER = Tokenizer({bytes([b]): b for b in range(256)})


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """A second run, or a resume, waits for the first to end; afterwards the folder is free."""
    with open_run(str(tmp_path / "r"), resume=False) as opening:
        with pytest.raises(ConfigError, match="another process is training there"):
            pretrain(small_run(out=str(tmp_path / "r")))
        write_json(opening.run.config, {})
        with pytest.raises(ConfigError, match="another process is training there"):
            pretrain(small_run(out=str(tmp_path / "r")), resume=True)
        opening.started = True
    with open_run(str(tmp_path / "r"), resume=True):
        pass


@pytest.mark.parametrize("records", [[{"messages": [{"role": "user", "content": "q"}]}], [{"text": "x" * 99}]])
def test_a_run_that_never_starts_leaves_nothing(records: list[dict[str, str]], tmp_path: Path) -> None:
    """Documents without a target, and a seed's or loss's fault at the first step: the folder is as it was."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    config = small_run(out=str(tmp_path / "deep" / "r"))
    with pytest.raises((DataError, KeyboardInterrupt)), pytest.MonkeyPatch.context() as patch:
        patch.setattr("openk3.train.pretrain.train_step", stop)
        pretrain(config, sources=[Records("r", records)], tokenizer=TOKENIZER)
    assert os.listdir(tmp_path) == []
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(RuntimeError), open_run(str(tmp_path), resume=False) as opening:
        write_json(opening.run.config, {})
        raise RuntimeError
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_a_started_run_is_kept(tmp_path: Path) -> None:
    """What cost a step stays, to be resumed."""
    run = RunFolder.at(tmp_path / "r")
    with pytest.raises(RuntimeError), open_run(str(run.path), resume=False) as opening:
        write_json(run.config, {})
        opening.started = True
        raise RuntimeError
    assert run.is_run
    with pytest.raises(RuntimeError), open_run(str(run.path), resume=True):
        raise RuntimeError
    assert run.is_run


def test_what_is_in_the_way_is_said_before_training(tmp_path: Path) -> None:
    """A file in place of the folder, and other files where the model will go; a model of ours makes way."""
    (tmp_path / "f").write_text("x")
    with (
        pytest.raises(ConfigError, match="f: cannot be used as a run folder"),
        open_run(str(tmp_path / "f"), resume=False),
    ):
        pass
    model = tmp_path / "r" / "model"
    model.mkdir(parents=True)
    (model / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match="model: holds other files"), open_run(str(tmp_path / "r"), resume=False):
        pass
    (model / "notes.txt").unlink()
    K3.build(small_model(), seed=0).save_pretrained(model)
    with open_run(str(tmp_path / "r"), resume=False):
        pass
