"""Find the run that a command should use: the given one, the newest run, or the model shipped with openk3."""

from __future__ import annotations

import shlex
from datetime import datetime
from pathlib import Path

import openk3
from openk3.commands.errors import UserError
from openk3.runtime.run_folder import RunFolder

RUNS = Path("runs")
SHIPPED = Path(openk3.__file__).parent / "shipped" / "pocket"
ABOUT_SHIPPED = (
    "pocket, the small model that comes with openk3, for words, sums, Python, fables and pictures; it makes mistakes"
)


def is_model(directory: Path) -> bool:
    """Whether the directory holds a model in the released layout."""
    return (directory / "config.json").is_file()


def model_in(run: Path) -> Path | None:
    """The model directory of a run folder (the run's model, or `run` itself), or None."""
    return next((directory for directory in (run, RunFolder.at(run).model) if is_model(directory)), None)


def newest_run(runs: Path | None = None) -> Path | None:
    """The run under `runs/` whose model was written last, or None."""
    runs = RUNS if runs is None else runs
    folders = [folder for folder in runs.iterdir() if model_in(folder)] if runs.is_dir() else []
    return max(folders, key=lambda folder: (_written(folder), folder.name), default=None)


def _written(run: Path) -> float:
    model = model_in(run)
    return (model / "config.json").stat().st_mtime if model else 0.0


def find_run(given: Path | None) -> Path:
    """The run folder (or model directory) to use; the shipped model goes by its name, too.

    Raises UserError that says which run may be meant, or how to make one.
    """
    if given is not None:
        if given.exists():
            return given
        if str(given) == SHIPPED.name and is_model(SHIPPED):
            return SHIPPED
        if (RUNS / given).exists():
            raise UserError(f"{given}: no such run; did you mean {RUNS / given}?")
        raise UserError(f"{given}: no such run; `ls {RUNS}` shows what there is, `openk3 quickstart` makes one")
    newest = newest_run()
    if newest is not None:
        return newest
    if is_model(SHIPPED):
        return SHIPPED
    raise UserError(f"no run under {RUNS}/ and no RUN given; make one with `openk3 quickstart` (8 minutes)")


def about_model(directory: Path) -> str:
    """What to say of the model in this directory: its path, or what the shipped one is."""
    return ABOUT_SHIPPED if directory == SHIPPED else str(directory)


def find_model(given: Path | None) -> Path:
    """The directory with config.json and weights of the run to use. Raises UserError when the run has no model yet."""
    run = find_run(given)
    model = model_in(run)
    if model is None:
        raise UserError(f"{run}: holds no model (no config.json); give a finished run or a model directory")
    return model


def new_run(now: datetime | None = None) -> Path:
    """A run folder that does not exist yet, named by date and time."""
    base = RUNS / (now or datetime.now()).strftime("%Y-%m-%d-%H%M%S")
    names = (base if n == 0 else base.with_name(f"{base.name}-{n}") for n in range(1000))
    return next(path for path in names if not path.exists())


def next_commands(run: Path | str) -> str:
    """What one may do with a finished run, as lines to print."""
    name = shlex.quote(str(run))
    return f"next:\n  openk3 chat {name}\n  openk3 pretrain --resume {name} --steps N\n  openk3 plan {name}"
