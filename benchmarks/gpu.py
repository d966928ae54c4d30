"""Every row of the GPU stack by one command: operators, decoding and whole training steps, one file of results.

    python benchmarks/gpu.py                         # all parts; writes results/gpu-<gpu>-<date>.json and Markdown
    python benchmarks/gpu.py --peers A B             # folders with fla-core, NeMo AutoModel, transformers, put first
    python benchmarks/gpu.py --seconds 500           # parts that would end later, by estimate, are left out
    python benchmarks/gpu.py --parts attn_res train  # some of them; files gpu_attn_res_train-<gpu>-<date>
    python benchmarks/gpu.py --device cpu --small    # tries all parts on tiny shapes; writes if --out is given

Parts are this folder's own scripts, called one after the other in this process, what matters most first; `train` is
`train_rows.py`, and `whole_models.py` makes rows of `engine` (needs a GPU), `hybrid_decode` and `time_to_loss`.
Unless it is asked for by --parts, the rows of `time_to_loss` come from the newest results of this GPU, and say so:
its runs take four minutes, on text gathered before them unless --tokens names a file of `token_file.py`. Both files
are written anew after each part. A part that fails is named in the results with its reason, the others go on (in
another process if the GPU answers no more), and the exit status is 1. KDA has a script of its own (`kda.py`). Peers
are taken where they can be imported.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import train_rows  # noqa: E402
import whole_models  # noqa: E402
from gpu_report import markdown  # noqa: E402

from openk3.config.activations import check as check_activations  # noqa: E402
from openk3.config.model import ConfigError  # noqa: E402
from openk3.model.roofline import H200  # noqa: E402
from openk3.runtime.device import peak_flops  # noqa: E402

Rows = list[dict[str, Any]]
WHOLE: dict[str, Callable[[argparse.Namespace, Path], Rows]] = {
    "engine": whole_models.engine,
    "hybrid_decode": whole_models.hybrid_decode,
    "time_to_loss": whole_models.time_to_loss,
}
# What matters most first, and the seconds that a part takes on an H200 whose kernels are compiled.
SECONDS = {"train": 55, "decode": 30, "attn_res": 30, "mla": 60, "experts": 25, "residuals": 40, "newton_schulz": 30}
SECONDS |= {"cross_entropy": 15, "situ": 6, "kimi_linear": 60, "time_to_loss": 240, "latent_moe": 45, "mxfp4": 20}
SECONDS |= {"hybrid_decode": 45, "engine": 130}
PARTS = tuple(SECONDS)
SCRIPTS = tuple(part for part in PARTS if part != "train" and part not in WHOLE)
WITH_PEERS = {
    "attn_res": 1,
    "situ": 1,
    "kimi_linear": 9,
}  # scripts that look for some of their own, and in how many folders
LOST_MEMORY = 8e9  # bytes that a part may leave behind; with more the next one begins in a process of its own
QUICK = ("cross_entropy", "newton_schulz")  # scripts that otherwise compile torch's way, too, for a minute each
NEED_GPU = ("engine",)  # elsewhere it is `openk3 bench serve`
PACKAGES = ("triton", "fla-core", "nemo-automodel", "transformers")


def of_script(name: str, options: argparse.Namespace) -> Rows:
    """The rows of one of this folder's scripts."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        arguments = ["--device", options.device, "--json", str(out)]
        arguments += ["--small"] * options.small + ["--quick"] * (options.quick or name in QUICK)
        if options.rows:
            arguments += ["--rows", *options.rows]
        if name in WITH_PEERS and options.peers:
            arguments += ["--peers", *map(str, options.peers[: WITH_PEERS[name]])]
        importlib.import_module(name).main(arguments)
        return json.loads(out.read_text(encoding="utf-8"))["rows"]


def of_whole_models(name: str, options: argparse.Namespace) -> Rows:
    """The rows of a comparison of whole models."""
    with tempfile.TemporaryDirectory() as folder:
        return WHOLE[name](options, Path(folder))


def released(options: argparse.Namespace) -> bool:
    """Give memory back before the next part; whether the GPU still answers, and has its memory back."""
    gc.collect()
    if options.device == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
        return torch.cuda.memory_allocated() < LOST_MEMORY
    return True


