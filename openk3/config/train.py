"""PretrainConfig and its parts: what a training run reads, how it steps, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openk3.config.activations import check as check_activations
from openk3.config.json_file import JsonError, read_json
from openk3.config.model import ConfigError, ModelConfig

SEEDS = range(-(2**63), 2**64)  # what torch's generators take
MOST_TOKENS = 2**31 - 1  # of one batch: token offsets are 32-bit integers
_MOST = 2**48  # of any other whole number


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how it is cut into batches."""

    paths: tuple[str, ...] = ()  # text, Markdown, Python and JSONL files, or folders of them
    weights: tuple[float, ...] = ()  # share of the tokens for each path; empty: every document once per epoch
    tokenizer: str = ""  # folder or tiktoken.model to use; empty: train one on the training documents
    held_out_paths: tuple[str, ...] = ()  # documents for validation; empty: some of the training documents are kept
    held_out_percent: int = 5  # documents kept for validation, chosen by the md5 of their path
    stages: tuple[tuple[float, int], ...] = ((1.0, 8192),)  # length curriculum: (fraction of the tokens, window length)
    batch_tokens: int = 65536  # tokens of one optimizer step
    micro_batch_tokens: int = 8192  # tokens of one forward and backward pass

    def __post_init__(self) -> None:
        _check_numbers(self, "data.")
        _require(  # without paths the weights are those of sources or paths that come later
            not self.weights or not self.paths or len(self.weights) == len(self.paths),
            f"data.weights: {len(self.weights)} weights for {len(self.paths)} paths; give one per path, or none",
        )
        _require(all(w > 0 for w in self.weights), "data.weights: every weight must be positive")
        _require(0 <= self.held_out_percent < 100, "data.held_out_percent: must lie in 0..99")
        _require(bool(self.stages), "data.stages: give at least one (fraction, length) pair")
        total = sum(fraction for fraction, _ in self.stages)
        _require(abs(total - 1) < 1e-6, f"data.stages: the fractions must add up to 1, got {total:g}")
        _require(
            all(fraction > 0 and 2 <= length <= MOST_TOKENS for fraction, length in self.stages),
            f"data.stages: fractions must be positive and lengths lie in 2..{MOST_TOKENS}",
        )
        _require(self.batch_tokens <= MOST_TOKENS, f"data.batch_tokens: must be at most {MOST_TOKENS}")
        _require(self.micro_batch_tokens >= 2, "data.micro_batch_tokens: must be at least 2")
        _require(
            self.batch_tokens >= self.micro_batch_tokens,
            f"data.batch_tokens: {self.batch_tokens} is less than micro_batch_tokens {self.micro_batch_tokens}",
        )

    def length_at(self, progress: float) -> int:
        """Window length once this fraction (0..1) of the run's tokens is done."""
        done = 0.0
        for fraction, length in self.stages:
            done += fraction
            if progress < done - 1e-9:
                return length
        return self.stages[-1][1]


