"""Decoding with growing contexts: a hybrid of KDA and MLA against the same model with MLA in every layer.

    python benchmarks/hybrid_decode.py                       # recipe small, 4K to 1M tokens, batch 1 and 8
    python benchmarks/hybrid_decode.py --contexts 4096 131072 --batches 1
    python benchmarks/hybrid_decode.py --device cpu --small  # tries the script: recipe tiny, plain PyTorch

Both models have the recipe's depth, widths, experts and attention over depth; only the mixers differ. A step is one
CUDA graph (`model/decoder.py`); weights, states and latents are random, and latents fill the cache to the context's
length. A context whose cache does not fit into memory is left out, and named. Besides the batches asked for, the
longest context is measured with as many sequences as fit: a smaller cache admits more of them, and a token then costs
`ours_ms / batch`.

What the ratio can come to: in the limit of long contexts latents are all that a step reads, and a hybrid has them in a
share of its layers alone: small has 7 MLA layers of 25, so 3.6 times at equal batch. At short contexts weights are what
is read, and in small below 32K the number of launches binds, which both models have alike: the ratio is then about 1.

Writes hybrid_decode.json, hybrid_decode.md and hybrid_decode.svg into --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from all_mla import all_mla  # noqa: E402
from kda_report import number, table  # noqa: E402
from kda_timing import Protocol, copy_rate, median_ms  # noqa: E402
from loss_curves import standalone  # noqa: E402
from time_to_loss import head  # noqa: E402

from openk3 import recipes  # noqa: E402
from openk3.commands.bench import random_model  # noqa: E402
from openk3.config.train import PretrainConfig  # noqa: E402
from openk3.evals.svg import Axes, Series, line_chart  # noqa: E402
from openk3.model.accounting import account, expert_size  # noqa: E402
from openk3.model.decoder import Decoder  # noqa: E402
from openk3.model.k3 import K3  # noqa: E402
from openk3.model.step_cache import StepLatents  # noqa: E402
from openk3.runtime.run_folder import write_atomic  # noqa: E402

MODELS = {"hybrid": "hybrid", "all-mla": "all MLA"}
CONTEXTS = (4096, 32768, 131072, 524288, 1048576)
BATCHES = (1, 8)
MOST_OF_MEMORY = 0.9  # that weights and cache may take
MOST_SEQUENCES = 32  # of the row that takes as many as fit


@dataclass(frozen=True)
class Row:
    """A step of `batch` sequences that have `context` tokens each."""

    model: str
    batch: int
    context: int

    @property
    def name(self) -> str:
        """As in results."""
        return f"{self.model}, batch {self.batch}, context {self.context}"


def moved(config: PretrainConfig, row: Row) -> dict[str, float]:
    """Gigabytes that a step moves at least: weights that even choices use, states both ways, latents."""
    text, books = config.model.text, account(config.model)
    layers = sum(text.is_moe_layer(i) for i in range(text.num_hidden_layers))
    chosen = text.num_experts * (1 - (1 - text.num_experts_per_token / text.num_experts) ** row.batch)
    weights = books.activated + layers * (chosen - text.num_experts_per_token) * expert_size(text)
    states = 2 * row.batch * books.state_bytes_per_request()
    latents = row.batch * row.context * books.latent_bytes_per_token()
    return {"weights_gb": 2 * weights / 1e9, "states_gb": states / 1e9, "latents_gb": latents / 1e9}


def cache_bytes(config: PretrainConfig, batch: int, tokens: int) -> int:
    """What a decoder's cache takes; one more row of latents is nobody's."""
    books = account(config.model)
    return batch * books.state_bytes_per_request() + (batch + 1) * tokens * books.latent_bytes_per_token()


def most_sequences(config: PretrainConfig, context: int, free: float) -> int:
    """As many as fit into `free` bytes; 0 where not one does."""
    fits = [n for n in range(1, MOST_SEQUENCES + 1) if cache_bytes(config, n, context) <= free]
    return max(fits, default=0)


@torch.no_grad()
def fill(decoder: Decoder, batch: int, context: int, seed: int = 0) -> None:
    """Random states and latents, and the lengths that say so."""
    torch.manual_seed(seed)
    for layer in decoder.cache.layers:
        if isinstance(layer, StepLatents):
            (memory_RTC,) = (value for value in vars(layer).values() if isinstance(value, torch.Tensor))
            for n in range(batch):
                memory_RTC[n, :context].normal_()
        else:
            for tensor in layer.pool.tensors():
                tensor.normal_(std=0.1)
    decoder.cache.length_R[:batch] = context
    decoder.lengths = [context] * batch


def check(model: K3, context: int) -> dict[str, float]:
    """Largest difference of three graphed steps to the same steps without a graph, and the logits' own size."""
    found = []
    for graphs in (None, False):
        decoder = Decoder(model, slots=2, max_tokens=context + 8, graphs=graphs)
        if graphs is None:
            decoder.step([0, 1], [0, 0])  # captured before lengths and values are set
        fill(decoder, 2, context)
        found.append(torch.stack([decoder.step([0, 1], [5, n]).float().clone() for n in range(3)]))
    if not bool(torch.isfinite(found[0]).all()):
        raise ArithmeticError("logits are not finite")
    return {"largest_difference": float((found[0] - found[1]).abs().max()), "largest": float(found[1].abs().max())}