class Results:
    """Everything found so far, written anew after each part."""

    def __init__(self, options: argparse.Namespace, path: Path | None) -> None:
        self.path = path
        self.found = head(options)
        before = json.loads(options.onto.read_text(encoding="utf-8")) if options.onto else {}
        for name, empty in (("rows", []), ("failed", {}), ("left_out", {}), ("seconds", {})):
            self.found[name] = before.get(name, empty)

    def put(self, part: str, rows: Rows) -> None:
        """A part's rows, in place of those it had."""
        same = {"commit": self.found["commit"]}
        others = [row for row in self.found["rows"] if row["part"] != part]
        self.found["rows"] = others + [{"part": part, **row, **same} for row in rows]
        self.write()

    def write(self) -> None:
        """Both files, if there is a place for them."""
        if self.path is None:
            return
        texts = {".json": json.dumps(self.found, indent=1) + "\n", ".md": markdown(self.found)}
        for suffix, text in texts.items():
            part = self.path.with_suffix(".part")
            part.write_text(text, encoding="utf-8")
            part.replace(self.path.with_suffix(suffix))


def rows_of(part: str, options: argparse.Namespace, results: Results) -> Rows:
    """What a part finds; of training, what it has found is kept after each recipe."""
    if part == "train":
        return train_rows.rows(options, lambda rows: results.put(part, rows))
    if part == "time_to_loss" and part not in options.asked and options.device == "cuda":
        return whole_models.recorded_loss(results.found["gpu"])
    if part in WHOLE:
        return of_whole_models(part, options)
    return of_script(part, options)


def run(options: argparse.Namespace, results: Results, began: float) -> None:
    """Every part that there is time for; where the GPU answers no more, the rest runs in another process."""
    for n, part in enumerate(options.parts):
        recorded = part == "time_to_loss" and part not in options.asked
        left, takes = options.seconds - (time.perf_counter() - began), 1 if recorded else SECONDS[part]
        if takes > left and not options.small:
            results.found["left_out"][part] = f"takes about {takes} seconds, {max(0, left):.0f} were left"
            print(f"== {part}: {results.found['left_out'][part]}", flush=True)
            continue
        print(f"== {part}, about {takes} s [{time.perf_counter() - began:.0f} s]", flush=True)
        rest = options.parts[n + 1 :]

        def give_up(part: str = part, rest: list[str] = rest) -> None:
            results.found["failed"][part] = f"not done in {limit(part):.0f} seconds"
            results.write()
            go_on_anew(options, results, rest, options.seconds - (time.perf_counter() - began))

        start = time.perf_counter()
        try:
            with Watch(part, limit(part), give_up):
                rows = rows_of(part, options, results)
            results.found["seconds"][part] = round(time.perf_counter() - start, 1)
            results.put(part, rows)
        except Exception as error:  # one part's fault must not cost the others' minutes on a machine that is lent
            traceback.print_exc()
            results.found["failed"][part] = f"{type(error).__name__}: {str(error)[:300]}"
        results.write()
        if not released(options):
            go_on_anew(options, results, rest, options.seconds - (time.perf_counter() - began))


def limit(part: str) -> float:
    """Seconds behind which a part is given up: kernels may have to be compiled."""
    return 60 + 3 * SECONDS[part]


def go_on_anew(options: argparse.Namespace, results: Results, parts: list[str], seconds: float) -> None:
    """The parts that are left, by this script anew in place of this process, whose GPU or memory is gone."""
    if not parts:
        print(markdown(results.found), flush=True)
        os._exit(1)
    before = Path(tempfile.mkdtemp()) / (results.path.name if results.path else "gpu.json")
    before.write_text(json.dumps(results.found), encoding="utf-8")
    given = sys.orig_argv[1 : len(sys.orig_argv) - len(options.words)]
    words = [*given, *options.words, "--parts", *parts, "--onto", str(before), "--seconds", f"{max(1.0, seconds):.0f}"]
    words += [] if "time_to_loss" in options.asked else ["--recorded"]
    print(f"a new process goes on with {', '.join(parts)}", flush=True)
    os.execv(sys.executable, [sys.executable, *words])


