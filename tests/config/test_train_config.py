"""PretrainConfig: round trip through JSON, what is refused, the length curriculum, a line of help per field."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from openk3 import recipes
from openk3.config import train
from openk3.config.model import ConfigError
from openk3.config.train import (
    BalanceConfig,
    CheckpointConfig,
    DataConfig,
    OptimConfig,
    PretrainConfig,
    ValidationConfig,
)


@pytest.mark.parametrize("name", recipes.NAMES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    """Every recipe survives JSON, with lists for tuples and integers for whole floats."""
    config = dataclasses.replace(recipes.pretrain(name), out="runs/x", minutes=2)
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, paths=("a", "b"), weights=(1.0, 2.0), held_out_percent=3)
    )
    (tmp_path / "run.json").write_text(json.dumps(config.to_dict()))
    assert PretrainConfig.from_json(tmp_path) == PretrainConfig.from_json(tmp_path / "run.json") == config


def data(**changes: Any) -> Any:
    """tiny as a dictionary with some entries replaced; dots in names lead into sections."""
    out = recipes.pretrain("tiny").to_dict()
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            out[section][field] = value
        else:
            out[section] = value
    return out


BAD = [
    (data(stepz=3), "stepz: no such field"),
    (data(optim__lrr=3.0), r"optim\.lrr: no such field"),
    (data(optim__lr="fast"), r"optim\.lr: expected float, got 'fast'"),
    (data(steps=1.5), "steps: expected int, got 1.5"),
    (data(steps=True), "steps: expected int, got True"),
    (data(optim=3), "optim: expected an object"),
    (data(data__stages=[[1.0]]), r"data\.stages: expected a list of the right length"),
    (data(data__paths="a"), r"data\.paths: expected a list"),
    (data(data__paths=[1]), r"data\.paths: expected str, got 1"),
    (data(model=None), "model: missing"),
    (data(optim__lr=math.inf), r"optim\.lr: must be a finite number, got inf"),
    (data(optim__eps=math.nan), r"optim\.eps: must be a finite number, got nan"),
    (data(optim__lr=10**400), r"optim\.lr: must be a finite number, got inf"),
    (data(minutes=math.inf), "minutes: must be a finite number"),
    (data(data__weights=[math.inf]), r"data\.weights: must be a finite number"),
    (data(steps=10**30), "steps: must be at most"),
    (data(data__stages=[[1.0, 10**12]]), r"data\.stages: .* lengths lie in 2\.\."),
    (data(data__batch_tokens=2**31), r"data\.batch_tokens: must be at most"),
    (data(seed=2**64), "seed: must lie in"),
    (data(seed=-(2**63) - 1), "seed: must lie in"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_wrong_files_are_refused_by_field(given: Any, message: str, tmp_path: Path) -> None:
    """One line with the file and the field."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=f"run.json: {message}"):
        PretrainConfig.from_json(path)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    """No file, no JSON."""
    with pytest.raises(ConfigError, match=r"run\.json: no such file"):
        PretrainConfig.from_json(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json: not valid JSON"):
        PretrainConfig.from_json(tmp_path)


WRONG_VALUES = [
    (DataConfig, {"paths": ("a", "b"), "weights": (1.0,)}, r"data\.weights: 1 weights for 2 paths"),
    (DataConfig, {"paths": ("a",), "weights": (0.0,)}, r"data\.weights"),
    (DataConfig, {"held_out_percent": 100}, r"data\.held_out_percent"),
    (DataConfig, {"stages": ()}, r"data\.stages"),
    (DataConfig, {"stages": ((0.5, 64),)}, r"data\.stages: the fractions must add up to 1, got 0\.5"),
    (DataConfig, {"stages": ((1.0, 1),)}, r"data\.stages"),
    (DataConfig, {"micro_batch_tokens": 1}, r"data\.micro_batch_tokens"),
    (DataConfig, {"batch_tokens": 10}, r"data\.batch_tokens: 10 is less than"),
    (OptimConfig, {"lr": 0.0}, r"optim\.lr"),
    (OptimConfig, {"lr": float("nan")}, r"optim\.lr"),
    (OptimConfig, {"min_lr": 1.0}, r"optim\.min_lr"),
    (OptimConfig, {"schedule": "linear"}, r"optim\.schedule"),
    (OptimConfig, {"beta1": 1.0}, r"optim\.beta1"),
    (OptimConfig, {"newton_schulz_steps": 0}, r"optim\.newton_schulz_steps"),
    (OptimConfig, {"clip_norm": 0.0}, r"optim\.clip_norm"),
    (OptimConfig, {"weight_decay": -1.0}, r"optim\.weight_decay"),
    (BalanceConfig, {"method": "none"}, r"balance\.method"),
    (BalanceConfig, {"bins": 0}, r"balance\.bins"),
    (BalanceConfig, {"ema": 1.0}, r"balance\.ema"),
    (CheckpointConfig, {"every": -1}, r"checkpoint\.every"),
    (CheckpointConfig, {"keep": 0}, r"checkpoint\.keep"),
    (CheckpointConfig, {"experts": "int8"}, r"checkpoint\.experts"),
    (ValidationConfig, {"every": -1}, r"validation\.every"),
    (ValidationConfig, {"max_tokens": 1}, r"validation\.max_tokens"),
]


@pytest.mark.parametrize(("cls", "values", "message"), WRONG_VALUES)
def test_wrong_values_are_refused_by_field(cls: type, values: dict[str, Any], message: str) -> None:
    """The message starts with the flag's name."""
    with pytest.raises(ConfigError, match=f"^{message}"):
        cls(**values)


@pytest.mark.parametrize("values", [{"steps": 0}, {"minutes": -1.0}, {"mtp_loss_weight": -0.1}, {"dtype": "int8"}])
def test_wrong_run_values(values: dict[str, Any]) -> None:
    """The same for the run's own fields."""
    with pytest.raises(ConfigError, match=f"^{next(iter(values))}"):
        dataclasses.replace(recipes.pretrain("tiny"), **values)


def test_length_curriculum() -> None:
    """A stage lasts for its fraction of the tokens; the last one holds at the end and beyond."""
    config = DataConfig(stages=((0.7, 10), (0.2, 20), (0.1, 80)))
    lengths = [config.length_at(step / 10) for step in range(12)]
    assert lengths == [10] * 7 + [20] * 2 + [80] * 3


def test_every_field_says_what_it_is() -> None:
    """`--help` shows the comment on the field's line, so each field has one."""
    source = Path(train.__file__).read_text()
    lines = source.splitlines()
    fields = [
        node
        for cls in ast.walk(ast.parse(source))
        if isinstance(cls, ast.ClassDef)
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
    ]
    plain = [ast.unparse(node.target) for node in fields if "  # " not in lines[(node.end_lineno or 0) - 1]]
    sections = {"data", "optim", "balance", "checkpoint", "validation"}  # their classes' docstrings say it
    assert len(fields) > 40 and set(plain) == sections
