"""Depth reads: ours beside fla-core's (Triton and Gluon), NeMo AutoModel's and our definition, in one run.

    python benchmarks/attn_res.py                         # every row, about two minutes on an H200
    python benchmarks/attn_res.py --peers PEERS           # PEERS holds fla and nemo_automodel to import
    python benchmarks/attn_res.py --rows L=9              # rows whose name contains one of these
    python benchmarks/attn_res.py --device cpu --small    # try the script: the definition on tiny shapes

8192 tokens of width 7168 in bfloat16, L sources. "read": the mixture and its norm (NeMo's: the mixture alone, from
sources stacked beforehand); "layer": the same with the running block's sum before it, which is one kernel of ours and
an addition of torch's with the others. Floor: every input read and every output written once, at the copy rate
measured in the same run. Median of 20 after 5, CUDA events. Errors are norm ratios against float64 on 256 tokens.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import row_flags  # noqa: E402
import torch  # noqa: E402
from kda_timing import Protocol, copy_rate, median_ms, peak_growth  # noqa: E402
from torch import Tensor  # noqa: E402

from openk3.ops.attn_res import inter_block, merge_normed, mix_depth_normed  # noqa: E402

EPS, CHECKED = 1e-5, 256
Leaves = dict[str, Tensor]
Way = Callable[[Leaves], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Row:
    """A depth read over `sources`; `added`: with the sum before it; or one of the two phases for `queries`."""

    kind: str
    sources: int
    backward: bool = False
    goal_ms: float | None = None
    queries: int = 0
    tokens: int = 8192
    width: int = 7168

    @property
    def name(self) -> str:
        """What is measured."""
        both = "forward+backward" if self.backward else "forward"
        return f"{self.kind} L={self.sources} " + (f"queries={self.queries}" if self.queries else both)

    @property
    def added(self) -> bool:
        """Whether something is added to the last source first."""
        return self.kind == "layer"

    @property
    def floor_bytes(self) -> int:
        """Each input read and each output written once."""
        units = self.sources + 1 + 2 * self.added
        if self.kind == "phase one":
            units = self.sources + self.queries
        if self.kind == "phase two":
            units = 5
        if self.backward:
            units += 2 * self.sources + 1 + self.added
        return units * self.tokens * self.width * 2


GOALS = {2: (0.097, 0.61), 5: (0.194, 0.725), 9: (0.323, 0.975)}
ROWS = [Row("read", L, both, GOALS[L][both]) for both in (False, True) for L in GOALS]
ROWS += [Row("layer", L, both) for both in (False, True) for L in GOALS]
ROWS += [Row("phase one", 8, queries=8), Row("phase one", 8, queries=16), Row("phase two", 9, queries=1)]


def small(row: Row) -> Row:
    """The same row in a tiny shape and without a goal."""
    return replace(row, tokens=5, width=16, queries=min(row.queries, 3), goal_ms=None)


@contextmanager
def definition() -> Generator[None]:
    """Our operators run their PyTorch definition."""
    before = os.environ.get("OPENK3_BACKEND")
    os.environ["OPENK3_BACKEND"] = "reference"
    try:
        yield
    finally:
        os.environ.pop("OPENK3_BACKEND")
        os.environ.update({} if before is None else {"OPENK3_BACKEND": before})


def draw(row: Row, device: torch.device) -> Leaves:
    """Weights, sources of different sizes, what is added to the last one."""
    generator = torch.Generator(device).manual_seed(row.sources)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    values = {
        "query": 0.05 * normal(row.width),
        "norm": 1 + 0.1 * normal(row.width),
        "out": 1 + 0.1 * normal(row.width),
    }
    values |= {f"v{i}": normal(row.tokens, row.width) * 4.0 ** (i % 4 - 2) for i in range(row.sources)}
    values |= {"addend": normal(row.tokens, row.width)} if row.added else {}
    return {name: x.bfloat16().requires_grad_() for name, x in values.items()}


def sources_of(x: Leaves) -> list[Tensor]:
    """The sources, in order."""
    return [value for name, value in x.items() if name[0] == "v"]


def ours(x: Leaves) -> tuple[Tensor, ...]:
    """One call for everything."""
    found = mix_depth_normed(sources_of(x), x["query"], x["norm"], x["out"], EPS, addend_TD=x.get("addend"))
    return (found.normed_TD, found.newest_TD) if "addend" in x else (found.normed_TD,)


def after_sum(read: Callable[[Leaves, list[Tensor]], Tensor]) -> Way:
    """A peer's read, after the sum by torch if there is one."""

    def way(x: Leaves) -> tuple[Tensor, ...]:
        sources = sources_of(x)
        if "addend" not in x:
            return (read(x, sources),)
        sources[-1] = sources[-1] + x["addend"]
        return read(x, sources), sources[-1]

    return way


