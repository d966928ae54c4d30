"""Time to loss: a K3 against models of the same parts that are all MLA, with plain residuals, at equal compute.

    python benchmarks/token_file.py tokens.xz          # real text of this machine, once
    python benchmarks/time_to_loss.py tokens.xz --out runs/loss
    python benchmarks/time_to_loss.py tokens.xz --out runs/loss --seeds 0 1 --models k3 mla --steps 400
    python benchmarks/time_to_loss.py --device cpu --small --out /tmp/loss    # tries all of it, in a minute

Every model sees the same batches (by seed), has the same optimizer (Per-Head Muon and AdamW), schedule and initial
values where names agree, stores as many parameters and costs as many model FLOPs a token at the trained length, within
2 % each (`all_mla.py` says how). Each run's curve is written as it goes, so that the same command goes on where it was
cut off; finished runs are never repeated.

1. A few steps of each model are timed, alone on the device; with --seconds, the number of steps that all runs fit into
   follows. plan.json keeps both. --part plan ends here.
2. Runs of the first seed at every learning rate, of full length; a model's own rate is its best by last held-out loss.
3. Runs of the other seeds at each model's own rate. Several processes may share the work of 2 and 3 once the plan is
   there: --models of one each, --part runs.
4. results.json, results.md and loss.svg from all finished runs in the folder; --part report does this alone.

The ratio is what the baseline took to its last held-out loss over what the K3 took to the same one: above 1 the K3 is
faster, below 1 slower. `seconds` are steps times the median of the timed steps: without evaluations, first launches and
whatever else shares the device.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import loss_curves  # noqa: E402
import torch  # noqa: E402
from all_mla import MODELS, model_class, model_config, training_flops  # noqa: E402
from token_file import Tokens, gather, read, roots  # noqa: E402
from torch import Tensor  # noqa: E402

from openk3.config.train import DataConfig, OptimConfig, PretrainConfig  # noqa: E402
from openk3.inputs.packed import Packed  # noqa: E402
from openk3.model.accounting import account  # noqa: E402
from openk3.model.k3 import K3  # noqa: E402
from openk3.ops.sequences import remember_integers  # noqa: E402
from openk3.runtime.device import pick_device, pick_dtype, seed_everything  # noqa: E402
from openk3.runtime.run_folder import write_atomic  # noqa: E402
from openk3.train.state import TrainState  # noqa: E402
from openk3.train.step import train_step  # noqa: E402

POINTS = 24  # of a curve
TIMED_STEPS = 8  # of the runs that only say how long a step takes


@dataclass(frozen=True)
class Sizes:
    """Batches and evaluations."""

    length: int = 2048
    micro_batch: int = 32768
    micro_batches: int = 1
    held_out: int = 131072  # tokens of an evaluation
    small: bool = False

    @property
    def batch_tokens(self) -> int:
        """Of a step."""
        return self.micro_batch * self.micro_batches


TRIAL = Sizes(length=64, micro_batch=256, micro_batches=2, held_out=512, small=True)


@dataclass(frozen=True)
class Run:
    """One training run."""

    model: str
    seed: int
    lr: float
    steps: int

    @property
    def file(self) -> str:
        """Where its curve is kept."""
        return f"{self.model}-seed{self.seed}-rate{self.lr:g}-steps{self.steps}.json"


def packed(rows_NT: Tensor) -> Packed:
    """Windows of one length as a micro-batch."""
    bounds = torch.arange(0, rows_NT.numel() + 1, rows_NT.shape[1], dtype=torch.int32)
    return Packed(rows_NT.flatten().long(), bounds)


def windows(ids_T: Tensor, length: int) -> Tensor:
    """The text in windows of `length` ids [N, length], the rest left out."""
    return ids_T[: len(ids_T) // length * length].view(-1, length)


def batches(windows_NT: Tensor, sizes: Sizes, seed: int, step: int) -> list[Packed]:
    """A step's micro-batches: all windows in an order of the seed's and of the epoch's, epoch after epoch."""
    rows = sizes.batch_tokens // sizes.length
    chosen = []
    for at in range(step * rows, (step + 1) * rows):
        epoch, place = divmod(at, len(windows_NT))
        chosen.append(_order(len(windows_NT), seed, epoch)[place])
    picked_NT = windows_NT[torch.tensor(chosen)]
    return [packed(part_NT) for part_NT in picked_NT.chunk(sizes.micro_batches)]


