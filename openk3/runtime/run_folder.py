"""The run folder: where a run's configuration, metrics, checkpoints, exported model and report lie."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openk3.runtime.staging import named, temporary_beside, umask


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run folder; nothing is created until it is written."""

    path: Path

    @classmethod
    def at(cls, path: str | Path) -> RunFolder:
        """The folder at `path`, with `~` expanded."""
        return cls(Path(os.path.expanduser(path)))

    @property
    def config(self) -> Path:
        """PretrainConfig as JSON: what `--resume` reads."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """One JSON line per step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Training states, one folder per saved step."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that the run trains with."""
        return self.path / "tokenizer"

    @property
    def model(self) -> Path:
        """The exported model in the released layout, tokenizer beside it."""
        return self.path / "model"

    @property
    def report(self) -> Path:
        """The self-contained report page."""
        return self.path / "report.html"

    @property
    def is_run(self) -> bool:
        """Whether a training run was started here."""
        return self.config.is_file()


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write(temporary)` with a name in the same folder, then put it in `path`'s place; on failure leave nothing.

    The data is on disk before the name changes, so that a power cut leaves either the old file or the new one. A link
    stays, and the file behind it is written; a device or a pipe is written to, for a file must never take its place.
    An OSError names `path`.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            write(path)
            return
        place = Path(os.path.realpath(path))
        place.parent.mkdir(parents=True, exist_ok=True)
        with temporary_beside(place, folder=False) as temporary:
            write(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.chmod(0o666 & ~umask())
            os.replace(temporary, place)
    except OSError as error:
        raise named(error, path) from error


def write_json(path: Path, data: Any) -> None:
    """Write `data` as indented JSON, atomically."""
    text = json.dumps(data, indent=2) + "\n"
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
