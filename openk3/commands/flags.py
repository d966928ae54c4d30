"""The flags of every command as dataclasses, without torch, so that --help answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg, subcommand

Seed = Annotated[int, arg(help="Seed of everything random in this run.")]
Run = Positional[Annotated[Path | None, arg(metavar="[RUN]", help="Run folder or model directory; default: newest run.")]]


@dataclass(frozen=True)
class Quickstart:
    """Train a small true K3 on this machine, on real text and rendered images, and write a report.

    example: openk3 quickstart --minutes 2
    """

    minutes: float = 8.0
    """Time for everything, in minutes; the plan is fitted to this machine's speed."""
    text: tuple[Path, ...] = ()
    """Your own text files or folders; default: the Python standard library's sources."""
    out: Path | None = None
    """Run folder to make; default: runs/<date and time>."""
    seed: Seed = 0


@dataclass(frozen=True)
class Generate:
    """Continue a text, printing as it goes.

    example: openk3 generate --prompt "def main(" --max-tokens 100
    """

    run: Run = None
    prompt: str = "-"
    """Text to continue; `-` reads standard input."""
    max_tokens: int = 200
    """Tokens to generate at most."""
    temperature: float = 0.8
    """0 takes the most likely token each time."""
    top_k: int = 0
    """Keep only the k most likely tokens; 0 keeps all."""
    top_p: float = 0.95
    """Keep the most likely tokens that together hold this much probability."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights while running."""
    seed: Seed = 0


@dataclass(frozen=True)
class Chat:
    """Talk to a model. Inside: /help, /image FILE, /effort LEVEL, /reset; Ctrl-C stops an answer.

    example: openk3 chat --image chart.png
    """

    run: Run = None
    message: str | None = None
    """Ask this one question and leave; without it, read questions from the terminal or standard input."""
    image: tuple[Path, ...] = ()
    """Images that go with the first question."""
    effort: Literal["low", "high", "max", "off"] = "max"
    """How long to reason; `off` answers directly."""
    max_tokens: int = 400
    """Tokens per answer at most."""
    temperature: float = 0.7
    """0 takes the most likely token each time."""
    top_k: int = 0
    """Keep only the k most likely tokens; 0 keeps all."""
    top_p: float = 0.95
    """Keep the most likely tokens that together hold this much probability."""
    seed: Seed = 0


@dataclass(frozen=True)
class Plan:
    """Count a model's parameters, FLOPs, cache and memory from its configuration alone.

    example: openk3 plan k3
    """

    model: Positional[
        Annotated[str, arg(metavar="[MODEL]", help="Recipe name, config.json, model directory or run; default: newest run.")]
    ] = ""
    context: int = 8192
    """Length of the request whose cache is shown, in tokens."""
    json: bool = False
    """Print one JSON object instead of the table."""
    seed: Seed = 0


@dataclass(frozen=True)
class Convert:
    """Write a model in the released layout, one shard at a time, with experts as BF16, FP32 or packed MXFP4.

    example: openk3 convert runs/mine out/ --experts mxfp4
    """

    source: Positional[Annotated[Path, arg(metavar="SOURCE", help="Run folder, training checkpoint or model directory.")]]
    target: Positional[Annotated[Path, arg(metavar="TARGET", help="New directory to write.")]]
    experts: Literal["bf16", "float32", "mxfp4"] = "bf16"
    """Number format of the routed experts."""
    rule: Literal["even", "floor", "ceil"] = "even"
    """How an MXFP4 scale is chosen; `even` is the released quantiser's."""
    shard_mib: int = 4096
    """Largest shard to write, in MiB."""
    seed: Seed = 0


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
    seed: Seed = 0


@dataclass(frozen=True)
class TokenizerEncode:
    """Show how a text is cut into tokens.

    example: openk3 tokenizer encode "import torch" --tokenizer tok/
    """

    text: Positional[Annotated[str, arg(metavar="[TEXT]", help="Text to cut; `-` reads standard input.")]] = "-"
    tokenizer: Path | None = None
    """Directory with tiktoken.model, or the file; default: the newest run's."""
    ids: bool = False
    """Print only the ids, separated by spaces."""
    seed: Seed = 0


@dataclass(frozen=True)
class Doctor:
    """Say what this machine has and which backends will be used.

    example: openk3 doctor
    """

    seed: Seed = 0


Tokenizer = Annotated[TokenizerTrain, subcommand("train")] | Annotated[TokenizerEncode, subcommand("encode")]

FLAGS: dict[str, Any] = {
    "quickstart": Quickstart,
    "generate": Generate,
    "chat": Chat,
    "plan": Plan,
    "convert": Convert,
    "tokenizer": Tokenizer,
    "doctor": Doctor,
}


def parse(name: str, arguments: Sequence[str]) -> Any:
    """The flags of command `name`. Prints help or the error, with the nearest flag, and exits by itself."""
    return tyro.cli(FLAGS[name], args=list(arguments), prog=f"openk3 {name}")
