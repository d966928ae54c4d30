"""The flags of `openk3 bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from openk3 import recipes
from openk3.commands.flag_kinds import Run, Seed, unset

Where = Annotated[Literal["auto", "cpu", "cuda"], arg(help="Where to run; auto takes a GPU if there is one.")]


@dataclass(frozen=True)
class BenchTrain:
    """Measure on random tokens how fast a recipe trains here: tokens per second, MFU, memory, and time by operation.

    example: openk3 bench train small --micro-batches 2
    """

    recipe: Positional[Annotated[str, arg(metavar="RECIPE", help=f"One of {', '.join(recipes.NAMES)}.")]]
    context: Annotated[int, unset("INT", "the recipe's")] = 0
    """Length of every sequence, in tokens."""
    micro_batch: Annotated[int, unset("INT", "the recipe's")] = 0
    """Tokens of one forward and backward pass."""
    micro_batches: Annotated[int, unset("INT", "the recipe's")] = 0
    """Forward and backward passes of a step."""
    steps: int = 5
    """Steps to time; the median counts."""
    warmups: int = 2
    """Steps before them; the first ones compile kernels."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Number format of the model; auto is bfloat16 on a GPU, float32 on a CPU."""
    activations: Annotated[str, unset("POLICY", "the recipe's")] = ""
    """Activation policy: none, selective, memory, full, auto or GROUP=HOW,..."""
    device: Where = "auto"
    json: bool = False
    """Print one JSON object instead of the table."""
    seed: Seed = 0


@dataclass(frozen=True)
class BenchServe:
    """Measure how fast an engine answers: output tokens per second at several loads, with guesses and without.

    Prompts are pieces of a text, answers of several lengths. Each load keeps that many requests under way until
    all are through. Guesses never change an answer, so only times differ.

    example: openk3 bench serve runs/mine --text src/ --concurrency 1 16 --drafts off mtp
    """

    run: Run = None
    mix: Annotated[str, unset("RECIPE", "no mix")] = ""
    """Measure a mix of requests through a fresh model of this recipe (or quickstart) instead: prompts of 16 to 512
    tokens, answers of 16 to 256, and a second time with 90 % of the requests behind one of four long prefixes."""
    peer_python: Annotated[Path | None, unset("PATH", "no peer")] = None
    """A Python with torch and transformers, whose generate answers the same mix in static batches."""
    mix_requests: int = 64
    """Requests of the mix."""
    at_once: int = 32
    """Most requests of the mix that the engine has under way, and the size of the peer's batches."""
    rate: float = 0.0
    """Requests of the mix that come in a second, by chance (Poisson); 0: all at once."""
    text: Annotated[Path | None, unset("PATH", "the Python standard library's sources")] = None
    """File or folder that prompts are cut from; files that `quickstart` holds out come first."""
    concurrency: tuple[int, ...] = (1, 4, 16)
    """Requests under way at the same time."""
    drafts: tuple[Literal["off", "ngram", "mtp"], ...] = ("off", "ngram", "mtp")
    """Who guesses: nobody, what followed the same tokens before, or the MTP layer."""
    most_drafts: int = 8
    """Guesses of a request in one pass at most."""
    always: bool = False
    """Make that many in every pass, whether they pay or not."""
    requests: int = 16
    """Requests to time at each load, or six times as many as are under way if that is more."""
    prompt_tokens: int = 128
    """Length of each prompt."""
    answer_tokens: int = 64
    """Mean length of an answer; they have from half to one and a half of it."""
    temperature: float = 0.0
    """0 takes the most likely token each time."""
    rounds: int = 3
    """Rounds of all settings in turn; the fastest counts."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the model; auto is bfloat16 on a GPU, float32 on a CPU."""
    device: Where = "auto"
    out: Annotated[Path | None, unset("FILE", "none")] = None
    """JSON file to write, with what the numbers mean nothing without: machine, commit and versions."""
    json: bool = False
    """Print the same JSON instead of the table."""
    seed: Seed = 0


Bench = Annotated[BenchTrain, subcommand("train")] | Annotated[BenchServe, subcommand("serve")]
