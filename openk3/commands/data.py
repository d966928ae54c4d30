"""`openk3 data`: raw text to training shards, and the quality model that filters it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from tqdm import tqdm

from openk3.commands.data_flags import DataPrepare, DataTrainQuality
from openk3.commands.errors import UserError
from openk3.config.prepare import PrepareConfig

try:
    import pyarrow  # noqa: F401
    import rensa  # noqa: F401
    import sklearn  # noqa: F401

    missing = ""
except ModuleNotFoundError as error:
    missing = str(error.name)
else:
    from openk3.data.prepare.prepare import prepare as prepare_data
    from openk3.data.prepare.quality_texts import samples
    from openk3.data.prepare.quality_training import train
    from openk3.data.prepare.report import as_text

if TYPE_CHECKING:
    from openk3.data.prepare.quality_training import Figures

MOST_WORKERS = 16
STAGES = {"read": "reading", "duplicates": "removing duplicates", "shards": "writing shards", "report": "report"}


def run(flags: DataPrepare | DataTrainQuality) -> None:
    """Do what is asked for. Raises UserError, DataError, ConfigError, OSError."""
    if missing:
        raise UserError(f"data: needs the package {missing}; install them with: pip install 'openk3[data]'")
    if isinstance(flags, DataPrepare):
        prepare(flags)
    else:
        train_quality(flags)


def prepare(flags: DataPrepare) -> None:
    """Make the shards with a bar of progress, and say what was kept and dropped."""
    config = PrepareConfig(
        inputs=flags.inputs,
        out=str(flags.out),
        text_field=flags.text_field,
        language=flags.language,
        skip_rules=flags.skip_rules,
        quality=flags.quality,
        min_quality=flags.min_quality,
        similarity=flags.similarity,
        num_hashes=flags.num_hashes,
        shard_mib=flags.shard_mib,
        max_document_mib=flags.max_document_mib,
        max_ratio=flags.max_ratio,
        workers=min(cores(), MOST_WORKERS) if flags.workers is None else flags.workers,
        tokenizer="" if flags.tokenizer is None else str(flags.tokenizer),
        strict=flags.strict,
    )
    with Bars() as bars:
        try:
            report = prepare_data(config, restart=flags.restart, progress=bars.show)
        except KeyboardInterrupt:
            bars.close()
            print(f"\nstopped; the same command goes on where it was ({flags.out})", file=sys.stderr)
            raise
    print(as_text(report), end="")
    print(f"{flags.out}: written; examples of what was dropped: {flags.out / 'report.html'}")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Bars:
    """One bar of progress at a time, with the time that is left."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: tqdm | None = None

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def show(self, stage: str, share: float, note: str) -> None:
        """Draw `share` (0..1) of a stage as done."""
        if stage != self._stage:
            self.close()
            self._stage = stage
            interval = 0.5 if sys.stderr.isatty() else 10.0  # a log file needs no animation
            shape = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
            self._bar = tqdm(total=1.0, desc=STAGES[stage], bar_format=shape, mininterval=interval, dynamic_ncols=True)
        assert self._bar is not None
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(min(share, 1.0) - self._bar.n)

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def train_quality(flags: DataTrainQuality) -> None:
    """Train, write the model, and say how it does on texts that it has not seen."""
    if not flags.good:
        raise UserError("--good: name at least one file or folder of good text")
    if flags.out.is_dir():
        raise UserError(f"--out: {flags.out} is a folder; name a file")
    for given in (*flags.good, *flags.bad):
        if flags.out.exists() and os.path.realpath(given) == os.path.realpath(flags.out):
            raise UserError(f"--out: {flags.out} is also a text to train on, and would be written over")
    found = samples(flags.good, flags.bad, flags.text_field, flags.seed)
    model, figures = train(
        tqdm(found, desc="reading", unit=" pieces", disable=not sys.stderr.isatty()),
        language=flags.language,
        about=flags.about,
    )
    model.save(flags.out)
    for kind, held in figures.items():
        print(describe(kind, held))
    print(f"{flags.out}: written; use it with: openk3 data prepare IN --out OUT --quality {flags.out}")


def describe(kind: str, held: Figures) -> str:
    """What a model does on held-out texts, in one line."""
    return (
        f"{kind}: trained on {held.num_train:,} pieces; of {held.num_held_out:,} others it keeps {held.good_kept:.1%}"
        f" of the good and drops {held.bad_dropped:.1%} of the bad at 0.5 (area under the curve {held.auc:.4f})"
    )
