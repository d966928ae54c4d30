"""`openk3 convert`: a model or a run's checkpoint into the released layout, or released weights into a run."""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm import tqdm

from openk3.commands.errors import UserError
from openk3.commands.flags import Convert
from openk3.commands.generate import load_tokenizer
from openk3.commands.memory import require_memory
from openk3.commands.runs import model_in
from openk3.config.model import ModelConfig
from openk3.config.train import PretrainConfig
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.hf import convert_checkpoint
from openk3.model.k3 import K3
from openk3.runtime.run_folder import RunFolder, write_json
from openk3.runtime.staging import staged_folder
from openk3.train import checkpoint
from openk3.train.state import TrainState

MIB = 2**20


def run(flags: Convert) -> None:
    """Write TARGET whole or not at all, and say what it is."""
    if not flags.source.exists():
        raise UserError(f"{flags.source}: no such file or folder; give a run, a checkpoint or a model directory")
    if flags.shard_mib < 1:
        raise UserError(f"--shard-mib: must be at least 1, got {flags.shard_mib}")
    saved = training_checkpoint(flags.source)
    if flags.to == "run":
        to_run(flags)
    elif saved is not None:
        from_training(flags, saved)
    else:
        from_released(flags)
    print(f"{flags.target}: written")


def training_checkpoint(source: Path) -> Path | None:
    """The training state that `source` names: a step folder itself, or a run's newest."""
    if (source / "state.json").is_file():
        return source
    return checkpoint.latest(RunFolder.at(source).checkpoints)


def from_training(flags: Convert, saved: Path) -> None:
    """The weights of a training checkpoint, in full precision until they are stored."""
    run = RunFolder.at(saved.parent.parent)
    config = PretrainConfig.from_json(run.path)
    require_memory(str(run.path), config.model, torch.float32.itemsize, torch.device("cpu"))
    model = K3.empty(config.model)
    checkpoint.load_weights(model, saved)
    print(f"{saved}: {sum(p.numel() for p in model.parameters()):,} parameters")
    model.save_pretrained(
        flags.target,
        experts=config.checkpoint.experts if flags.experts == "keep" else flags.experts,
        dtype=None if flags.dtype == "keep" else flags.dtype,
        scale_rule=flags.rule,
        shard_bytes=flags.shard_mib * MIB,
        also=Tokenizer.load(run.tokenizer).save,
    )


def from_released(flags: Convert) -> None:
    """Another number format for a released-layout folder, without building the model."""
    bars: list[tqdm] = []

    def on_progress(done: int, total: int) -> None:
        if not bars:  # not before the first file is written: an error comes alone
            bars.append(tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="converting"))
        bars[0].update(done - bars[0].n)

    try:
        convert_checkpoint(
            model_in(flags.source) or flags.source,
            flags.target,
            experts=None if flags.experts == "keep" else flags.experts,
            dtype=None if flags.dtype == "keep" else flags.dtype,
            scale_rule=flags.rule,
            shard_bytes=flags.shard_mib * MIB,
            on_progress=on_progress,
        )
    finally:
        for bar in bars:
            bar.close()


def to_run(flags: Convert) -> None:
    """A run folder at step 0 around released weights, with their tokenizer: whole or not at all."""
    ignored = [
        name for name in ("experts", "dtype", "rule", "shard_mib") if getattr(flags, name) != getattr(Convert, name)
    ]
    if ignored:
        raise UserError(
            f"--{ignored[0].replace('_', '-')}: a run holds full-precision weights; leave it out with --to run"
        )
    directory = model_in(flags.source) or flags.source
    tokenizer = load_tokenizer(directory)
    require_memory(str(directory), ModelConfig.from_json(directory), torch.float32.itemsize, torch.device("cpu"))
    with staged_folder(RunFolder.at(flags.target).path, may_replace=lambda folder: False) as folder:
        run, model = RunFolder.at(folder), K3.from_pretrained(directory)
        config = PretrainConfig(model=model.config, out=str(RunFolder.at(flags.target).path))
        try:
            checkpoint.save(TrainState.around(model, config), run.checkpoints)
        except checkpoint.CheckpointError as error:  # it names the temporary folder
            raise UserError(f"{flags.target}: cannot be written ({checkpoint.reason(error.__cause__)})") from error
        tokenizer.save(run.tokenizer)
        write_json(run.config, config.to_dict())
