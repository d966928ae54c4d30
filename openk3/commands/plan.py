"""`openk3 plan`: what a model of this configuration costs, counted without building it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from openk3 import recipes
from openk3.commands.activation_table import activation_table, held_activations
from openk3.commands.errors import UserError
from openk3.commands.flags import Plan
from openk3.commands.quantities import quantity, row
from openk3.commands.runs import find_model, model_in
from openk3.config.model import ModelConfig
from openk3.model.accounting import Account, account
from openk3.model.roofline import H200, Roofline, roofline

DTYPES = {
    "experts MXFP4, rest BF16": ("mxfp4", "bf16"),
    "all BF16": ("bf16", "bf16"),
    "all FP32": ("float32", "float32"),
}


def run(flags: Plan) -> None:
    """Print the books of the named configuration."""
    if flags.context < 1:
        raise UserError(f"--context: must be at least 1 token, got {flags.context}")
    if flags.micro_batch < 1:
        raise UserError(f"--micro-batch: must be at least 1 token, got {flags.micro_batch}")
    name, config = read_config(flags.model)
    books = account(config)
    bound = roofline(config, length=flags.context, micro_batch=flags.micro_batch)
    held = held_activations(config, flags.activations, flags.context, flags.micro_batch)
    if flags.json:
        print(json.dumps({"model": name, **summary(books, flags.context), "roofline": bounds(bound), **held}, indent=2))
    else:
        lines = [*table(name, books, flags.context), "", *roofline_table(bound), "", *activation_table(held)]
        print("\n".join(lines))


def read_config(model: str) -> tuple[str, ModelConfig]:
    """(name, configuration) of a recipe, a config.json, a model directory, a run, or ("") the newest run."""
    if model in recipes.NAMES:
        return f"recipe {model}", recipes.model(model)
    path = Path(model) if model else find_model(None)
    if not path.exists():
        raise UserError(f"{model}: neither a file nor a recipe; recipes are {', '.join(recipes.NAMES)}")
    if path.is_dir():
        path = model_in(path) or path
    return str(path), ModelConfig.from_json(path)


def summary(books: Account, context: int) -> dict[str, Any]:
    """The same figures for programs: integers, bytes and FLOPs."""
    return {
        "parameters": books.total,
        "activated": books.activated,
        "mtp": books.mtp,
        "components": {part.name: part.total for part in books.components},
        "by_dtype": books.by_dtype(),
        "forward_flops_per_token": books.forward_flops(context).total,
        "training_flops_per_token": books.training_flops(context).total,
        "latent_values_per_token_and_layer": books.latent_values_per_layer,
        "latent_bytes_per_token": books.latent_bytes_per_token(),
        "kda_state_bytes_per_layer": books.kda_state_bytes_per_layer(),
        "state_bytes_per_request": books.state_bytes_per_request(),
        "request_bytes": {"tokens": context, "bytes": books.request_bytes(context)},
        "weight_bytes": {label: weight_bytes(books, label) for label in DTYPES},
    }


def bounds(bound: Roofline) -> dict[str, Any]:
    """The roofline for programs: of one token of training."""
    operations = [
        {"name": each.name, "flops": each.flops, "bytes": each.bytes, "seconds": each.seconds(H200)}
        for each in bound.operations
    ]
    figures = {"tokens_per_second": 1 / bound.seconds(), "mfu": bound.mfu(), "micro_batch": bound.micro_batch}
    return {"machine": H200.name, **figures, "operations": operations}


def roofline_table(bound: Roofline) -> list[str]:
    """The roofline for a reader, the slowest operation first."""
    total = bound.seconds()
    lines = [
        f"Roofline of training on one {H200.name}: {H200.matmul_flops / 1e12:.0f} TFLOP/s of BF16 products, "
        f"{H200.bytes_per_second / 1e12:.2f} TB/s",
        f"  sequences of {bound.length:,}, micro-batches of {bound.micro_batch:,} tokens; of one token: FLOPs, bytes, "
        "share of the time",
    ]
    for each in sorted(bound.operations, key=lambda each: -each.seconds(H200)):
        flops, moved = quantity(each.flops, "FLOP", 1000), quantity(each.bytes, "B", 1000)
        share = f"{each.seconds(H200) / total:.1%} {each.binds(H200)}"
        lines.append(f"  {each.name:<30} {flops:>16} {moved:>14}  {share}")
    return [*lines, *row("bound: tokens per second, MFU", f"{1 / total:,.0f}", f"{bound.mfu():.1%}")]


def weight_bytes(books: Account, label: str) -> int | None:
    """Bytes of the weights in one of DTYPES; None where the widths cannot be packed as MXFP4."""
    try:
        return books.weight_bytes(*DTYPES[label])
    except ValueError:
        return None


def table(name: str, books: Account, context: int) -> list[str]:
    """The figures as lines for a reader."""
    kda, mla = (books.config.text.layer_kinds().count(kind) for kind in ("kda", "mla"))
    used = books.activated / books.total
    lines = [f"{name}: {kda + mla} layers ({kda} KDA, {mla} MLA), width {books.config.text.hidden_size}", ""]
    lines += ["Parameters", *row("total, as stored, without MTP", f"{books.total:,}")]
    lines += row("activated by one token", f"{books.activated:,}", f"{used:.1%}")
    lines += row("MTP layer", f"{books.mtp_layer.total:,}", "" if books.mtp else "not in this configuration")
    for part in sorted(books.components, key=lambda part: -part.total):
        lines += row(f"  {part.name}", f"{part.total:,}", f"{part.total / books.total:.2%}")
    lines += ["", f"FLOPs per token at {context:,} tokens of context"]
    forward, training = books.forward_flops(context), books.training_flops(context)
    lines += row("forward", quantity(forward.total, "FLOP", 1000), f"weights {forward.weights / forward.total:.1%}")
    lines += row("training, mean over a sequence of that length", quantity(training.total, "FLOP", 1000))
    lines += ["", "Cache of one request (latents BF16, KDA state FP32)"]
    lines += row("latent values per token and MLA layer", f"{books.latent_values_per_layer:,}")
    lines += row("latent bytes per token", f"{books.latent_bytes_per_token():,}")
    lines += row("KDA state bytes per layer", f"{books.kda_state_bytes_per_layer():,}")
    lines += row("fixed state of the request", quantity(books.state_bytes_per_request(), "B"))
    lines += row(f"whole request of {context:,} tokens", quantity(books.request_bytes(context), "B"))
    lines += ["", "Memory of the weights, MTP included" if books.mtp else "Memory of the weights"]
    for label in DTYPES:
        size = weight_bytes(books, label)
        exact = "" if size is None else f"{size:,}"
        lines += row(label, "not possible: expert widths" if size is None else quantity(size, "B"), exact)
    return lines
