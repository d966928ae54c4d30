"""KDA kernels beside fla-core's, FlashKDA's and NeMo AutoModel's in one run: errors against float64, times, memory.

    python benchmarks/kda.py                          # every row, about four minutes on an H200
    python benchmarks/kda.py --peers PEERS            # PEERS holds fla, flash_kda and nemo_automodel to import
    python benchmarks/kda.py --rows T=8192 decode     # rows whose name contains one of these, in a file of their own
    python benchmarks/kda.py --check-only             # errors alone, on the rows and on hard inputs
    python benchmarks/kda.py --check-only --rows hard # on hard inputs
    python benchmarks/kda.py --device cpu --small     # try the script: plain PyTorch on tiny shapes, nothing written

Protocol: batch 1, heads of 128 channels, bfloat16 tokens and logits, float32 gate parameters and states; gate, L2 norm
and sigmoid inside the clock (NeMo's log decay and beta are made outside, in float32: it has no other form). Fresh
random inputs for each row, in turns where one set would fit the L2 cache; median of 20 after 5, CUDA events. Decode
steps are timed as one replayed CUDA graph over states of more than 200 MB. Errors are norm ratios against the float64
chunk form on the same inputs (large shapes: on some heads).
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from kda_report import COLUMNS, markdown, print_row, verdict_on_errors, worse_than_fla  # noqa: E402
from kda_timing import Protocol, copy_rate  # noqa: E402

from openk3.commands.conditions import commit  # noqa: E402
from openk3.runtime.run_folder import write_atomic, write_json  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
HARD = "hard inputs"  # chosen by --rows like a row
HEADS_CHECKED = 12  # gradients of A_log are one number a head: of fewer, chance decides which is nearer
VARLEN = {"1300+547+2048+963+271+3063": (1300, 547, 2048, 963, 271, 3063), "8x1024": (1024,) * 8}


@dataclass(frozen=True)
class Work:
    """A row over packed tokens: forward, or forward and backward."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    backward: bool = False
    goal_ms: float | None = None
    width: int = 128

    @property
    def floor_bytes(self) -> int:
        """Every input read and every output written once: five tensors of tokens, nine more in the backward pass."""
        tokens = sum(self.lengths) * self.heads * (2 * 5 * self.width + 2)
        states = 2 * 4 * len(self.lengths) * self.heads * self.width**2
        if self.backward:
            tokens, states = tokens + sum(self.lengths) * self.heads * (2 * 9 * self.width + 4), 2 * states
        return tokens + states


@dataclass(frozen=True)
class DecodeWork:
    """A row of decode steps for a batch of requests."""

    name: str
    batch: int
    fused: bool
    goal_ms: float | None = None
    heads: int = 96
    width: int = 128

    @property
    def floor_bytes(self) -> int:
        """States read and written, tokens read, outputs written."""
        from kda_decode import step_bytes

        return step_bytes(self.batch, self.heads, self.width, self.fused)


def all_rows() -> list[Work | DecodeWork]:
    """Every row; goals are those of one H200."""
    forward = {(8192, 96): 1.0, (32768, 96): 3.8, (8192, 12): 0.35, (131072, 12): 2.5}
    both = {(8192, 96): 5.0, (8192, 12): None, (32768, 96): 19.0, (131072, 12): 14.0}
    rows: list[Work | DecodeWork] = []
    rows += [Work(f"forward T={T} H={H}", (T,), H, goal_ms=goal) for (T, H), goal in forward.items()]
    for heads in (96, 64):
        rows += [Work(f"forward {name} H={heads}", lengths, heads) for name, lengths in VARLEN.items()]
    rows += [Work(f"forward+backward T={T} H={H}", (T,), H, True, goal) for (T, H), goal in both.items()]
    for heads in (96, 64):
        rows += [Work(f"forward+backward {name} H={heads}", lengths, heads, True) for name, lengths in VARLEN.items()]
    for fused, kind in ((False, "recurrence only"), (True, "fused")):
        for batch, goal in ((1, 0.012), (8, 0.040), (64, 0.24), (256, 0.89)):
            rows.append(DecodeWork(f"decode {kind}, batch {batch}", batch, fused, goal))
    return rows


def small(row: Work | DecodeWork) -> Work | DecodeWork:
    """The same row in a tiny shape, which its name says, and without a goal."""
    if isinstance(row, DecodeWork):
        tiny = replace(row, batch=min(row.batch, 3), heads=2, width=16, goal_ms=None)
        return replace(tiny, name=f"{row.name} (tiny: batch {tiny.batch}, H=2, 16 channels)")
    tiny = replace(row, lengths=tuple(1 + n % 37 for n in row.lengths), heads=2, width=16, goal_ms=None)
    return replace(tiny, name=f"{row.name} (tiny: T={sum(tiny.lengths)}, H=2, 16 channels)")


@dataclass(frozen=True)
class Bench:
    """What a run measures with."""

    implementations: dict[str, Any]
    device: torch.device
    protocol: Protocol | None  # None: errors alone
    heads_checked: int

    def measure(self, row: Work | DecodeWork) -> dict[str, Any]:
        """Errors, and unless they are all that is asked for times and memory, of every implementation."""
        if isinstance(row, DecodeWork):
            from kda_decode import measure_decode

            return measure_decode(row, list(self.implementations), self.device, self.protocol)
        from kda_operator import measure_operator

        measured = (self.implementations, self.device, self.protocol)
        return measure_operator(row, *measured, heads_checked=self.heads_checked)


