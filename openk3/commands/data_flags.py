"""The flags of `openk3 data`, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from openk3.commands.flag_kinds import Seed, unset

_IN = (
    "Files or folders: .jsonl and .parquet, text, Markdown and code, zip and tar archives (.gz and .zst too)."
    " DOMAIN=PATH labels all of PATH: web, code, mathematics or knowledge."
)


@dataclass(frozen=True)
class DataPrepare:
    """Make training shards from raw text: read, filter by rules, score, remove duplicates, label, write, report.

    Whatever is dropped is counted by its reason, with examples, in OUT/report.html. A run that is stopped, by Ctrl-C, a
    crash or a full disk, goes on where it was when the same command is given again. Train on the result with
    `openk3 pretrain RECIPE --data OUT`, or on a mixture with `--data OUT/web OUT/code --data.weights 0.7 0.3`.

    example: openk3 data prepare crawl/*.jsonl.zst code=src/ --out data/mine
    """

    inputs: Positional[
        Annotated[tuple[str, ...], arg(metavar="IN [IN ...]", help=_IN, help_behavior_hint="(required)")]
    ]
    out: Path
    """Folder to make."""
    text_field: str = "text"
    """Field of a JSONL record, or column of a Parquet file, that holds the text."""
    language: Literal["any", "en"] = "any"
    """`en` also drops prose without English stop words."""
    skip_rules: Annotated[tuple[str, ...], unset("[RULE [RULE ...]]")] = ()
    """Rules that are not applied; docs/data.md lists them by name."""
    quality: str = "default"
    """Quality model: `default`, `off`, or a file that `openk3 data train-quality` wrote."""
    min_quality: float = 0.1
    """Text that scores less, between 0 and 1, is dropped."""
    similarity: float = 0.8
    """Share of common five-word runs from which a text repeats an earlier one; 0 removes exact duplicates only."""
    num_hashes: int = 128
    """Values of a MinHash signature; more estimate the similarity better."""
    shard_mib: int = 128
    """Largest shard, in MiB of text."""
    max_document_mib: int = 8
    """A longer line, record or file is dropped."""
    max_ratio: int = 200
    """Compressed input that grows by more than this is not read on."""
    workers: Annotated[int | None, unset("INT", "one per core, at most 16")] = None
    """Processes that filter and write."""
    tokenizer: Annotated[Path | None, unset("PATH", "shards hold text, for any tokenizer")] = None
    """Write token ids of this tokenizer in place of text."""
    strict: bool = False
    """Stop at the first line or file that cannot be read, in place of counting it."""
    restart: bool = False
    """Remove what is in OUT, finished or not, and begin again."""


@dataclass(frozen=True)
class DataTrainQuality:
    """Train a quality model for `openk3 data prepare --quality FILE` on texts that are good, and on bad ones.

    A linear model over hashed words and pairs of words, one for prose and one for code. Without --bad, bad texts are
    made from the good ones: word salad, misread pages, menus, advertisements, lists, logs, encoded and squeezed code.

    example: openk3 data train-quality --good books/ src/ --out quality.safetensors
    """

    good: tuple[str, ...]
    """Files or folders of good text, of the kinds that `openk3 data prepare` reads."""
    out: Path
    """File to write."""
    bad: Annotated[tuple[str, ...], unset("[PATH [PATH ...]]")] = ()
    """Files or folders of bad text."""
    text_field: str = "text"
    """Field of a JSONL record, or column of a Parquet file, that holds the text."""
    language: Literal["any", "en"] = "any"
    """`en`: the good prose is English, and the model judges no other."""
    about: str = ""
    """A sentence that the model keeps about what it was trained on."""
    seed: Seed = 0


Data = Annotated[DataPrepare, subcommand("prepare")] | Annotated[DataTrainQuality, subcommand("train-quality")]
