"""`openk3 bench train`: how fast a recipe trains on this machine, and where the time of a step goes; and `serve`."""

from __future__ import annotations

import dataclasses
import json
import time
from statistics import median
from typing import Any

import torch

from openk3 import recipes
from openk3.commands import bench_serve
from openk3.commands.bench_flags import BenchServe, BenchTrain
from openk3.commands.errors import UserError
from openk3.commands.memory import TRAINING_BYTES, require_memory
from openk3.config.train import DataConfig, PretrainConfig
from openk3.inputs.packed import Packed
from openk3.model.accounting import account
from openk3.model.k3 import K3
from openk3.model.roofline import H200, Roofline, roofline
from openk3.model.saved_bytes import REST, saved
from openk3.model.trace import Trace
from openk3.ops.saved import saving
from openk3.runtime.cpu import tune_cpu
from openk3.runtime.device import pick_device, pick_dtype, seed_everything
from openk3.train.activations import form_of
from openk3.train.breakdown import breakdown, mark
from openk3.train.flops import model_flops, utilisation
from openk3.train.state import TrainState
from openk3.train.step import next_token_loss, train_step


def run(flags: BenchTrain | BenchServe) -> None:
    """Train a few steps on random tokens and print what they took; `serve` has its own file."""
    if isinstance(flags, BenchServe):
        bench_serve.run(flags)
        return
    config = complete(flags)
    require_memory(flags.recipe, config.model, TRAINING_BYTES, pick_device(config.device))
    tune_cpu()
    found = measure(config, flags)
    print(json.dumps(found, indent=2) if flags.json else "\n".join(table(found)))


