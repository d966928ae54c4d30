"""Activation policies: what a forward pass holds, what FP8 does to gradients, and whether training notices.

    python benchmarks/activations.py                       # all of it, recipe tiny on a CPU, some minutes
    python benchmarks/activations.py --rows gradients      # one part: memory, gradients, curves or blocks
    python benchmarks/activations.py --steps 20 --seeds 1  # tries the script

Training is on bytes of the Python standard library's sources, in windows of one length. Exact policies must give the
bits of keeping everything; the script ends with an error if they do not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from openk3 import recipes  # noqa: E402
from openk3.config.activations import FP8, HOLDS, PRESETS, ActivationPolicy  # noqa: E402
from openk3.config.train import PretrainConfig  # noqa: E402
from openk3.inputs.packed import Packed  # noqa: E402
from openk3.model.k3 import K3  # noqa: E402
from openk3.model.saved_bytes import saved  # noqa: E402
from openk3.ops.mxfp8 import fake_quantize_mxfp8  # noqa: E402
from openk3.ops.saved import saving  # noqa: E402
from openk3.train.activations import form_of  # noqa: E402
from openk3.train.state import TrainState  # noqa: E402
from openk3.train.step import train_step  # noqa: E402

PARTS = ("memory", "gradients", "blocks", "curves")
# FP8 wherever a group can have it.
ALL_FP8 = ",".join(f"{name}={FP8}" for name, choices in HOLDS.items() if FP8 in choices)


class Text:
    """Windows of Python's own sources as bytes; the last twentieth is held out."""

    def __init__(self, length: int, batch: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        joined = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self._ids, self._length, self._batch = joined.long(), length, batch
        self._train = len(joined) * 19 // 20

    def batch(self, seed: int, step: int) -> Packed:
        """The windows of one step."""
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        starts = torch.randint(self._train - self._length, (self._batch,), generator=generator)
        return Packed.join([self._ids[start : start + self._length] for start in starts.tolist()])

    def held_out(self) -> Packed:
        """The same windows always."""
        starts = torch.linspace(self._train, len(self._ids) - self._length, 4 * self._batch).long()
        return Packed.join([self._ids[start : start + self._length] for start in starts.tolist()])


def configured(options: argparse.Namespace, policy: str, seed: int) -> PretrainConfig:
    """Recipe tiny under a policy; the data comes from `Text`."""
    config = recipes.pretrain("tiny")
    data = dataclasses.replace(config.data, stages=((1.0, options.length),), micro_batch_tokens=options.length)
    changes = {"data": data, "steps": options.steps, "seed": seed, "activations": policy, "device": "cpu"}
    return dataclasses.replace(config, **changes)  # pyrefly: ignore


def trained(options: argparse.Namespace, policy: str, seed: int) -> tuple[TrainState, list[float]]:
    """A state after all steps, and the loss of each."""
    state, text = TrainState.build(configured(options, policy, seed)), Text(options.length, options.batch)
    losses = [train_step(state, [text.batch(seed, step)])["lm"] for step in range(options.steps)]
    return state, losses


def memory(model: K3, packed: Packed, config: PretrainConfig) -> list[dict[str, Any]]:
    """Bytes of a token that each preset holds, found and counted."""
    own, rows = [*model.parameters(), *model.buffers()], []
    for name in (*PRESETS, ALL_FP8):
        policy = ActivationPolicy.parse(name)
        books = saved(config.model, policy, form_of(config, model.embed.weight))
        with saving(policy.groups(), beside=own) as held:
            loss = model.loss(packed)
            found = (sum(held.bytes().values()) - books.fixed) / packed.num_tokens
        del loss
        title = "all in FP8" if name == ALL_FP8 else name
        rows.append({"work": f"memory, {title}", "bytes": found, "counted": books.total})
    return rows


def gradients_of(model: K3, packed: Packed, policy: ActivationPolicy) -> dict[str, Tensor]:
    """Gradients by parameter, the forward pass under a policy."""
    model.zero_grad()
    with saving(policy.groups()):
        loss = model.loss(packed).total
    loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def gradients(model: K3, packed: Packed) -> list[dict[str, Any]]:
    """How far gradients are from those of keeping everything: of all together, and of the worst parameter."""
    want = gradients_of(model, packed, ActivationPolicy())
    whole = sum(float(x.norm()) ** 2 for x in want.values()) ** 0.5
    rows = []
    singles = {f"{name} in FP8": f"{name}={FP8}" for name, choices in HOLDS.items() if FP8 in choices}
    for title, text in {**{name: name for name in PRESETS}, **singles, "all in FP8": ALL_FP8}.items():
        policy = ActivationPolicy.parse(text)
        got = gradients_of(model, packed, policy)
        off = {name: float((got[name] - x).norm()) for name, x in want.items()}
        if policy.is_exact and any(off.values()):
            raise SystemExit(f"{title}: gradients are not those of keeping everything")
        relative = {name: off[name] / float(x.norm()) for name, x in want.items() if float(x.norm()) > 1e-6 * whole}
        worst = max(relative, key=lambda name: relative[name])
        error = sum(value**2 for value in off.values()) ** 0.5 / whole
        along = sum(float((got[name] * x).sum()) for name, x in want.items()) / whole**2
        row = {"work": f"gradients, {title}", "error": error, "along": along, "worst": relative[worst]}
        rows.append(row | {"worst_parameter": worst, "median": sorted(relative.values())[len(relative) // 2]})
    return rows


def blocks(model: K3, packed: Packed) -> list[dict[str, Any]]:
    """Relative rounding error of what is saved, in blocks of 32 and 128 with one scale each."""
    own, found = {p.untyped_storage()._cdata for p in model.parameters()}, []

    def note(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.numel() >= 4096 and x.untyped_storage()._cdata not in own:
            found.append(x.detach().flatten()[: x.numel() // 128 * 128].float())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        model.loss(packed)
    rows = []
    for title, rounded in (("32, power of two", fake_quantize_mxfp8), ("128, float32", tiles_of_128)):
        errors = [float((rounded(x) - x).norm() / x.norm().clamp_min(1e-30)) for x in found]
        row = {"work": f"blocks of {title}", "error": mean(errors), "worst": max(errors), "tensors": len(errors)}
        rows.append(row)
    return rows


def tiles_of_128(x: Tensor) -> Tensor:
    """x in E4M3 with one float32 scale for 128 values, and back."""
    tiles = x.unflatten(-1, (-1, 128))
    scale = tiles.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
    return ((tiles / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def curves(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Losses of whole runs: exact policies the same, FP8 beside the distance of two seeds."""
    rows = []
    for seed in range(options.seeds):
        for title, policy in (
            ("none", "none"),
            ("selective", "selective"),
            ("memory", "memory"),
            ("all in FP8", ALL_FP8),
        ):
            began = time.perf_counter()
            state, losses = trained(options, policy, seed)
            with torch.no_grad():
                held_out = float(state.model.loss(Text(options.length, options.batch).held_out()).lm)
            row = {"work": f"training, {title}, seed {seed}", "last": mean(losses[-20:]), "held_out": held_out}
            rows.append(row | {"losses": losses, "seconds": time.perf_counter() - began})
            print(f"{row['work']}: last {row['last']:.4f}, held out {held_out:.4f}", flush=True)
        exact = rows[-3]["losses"] == rows[-4]["losses"]
        if not exact:
            raise SystemExit("training, selective: losses are not those of keeping everything")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts asked for; print rows, and write them if a file is named."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="windows of a step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    if set(options.rows) - {"curves"}:
        state, _ = trained(argparse.Namespace(**vars(options) | {"steps": min(60, options.steps)}), "none", 0)
        packed = Text(options.length, options.batch).held_out()
        parts = {
            "memory": lambda: memory(state.model, packed, state.config),
            "gradients": lambda: gradients(state.model, packed),
            "blocks": lambda: blocks(state.model, packed),
        }
        for part in options.rows:
            if part in parts:
                rows += parts[part]()
        for row in rows:
            print({name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()})
    if "curves" in options.rows:
        rows += curves(options)
    if options.json:
        head = {"device": "CPU", "recipe": "tiny", "torch": torch.__version__, "steps": options.steps}
        options.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
