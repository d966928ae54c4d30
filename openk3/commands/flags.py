"""The flags of every command as dataclasses, without torch, so that --help answers at once."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import AvoidSubcommands, FlagCreatePairsOff, Positional, arg, subcommand

from openk3 import recipes
from openk3.commands.bench_flags import Bench
from openk3.commands.data_flags import Data
from openk3.commands.errors import UserError
from openk3.commands.flag_kinds import Run, Seed, unset
from openk3.commands.fleet_flags import Fleet
from openk3.commands.route_flags import Route
from openk3.commands.serve_flags import Serve
from openk3.config.model import ID_FIELDS, ConfigError
from openk3.config.train import SEEDS, PretrainConfig


@dataclass(frozen=True)
class Quickstart:
    """Train a small true K3 on this machine, on real text and rendered images, and write a report.

    example: openk3 quickstart --minutes 2
    """

    minutes: float = 8.0
    """Time for everything, in minutes; the plan is fitted to this machine's speed."""
    text: Annotated[Path | None, unset("PATH", "the Python standard library's sources")] = None
    """Your own text, a file or a folder."""
    out: Annotated[Path | None, unset("PATH", "runs/<date and time>")] = None
    """Run folder to make."""
    seed: Seed = 0


@dataclass(frozen=True)
class Writing:
    """The flags of every command that lets a model write."""

    max_tokens: int = 300
    """Tokens to write at most."""
    temperature: Annotated[float | None, unset("FLOAT", "the model's own, or 0.8")] = None
    """0 takes the most likely token each time."""
    top_k: int = 0
    """Keep only the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float | None, unset("FLOAT", "the model's own, or 0.95")] = None
    """Keep the most likely tokens that together hold this much probability."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights while running."""
    device: Annotated[Literal["auto", "cpu", "cuda"], arg(help="Where to run; auto takes a GPU if there is one.")] = (
        "auto"
    )
    seed: Seed = 0


@dataclass(frozen=True)
class Generate(Writing):
    """Continue a text, printing as it goes.

    example: openk3 generate --prompt "def main(" --max-tokens 100
    """

    run: Run = None
    prompt: Annotated[str, arg(metavar="TEXT")] = "-"
    """Text to continue; `-` reads standard input."""


@dataclass(frozen=True)
class Chat(Writing):
    """Talk to a model; without a run, to the small one that comes with openk3.

    Inside: /help, /image FILE, /effort LEVEL, /reset; Ctrl-C stops an answer.

    example: openk3 chat --image chart.png
    """

    run: Run = None
    message: Annotated[str | None, unset("TEXT")] = None
    """Ask this one question and leave; without it, read questions from the terminal or standard input."""
    image: Annotated[tuple[Path, ...], unset("[PATH [PATH ...]]")] = ()
    """Images that go with the first question."""
    effort: Literal["low", "high", "max", "off"] = "max"
    """How long to reason; `off` answers directly."""


@dataclass(frozen=True)
class Pretrain:
    """Train a K3 from scratch by a recipe, or continue a run. Every field of the recipe is a flag.

    example: openk3 pretrain tiny --data src/ --out runs/mine --steps 200
    """

    config: Annotated[PretrainConfig, arg(name="")]
    recipe: Positional[
        Annotated[str, arg(metavar="[RECIPE]", help=f"One of {', '.join(recipes.NAMES)}.", help_behavior_hint="")]
    ] = ""
    data: Annotated[tuple[Path, ...], unset("[PATH [PATH ...]]")] = ()
    """Text, Markdown, Python and JSONL files, folders of them, or what `openk3 data prepare` made; or --data.paths."""
    resume: Annotated[Path | None, unset("RUN")] = None
    """Continue this run from its last checkpoint; no RECIPE then."""