def peers() -> tuple[dict[str, Way], dict[str, str]]:
    """Peers that can be imported, and why others cannot."""
    found: dict[str, Way] = {}
    missing: dict[str, str] = {}
    try:
        from fla.ops.attnres.backends.gluon import _run as fla_gluon  # pyrefly: ignore[missing-import]
        from fla.ops.attnres.fused import fused_attnres  # pyrefly: ignore[missing-import]

        for name, function in (("fla", fused_attnres), ("fla_gluon", fla_gluon)):
            found[name] = after_sum(
                lambda x, sources, f=function: f(x["query"], sources, x["norm"], x["out"], rms_eps=EPS)
            )
    except ImportError as error:
        missing["fla"] = str(error)
    try:
        # pyrefly: ignore[missing-import]
        from nemo_automodel.components.models.kimi_k3 import attn_res_triton as nemo

        found["nemo"] = lambda x: (_Nemo.apply(nemo, sources_of(x)[-1], stacked(x), x["norm"], x["query"]),)
    except ImportError as error:
        missing["nemo"] = str(error)
    return found, missing


STACKED: dict[int, Tensor] = {}  # NeMo's layout of the finished blocks, made outside the clock


def stacked(x: Leaves) -> Tensor:
    """[T, L - 1, D], made once for given sources."""
    key = id(x["v0"])
    if key not in STACKED:
        STACKED.clear()
        STACKED[key] = torch.stack([value.detach() for value in sources_of(x)[:-1]], 1).requires_grad_()
    return STACKED[key]


class _Nemo(torch.autograd.Function):
    """NeMo's two functions as one that autograd can use."""

    @staticmethod
    def forward(ctx: Any, nemo: Any, *tensors: Tensor) -> Tensor:
        """The mixture, of prefix, stacked blocks, norm weight and query."""
        mixed, stats = nemo.attn_res_fwd_triton(*tensors, EPS)
        ctx.nemo = nemo
        ctx.save_for_backward(*tensors, stats)
        return mixed

    @staticmethod
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of prefix, blocks and both vectors."""
        prefix, blocks, norm, query, stats = ctx.saved_tensors
        d_prefix, d_blocks, d_vector = ctx.nemo.attn_res_bwd_triton(prefix, blocks, norm, query, grad, stats)
        return None, d_prefix, d_blocks, (d_vector * query).to(norm.dtype), (d_vector * norm).to(query.dtype)


def both_ways(way: Way, x: Leaves, upstream: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Results and the gradients of all leaves."""
    outputs = way(x)
    leaves = [*x.values(), *STACKED.values()]
    grads = torch.autograd.grad(outputs, leaves, upstream[: len(outputs)], allow_unused=True)
    return *(x.detach() for x in outputs), *(grad for grad in grads if grad is not None)


def errors(way: Way, row: Row, x: Leaves, upstream: Sequence[Tensor]) -> dict[str, float]:
    """Against float64 on some tokens: the worst result, the worst gradient of a source, and of the vectors."""
    part = {n: v.detach()[:CHECKED].clone().requires_grad_() if v.ndim == 2 else v for n, v in x.items()}
    wide = {n: v.detach().double().requires_grad_() for n, v in part.items()}
    if row.added:  # the sum is rounded in everybody's arithmetic
        last = f"v{row.sources - 1}"
        wide[last] = (part[last] + part["addend"]).detach().double().requires_grad_()
        wide["addend"] = torch.zeros_like(wide["addend"]).requires_grad_()
    some = [d[:CHECKED] for d in upstream]
    STACKED.clear()
    if not row.backward:
        with definition(), torch.no_grad():
            want = ours(wide)
        with torch.no_grad():
            got = way(part)
    else:
        with definition():
            want = both_ways(ours, wide, [d.double() for d in some])
        got = both_ways(way, part, some)
    count = 1 + row.added
    found = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]
    parts = {"out": found[:count], "vectors": found[count : count + 3], "sources": found[count + 3 :]}
    return {name: max(each) for name, each in parts.items() if each}