def record(row: Work | DecodeWork, found: dict[str, Any], rate: float) -> dict[str, Any]:
    """A row of the results file: times by column, floor, goal, and everything else that was found."""
    times = found.pop("times")
    goal = row.goal_ms
    rivals = [times[name] for name in ("flashkda", "nemo") if name in times]
    if goal is None and rivals and isinstance(row, Work) and len(row.lengths) > 1 and not row.backward:
        goal = min(rivals) / 1.4
    columns = {f"{name}_ms": times.get(name) for name in COLUMNS}
    columns |= {f"{name}_ms": value for name, value in times.items() if name not in COLUMNS}
    floor = {"floor_ms": row.floor_bytes / rate * 1e3, "goal_ms": goal}
    return {"work": row.name} | columns | floor | {name: value for name, value in found.items() if value}


def conditions(device: torch.device, peers: dict[str, str], name: str) -> dict[str, Any]:
    """What a number means nothing without: commit, card, versions."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        import triton
    except ImportError:
        pass
    else:
        versions["triton"] = triton.__version__
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": name,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none (CPU)",
        "versions": versions | peers,
    }


def file_of(results: dict[str, Any], folder: Path, kind: str = "") -> Path:
    """Where results go: kda-GPU-DATE.json has every row at full size, and what is of another `kind` a name of its own.

    So it replaces only results of its kind.
    """
    gpu = results["gpu"].removeprefix("NVIDIA ").split(" ")[0].lower()
    return folder / f"{'_'.join(filter(None, ('kda', kind)))}-{gpu}-{results['date']}.json"


def write(results: dict[str, Any], path: Path) -> None:
    """As JSON, and as Markdown beside it."""
    write_json(path, results)
    write_atomic(path.with_suffix(".md"), lambda partial: partial.write_text(markdown(results), encoding="utf-8"))


def kind_of(options: argparse.Namespace) -> str:
    """What a run is of other than every row at full size, as a part of its file's name."""
    parts = [name for name in ("small", "quick") if getattr(options, name)]
    if options.rows != [""]:
        parts += ["rows", *(re.sub(r"[^\w=+]+", "_", part).strip("_") or "all" for part in options.rows)]
    return "_".join(parts)


def flags(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[""], help="parts of names; rows that contain one are measured")
    parser.add_argument("--peers", type=Path, help="folder with packages of peers, put before the installed ones")
    parser.add_argument("--quick", action="store_true", help="median of 5 after 2, one head checked")
    parser.add_argument("--check-only", action="store_true", help="errors without times; nothing is written")
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu to try the script")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--commit", help="what to record as the commit where the checkout has no history")
    parser.add_argument("--out", type=Path, help="folder of the results; default benchmarks/results, on a CPU none")
    options = parser.parse_args(arguments)
    try:
        options.device = torch.device(options.device)
    except RuntimeError:
        parser.error(f"--device {options.device}: must be cuda, cuda:0 and so on, or cpu")
    if options.device.type not in ("cuda", "cpu"):
        parser.error(f"--device {options.device}: must be cuda, cuda:0 and so on, or cpu")
    if options.device.type == "cuda" and (options.device.index or 0) >= torch.cuda.device_count():
        parser.error(f"--device {options.device}: torch sees {torch.cuda.device_count()} CUDA devices here; try cpu")
    if not any(part in name for part in options.rows for name in (HARD, *(row.name for row in all_rows()))):
        parser.error(f"--rows {' '.join(options.rows)}: no row has that in its name, such as {all_rows()[0].name!r}")
    if options.peers is not None and not options.peers.is_dir():
        parser.error(f"--peers {options.peers}: no such folder")
    if options.out is None and options.device.type == "cuda":
        options.out = RESULTS
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out}: not a folder")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; 1 if a result of ours is further from float64 than fla-core's, or missing."""
    options = flags(arguments)
    if options.peers is not None:
        sys.path.insert(0, str(options.peers))
    import kda_peers

    device = options.device
    if device.type == "cpu":
        implementations, missing = {"ours": kda_peers.reference()}, {}
    else:
        implementations, missing = kda_peers.load(list(COLUMNS))
    for name, reason in missing.items():
        print(f"{name} is left out: {reason}")
    protocol = Protocol(repeats=5, warmups=2) if options.quick else Protocol()
    bench = Bench(
        implementations, device, None if options.check_only else protocol, 1 if options.quick else HEADS_CHECKED
    )
    rate = copy_rate(device, protocol)
    name = options.commit or commit() or "unknown"
    results: dict[str, Any] = conditions(device, kda_peers.versions(list(implementations)), name)
    results |= {"copy_tb_s": rate / 1e12, "left_out": missing, "rows": [], "checks": []}
    print("\n".join(f"{name}: {value}" for name, value in results.items() if value))
    kind, folder = kind_of(options), None if options.check_only else options.out
    unfinished = file_of(results, folder or Path(), "_".join(filter(None, (kind, "unfinished"))))
    rows = [row for row in all_rows() if any(part in row.name for part in options.rows)]
    for row in [small(row) for row in rows] if options.small else rows:
        results["rows"].append(record(row, bench.measure(row), rate))
        print_row(results["rows"][-1])
        if folder:  # what is measured is there if a later row breaks the process
            write(results, unfinished)
    if any(part in HARD for part in options.rows):
        from kda_operator import hard_checks

        results["checks"] = hard_checks(implementations, device, tiny=options.small)
    print("\n" + markdown(results))
    if folder:
        path = file_of(results, folder, kind)
        write(results, path)
        for rest in (unfinished, unfinished.with_suffix(".md")):
            rest.unlink(missing_ok=True)
        print(f"written to {path}")
    elif not options.check_only:
        print("nothing is written; --out FOLDER keeps the results")
    bad = worse_than_fla(results)
    print("\n".join(bad) or verdict_on_errors(results))
    rows = [*results["rows"], *results["checks"]]
    return int(bool(bad) or "ours" in missing or any("ours" in row.get("failed", {}) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