@dataclass(frozen=True)
class Plan:
    """Count a model's parameters, FLOPs, cache and memory from its configuration alone.

    example: openk3 plan k3
    """

    model: Positional[
        Annotated[
            str,
            arg(
                metavar="[MODEL]",
                help="Recipe, config.json, model directory or run.",
                help_behavior_hint="(default: newest run)",
            ),
        ]
    ] = ""
    context: int = 8192
    """Length of the request whose cache is shown, and of the sequences of training, in tokens."""
    micro_batch: int = 32768
    """Tokens of one forward and backward pass, for the roofline and memory of training."""
    activations: str = "none"
    """Activation policy to show by group: none, selective, memory, full, auto or GROUP=HOW,..."""
    json: bool = False
    """Print one JSON object instead of the table."""


@dataclass(frozen=True)
class Convert:
    """Write a model or a run's last checkpoint in the released layout, one tensor at a time; or the other way round.

    example: openk3 convert runs/mine out/ --experts mxfp4
    """

    source: Positional[Annotated[Path, arg(metavar="SOURCE", help="Run, training checkpoint or model directory.")]]
    target: Positional[
        Annotated[Path, arg(metavar="TARGET", help="Directory to write: new, empty, or an earlier model to replace.")]
    ]
    to: Literal["released", "run"] = "released"
    """`released`: safetensors as Kimi K3's; `run`: a run at step 0 that `pretrain --resume` trains on."""
    experts: Literal["keep", "bf16", "float32", "mxfp4"] = "keep"
    """Number format of the routed experts; packed ones that are kept stay as they are, byte for byte."""
    dtype: Literal["keep", "bf16", "float32"] = "keep"
    """Number format of the other weights; what the release stores in float32 stays so."""
    rule: Literal["even", "floor", "ceil"] = "even"
    """How an MXFP4 scale is chosen; `even` is the released quantiser's."""
    shard_mib: int = 4096
    """Largest shard to write, in MiB."""


@dataclass(frozen=True)
class TokenizerTrain:
    """Train a tokenizer on text files and write it in the released tiktoken format.

    example: openk3 tokenizer train --text src/ --vocab-size 2304 --out tok/
    """

    text: tuple[Path, ...]
    """Text files or folders to learn from."""
    out: Path
    """Directory to write."""
    vocab_size: int = 4096
    """Ids in all, with K3's 256 special ones."""


@dataclass(frozen=True)
class TokenizerEncode:
    """Show how a text is cut into tokens.

    example: openk3 tokenizer encode "import torch" --tokenizer tok/
    """

    text: Positional[Annotated[str, arg(metavar="[TEXT]", help="Text to cut; `-` reads standard input.")]] = "-"
    tokenizer: Annotated[Path | None, unset("PATH", "the newest run's")] = None
    """Directory with tiktoken.model, or the file."""
    ids: bool = False
    """Print only the ids, separated by spaces."""


@dataclass(frozen=True)
class Doctor:
    """Say what this machine has and which backends will be used.

    example: openk3 doctor
    """


Tokenizer = Annotated[TokenizerTrain, subcommand("train")] | Annotated[TokenizerEncode, subcommand("encode")]

COMMANDS: dict[str, Any] = {
    "quickstart": Quickstart,
    "generate": Generate,
    "pretrain": Pretrain,
    "chat": Chat,
    "serve": Serve,
    "route": Route,
    "fleet": Fleet,
    "plan": Plan,
    "bench": Bench,
    "convert": Convert,
    "data": Data,
    "tokenizer": Tokenizer,
    "doctor": Doctor,
}


def parse(name: str, arguments: Sequence[str]) -> Any:
    """The flags of command `name`. Prints help, or the error in one line with the nearest flag, and exits by itself.

    Raises ConfigError for a recipe or a run that does not exist.
    """
    prog, arguments = f"openk3 {name}", list(arguments)
    help_asked = bool({"-h", "--help"} & set(arguments))
    if name != "pretrain":
        config = (FlagCreatePairsOff,)
        parsed = _one_line_errors(
            prog, lambda: tyro.cli(COMMANDS[name], args=arguments, prog=prog, config=config), help_asked
        )
        _check_numbers(parsed)
        return parsed
    default = Pretrain(starting_config(arguments))
    arguments = ["--help"] if help_asked else arguments  # with RECIPE among the flags
    config = (FlagCreatePairsOff, AvoidSubcommands)
    return _one_line_errors(
        prog, lambda: tyro.cli(Pretrain, args=arguments, prog=prog, default=default, config=config), help_asked
    )