def measure_read(row: Row, ways: dict[str, Way], device: torch.device, protocol: Protocol) -> dict[str, Any]:
    """Errors, times and memory of every way that has what the row measures."""
    x = draw(row, device)
    generator = torch.Generator(device).manual_seed(99)
    shape = (row.tokens, row.width)
    upstream = [torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(2)]
    found: dict[str, Any] = {"errors": {}, "peak_gb": {}, "failed": {}}
    for name, way in ways.items():
        if name == "nemo" and row.added:
            continue
        try:
            with definition() if name == "definition" else nullcontext():
                if name != "nemo":  # it has no norm
                    found["errors"][name] = errors(way, row, x, upstream)
                STACKED.clear()
                if row.backward:
                    call = partial(both_ways, way, x, upstream)
                    growth = peak_growth(call, device)
                    found["peak_gb"][name] = None if growth is None else growth / 1e9
                    found[f"{name}_ms"] = median_ms([call], device, protocol)
                else:
                    with torch.no_grad():
                        found[f"{name}_ms"] = median_ms([lambda way=way: way(x)], device, protocol)
        except Exception as error:
            found["failed"][name] = f"{type(error).__name__}: {str(error)[:200]}"
    STACKED.clear()
    return found


def measure_phase(row: Row, device: torch.device, protocol: Protocol) -> dict[str, Any]:
    """Phase one for many queries, or phase two with sum and norm, and the definition beside it."""
    with torch.no_grad():
        x = {name: value.detach() for name, value in draw(replace(row, kind="layer"), device).items()}
        blocks = [x[f"v{i}"] for i in range(row.sources - (row.kind == "phase two"))]
        vectors = 0.05 * torch.randn(row.queries, row.width, device=device)
        kind = torch.bfloat16

        def one() -> tuple[Tensor, Tensor, Tensor]:
            return inter_block(blocks, vectors, EPS, dtype=kind)

        o_QTD, max_QT, sum_QT = one()
        first = o_QTD[0], max_QT[0], sum_QT[0]
        last = x[f"v{row.sources - 1}"]

        def two() -> tuple[Tensor, Tensor]:
            return merge_normed(first, last, vectors[0], x["out"], eps=EPS, addend_TD=x["addend"])

        call = one if row.kind == "phase one" else two
        found = {"ours_ms": median_ms([call], device, protocol), "errors": {}, "failed": {}, "peak_gb": {}}
        if row.kind == "phase two":
            with definition():
                found["definition_ms"] = median_ms([call], device, Protocol(3, 1))
    return found


def line(found: dict[str, Any]) -> str:
    """A row for a reader."""
    times = [f"{name[:-3]} {value:.3f}" for name, value in found.items() if name.endswith("_ms") and value]
    rivals = {
        name: found[f"{name}_ms"] / found["ours_ms"] for name in ("fla", "fla_gluon", "nemo") if f"{name}_ms" in found
    }
    ratios = [f"{name} {value:.2f} times ours" for name, value in rivals.items()]
    verdict = (
        [] if found["goal_ms"] is None else ["goal met" if found["ours_ms"] <= found["goal_ms"] else "goal MISSED"]
    )
    wrong = [f"{name} {kind} {value:.1e}" for name, each in found["errors"].items() for kind, value in each.items()]
    peaks = [f"{name} {value:.2f} GB" for name, value in found["peak_gb"].items() if value is not None]
    rate = [f"{found['of_floor']:.1%} of the copy rate"]
    return f"{found['work']:<30} " + ", ".join(
        [*times, *rate, *ratios, *verdict, *peaks, *wrong, *map(str, found["failed"].items())]
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; write the rows as JSON if asked to."""
    options = row_flags.parse(__doc__, arguments, peers=True)
    device = torch.device(options.device)
    protocol = Protocol(5, 2) if options.quick or options.small else Protocol()
    rate = copy_rate(device, protocol)
    print(f"copy rate {rate / 1e12:.2f} TB/s")
    rivals, missing = peers() if device.type == "cuda" else ({}, {})
    for name, why in missing.items():
        print(f"{name} is left out: {why}")
    ways = {"ours": ours, **rivals, "definition": ours}
    results = []
    for row in [row for row in ROWS if any(part in row.name for part in options.rows)]:
        row = small(row) if options.small else row
        found = measure_phase(row, device, protocol) if row.queries else measure_read(row, ways, device, protocol)
        floor = row.floor_bytes / rate * 1e3
        more = {"floor_ms": floor, "goal_ms": row.goal_ms, "of_floor": floor / found["ours_ms"]}
        results.append({"work": row.name} | found | more)
        print(line(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"copy_tb_s": rate / 1e12, "rows": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
