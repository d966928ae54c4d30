"""What a micro-batch's forward pass holds under each activation policy, for `openk3 plan` and `openk3 bench train`."""

from __future__ import annotations

from typing import Any

from openk3.commands.quantities import quantity, row
from openk3.config.activations import AUTO, PRESETS, ActivationPolicy
from openk3.config.model import ModelConfig
from openk3.model.accounting import account
from openk3.model.roofline import H200
from openk3.model.saved_bytes import Form, Saved, choose, saved, state_bytes


def held_activations(config: ModelConfig, asked: str, context: int, micro_batch: int) -> dict[str, Any]:
    """The books of the asked policy by group, and of every preset in one line each; kernels, bfloat16.

    "auto" is what one H200 has room for. Raises ConfigError for what is no policy.
    """
    form = Form(length=context)
    auto = choose(config, micro_batch, H200.memory, H200, form)
    policy = auto if asked == AUTO else ActivationPolicy.parse(asked)
    tried = {name: ActivationPolicy.parse(name) for name in PRESETS} | {AUTO: auto}
    if str(policy) not in tried and asked != AUTO:
        tried[str(policy)] = policy
    books = account(config)
    state, flops = state_bytes(books), books.training_flops(context).total
    found = saved(config, policy, form)
    groups = {name: {"held": policy.groups().get(name, "keep"), "bytes": size} for name, size in found.groups.items()}
    rows = {name: _summary(saved(config, each, form), flops, state, micro_batch) for name, each in tried.items()}
    rows[AUTO]["policy"] = str(auto)
    sizes = {"micro_batch": micro_batch, "state_bytes": state}
    return {"activations": {"policy": str(policy), **sizes, "groups": groups, "policies": rows}}


def activation_table(held: dict[str, Any]) -> list[str]:
    """The same for a reader."""
    books = held["activations"]
    tokens = books["micro_batch"]
    lines = [
        f"Memory of training on one {H200.name}: micro-batches of {tokens:,} tokens, BF16 by kernels",
        *row("weights, masters, momenta, sums of gradients", quantity(books["state_bytes"], "B")),
        f"  activations under policy {books['policy']}, bytes of one token",
    ]
    for name, each in sorted(books["groups"].items(), key=lambda item: -item[1]["bytes"]):
        lines += row(f"  {name}", f"{each['bytes']:,.0f}", each["held"])
    heads = ("bytes a token", "peak with state", "FLOPs added", "time added")
    lines.append(f"  {'policy':<28} {heads[0]:>13} {heads[1]:>16} {heads[2]:>12} {heads[3]:>11}")
    for name, each in books["policies"].items():
        figures = f"{each['bytes']:>13,.0f} {quantity(each['peak_bytes'], 'B'):>16} {each['flops_share']:>12.1%}"
        note = f"  {each['policy']}" if "policy" in each else ""
        lines.append(f"  {name:<28} {figures} {each['seconds'] * 1e6:>8.2f} us{note}".rstrip())
    return lines


def _summary(books: Saved, flops: float, state: float, micro_batch: int) -> dict[str, Any]:
    return {
        "bytes": books.total,
        "peak_bytes": state + books.peak(micro_batch),
        "flops": books.flops,
        "flops_share": books.flops / flops,
        "seconds": books.seconds(H200),
    }
