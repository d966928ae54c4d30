"""`openk3 generate`: continue a text, printing each piece as soon as it is certain."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from openk3.commands.errors import UserError
from openk3.commands.flags import Generate, Writing
from openk3.commands.memory import require_memory
from openk3.commands.runs import about_model, find_model
from openk3.commands.terminal import printable, read_text
from openk3.config.model import ModelConfig
from openk3.config.sampling import first, read_sampling
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.generate import generate
from openk3.model.k3 import K3
from openk3.runtime.device import pick_device

TEMPERATURE, TOP_P = 0.8, 0.95  # of a model that does not say how it is sampled


def run(flags: Generate) -> None:
    """Print the prompt and its continuation."""
    check_sampling(flags)
    directory = find_model(flags.run)
    sampling = read_sampling(directory)
    if flags.run is None and sys.stderr.isatty():
        print(about_model(directory), file=sys.stderr)
    if flags.prompt == "-" and sys.stdin.isatty():
        print("the text to continue, then Ctrl-D:", file=sys.stderr)
    prompt = read_text() if flags.prompt == "-" else flags.prompt
    device, tokenizer = fitting_device(directory, flags), load_tokenizer(directory)
    special = tokenizer.special
    ids = [special["[BOS]"], *tokenizer.encode(prompt)]
    room = context_left(ModelConfig.from_json(directory), len(ids), "the prompt")
    model = K3.from_pretrained(directory, dtype=getattr(torch, flags.dtype), device=device)
    decoder = tokenizer.decoder()
    # What a model writes may not steer the reader's terminal; to a file or pipe it goes as it is.
    shown = printable if sys.stdout.isatty() else str
    sys.stdout.write(shown(prompt))
    tokens = generate(
        model,
        ids,
        max_tokens=min(flags.max_tokens, room),
        temperature=first(flags.temperature, sampling.temperature, TEMPERATURE),
        top_k=flags.top_k,
        top_p=first(flags.top_p, sampling.top_p, TOP_P),
        stop_ids=(special["[EOS]"], special["<|end_of_msg|>"]),
        generator=torch.Generator(model.embed.weight.device).manual_seed(flags.seed),
    )
    for token in tokens:
        if token < tokenizer.num_ranks:  # a control token ends the text and is no part of it
            sys.stdout.write(shown(decoder.feed(token)))
            sys.stdout.flush()
    sys.stdout.write(decoder.finish() + "\n")


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer beside a model. Raises TokenizerError, and UserError if it is another model's."""
    tokenizer, size = Tokenizer.load(directory), ModelConfig.from_json(directory).text.vocab_size
    if tokenizer.vocab_size != size:
        sizes = f"{tokenizer.vocab_size:,} ids for a model of {size:,}"
        raise UserError(f"{directory}: its tokenizer has {sizes}; put the model's own tiktoken.model there")
    return tokenizer


def context_left(config: ModelConfig, num_tokens: int, what: str) -> int:
    """Tokens that fit behind `num_tokens`. Raises UserError if none does."""
    most = config.text.max_position_embeddings
    if num_tokens >= most:
        raise UserError(f"{what}: has {num_tokens:,} tokens, and the model's context holds {most:,}; make it shorter")
    return most - num_tokens


def fitting_device(directory: Path, flags: Writing) -> torch.device:
    """Where the model will run. Raises DeviceError, ConfigError, and UserError if it cannot fit there."""
    device = pick_device(flags.device)
    require_memory(str(directory), ModelConfig.from_json(directory), getattr(torch, flags.dtype).itemsize, device)
    return device


def check_sampling(flags: Writing) -> None:
    """Raise UserError naming the first sampling flag that is out of range."""
    if flags.max_tokens < 1:
        raise UserError(f"--max-tokens: must be at least 1, got {flags.max_tokens}")
    if flags.temperature is not None and not flags.temperature >= 0:
        raise UserError(f"--temperature: must not be negative, got {flags.temperature:g}")
    if flags.top_k < 0:
        raise UserError(f"--top-k: must not be negative, got {flags.top_k}")
    if flags.top_p is not None and not 0 < flags.top_p <= 1:
        raise UserError(f"--top-p: must lie in (0, 1], got {flags.top_p:g}")