class Watch:
    """Ends a part that hangs: behind its limit the process is replaced by one that goes on with the next part."""

    def __init__(self, part: str, seconds: float, give_up: Callable[[], None]) -> None:
        self._part, self._seconds, self._give_up = part, seconds, give_up
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def _end(self) -> None:
        print(f"{self._part} has not ended behind {self._seconds:.0f} seconds", flush=True)
        self._give_up()

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()


def head(options: argparse.Namespace) -> dict[str, Any]:
    """What the numbers mean nothing without."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = options.commit
    if not commit and (ROOT / ".git").exists():
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    device = torch.device(options.device)
    peak = peak_flops(device) or H200.peak_flops
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "gpus": 1,
        "versions": versions,
        "commit": commit or "unknown",
        "peak_tflops": peak / 1e12,
    }


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with one line and status 2 where no part could run, or nothing could be written after minutes of work."""
    if options.device not in ("cuda", "cpu"):
        parser.error(f"--device: must be cuda or cpu, got {options.device!r}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU here; --device cpu --small tries the script")
    for part in NEED_GPU:
        if part in options.parts and options.device != "cuda":
            parser.error(f"--parts {part}: needs a GPU; openk3 bench serve measures an engine on a CPU")
    for folder in options.peers:
        if not folder.is_dir():
            parser.error(f"--peers: no such folder: {folder}")
    for flag, file in (("--tokens", options.tokens), ("--onto", options.onto)):
        if file is not None and not file.is_file():
            parser.error(f"{flag}: no such file: {file}")
    if options.seconds <= 0:
        parser.error(f"--seconds: must be positive, got {options.seconds:g}")
    try:
        if options.activations:
            check_activations(options.activations)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=options.out):
                pass
    except (ConfigError, OSError) as error:
        parser.error(str(error))


def result_path(options: argparse.Namespace, every: list[str]) -> Path | None:
    """Where results go: a name of its own for what is not a whole run; None where nothing is to be written."""
    folder = options.out or (ROOT / "benchmarks" / "results" if options.device == "cuda" else None)
    if folder is None:
        return None
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    card = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")
    if options.onto is not None:
        return folder / options.onto.name
    fewer = set(options.parts) != set(every)
    partly = options.rows or options.small or options.quick
    some = "_" + "_".join(options.parts) if fewer else "_some" if partly else ""
    return folder / f"gpu{some}-{card}-{datetime.date.today().isoformat()}.json"


def arguments_of(words: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The parser, and what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all that the device can")
    parser.add_argument("--rows", nargs="+", default=[], help="parts of names; rows that contain one are measured")
    parser.add_argument("--peers", nargs="+", type=Path, default=[], help="folders with packages of peers, put first")
    parser.add_argument("--tokens", type=Path, help="text of time_to_loss, a file of token_file.py")
    parser.add_argument("--activations", default="", help="activation policy of training; the recipe's by default")
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu to try the script")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="parts that would end later are left out")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git to ask")
    parser.add_argument("--onto", type=Path, help="results of a run before, whose other parts are kept")
    parser.add_argument("--recorded", action="store_true", help="time_to_loss from its own results, though asked for")
    parser.add_argument("--out", type=Path, help="folder of the results")
    options = parser.parse_args(words)
    options.words = sys.argv[1:] if words is None else words
    options.asked = [part for part in options.parts or [] if not (options.recorded and part == "time_to_loss")]
    return parser, options


def main(arguments: list[str] | None = None) -> int:
    """Run the parts asked for and write their rows."""
    began = time.perf_counter()
    parser, options = arguments_of(arguments)
    every = [part for part in PARTS if options.device == "cuda" or part not in NEED_GPU]
    options.parts = options.parts or every
    check(parser, options)
    sys.path[:0] = map(str, options.peers)
    path = result_path(options, every)
    results = Results(options, path)
    facts = results.found
    print(f"{facts['gpu']}, commit {facts['commit']}, {facts['versions']}", flush=True)
    run(options, results, began)
    results.write()
    print(markdown(facts))
    if path is not None:
        print(f"written to {path}")
    return 1 if facts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