def _check_numbers(parsed: Any) -> None:
    """Raise UserError for a number that no command can use: infinite, or a seed that torch does not take."""
    for spec in dataclasses.fields(parsed):
        value, flag = getattr(parsed, spec.name), f"--{spec.name.replace('_', '-')}"
        if isinstance(value, float) and math.isinf(value):
            raise UserError(f"{flag}: must be a finite number, got {value}")
        if spec.name == "seed" and value not in SEEDS:
            raise UserError(f"{flag}: must lie in {SEEDS.start}..{SEEDS.stop - 1}, got {value}")


NARROWEST = 40  # columns; tyro never ends where it has less than eight


def _one_line_errors(prog: str, parse: Callable[[], Any], asks_for_help: bool) -> Any:
    """What `parse` returns. tyro frames its errors in a box of several lines; here they become one."""
    errors = io.StringIO()
    columns = os.environ.get("COLUMNS")
    try:
        with contextlib.redirect_stderr(errors):
            if not asks_for_help:
                os.environ["COLUMNS"] = "100000"  # the box breaks long words, a path say, at the terminal's width
            elif shutil.get_terminal_size().columns < NARROWEST:
                os.environ["COLUMNS"] = str(NARROWEST)
            return parse()
    except SystemExit as end:
        if end.code:
            print(one_line(prog, errors.getvalue()), file=sys.stderr)
        raise
    finally:
        os.environ.pop("COLUMNS", None)
        os.environ.update({} if columns is None else {"COLUMNS": columns})


def one_line(prog: str, box: str) -> str:
    """tyro's framed error as one line: what is wrong, the flags it suggests, and where to read more."""
    lines = [line.strip("│| ") for line in box.splitlines()]
    rules = [i for i, line in enumerate(lines) if line and (line[0] in "╭╰" or not line.strip("─-"))]
    # The first rule lies under or in the title, which repeats what follows; a terminal without UTF-8 has plain dashes.
    start, end = (rules + [-1, len(lines)])[:2] if len(rules) != 1 else (rules[0], len(lines))
    message = " ".join(lines[start + 1 : end]).strip() or "wrong arguments"
    # A section's own message names its field; tyro's name of what has no name says nothing.
    message = re.sub(r"^Error parsing (config|__tyro-dummy-inner__)\S*: ", "", message)
    first = [line.split()[0] for line in lines if line]
    near = [word for word in first if word.startswith("--") and word.strip("-") and word not in message]
    suggestion = f"; perhaps you meant {' or '.join(dict.fromkeys(near))}" if near else ""
    return f"openk3: {message}{suggestion} (see {prog} --help)"


def starting_config(arguments: Sequence[str]) -> PretrainConfig:
    """What the flags of `pretrain` override: the resumed run's configuration, or the recipe's (tiny for --help).

    Control tokens lie at the top of the vocabulary, so another size moves them. Raises ConfigError.
    """
    run = _value(arguments, "--resume")
    if run:
        return PretrainConfig.from_json(run)
    has_recipe = bool(arguments) and not arguments[0].startswith("-")
    config = recipes.pretrain(arguments[0] if has_recipe else "tiny")
    size = _value(arguments, "--model.text.vocab-size")
    if not size.isdecimal() or len(size) > 12:
        return config  # the parser answers
    if int(size) < 512:
        raise ConfigError(f"--model.text.vocab-size: at least 512, for 256 bytes and 256 control tokens; got {size}")
    model, moved = config.model, int(size) - config.model.text.vocab_size
    ids = {name: getattr(model, name) + moved for name in ID_FIELDS}
    text = dataclasses.replace(model.text, vocab_size=int(size))
    return dataclasses.replace(config, model=dataclasses.replace(model, text=text, **ids))


def _value(arguments: Sequence[str], wanted: str) -> str:
    """What follows a flag, before the parser has seen it; empty without it."""
    for index, word in enumerate(arguments):
        flag, _, value = word.partition("=")
        if flag == wanted:
            return value or "".join(arguments[index + 1 : index + 2])
    return ""
