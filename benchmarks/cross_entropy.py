"""Head and loss: ours beside torch on whole logits, plain and compiled, and beside our definition, in one run.

    python benchmarks/cross_entropy.py                       # every row, about a minute on an H200
    python benchmarks/cross_entropy.py --rows V=32768        # rows whose name contains one of these
    python benchmarks/cross_entropy.py --device cpu --small  # try the script: the definition on tiny shapes

Hidden states and head in bfloat16, logits of a standard deviation of about 2; forward and backward to both, or
log-probabilities and entropies with their backward pass. The floor is the products alone (three, or four where logits
are computed twice) at the rate of torch's bfloat16 product of the same shapes, measured in the same run. Median of 10
after 3, CUDA events. Errors are norm ratios against float64 on the first 512 tokens; memory is what tensors held at
most beyond inputs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import row_flags  # noqa: E402
import torch  # noqa: E402
from kda_timing import Protocol, median_ms, peak_growth  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from openk3.ops.cross_entropy import linear_cross_entropy, token_logprobs  # noqa: E402

CHECKED = 512
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """T tokens of width D over a vocabulary of V; `rl`: log-probabilities and entropies instead of the loss."""

    T: int
    D: int
    V: int
    rl: bool = False

    @property
    def name(self) -> str:
        """What is measured."""
        return f"{'logprobs' if self.rl else 'loss'} T={self.T} D={self.D} V={self.V}"


ROWS = [Row(8192, 7168, 163_840), Row(32_768, 768, 32_768), Row(16_384, 1536, 65_536), Row(8192, 7168, 163_840, True)]


def small(row: Row) -> Row:
    """The same row in a tiny shape."""
    return replace(row, T=9, D=8, V=100)


@contextmanager
def definition() -> Any:
    """Our operators run their PyTorch definition."""
    before = os.environ.get("OPENK3_BACKEND")
    os.environ["OPENK3_BACKEND"] = "reference"
    try:
        yield
    finally:
        os.environ.pop("OPENK3_BACKEND")
        os.environ.update({} if before is None else {"OPENK3_BACKEND": before})


def ours(h: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The sum of cross-entropies."""
    return linear_cross_entropy(h, weight, ids)[0]


def ours_rl(h: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """A combination of log-probabilities and entropies."""
    logprob_T, entropy_T = token_logprobs(h, weight, ids)
    return entropy_T.sum() * 0.01 - logprob_T.sum()


def whole(h: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """torch on whole logits, as models usually do it: float32 copies of them."""
    return F.cross_entropy((h @ weight.T).float(), ids, reduction="sum")


def whole_rl(h: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The same for log-probabilities and entropies."""
    log_probs = (h @ weight.T).float().log_softmax(-1)
    entropy_T = -(log_probs.exp() * log_probs).sum(-1)
    return entropy_T.sum() * 0.01 - log_probs.gather(1, ids.unsqueeze(1)).sum()


def both_ways(way: Way, h: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """The loss and its gradients."""
    loss = way(h, weight, ids)
    return loss.detach(), *torch.autograd.grad(loss, (h, weight))


def errors(way: Way, row: Row, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    """Against float64, on some tokens."""
    h, weight, ids = inputs
    part = h.detach()[:CHECKED].requires_grad_(), weight, ids[:CHECKED]
    got = both_ways(way, *part)
    leaves = [x.detach().double().requires_grad_() for x in part[:2]]
    with definition():
        want = both_ways(ours_rl if row.rl else ours, *leaves, part[2])
    names = ("loss", "d_h", "d_weight")
    return {n: float((a.double() - b).norm() / b.norm()) for n, a, b in zip(names, got, want)}


def products_ms(row: Row, inputs: tuple[Tensor, Tensor, Tensor], protocol: Protocol) -> float:
    """The three or four products by themselves, over the chunks that ours takes."""
    from openk3.ops.cross_entropy_fused import chunk_tokens

    h, weight = (x.detach() for x in inputs[:2])
    chunk = min(row.T, chunk_tokens(row.T, row.V, None)) if h.device.type == "cuda" else row.T
    logits, d_h, d_weight = h.new_empty(chunk, row.V).normal_(), torch.empty_like(h[:chunk]), torch.empty_like(weight)
    calls = (
        lambda: torch.mm(h[:chunk], weight.T, out=logits),
        lambda: torch.mm(logits, weight, out=d_h),
        lambda: torch.mm(logits.T, h[:chunk], out=d_weight),
    )
    times = [median_ms([call], h.device, protocol) for call in calls]
    return (sum(times) + (times[0] if row.rl else 0)) * row.T / chunk


def measure(row: Row, device: torch.device, protocol: Protocol, compiled: bool) -> dict[str, Any]:
    """Errors, times and memory of every way."""
    generator = torch.Generator(device).manual_seed(0)
    h = torch.randn(row.T, row.D, generator=generator, device=device).bfloat16()
    weight = (torch.randn(row.V, row.D, generator=generator, device=device) * 2 * row.D**-0.5).bfloat16()
    ids = torch.randint(row.V, (row.T,), generator=generator, device=device)
    inputs = h.requires_grad_(), weight.requires_grad_(), ids
    mine, theirs = (ours_rl, whole_rl) if row.rl else (ours, whole)
    ways: dict[str, Way] = {"ours": mine, "torch": theirs}
    if compiled:
        ways["compiled"] = torch.compile(theirs)
    found: dict[str, Any] = {"errors": {}, "peak_gb": {}, "failed": {}}
    for name, way in ways.items():
        try:
            found["errors"][name] = errors(way, row, inputs)
            growth = peak_growth(lambda way=way: both_ways(way, *inputs), device)
            found["peak_gb"][name] = None if growth is None else growth / 1e9
            found[f"{name}_ms"] = median_ms([lambda way=way: both_ways(way, *inputs)], device, protocol)
        except torch.OutOfMemoryError as error:
            found["failed"][name] = str(error)[:200]
    with definition():
        found["definition_ms"] = median_ms([lambda: both_ways(mine, *inputs)], device, Protocol(3, 1))
    floor = products_ms(row, inputs, protocol)
    flops = (8.0 if row.rl else 6.0) * row.T * row.V * row.D
    return found | {"floor_ms": floor, "tflops": flops / found["ours_ms"] / 1e9, "of_floor": floor / found["ours_ms"]}


def line(found: dict[str, Any]) -> str:
    """A row for a reader."""
    times = [f"{name[:-3]} {value:.2f} ms" for name, value in found.items() if name.endswith("_ms")]
    peaks = [f"{name} {value:.2f} GB" for name, value in found["peak_gb"].items() if value is not None]
    errors = [f"{name} {kind} {value:.1e}" for name, each in found["errors"].items() for kind, value in each.items()]
    rate = f"{found['of_floor']:.1%} of the floor's speed, {found['tflops']:.0f} TFLOP/s"
    return f"{found['work']:<36} " + ", ".join([*times, rate, *peaks, *errors, *found["failed"]])


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; write the rows as JSON if asked to."""
    options = row_flags.parse(__doc__, arguments, quick="median of 5 after 2, without torch.compile")
    device = torch.device(options.device)
    protocol = Protocol(5, 2) if options.quick or options.small else Protocol(10, 3)
    rows = [row for row in ROWS if any(part in row.name for part in options.rows)]
    results = []
    for row in [small(row) for row in rows] if options.small else rows:
        found = measure(row, device, protocol, device.type == "cuda" and not options.quick)
        results.append({"work": row.name} | found)
        print(line(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
