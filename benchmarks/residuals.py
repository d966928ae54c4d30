"""What attention over depth costs a whole model: training and decoding steps beside the same with plain residuals.

    python benchmarks/residuals.py                       # recipes small and medium, about a minute on an H200
    python benchmarks/residuals.py --rows decode         # rows whose name contains one of these
    python benchmarks/residuals.py --device cpu --small  # tries the script: recipe tiny

One model with random weights, steps with and without depth attention taking turns; the plain stream's sum and norm are
one kernel too. Training steps are whole ones of two micro-batches, so the optimizer weighs more than in a step of
0.5M tokens. Goals: at most 4 % more time in training, 2 % in decoding.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import row_flags  # noqa: E402
import torch  # noqa: E402
from all_mla import PlainStream  # noqa: E402
from kda_timing import Protocol, median_ms  # noqa: E402
from train_rows import dismiss  # noqa: E402

from openk3.commands.bench import complete, random_batches, random_model  # noqa: E402
from openk3.commands.bench_flags import BenchTrain  # noqa: E402
from openk3.model import k3  # noqa: E402
from openk3.model.decoder import Decoder  # noqa: E402
from openk3.train.state import TrainState  # noqa: E402
from openk3.train.step import train_step  # noqa: E402

MORE_IN_TRAINING, MORE_IN_DECODING = 1.04, 1.02


@dataclass(frozen=True)
class Row:
    """A training step of two micro-batches of `tokens`, or a decoding step of `batch` sequences of `tokens` each."""

    recipe: str
    tokens: int
    batch: int = 0

    @property
    def name(self) -> str:
        """As in results."""
        if self.batch:
            return f"residuals, decode {self.recipe}, batch {self.batch}, context {self.tokens}"
        return f"residuals, train {self.recipe} 2x{self.tokens}"


ROWS = [Row("small", 65536), Row("medium", 32768), *(Row("small", 4096, batch) for batch in (1, 64, 256))]
TRIAL = [Row("tiny", 64), Row("tiny", 32, 2)]


@contextmanager
def plain_residuals(is_plain: bool = True) -> Iterator[None]:
    """Every model that runs inside has plain residuals."""
    before, few_hidden = k3.open_stream, k3.few_hidden
    if is_plain:
        vars(k3)["open_stream"] = lambda x_TD, *given: PlainStream(x_TD)
        vars(k3)["few_hidden"] = lambda *given, **named: None  # it reads depth by kernels of its own
    try:
        yield
    finally:
        vars(k3)["open_stream"] = before
        vars(k3)["few_hidden"] = few_hidden


def training(row: Row, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of whole steps with depth attention and without, taking turns; the first of each is not timed."""
    sizes = {"micro_batch": row.tokens, "micro_batches": 2, "context": min(8192, row.tokens)}
    config = complete(BenchTrain(row.recipe, **sizes, steps=1, warmups=0, device=options.device))
    state, batches = TrainState.around(random_model(config), config), random_batches(config)
    times: dict[bool, list[float]] = {False: [], True: []}
    try:
        for _ in range(3 if options.quick or options.small else 5):
            for is_plain in times:
                began = time.perf_counter()
                with plain_residuals(is_plain):
                    train_step(state, batches)
                if options.device == "cuda":
                    torch.cuda.synchronize()
                times[is_plain].append(1e3 * (time.perf_counter() - began))
    finally:
        dismiss(state.optimizer)
    return {"ours_ms": statistics.median(times[False][1:]), "plain_ms": statistics.median(times[True][1:])}


@torch.no_grad()
def decoding(row: Row, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a graph's replay (of a step, on a CPU) with depth attention and without, one after the other."""
    device = torch.device(options.device)
    protocol = Protocol(5, 2) if options.quick or options.small else Protocol()
    config = complete(BenchTrain(row.recipe, context=64, micro_batch=64, micro_batches=1, device=options.device))
    model = random_model(config)
    found = {}
    for name, is_plain in (("ours_ms", False), ("plain_ms", True)):
        with plain_residuals(is_plain):
            decoder = Decoder(model, slots=row.batch, max_tokens=row.tokens + protocol.repeats + protocol.warmups + 2)
            decoder.cache.length_R[: row.batch] = row.tokens
            decoder.lengths = [row.tokens] * row.batch
            slots = list(range(row.batch))
            decoder.step(slots, [0] * row.batch)
            found[name] = median_ms([lambda decoder=decoder, slots=slots: decoder.step(slots)], device, protocol)
    return found


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Both times, what is more, and the goal."""
    times = decoding(row, options) if row.batch else training(row, options)
    most = MORE_IN_DECODING if row.batch else MORE_IN_TRAINING
    ratio = times["ours_ms"] / times["plain_ms"]
    return {"work": row.name, **times, "floor_ms": None, "goal_ms": most * times["plain_ms"], "more": ratio - 1}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; write the rows as JSON if asked to."""
    options = row_flags.parse(__doc__, arguments, small="recipe tiny, to try the script", quick="fewer steps")
    results: list[dict[str, Any]] = []
    for row in [row for row in (TRIAL if options.small else ROWS) if any(part in row.name for part in options.rows)]:
        try:
            found = measure(row, options)
            print(
                f"{row.name}: {found['ours_ms']:.3f} ms, plain {found['plain_ms']:.3f}, {found['more']:+.1%}",
                flush=True,
            )
        except RuntimeError as error:  # a fault of one row must not cost the others
            found = {"work": row.name, "ours_ms": None, "floor_ms": None, "goal_ms": None, "error": str(error)[:300]}
            print(f"{row.name}: {found['error']}", flush=True)
        results.append(found)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({"rows": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
