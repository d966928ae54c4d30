"""Loss curves of several runs: when one reaches what another ended with, ratios over seeds, tables and plots."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kda_report import table

from openk3.evals.svg import Axes, Series, line_chart

AXES = ("tokens", "flops", "seconds")
TITLES = {"k3": "K3", "mla": "all MLA", "mla-rotary": "all MLA with RoPE"}
# The page's style sheet is not there where a plot lies in a file of its own.
STYLE = (
    "svg{background:#fff}text{fill:#5d6870;font:11px system-ui,sans-serif}.grid{stroke:#dfe3e6}"
    ".line{fill:none;stroke-width:1.5}.dot{stroke:none}.level{stroke:#5d6870;stroke-dasharray:4 4}"
    ".c1{stroke:#1f6fb4}.c2{stroke:#c4551a}.c3{stroke:#3a8a3f}"
    ".dot.c1{fill:#1f6fb4}.dot.c2{fill:#c4551a}.dot.c3{fill:#3a8a3f}"
)
Curve = Sequence[dict[str, float]]  # points in order of training: "loss", and each of AXES


@dataclass(frozen=True)
class Advantage:
    """How much less a run needs than another one for the same held-out loss; below 1 it needs more."""

    level: float  # the loss that both reach: the worse one's last
    tokens: float
    flops: float
    seconds: float


def crossing(curve: Curve, level: float, axis: str) -> float | None:
    """Where on `axis` the loss first comes down to `level`, in a straight line between points; None if never."""
    before: dict[str, float] | None = None
    for point in curve:
        if point["loss"] <= level:
            if before is None:
                return point[axis]
            share = (before["loss"] - level) / (before["loss"] - point["loss"])
            return before[axis] + share * (point[axis] - before[axis])
        before = point
    return None


def advantage(ours: Curve, theirs: Curve) -> Advantage:
    """What `theirs` took to its last loss over what `ours` took to the same one; the other way round if ours is worse.

    Both are first crossings, so a curve that ends flat is not charged for its flat end. Both schedules fall to their
    ends, so a crossing before the end happens at a rate that is still high: a run made to end there would need less.
    The ratio is therefore a lower bound of the better run's advantage. Raises ValueError for curves without points.
    """
    if not ours or not theirs:
        raise ValueError("curves: at least one point each is needed")
    level = max(ours[-1]["loss"], theirs[-1]["loss"])
    ratios = {}
    for axis in AXES:
        mine, other = crossing(ours, level, axis), crossing(theirs, level, axis)
        assert mine is not None and other is not None  # neither last loss is above the level
        ratios[axis] = other / mine
    return Advantage(level, **ratios)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation (0 for one value), and the values themselves."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "deviation": deviation, "values": list(values)}


def best_rates(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The learning rate of each model's finished run with the lowest last loss."""
    finished = sorted((run for run in runs if run["finished"]), key=lambda run: -run["curve"][-1]["loss"])
    return {run["model"]: run["lr"] for run in finished}


def chosen(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Finished runs at their model's best rate on the first seed."""
    first = min((run["seed"] for run in runs), default=0)
    rates = best_rates([run for run in runs if run["seed"] == first])
    return [run for run in runs if run["finished"] and run["lr"] == rates.get(run["model"])]


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Last losses by model, and K3's advantage over each other model, seed by seed and together; all at their rates."""
    finished = chosen(runs)
    models = [name for name in TITLES if any(run["model"] == name for run in finished)]
    losses = {name: spread([run["curve"][-1]["loss"] for run in finished if run["model"] == name]) for name in models}
    found: dict[str, Any] = {"last_loss": losses, "advantage": {}}
    found["rates"] = {run["model"]: run["lr"] for run in finished}
    by_seed = {(run["model"], run["seed"]): run["curve"] for run in finished}
    for name in models:
        seeds = [seed for model, seed in by_seed if model == name and ("k3", seed) in by_seed]
        if name != "k3" and seeds:
            pairs = [advantage(by_seed["k3", seed], by_seed[name, seed]) for seed in seeds]
            found["advantage"][name] = {axis: spread([getattr(pair, axis) for pair in pairs]) for axis in AXES}
            found["advantage"][name]["level"] = spread([pair.level for pair in pairs])
            found["advantage"][name]["seeds"] = seeds
    return found


def mean_curve(runs: Sequence[dict[str, Any]], model: str, axis: str) -> list[tuple[float, float]]:
    """(axis, mean loss over seeds) at the points that every chosen run of a model has."""
    curves = [run["curve"] for run in chosen(runs) if run["model"] == model]
    return [
        (statistics.fmean(p[axis] for p in points), statistics.fmean(p["loss"] for p in points))
        for points in zip(*curves)
    ]


def plot(runs: Sequence[dict[str, Any]], axis: str = "tokens", *, skip: float = 0.1) -> str:
    """A line for each model, the mean over its seeds, without the first `skip` of the run."""
    series = []
    for name, title in TITLES.items():
        points = mean_curve(runs, name, axis)
        series += [Series(title, [p for p in points if p[0] >= skip * points[-1][0]])] if points else []
    return standalone(line_chart("held-out loss", series, Axes(axis, "held-out loss, nats a token")))


def standalone(svg: str) -> str:
    """A chart with its own colours, for a file of its own."""
    start, _, rest = svg.partition(">")
    return f"{start}><style>{STYLE}</style>{rest}\n"


def plus_minus(values: dict[str, Any], digits: int) -> str:
    """Mean and deviation."""
    return f"{values['mean']:.{digits}f} ± {values['deviation']:.{digits}f}"


def markdown(results: dict[str, Any]) -> str:
    """Sizes, learning rates, last losses and ratios as tables."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [f"# Time to loss on one {results['gpu']}, {results['date']}", ""]
    lines += [f"{versions}, commit {results['commit']}.", ""]
    plan, found = results["plan"], results["summary"]
    lines += [f"{plan['steps']} steps of {plan['batch_tokens']:,} tokens in sequences of {plan['length']:,}.", ""]
    sizes = [
        [TITLES[name], *(f"{each[key]:,.1f}" for key in ("parameters_m", "activated_m", "mflops_per_token"))]
        + [str(each["layers"]), str(each["experts"]), f"{1e3 * plan['step_seconds'][name]:.1f}"]
        for name, each in results["models"].items()
    ]
    titles = ["M parameters", "activated", "MFLOPs a token", "layers", "experts", "ms a step"]
    lines += [*table(["model", *titles], sizes), ""]
    seed = min((run["seed"] for run in results["runs"]), default=0)
    first = [run for run in results["runs"] if run["seed"] == seed]
    rates = [
        [TITLES[run["model"]], f"{run['lr']:g}", f"{run['curve'][-1]['loss']:.4f}", f"{run['curve'][-1]['step']:.0f}"]
        for run in first
    ]
    lines += [*table(["first seed", "rate", "last loss", "at step"], rates), ""]
    losses = [
        [TITLES[name], plus_minus(each, 4), str(len(each["values"]))] for name, each in found["last_loss"].items()
    ]
    lines += [*table(["last held-out loss", "nats a token", "seeds"], losses), ""]
    ratios = [
        [f"over {TITLES[name]}", *(plus_minus(each[axis], 2) for axis in AXES), str(len(each["seeds"]))]
        for name, each in found["advantage"].items()
    ]
    lines += [*table(["K3's advantage", *AXES, "seeds"], ratios), ""] if ratios else []
    return "\n".join(lines).rstrip() + "\n"
