"""SiTU-GLU: ours beside NeMo AutoModel's Triton kernels (exact and fast) and our definition, in one run.

    python benchmarks/situ.py                       # every row, some seconds on an H200
    python benchmarks/situ.py --peers PEERS         # PEERS holds nemo_automodel to import
    python benchmarks/situ.py --device cpu --small  # try the script: the definition on tiny shapes

bfloat16, gate and up of `rows` x `width` values, forward alone or with the gradients of both. NeMo's takes both side by
side in one tensor, which is not counted against it. Floor: every input read and every output written once at the copy
rate of the same run; the goal is NeMo's time. Each as a replayed graph, median of 20 after 5, CUDA events; errors are
norm ratios against float64 on 4096 rows: the worst of results and gradients.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import row_flags  # noqa: E402
import torch  # noqa: E402
from kda_timing import Protocol, copy_rate, median_ms, replayed  # noqa: E402
from latent_moe import forced  # noqa: E402
from torch import Tensor  # noqa: E402

from openk3.ops.situ import situ_glu  # noqa: E402

BETA, LINEAR_BETA, CHECKED = 4.0, 25.0, 4096
NEMO = "nemo_automodel.components.models.kimi_k3.situ_triton"
Way = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Row:
    """Gate and up of `rows` x `width`."""

    what: str
    rows: int
    width: int
    backward: bool = False

    @property
    def name(self) -> str:
        """What is measured."""
        both = "forward and backward" if self.backward else "forward"
        return f"SiTU, {self.what}, {self.rows} x {self.width}, {both}"

    @property
    def floor_bytes(self) -> float:
        """Forward reads two and writes one; backward reads three and writes two."""
        return 2.0 * self.rows * self.width * (8 if self.backward else 3)


SHAPES = (("medium's shared experts", 32768, 1536), ("released, shared experts", 8192, 6144), ("small", 65536, 384))
ROWS = [Row(*shape, backward) for backward in (False, True) for shape in SHAPES]


def small(row: Row) -> Row:
    """The same row in a tiny shape."""
    return replace(row, rows=7, width=16)


def autograd(gate: Tensor, up: Tensor, grad: Tensor | None) -> tuple[Tensor, ...]:
    """Ours: the output, and both gradients if there is one of the output."""
    if grad is None:
        with torch.no_grad():
            return (situ_glu(gate, up, BETA, LINEAR_BETA),)
    out = situ_glu(gate, up, BETA, LINEAR_BETA)
    return out.detach(), *torch.autograd.grad(out, (gate, up), grad)


def nemo_way(module: Any, both: Tensor, grad: Tensor | None, fast: bool) -> tuple[Tensor, ...]:
    """NeMo's two functions on gate and up side by side."""
    out = module.situ_fwd_triton(both, None, BETA, LINEAR_BETA, fast_math=fast)
    if grad is None:
        return (out,)
    d_both, _ = module.situ_bwd_triton(both, None, grad, BETA, LINEAR_BETA, False, fast_math=fast)
    return out, *d_both.chunk(2, -1)


def measure(row: Row, device: torch.device, protocol: Protocol, nemo: Any) -> dict[str, Any]:
    """Errors and times of every way."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(scale: float) -> Tensor:
        return (scale * torch.randn(row.rows, row.width, generator=generator, device=device)).bfloat16()

    gate, up, grad = draw(3.0), draw(10.0), draw(1.0) if row.backward else None
    leaves = gate.requires_grad_(row.backward), up.requires_grad_(row.backward)

    def definition() -> tuple[Tensor, ...]:
        with forced("reference"):
            return autograd(*leaves, grad)

    ways: dict[str, Callable[[], tuple[Tensor, ...]]] = {"ours": lambda: autograd(*leaves, grad)}
    if nemo is not None:
        both = torch.cat((gate.detach(), up.detach()), -1)
        ways["nemo"] = lambda: nemo_way(nemo, both, grad, False)
        ways["nemo_fast"] = lambda: nemo_way(nemo, both, grad, True)
    ways["definition"] = definition
    part = [x.detach()[:CHECKED].double().requires_grad_(row.backward) for x in leaves]
    with forced("reference"):
        want = autograd(*part, None if grad is None else grad[:CHECKED].double())
    found: dict[str, Any] = {"errors": {}, "failed": {}}
    for name, way in ways.items():
        try:
            errors = [float((a[:CHECKED].double() - b).norm() / b.norm()) for a, b in zip(way(), want, strict=True)]
            found["errors"][name] = max(errors)
            call = replayed([way]) if device.type == "cuda" else way
            found[f"{name}_ms"] = median_ms([call], device, protocol)
        except Exception as error:  # a peer's fault is no end of the row
            found["failed"][name] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; write the rows as JSON if asked to."""
    options = row_flags.parse(__doc__, arguments, peers=True)
    device, nemo = torch.device(options.device), None
    if device.type == "cuda":
        try:
            nemo = importlib.import_module(NEMO)
        except ImportError as error:
            print(f"nemo is left out: {error}")
    protocol = Protocol(5, 2) if options.quick or options.small else Protocol()
    rate = copy_rate(device, protocol)
    results = []
    for row in [row for row in ROWS if any(part in row.name for part in options.rows)]:
        row = small(row) if options.small else row
        found = measure(row, device, protocol, nemo)
        floor = row.floor_bytes / rate * 1e3
        goal = found.get("nemo_ms")
        results.append({"work": row.name} | found | {"floor_ms": floor, "goal_ms": goal})
        results[-1]["of_floor"] = floor / found["ours_ms"]
        times = ", ".join(f"{name[:-3]} {value:.3f}" for name, value in found.items() if name.endswith("_ms"))
        print(f"{row.name}: {times} ms, {floor / found['ours_ms']:.0%} of the copy rate {found['failed']}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"copy_tb_s": rate / 1e12, "rows": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