@dataclass(frozen=True)
class OptimConfig:
    """Per-Head Muon for matrices, AdamW for the rest, one learning rate for both (report sections 2.5, 3.3)."""

    lr: float = 2e-4  # peak learning rate
    min_lr: float = 2e-5  # where the schedule ends
    schedule: str = "cosine"  # "cosine", or "wsd": stay at the peak, then fall linearly
    warmup_fraction: float = 0.01  # share of the steps that warm up linearly
    decay_fraction: float = 0.2  # share of the steps in which "wsd" falls
    weight_decay: float = 0.1  # decoupled; on everything but vectors
    momentum: float = 0.95  # Muon's, with the Nesterov form
    newton_schulz_steps: int = 5  # iterations of Muon's orthogonalisation
    update_scale: float = 0.2  # Muon's update has about this RMS, as AdamW's
    beta1: float = 0.9  # AdamW's decay of the mean gradient
    beta2: float = 0.95  # AdamW's decay of the mean squared gradient
    eps: float = 1e-8  # AdamW's guard against division by zero
    adamw_lr_scale: float = 1.0  # AdamW's learning rate as a multiple of lr
    clip_norm: float = 1.0  # largest global gradient norm
    qk_clip_tau: float = 100.0  # largest attention logit that QK-Clip leaves alone; 0 turns it off

    def __post_init__(self) -> None:
        _check_numbers(self, "optim.")
        _require(self.lr > 0, f"optim.lr: must be positive, got {self.lr}")
        _require(0 <= self.min_lr <= self.lr, f"optim.min_lr: must lie in 0..lr ({self.lr}), got {self.min_lr}")
        _require(self.schedule in ("cosine", "wsd"), f"optim.schedule: 'cosine' or 'wsd', got {self.schedule!r}")
        for name in ("warmup_fraction", "decay_fraction", "momentum", "beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"optim.{name}: must lie in [0, 1), got {getattr(self, name)}")
        _require(self.newton_schulz_steps >= 1, "optim.newton_schulz_steps: must be at least 1")
        for name in ("update_scale", "eps", "adamw_lr_scale", "clip_norm"):
            _require(getattr(self, name) > 0, f"optim.{name}: must be positive, got {getattr(self, name)}")
        for name in ("weight_decay", "qk_clip_tau"):
            _require(getattr(self, name) >= 0, f"optim.{name}: must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True)
class BalanceConfig:
    """Quantile Balancing of the routed experts (report section 2.3.3 and Appendix D)."""

    method: str = "histogram"  # "histogram", or "exact": keeps every margin of the step
    bins: int = 1000  # bins of the histogram
    ema: float = 0.0  # share of the earlier bias that an update keeps at most, against noise; 0: each step stands alone

    def __post_init__(self) -> None:
        _check_numbers(self, "balance.")
        _require(self.method in ("histogram", "exact"), f"balance.method: 'histogram' or 'exact', got {self.method!r}")
        _require(self.bins >= 1, "balance.bins: must be at least 1")
        _require(0 <= self.ema < 1, f"balance.ema: must lie in [0, 1), got {self.ema}")


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a run."""

    every: int = 500  # steps between checkpoints; 0: only at the end, and when stopped
    keep: int = 2  # newest checkpoints kept
    experts: str = "bf16"  # routed experts in the exported model: "bf16", "float32" or "mxfp4"

    def __post_init__(self) -> None:
        _check_numbers(self, "checkpoint.")
        _require(self.every >= 0, "checkpoint.every: must not be negative")
        _require(self.keep >= 1, "checkpoint.keep: must be at least 1")
        _require(
            self.experts in ("bf16", "float32", "mxfp4"),
            f"checkpoint.experts: 'bf16', 'float32' or 'mxfp4', got {self.experts!r}",
        )


@dataclass(frozen=True)
class ValidationConfig:
    """Held-out bits per byte."""

    every: int = 200  # steps between validations; 0: only at the end
    max_tokens: int = 65536  # held-out tokens used each time, the same ones always

    def __post_init__(self) -> None:
        _check_numbers(self, "validation.")
        _require(self.every >= 0, "validation.every: must not be negative")
        _require(self.max_tokens >= 2, "validation.max_tokens: must be at least 2")


@dataclass(frozen=True)
class PretrainConfig:
    """One pretraining run, complete: the same configuration, data and seed give the same model on the same machine."""

    model: ModelConfig  # shapes; vocabulary size and special ids follow the tokenizer
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    out: str = ""  # run folder to make; empty: runs/<date and time>
    steps: int = 1000  # optimizer steps in all
    minutes: float = 0.0  # train this long in all, a resumed run from its start: steps are planned from it; 0: by steps
    workers: int = 1  # micro-batches computed at once, by a thread each: for small models on a CPU
    mtp_loss_weight: float = 0.1  # weight of the multi-token prediction loss
    mxfp4_from: float = 1.0  # share of the steps after which routed experts compute with weights rounded to MXFP4
    seed: int = 0  # initial weights and data order
    device: str = "auto"  # "auto", "cpu" or "cuda"
    dtype: str = "auto"  # "auto" (float32 on a CPU, bfloat16 on a GPU), "float32", "bfloat16" or "float64"
    activations: str = "none"  # made again or FP8: "none", "selective", "memory", "full", "auto", or GROUP=HOW,...

    def __post_init__(self) -> None:
        _check_numbers(self, "")
        _require(self.steps >= 1, f"steps: must be at least 1, got {self.steps}")
        _require(self.minutes >= 0, f"minutes: must not be negative, got {self.minutes}")
        _require(self.seed in SEEDS, f"seed: must lie in {SEEDS.start}..{SEEDS.stop - 1}, got {self.seed}")
        _require(self.workers >= 1, f"workers: must be at least 1, got {self.workers}")
        _require(self.mtp_loss_weight >= 0, "mtp_loss_weight: must not be negative")
        _require(0 <= self.mxfp4_from <= 1, f"mxfp4_from: must lie in 0..1, got {self.mxfp4_from}")
        check_activations(self.activations)
        _require(
            self.dtype in ("auto", "float32", "bfloat16", "float64"),
            f"dtype: 'auto', 'float32', 'bfloat16' or 'float64', got {self.dtype!r}",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict(to_dict())` is the identity."""
        data = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        for name, value in data.items():
            if isinstance(value, ModelConfig):
                data[name] = value.to_dict()
            elif dataclasses.is_dataclass(value) and not isinstance(value, type):
                data[name] = dataclasses.asdict(value)
        return json.loads(json.dumps(data))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PretrainConfig:
        """Rebuild from `to_dict`'s form. Raises ConfigError naming an unknown, missing or wrong field."""
        if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
            raise ConfigError("model: missing; this is not the configuration of a training run")
        rest = {name: value for name, value in data.items() if name != "model"}
        return _build(cls, rest, "", model=ModelConfig.from_dict(data["model"]))

    @classmethod
    def from_json(cls, path: str | Path) -> PretrainConfig:
        """Read `run.json`, or the one inside a run folder. Raises ConfigError naming the file."""
        path = Path(path)
        path = path / "run.json" if path.is_dir() else path
        try:
            return cls.from_dict(read_json(path))
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; expected the run.json of a training run") from None
        except JsonError as error:
            raise ConfigError(str(error)) from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _check_numbers(section: Any, prefix: str) -> None:
    """No infinity and no NaN anywhere, and no whole number beyond what any machine can count."""
    for spec in dataclasses.fields(section):
        value = getattr(section, spec.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float):
                _require(math.isfinite(number), f"{prefix}{spec.name}: must be a finite number, got {number}")
            elif isinstance(number, int) and spec.name != "seed":
                _require(number <= _MOST, f"{prefix}{spec.name}: must be at most {_MOST}, got {str(number)[:40]}")


def _build(cls: type, data: Any, where: str, **given: Any) -> Any:
    """A dataclass from plain JSON values; unknown names are refused, missing ones keep their default."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where.rstrip('.')}: expected an object, got {data!r}")
    kinds = typing.get_type_hints(cls)
    unknown = sorted(set(data) - set(kinds))
    if unknown:
        raise ConfigError(f"{where}{unknown[0]}: no such field")
    values = {name: _coerce(value, kinds[name], where + name) for name, value in data.items()}
    return cls(**values, **given)


def _coerce(value: Any, kind: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast(type, kind), value, where + ".")
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        if not isinstance(value, (list, tuple)) or (items[-1] is not ... and len(items) != len(value)):
            raise ConfigError(f"{where}: expected a list of the right length, got {value!r}")
        kinds = [items[0]] * len(value) if items[-1] is ... else list(items)
        return tuple(_coerce(item, item_kind, where) for item, item_kind in zip(value, kinds, strict=True))
    if kind is float and type(value) in (int, float):
        return math.inf if abs(value) > _MOST else float(value)  # refused as such by its field's check
    if type(value) is not kind:
        raise ConfigError(f"{where}: expected {kind.__name__}, got {value!r}")
    return value