@torch.no_grad()
def measure(model: K3, config: PretrainConfig, row: Row, protocol: Protocol, rate: float) -> dict[str, Any]:
    """Milliseconds of a step, and its floor."""
    device = model.embed.weight.device
    steps = protocol.repeats + protocol.warmups + 2
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    decoder = Decoder(model, slots=row.batch, max_tokens=row.context + steps)
    fill(decoder, row.batch, row.context)
    slots = list(range(row.batch))
    decoder.step(slots, [0] * row.batch)
    took = median_ms([lambda: decoder.step(slots)], device, protocol)
    bytes_moved = moved(config, row)
    floor = 1e12 * sum(bytes_moved.values()) / rate
    found = {"work": row.name, "model": row.model, "batch": row.batch, "context": row.context, "ours_ms": took}
    found |= {"ms_per_token": took / row.batch, "floor_ms": floor, "of_floor": floor / took, **bytes_moved}
    if device.type == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    return found


def configurations(options: argparse.Namespace) -> dict[str, PretrainConfig]:
    """The recipe, and the recipe with MLA in every layer."""
    config = recipes.pretrain("tiny" if options.small else "small")
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    config = dataclasses.replace(config, device=options.device, dtype=dtype)
    return {"hybrid": config, "all-mla": dataclasses.replace(config, model=all_mla(config.model))}


def rows_of(name: str, config: PretrainConfig, options: argparse.Namespace, free: float) -> list[Row]:
    """What is measured of a model: what was asked for, and the longest context with as many sequences as fit."""
    rows = [Row(name, batch, context) for batch in options.batches for context in options.contexts]
    most = most_sequences(config, max(options.contexts), free)
    more = [Row(name, most, max(options.contexts))] if most and options.most else []
    return rows + [row for row in more if row not in rows]


def run(options: argparse.Namespace, protocol: Protocol) -> dict[str, Any]:
    """Every row of both models; one that fails is named, and the others go on."""
    device = torch.device(options.device)
    results: dict[str, Any] = head(options.device)
    rate = copy_rate(device, protocol)
    gc.collect()
    memory = float("inf")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        memory = MOST_OF_MEMORY * torch.cuda.get_device_properties(device).total_memory
    results |= {"copy_tb_s": rate / 1e12, "rows": [], "left_out": {}, "checks": {}, "models": {}}
    for name, config in configurations(options).items():
        model = random_model(config)
        books, kinds = account(config.model), config.model.text.layer_kinds()
        free = memory - books.in_memory * 2
        results["models"][name] = {"parameters_m": books.in_memory / 1e6, "mla_layers": kinds.count("mla")}
        results["models"][name] |= {"layers": len(kinds), "latent_bytes_per_token": books.latent_bytes_per_token()}
        results["checks"][name] = check(model, min(options.contexts))
        print(f"{name}: graph against eager steps {results['checks'][name]}", flush=True)
        for row in rows_of(name, config, options, 16e9 if free == math.inf else free):
            if cache_bytes(config, row.batch, row.context + 64) > free:
                results["left_out"][row.name] = f"a cache of {cache_bytes(config, row.batch, row.context) / 1e9:.0f} GB"
                continue
            try:
                results["rows"].append(measure(model, config, row, protocol, rate))
                found = results["rows"][-1]
                print(f"{row.name}: {found['ours_ms']:.3f} ms, {found['of_floor']:.1%} of the floor", flush=True)
            except (RuntimeError, ValueError) as error:  # a fault of one row must not cost the others
                results["left_out"][row.name] = f"{type(error).__name__}: {str(error)[:200]}"
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        del model
    results["ratios"] = ratios(results["rows"])
    return results


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times as long all MLA takes as the hybrid, at equal batch and context, and by what the floors differ."""
    by_size = {(row["model"], row["batch"], row["context"]): row for row in rows}
    found = []
    for (model, batch, context), ours in by_size.items():
        theirs = by_size.get(("all-mla", batch, context))
        if model == "hybrid" and theirs is not None:
            found.append(
                {
                    "batch": batch,
                    "context": context,
                    "ratio": theirs["ours_ms"] / ours["ours_ms"],
                    "of_floors": theirs["floor_ms"] / ours["floor_ms"],
                }
            )
    return found


def packed_ratio(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """At the longest context, milliseconds a token with each model's best batch there; None unless both have one."""
    longest = max((row["context"] for row in rows), default=0)
    best = {}
    for model in MODELS:
        found = [row for row in rows if row["model"] == model and row["context"] == longest]
        if not found:
            return None
        best[model] = min(found, key=lambda row: row["ms_per_token"])
    ratio = best["all-mla"]["ms_per_token"] / best["hybrid"]["ms_per_token"]
    return {"context": longest, "ratio": ratio} | {
        name: {key: row[key] for key in ("batch", "ms_per_token")} for name, row in best.items()
    }


