"""Every row of the GPU stack by one command: operators, decoding and whole training steps, one file of results.

    python benchmarks/gpu.py                         # all parts; writes results/gpu-<gpu>-<date>.json and Markdown
    python benchmarks/gpu.py --parts attn_res train  # some of them; files gpu_attn_res_train-<gpu>-<date>
    python benchmarks/gpu.py --device cpu --small    # tries every part on tiny shapes; writes only if --out is given

Parts are this folder's own scripts, called one after the other in this process; `train` is `openk3 bench train`, and
`whole_models.py` makes rows of `engine` (needs a GPU), `hybrid_decode` and `time_to_loss` (runs of four minutes, and
text gathered before them unless --tokens names a file of `token_file.py`). A part that fails is named in the results
with its reason, the others go on, and the exit status is 1. KDA has a script of its own (`kda.py`). Peers are taken
where they can be imported; `--peers` puts a folder of them first, transformers for the engine among them.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import whole_models  # noqa: E402
from kda_report import number, table  # noqa: E402

from openk3.commands import bench  # noqa: E402
from openk3.commands.bench_flags import BenchTrain  # noqa: E402
from openk3.config.activations import check as check_activations  # noqa: E402
from openk3.config.model import ConfigError  # noqa: E402
from openk3.model.roofline import H200  # noqa: E402
from openk3.runtime.device import peak_flops  # noqa: E402

Rows = list[dict[str, Any]]
SCRIPTS = ("attn_res", "latent_moe", "mla", "cross_entropy", "newton_schulz", "mxfp4", "decode", "residuals")
WHOLE: dict[str, Callable[[argparse.Namespace, Path], Rows]] = {
    "engine": whole_models.engine,
    "hybrid_decode": whole_models.hybrid_decode,
    "time_to_loss": whole_models.time_to_loss,
}
PARTS = (*SCRIPTS, "train", *WHOLE)
NEED_GPU = ("engine",)  # elsewhere it is `openk3 bench serve`
NAMES = {"tokens_per_s": "tokens/s", "mfu": "MFU", "of_floor": "of the floor"}
NAMES |= {
    "ratio": "ratio",
    "of_floors": "of floors",
    "published_ratio": "published",
    "token_ratio": "in tokens",
    "more": "more",
}
# Recipe, tokens of a micro-batch, micro-batches of a step, goal of MFU.
TRAINING = (("small", 65536, 8, 0.25), ("medium", 32768, 16, 0.40))


def of_script(name: str, options: argparse.Namespace) -> Rows:
    """The rows of one of this folder's scripts."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        arguments = ["--device", options.device, "--json", str(out)]
        arguments += ["--small"] * options.small + ["--quick"] * options.quick
        if options.rows:
            arguments += ["--rows", *options.rows]
        if name == "attn_res" and options.peers:
            arguments += ["--peers", str(options.peers)]
        importlib.import_module(name).main(arguments)
        return json.loads(out.read_text(encoding="utf-8"))["rows"]


def of_whole_models(name: str, options: argparse.Namespace) -> Rows:
    """The rows of a comparison of whole models."""
    with tempfile.TemporaryDirectory() as folder:
        return WHOLE[name](options, Path(folder))


def of_training(options: argparse.Namespace) -> Rows:
    """Whole steps of the recipes at the batches of their goals."""
    rows = []
    plans = (("tiny", 64, 2, None),) if options.small else TRAINING
    for recipe, tokens, count, goal in plans:
        name = f"train {recipe} {count}x{tokens}"
        if options.rows and not any(part in name for part in options.rows):
            continue
        sizes = {"micro_batch": tokens, "micro_batches": count, "context": min(8192, tokens)}
        flags = BenchTrain(recipe, **sizes, steps=2, warmups=1, device=options.device, activations=options.activations)
        found = bench.measure(bench.complete(flags), flags)
        row = {"work": name, "ours_ms": 1e3 * found["seconds"], "floor_ms": None, "goal_ms": None}
        row |= {"tokens_per_s": found["tokens_per_s"], "activations": found["activations"]}
        row |= {key: found[key] for key in ("mfu", "peak_gb", "operations", "saved_bytes") if key in found}
        if "mfu" in found:
            row["floor_ms"] = 1e3 * tokens * count / found["roofline_tokens_per_s"]
            row["of_floor"] = row["floor_ms"] / row["ours_ms"]
            row["goal_ms"] = row["ours_ms"] * found["mfu"] / goal if goal else None
        rows.append(row)
        print(f"{name}: {row['ours_ms']:.1f} ms, {row['tokens_per_s']:,.0f} tokens/s", flush=True)
        released(options)
    return rows


def released(options: argparse.Namespace) -> None:
    """Give memory back before the next part."""
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()