def complete(flags: BenchTrain) -> PretrainConfig:
    """The recipe with the sizes that the flags name. Raises UserError."""
    for name in ("context", "micro_batch", "micro_batches", "steps"):
        if getattr(flags, name) < 0 or (name == "steps" and not flags.steps):
            raise UserError(f"--{name.replace('_', '-')}: must be positive, got {getattr(flags, name)}")
    config = recipes.pretrain(flags.recipe)
    micro = flags.micro_batch or config.data.micro_batch_tokens
    context = flags.context or min(config.data.stages[0][1], micro)
    if not 2 <= context <= micro:
        raise UserError(f"--context: must lie in 2..{micro}, the tokens of a micro-batch; got {context}")
    count = flags.micro_batches or max(1, config.data.batch_tokens // micro)
    data = DataConfig(stages=((1.0, context),), batch_tokens=micro * count, micro_batch_tokens=micro)
    activations = flags.activations or config.activations
    config = dataclasses.replace(config, data=data, activations=activations, workers=1)
    return dataclasses.replace(config, device=flags.device, dtype=flags.dtype, seed=flags.seed)


def measure(config: PretrainConfig, flags: BenchTrain) -> dict[str, Any]:
    """Build the model, warm up, time `steps` steps and profile one."""
    state = TrainState.around(random_model(config), config)
    batches = random_batches(config)
    device = state.device

    def step() -> float:
        began = time.perf_counter()
        train_step(state, batches, next_token_loss(config.mtp_loss_weight))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    for _ in range(flags.warmups):
        step()
    seconds = median(step() for _ in range(flags.steps))
    tokens = sum(packed.num_tokens for packed in batches)
    flops = model_flops(account(config.model), batches)
    bound = roofline(
        config.model, length=config.data.stages[0][1], micro_batch=config.data.micro_batch_tokens, batch=tokens
    )
    found: dict[str, Any] = {
        "work": f"bench train {flags.recipe}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "dtype": str(state.model.embed.weight.dtype).removeprefix("torch."),
        "context": config.data.stages[0][1],
        "micro_batch": config.data.micro_batch_tokens,
        "micro_batches": len(batches),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "model_flops_per_s": flops / seconds,
        **utilisation(flops, seconds, device),
        "roofline_tokens_per_s": 1 / bound.seconds(),
        "activations": str(state.activations),
        "saved_bytes": saved_by_group(state, batches[0]),
    }
    optimizer_step = state.optimizer.step

    def optimize(lr: float) -> float:
        with mark("optimizer"):
            return optimizer_step(lr)

    def whole() -> None:
        with mark("head and loss"):  # what no module is marked for
            step()

    vars(state.optimizer)["step"] = optimize
    times = breakdown(state.model, whole, device)
    del vars(state.optimizer)["step"]
    rows = operations(times, bound if device.type == "cuda" else None, tokens)
    return found | {"operations": rows, "busy_seconds": sum(times.values())}


def saved_by_group(state: TrainState, packed: Packed) -> dict[str, dict[str, float]]:
    """Bytes of a token that one forward pass holds by group, and what the books say of its sizes."""
    own = [*state.model.parameters(), *state.model.buffers()]
    with saving(state.activations.groups(), beside=own) as books:
        loss = state.model.loss(packed.to(state.device), Trace())
        found = books.bytes()
    del loss
    counted = saved(state.config.model, state.activations, form_of(state.config, state.model.embed.weight))
    found[REST] = max(0, found.get(REST, 0) - int(counted.fixed))
    return {
        name: {"bytes": size / packed.num_tokens, "counted": counted.groups.get(name, 0.0)}
        for name, size in sorted(found.items(), key=lambda item: -item[1])
    }


@torch.no_grad()
def random_model(config: PretrainConfig) -> K3:
    """Weights drawn on the device: true initial ones are drawn on a CPU, which takes minutes for large models."""
    device = pick_device(config.device)
    seed_everything(config.seed)
    model = K3.empty(config.model, dtype=pick_dtype(config.dtype, device), device=device)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.ndim > 1:
            tensor.normal_(std=config.model.text.initializer_range)
        else:
            tensor.fill_(float("norm" in name))
    return model


def operations(times: dict[str, float], bound: Roofline | None, tokens: int) -> list[dict[str, Any]]:
    """Measured and least seconds of a step by operation; least ones None where the roofline has no such operation."""
    least = {} if bound is None else {each.name: each.seconds(H200) * tokens for each in bound.operations}
    return [{"name": name, "seconds": value, "roofline_seconds": least.get(name)} for name, value in times.items()]


def random_batches(config: PretrainConfig) -> list[Packed]:
    """Micro-batches of sequences of one length (the last one of each may be shorter), of ids without control tokens."""
    generator = torch.Generator().manual_seed(config.seed)
    data, text_ids = config.data, config.model.text.vocab_size - 256
    context = data.stages[0][1]
    batches = []
    for _ in range(data.batch_tokens // data.micro_batch_tokens):
        ids_T = torch.randint(text_ids, (data.micro_batch_tokens,), generator=generator)
        batches.append(Packed.join(list(ids_T.split(context))))
    return batches


def table(found: dict[str, Any]) -> list[str]:
    """The measurement for a reader."""
    lines = [
        f"{found['work']} on {found['device']}, {found['dtype']}: {found['micro_batches']} micro-batches of "
        f"{found['micro_batch']:,} tokens, sequences of {found['context']:,}",
        f"  step                    {found['seconds']:>12.3f} s",
        f"  tokens per second       {found['tokens_per_s']:>12,.0f}",
        f"  model FLOPs per second  {found['model_flops_per_s'] / 1e12:>12,.1f} T",
    ]
    if "mfu" in found:
        lines.append(f"  MFU                     {found['mfu']:>12.1%}")
    if "peak_gb" in found:
        lines.append(f"  peak memory             {found['peak_gb']:>12.1f} GB")
        share = found["tokens_per_s"] / found["roofline_tokens_per_s"]
        lines.append(f"  roofline (one {H200.name})     {found['roofline_tokens_per_s']:>12,.0f}  reached {share:.1%}")
    lines.append(f"  activations             {found['activations']}")
    for name, each in found["saved_bytes"].items():
        lines.append(f"    {name:<21} {each['bytes']:>12,.0f} bytes a token, counted {each['counted']:,.0f}")
    lines += ["", f"  {'operation':<28} {'ms a step':>10} {'share':>7} {'least ms':>10} {'reached':>8}"]
    for each in found["operations"]:
        least = each["roofline_seconds"]
        bound = "" if least is None else f"{least * 1e3:>10.2f} {least / max(each['seconds'], 1e-12):>8.0%}"
        share = each["seconds"] / max(found["busy_seconds"], 1e-12)
        lines.append(f"  {each['name']:<28} {each['seconds'] * 1e3:>10.2f} {share:>7.1%} {bound}".rstrip())
    lines.append(f"  {'all of them':<28} {found['busy_seconds'] * 1e3:>10.2f}  of {found['seconds'] * 1e3:.2f}")
    return lines