def markdown(results: dict[str, Any]) -> str:
    """Times by context, ratios, and what was left out."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [f"# Hybrid against all MLA, decoding on one {results['gpu']}, {results['date']}", ""]
    lines += [f"{versions}, commit {results['commit']}; copy rate {results['copy_tb_s']:.2f} TB/s.", ""]
    by_size = {(row["batch"], row["context"], row["model"]): row for row in results["rows"]}
    cells = []
    for batch, context in dict.fromkeys((batch, context) for batch, context, _ in sorted(by_size)):
        pair = [by_size.get((batch, context, model)) for model in MODELS]
        times = [number(row and row["ours_ms"]) for row in pair] + [number(row and row["floor_ms"]) for row in pair]
        both = [row for row in results["ratios"] if (row["batch"], row["context"]) == (batch, context)]
        compared = [f"{both[0][key]:.2f}" if both else "-" for key in ("ratio", "of_floors")]
        cells.append([f"batch {batch}, {context:,} tokens", *times, *compared])
    titles = [f"{title}{what}" for what in ("", ", floor") for title in MODELS.values()]
    lines += [*table(["a step, ms", *titles, "ratio", "of floors"], cells), ""]
    hybrid = results["models"]["hybrid"]
    lines += [f"In the limit of long contexts {hybrid['layers'] / hybrid['mla_layers']:.2f} at equal batch.", ""]
    packed = packed_ratio(results["rows"])
    if packed:
        best = [f"{MODELS[name]} {packed[name]['ms_per_token']:.3f} (batch {packed[name]['batch']})" for name in MODELS]
        lines += [f"{packed['context']:,} tokens, ms a token: {', '.join(best)}: {packed['ratio']:.2f} times.", ""]
    lines += [f"- left out: {name}: {why}" for name, why in results["left_out"].items()]
    return "\n".join(lines).rstrip() + "\n"


def plot(results: dict[str, Any]) -> str:
    """Milliseconds of a step of one sequence against the context, in powers of two."""
    batch = min(row["batch"] for row in results["rows"])
    series = []
    for model, title in MODELS.items():
        rows = [row for row in results["rows"] if (row["model"], row["batch"]) == (model, batch)]
        points = sorted((math.log2(row["context"]), row["ours_ms"]) for row in rows)
        series.append(Series(title, points, dots=True))
    axes = Axes("context, log2 of tokens", f"ms a step, batch {batch}", low=0.0)
    return standalone(line_chart("decoding", series, axes))


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write what --out asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", nargs="+", type=int, help="tokens that a sequence has (default 4K to 1M)")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), help="sequences of a step (1 8)")
    parser.add_argument("--no-most", dest="most", action="store_false", help="without the rows of as many as fit")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="recipe tiny and short contexts, to try the script")
    parser.add_argument("--quick", action="store_true", help="median of 5 after 2")
    parser.add_argument("--out", type=Path, help="folder of the results")
    options = parser.parse_args(arguments)
    options.contexts = options.contexts or ([32, 128] if options.small else list(CONTEXTS))
    if min(options.contexts + options.batches) < 1:
        parser.error("--contexts and --batches: must be positive")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU here; --device cpu --small tries the script")
    results = run(options, Protocol(5, 2) if options.quick or options.small else Protocol())
    text = markdown(results)
    print(text, flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        files = {"json": json.dumps(results, indent=1) + "\n", "md": text, "svg": plot(results)}
        for suffix, content in files.items():
            write_atomic(options.out / f"hybrid_decode.{suffix}", lambda path, c=content: path.write_text(c))
    return 0


if __name__ == "__main__":
    sys.exit(main())