_ORDERS: dict[tuple[int, int, int], list[int]] = {}


def _order(count: int, seed: int, epoch: int) -> list[int]:
    key = count, seed, epoch
    if key not in _ORDERS:
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        _ORDERS[key] = torch.randperm(count, generator=generator).tolist()
    return _ORDERS[key]


@torch.no_grad()
def held_out_loss(model: K3, parts: list[Packed]) -> float:
    """Mean nats of a token that has another one before it in its window."""
    total, count = torch.zeros(2, dtype=torch.float64, device=model.embed.weight.device)
    for part in parts:
        moved = part.to(model.embed.weight.device)
        remember_integers(moved.cu_seqlens, part.cu_seqlens.tolist())
        found = model.loss(moved)
        total += found.lm.double() * found.num_tokens
        count += found.num_tokens
    return float(total / count)


def settings(run: Run, vocab: int, sizes: Sizes, device: str) -> PretrainConfig:
    """The training configuration of a run."""
    data = DataConfig(
        stages=((1.0, sizes.length),), batch_tokens=sizes.batch_tokens, micro_batch_tokens=sizes.micro_batch
    )
    optim = OptimConfig(lr=run.lr, min_lr=run.lr / 10, warmup_fraction=0.05)
    config = model_config(run.model, vocab, sizes.length, small=sizes.small)
    return PretrainConfig(config, data, optim, steps=run.steps, seed=run.seed, device=device)


def build(run: Run, config: PretrainConfig) -> TrainState:
    """A state at step 0."""
    device = pick_device(config.device)
    seed_everything(run.seed)
    model = model_class(run.model).build(
        config.model, seed=run.seed, dtype=pick_dtype(config.dtype, device), device=device
    )
    return TrainState.around(model, config)


