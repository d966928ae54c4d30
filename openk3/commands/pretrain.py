"""`openk3 pretrain`: run a recipe on the user's files, or continue a run."""

from __future__ import annotations

import dataclasses
import os
import shlex

from openk3 import recipes
from openk3.commands.errors import UserError
from openk3.commands.flags import Pretrain
from openk3.commands.memory import TRAINING_BYTES, require_memory
from openk3.commands.runs import new_run, next_commands
from openk3.config.train import DataConfig, PretrainConfig
from openk3.optim.optimizer import NonFiniteGradient
from openk3.runtime.cpu import tune_cpu
from openk3.runtime.device import pick_device
from openk3.runtime.log import setup_logging
from openk3.runtime.run_folder import RunFolder
from openk3.train.pretrain import pretrain

# What a run that was killed as it began leaves behind, and a new one may write over.
RUN_FILES = {"tokenizer", "checkpoints", "metrics.jsonl"}


def run(flags: Pretrain) -> None:
    """Train, then say what to do next. Ctrl-C and SIGTERM save the state first."""
    config = complete(flags)
    require_memory(flags.recipe or config.out, config.model, TRAINING_BYTES, pick_device(config.device))
    setup_logging()
    tune_cpu()
    try:
        state = pretrain(config, resume=flags.resume is not None)
    except NonFiniteGradient as error:
        raise UserError(f"{config.out}: training diverged ({error}); resume with a lower --optim.lr") from error
    if state.interrupted:
        print(f"\nstopped at step {state.step} of {state.total_steps}; go on with:")
        print(f"  openk3 pretrain --resume {shlex.quote(config.out)}")
        return
    print(f"\n{state.step} steps, {state.tokens:,} tokens in {state.seconds:.0f} s; the run is {config.out}")
    print(next_commands(config.out))


def complete(flags: Pretrain) -> PretrainConfig:
    """The run's configuration with the data and folder that the flags name. Raises UserError."""
    if flags.resume is not None:
        if flags.recipe:
            raise UserError(f"{flags.recipe}: a resumed run has its own configuration; leave RECIPE out with --resume")
        if flags.config.out != PretrainConfig.from_json(flags.resume).out:
            raise UserError("--out: a resumed run stays in its own folder; leave --out out with --resume")
        return dataclasses.replace(flags.config, out=str(flags.resume), data=with_paths(flags))
    if not flags.recipe:
        raise UserError(f"RECIPE: name one of {', '.join(recipes.NAMES)}, or continue a run with --resume RUN")
    config = dataclasses.replace(flags.config, data=with_paths(flags))
    if not config.data.paths:
        raise UserError("--data: name text files, JSONL files or folders of them to train on")
    if not config.out:
        return dataclasses.replace(config, out=str(new_run()))
    folder = RunFolder.at(config.out).path
    if folder.is_dir() and not RunFolder.at(folder).is_run and not RUN_FILES.issuperset(map(str, os.listdir(folder))):
        raise UserError(f"--out: {folder} holds other files and is left alone; choose an empty or new folder")
    return config


def with_paths(flags: Pretrain) -> DataConfig:
    """The data part with --data's paths, if there are any."""
    if not flags.data:
        return flags.config.data
    return dataclasses.replace(flags.config.data, paths=tuple(str(path) for path in flags.data))