def run(options: argparse.Namespace) -> tuple[dict[str, Rows], dict[str, str]]:
    """Rows by part, and why parts failed."""
    found: dict[str, Rows] = {}
    failed: dict[str, str] = {}
    for part in options.parts:
        print(f"== {part}", flush=True)
        try:
            if part == "train":
                found[part] = of_training(options)
            else:
                found[part] = (of_whole_models if part in WHOLE else of_script)(part, options)
        except Exception as error:  # one part's fault must not cost the others' minutes on a machine that is lent
            traceback.print_exc()
            failed[part] = f"{type(error).__name__}: {str(error)[:300]}"
        released(options)
    return found, failed


def head(options: argparse.Namespace) -> dict[str, Any]:
    """What the numbers mean nothing without."""
    versions = {"torch": torch.__version__}
    if importlib.util.find_spec("triton"):
        versions["triton"] = importlib.import_module("triton").__version__
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    device = torch.device(options.device)
    peak = peak_flops(device) or H200.peak_flops
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "gpus": 1,
        "versions": versions,
        "commit": git.stdout.strip() or "unknown",
        "peak_tflops": peak / 1e12,
    }


def report(results: dict[str, Any]) -> str:
    """The results as Markdown, a table for each part."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        f"# GPU stack on one {results['gpu']}, {results['date']}",
        "",
        f"{versions}, commit {results['commit']}.",
        "",
    ]
    for part in dict.fromkeys(row["part"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["part"] == part]
        times = list(dict.fromkeys(key for row in rows for key in row if key.endswith("_ms")))
        times = [key for key in times if any(isinstance(row.get(key), float | int) for row in rows)]
        more = [key for key in NAMES if any(key in row for row in rows)]
        body = [
            [row["work"], *(number(row.get(key)) for key in times), *(_shown(key, row.get(key)) for key in more)]
            for row in rows
        ]
        titles = [*(key[:-3].replace("ours", "openk3") for key in times), *(NAMES[key] for key in more)]
        lines += [f"## {part}", "", *table(["work, ms", *titles], body), ""]
    lines += [f"Failed: {part}: {why}" for part, why in results["failed"].items()]
    return "\n".join(lines).rstrip() + "\n"


def _shown(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key in ("mfu", "of_floor", "more"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if key == "tokens_per_s" else f"{value:.2f}"


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with one line and status 2 where no part could run, or nothing could be written after minutes of work."""
    if options.device not in ("cuda", "cpu"):
        parser.error(f"--device: must be cuda or cpu, got {options.device!r}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU here; --device cpu --small tries the script")
    for part in NEED_GPU:
        if part in options.parts and options.device != "cuda":
            parser.error(f"--parts {part}: needs a GPU; openk3 bench serve measures an engine on a CPU")
    if options.peers is not None and not options.peers.is_dir():
        parser.error(f"--peers: no such folder: {options.peers}")
    if options.tokens is not None and not options.tokens.is_file():
        parser.error(f"--tokens: no such file: {options.tokens}")
    try:
        if options.activations:
            check_activations(options.activations)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=options.out):
                pass
    except (ConfigError, OSError) as error:
        parser.error(str(error))


def main(arguments: list[str] | None = None) -> int:
    """Run the parts asked for and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all that the device can")
    parser.add_argument("--rows", nargs="+", default=[], help="parts of names; rows that contain one are measured")
    parser.add_argument("--peers", type=Path, help="folder with packages of peers, put before the installed ones")
    parser.add_argument("--tokens", type=Path, help="text of time_to_loss, a file of token_file.py")
    parser.add_argument("--activations", default="", help="activation policy of training; the recipe's by default")
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu to try the script")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--out", type=Path, help="folder of the results")
    options = parser.parse_args(arguments)
    every = [part for part in PARTS if options.device == "cuda" or part not in NEED_GPU]
    options.parts = options.parts or every
    check(parser, options)
    if options.peers is not None:
        sys.path.insert(0, str(options.peers))
    found, failed = run(options)
    results = head(options)
    same = {"commit": results["commit"]}
    results["rows"] = [{"part": part, **row, **same} for part, rows in found.items() for row in rows]
    results["failed"] = failed
    folder = options.out or (ROOT / "benchmarks" / "results" if options.device == "cuda" else None)
    if folder is not None:
        card = re.sub(r"[^a-z0-9]+", "-", results["gpu"].lower().removeprefix("nvidia ")).strip("-")
        fewer = set(options.parts) != set(every)
        partly = options.rows or options.small or options.quick
        some = "_" + "_".join(options.parts) if fewer else "_some" if partly else ""
        path = folder / f"gpu{some}-{card}-{results['date']}.json"
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(report(results), encoding="utf-8")
        print(f"written to {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