def train(run: Run, tokens: Tokens, sizes: Sizes, options: argparse.Namespace) -> dict[str, Any]:
    """Train, evaluate on the way and write the curve; a finished run is read instead."""
    path = options.out / run.file
    if path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        if old["finished"]:
            return old
    config = settings(run, tokens.vocab, sizes, options.device)
    state = build(run, config)
    train_NT, held_NT = windows(tokens.train_T, sizes.length), windows(tokens.held_out_T, sizes.length)
    held_NT = held_NT[: sizes.held_out // sizes.length]
    held_out = [packed(part) for part in held_NT.split(sizes.micro_batch // sizes.length)]
    flops = training_flops(config.model, sizes.length, plain=run.model != "k3")
    points: list[dict[str, float]] = []
    took: list[float] = []
    every = max(1, run.steps // POINTS)
    found: dict[str, Any] = {"model": run.model, "seed": run.seed, "lr": run.lr, "steps": run.steps}
    for step in range(run.steps):
        began = time.perf_counter()
        values = train_step(state, batches(train_NT, sizes, run.seed, step))
        _wait(options.device)
        took.append(time.perf_counter() - began)
        if (step + 1) % every and step + 1 < run.steps:
            continue
        point = {"step": step + 1.0, "tokens": float(state.tokens), "flops": flops * state.tokens}
        point |= {"loss": held_out_loss(state.model, held_out), "train_loss": values["lm"]}
        points.append(point | {name: values[name] for name in ("grad_norm", "max_load", "max_logit", "clipped_heads")})
        found |= {"finished": step + 1 == run.steps, "step_seconds": statistics.median(took), "curve": points}
        write_json(path, found | {"seconds_with_first": sum(took)})
    last = found["curve"][-1]
    print(f"{run.file}: {run.steps} steps of {1e3 * found['step_seconds']:.1f} ms, loss {last['loss']:.4f}", flush=True)
    del state
    gc.collect()
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a file whole or not at all."""
    text = json.dumps(values, indent=1) + "\n"
    write_atomic(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def plan(tokens: Tokens, sizes: Sizes, options: argparse.Namespace) -> dict[str, Any]:
    """How long a step of each model takes, and how long the runs are: kept, so that resumed runs have one length."""
    path = options.out / "plan.json"
    found: dict[str, Any] = {"step_seconds": {}, "steps": 0}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
    missing = [name for name in options.models if name not in found["step_seconds"]]
    for name in missing:
        timed = train(Run(name, 0, options.rates[0], TIMED_STEPS), tokens, sizes, options)
        found["step_seconds"][name] = timed["step_seconds"]
    if not found["steps"]:
        found |= {"steps": options.steps, "batch_tokens": sizes.batch_tokens, "length": sizes.length}
        found["schedule"] = "cosine to a tenth of the rate after 5 % of warm-up"
        if options.seconds:
            runs = len(options.rates) + len(options.seeds) - 1  # of a model
            fits = int(options.seconds / (runs * sum(found["step_seconds"].values())))
            found["steps"] = max(POINTS, min(options.steps, fits // POINTS * POINTS))
    if missing:
        write_json(path, found)
    return found


def collect(folder: Path, planned: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs of the planned length in the folder, finished or not; seconds are those of the timed steps."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(f"*-steps{planned['steps']}.json")]
    for run in runs:
        seconds = planned["step_seconds"][run["model"]]
        run["curve"] = [point | {"seconds": point["step"] * seconds} for point in run["curve"]]
    return sorted(runs, key=lambda run: (MODELS.index(run["model"]), run["seed"], run["lr"]))


def describe(vocab: int, sizes: Sizes, models: list[str]) -> dict[str, Any]:
    """Sizes and costs of the models."""
    found = {}
    for name in models:
        config = model_config(name, vocab, sizes.length, small=sizes.small)
        books, text = account(config), config.text
        flops = training_flops(config, sizes.length, plain=name != "k3")
        found[name] = {"parameters_m": books.total / 1e6, "activated_m": books.activated / 1e6}
        found[name] |= {"mflops_per_token": flops / 1e6, "layers": text.num_hidden_layers}
        found[name] |= {"experts": text.num_experts, "dense_width": text.intermediate_size, "width": text.hidden_size}
    return found


def head(device: str) -> dict[str, Any]:
    """What the numbers mean nothing without."""
    versions = {"torch": torch.__version__}
    if importlib.util.find_spec("triton"):
        versions["triton"] = importlib.import_module("triton").__version__
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    gpu = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    day = datetime.date.today().isoformat()
    return {"date": day, "gpu": gpu, "versions": versions, "commit": git.stdout.strip() or "unknown"}


def report(options: argparse.Namespace, tokens: Tokens, sizes: Sizes, planned: dict[str, Any]) -> None:
    """Write results.json, results.md and loss.svg from what lies in the folder."""
    runs = collect(options.out, planned)
    results = head(options.device) | {"plan": planned, "text": tokens.head, "runs": runs}
    results["models"] = describe(tokens.vocab, sizes, list(planned["step_seconds"]))
    results["summary"] = loss_curves.summary(runs)
    write_json(options.out / "results.json", results)
    for name, text in (("results.md", loss_curves.markdown(results)), ("loss.svg", loss_curves.plot(runs))):
        write_atomic(options.out / name, lambda partial, text=text: partial.write_text(text, encoding="utf-8"))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options. Ends with status 2 where nothing could run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "tokens", type=Path, nargs="?", help="file of token_file.py; --small reads a little text itself"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of curves and results; resumed if it has some")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default 0 1 2")
    parser.add_argument("--rates", nargs="+", type=float, default=[2e-3, 4e-3, 8e-3], help="learning rates tried")
    parser.add_argument("--steps", type=int, default=288, help="steps of a run, at most with --seconds (default 288)")
    parser.add_argument("--seconds", type=float, default=0, help="fit all runs into so many; 0: --steps")
    parser.add_argument("--part", choices=("all", "plan", "runs", "report"), default="all", help="what is done")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny models and batches, to try the script")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU here; --device cpu --small tries the script")
    if options.tokens is None and not options.small:
        parser.error("tokens: name a file that benchmarks/token_file.py wrote")
    if options.tokens is not None and not options.tokens.is_file():
        parser.error(f"tokens: no such file: {options.tokens}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Plan, runs, report."""
    options = parse(arguments)
    sizes = TRIAL if options.small else Sizes()
    tokens = read(options.tokens) if options.tokens else gather(roots(), 300_000, 1024)
    planned = plan(tokens, sizes, options)
    if options.part in ("runs", "all"):
        first, *others = options.seeds
        for model in options.models:
            for rate in options.rates:
                train(Run(model, first, rate, planned["steps"]), tokens, sizes, options)
        own = loss_curves.best_rates([run for run in collect(options.out, planned) if run["seed"] == first])
        for seed in others:
            for model in options.models:
                train(Run(model, seed, own[model], planned["steps"]), tokens, sizes, options)
    if options.part in ("report", "all"):
        report(options, tokens, sizes, planned)
        print((options.out / "results.md").read_text(encoding="utf-8"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
