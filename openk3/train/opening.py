"""Open a run folder for one training process: locked while it trains, and as it was before if the run never starts."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from openk3.config.model import ConfigError
from openk3.model.hf_card import is_ours
from openk3.runtime.lock import try_lock
from openk3.runtime.run_folder import RunFolder


@dataclass
class Opening:
    """An open run folder; `started` once there is something in it that cost time, the first step."""

    run: RunFolder
    started: bool = False


@contextmanager
def open_run(out: str, *, resume: bool) -> Generator[Opening]:
    """The folder `out` of a new or a resumed run. Raises ConfigError naming it and saying what to do.

    Whatever ends the block before the first step of a new run also takes back what it wrote, so that the same command
    can be given again once its fault is mended.
    """
    if not out:
        raise ConfigError("out: name the run folder to write")
    run = RunFolder.at(out)
    made = [path for path in (run.path, *run.path.parents) if not path.exists()]
    _check(run, resume)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        release = try_lock(run.path)
    except OSError as error:
        raise ConfigError(f"{run.path}: cannot be used as a run folder ({error.strerror}); name another one") from error
    if release is None:
        raise ConfigError(f"{run.path}: another process is training there; wait for it, or name another folder")
    opening = Opening(run)
    try:
        _check(run, resume)  # another process may have finished a run there meanwhile
        yield opening
    except BaseException:
        if not resume and not opening.started:
            _undo(run, made)
        raise
    finally:
        release()


def _check(run: RunFolder, resume: bool) -> None:
    if resume and not run.is_run:
        raise ConfigError(f"{run.path}: no run to resume there (no {run.config.name})")
    if not resume and run.is_run:
        raise ConfigError(f"{run.path}: already holds a run; resume it, or choose another folder")
    if run.model.exists() and not (run.model.is_dir() and (is_ours(run.model) or not any(run.model.iterdir()))):
        raise ConfigError(f"{run.model}: holds other files, and the trained model belongs there; move them away")


def _undo(run: RunFolder, made: list[Path]) -> None:
    for file in (run.config, run.metrics):
        file.unlink(missing_ok=True)
    for folder in (run.tokenizer, run.checkpoints):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in made:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
