"""`openk3 generate`: continue a text, printing each piece as soon as it is certain."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from openk3.commands.errors import UserError
from openk3.commands.flags import Generate, Writing
from openk3.commands.memory import require_memory
from openk3.commands.runs import find_model
from openk3.config.model import ModelConfig
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.generate import generate
from openk3.model.k3 import K3
from openk3.runtime.device import pick_device


def run(flags: Generate) -> None:
    """Print the prompt and its continuation."""
    check_sampling(flags)
    directory = find_model(flags.run)
    if flags.prompt == "-" and sys.stdin.isatty():
        print("the text to continue, then Ctrl-D:", file=sys.stderr)
    prompt = sys.stdin.read() if flags.prompt == "-" else flags.prompt
    tokenizer = Tokenizer.load(directory)
    model = load_model(directory, flags)
    special = tokenizer.special
    decoder = tokenizer.decoder()
    sys.stdout.write(prompt)
    tokens = generate(
        model,
        [special["[BOS]"], *tokenizer.encode(prompt)],
        max_tokens=flags.max_tokens,
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        stop_ids=(special["[EOS]"], special["<|end_of_msg|>"]),
        generator=torch.Generator(model.embed.weight.device).manual_seed(flags.seed),
    )
    for token in tokens:
        if token < tokenizer.num_ranks:  # a control token ends the text and is no part of it
            sys.stdout.write(decoder.feed(token))
            sys.stdout.flush()
    sys.stdout.write(decoder.finish() + "\n")


def load_model(directory: Path, flags: Writing) -> K3:
    """The model as the flags want it. Raises UserError if it cannot fit, DeviceError, ConfigError, CheckpointError."""
    device, dtype = pick_device(flags.device), getattr(torch, flags.dtype)
    require_memory(str(directory), ModelConfig.from_json(directory), dtype.itemsize, device)
    return K3.from_pretrained(directory, dtype=dtype, device=device)


def check_sampling(flags: Writing) -> None:
    """Raise UserError naming the first sampling flag that is out of range."""
    if flags.max_tokens < 1:
        raise UserError(f"--max-tokens: must be at least 1, got {flags.max_tokens}")
    if flags.temperature < 0:
        raise UserError(f"--temperature: must not be negative, got {flags.temperature:g}")
    if flags.top_k < 0:
        raise UserError(f"--top-k: must not be negative, got {flags.top_k}")
    if not 0 < flags.top_p <= 1:
        raise UserError(f"--top-p: must lie in (0, 1], got {flags.top_p:g}")
