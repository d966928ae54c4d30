"""Newton-Schulz and the whole optimizer step: ours beside bfloat16 products of torch, plain and compiled, in one run.

    python benchmarks/newton_schulz.py                       # every row, about a minute on an H200
    python benchmarks/newton_schulz.py --rows heads          # rows whose name contains one of these
    python benchmarks/newton_schulz.py --device cpu --small  # try the script: the definition on tiny shapes

Matrices are standard normal bfloat16 values of any norm, five steps; median of 20 after 5, CUDA events. Errors are norm
ratios against float64 of two matrices, standard normal ones and ones with singular values 1/n^2. An optimizer row is
one `Optimizer.step` of a recipe's parameters (bfloat16 with float32 masters), beside the same with torch's bfloat16
products for Newton-Schulz, and as a share of a training step of 524,288 tokens at the goal's MFU; at most 8 % of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import row_flags  # noqa: E402
import torch  # noqa: E402
from kda_timing import Protocol, copy_rate, median_ms  # noqa: E402
from torch import Tensor  # noqa: E402
from train_rows import dismiss  # noqa: E402

from openk3 import recipes  # noqa: E402
from openk3.model.accounting import account  # noqa: E402
from openk3.model.k3 import K3  # noqa: E402
from openk3.ops.newton_schulz import COEFFICIENTS, newton_schulz  # noqa: E402
from openk3.optim import muon  # noqa: E402
from openk3.optim.groups import build_optimizer  # noqa: E402
from openk3.optim.optimizer import Optimizer  # noqa: E402

STEPS, TOKENS, PEAK_FLOPS = 5, 1 << 19, 989e12
GOAL_MFU = {"small": 0.25, "medium": 0.40}
GOAL_SHARE = 0.08  # of a training step, at most


@dataclass(frozen=True)
class Row:
    """A batch of matrices [R, C], the longer side either way; or a recipe, for its optimizer step."""

    name: str
    B: int = 0
    R: int = 0
    C: int = 0
    recipe: str = ""
    goal_ms: float | None = None

    @property
    def flops(self) -> float:
        """Of the iteration as it is defined, symmetric products counted whole."""
        M, N = sorted((self.R, self.C))
        return STEPS * self.B * (4.0 * M * M * N + 2.0 * M**3)

    @property
    def floor_bytes(self) -> float:
        """X read twice and the result written once, as a Gram matrix allows."""
        return 3.0 * 2 * self.B * self.R * self.C


ROWS = [
    Row("96 heads of 128 x 7168", 96, 128, 7168, goal_ms=1.095),
    Row("480 heads of 128 x 768", 480, 128, 768),
    Row("1920 experts of 384 x 384", 1920, 384, 384),
    Row("480 experts of 768 x 768", 480, 768, 768),
    Row("1536 tall experts of 512 x 384", 1536, 512, 384),
    Row("12 matrices of 1536 x 6144", 12, 1536, 6144),
    Row("optimizer step of small", recipe="small"),
    Row("optimizer step of medium", recipe="medium"),
]


def small(row: Row) -> Row:
    """The same row in a tiny shape and without a goal."""
    if row.recipe:
        return replace(row, recipe="tiny")
    return replace(row, B=2, R=1 + row.R % 37, C=1 + row.C % 41, goal_ms=None)


def plain(x_BMN: Tensor, steps: int = STEPS) -> Tensor:
    """The iteration with torch's batched products, rounded to bfloat16 after each."""
    a, b, c = COEFFICIENTS
    tall = x_BMN.shape[1] > x_BMN.shape[2]
    wide = (x_BMN.mT if tall else x_BMN).float()
    x = (wide / torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True).clamp_min(1e-30)).bfloat16()
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(x_BMN.dtype)


def exact(x_BMN: Tensor) -> Tensor:
    """In float64 by the definition."""
    before = os.environ.get("OPENK3_BACKEND")
    os.environ["OPENK3_BACKEND"] = "reference"
    try:
        return newton_schulz(x_BMN.double(), STEPS)
    finally:
        os.environ.pop("OPENK3_BACKEND")
        os.environ.update({} if before is None else {"OPENK3_BACKEND": before})


def ill_conditioned(R: int, C: int, device: torch.device) -> Tensor:
    """One matrix [1, R, C] with singular values 1/n^2."""
    M = min(R, C)
    left, right = (torch.linalg.qr(torch.randn(size, M, device=device)).Q for size in (R, C))
    values = torch.arange(1, M + 1, device=device, dtype=torch.float32) ** -2
    return ((left * values) @ right.T).bfloat16().unsqueeze(0)


def error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((got.double() - want).norm() / want.norm())


def measure_matrices(row: Row, device: torch.device, protocol: Protocol, compiled: bool) -> dict[str, Any]:
    """Errors and times of one batch."""
    generator = torch.Generator(device).manual_seed(0)
    x_BRC = torch.randn(row.B, row.R, row.C, generator=generator, device=device).bfloat16()
    ways: dict[str, Callable[[Tensor], Tensor]] = {"ours": lambda x: newton_schulz(x, STEPS), "torch": plain}
    if compiled:
        ways["compiled"] = torch.compile(plain)
    cases = {"normal": x_BRC[:1], "1/n^2": ill_conditioned(row.R, row.C, device)}
    found: dict[str, Any] = {"errors": {}}
    for name, way in ways.items():
        if name != "compiled":  # the same arithmetic as torch's
            found["errors"][name] = {kind: error(way(x), exact(x)) for kind, x in cases.items()}
        found[f"{name}_ms"] = median_ms([lambda way=way: way(x_BRC)], device, protocol)
    if device.type == "cuda":
        found["core_ms"] = core_ms(x_BRC, protocol)
    found["tflops"] = row.flops / found["ours_ms"] / 1e9
    return found


def core_ms(x_BRC: Tensor, protocol: Protocol) -> float:
    """Ours without the passes that bring values into range, which Muon's step does as it makes the matrices."""
    from openk3.ops.newton_schulz_fused import orthogonalize

    out = torch.empty_like(x_BRC)
    return median_ms([lambda: orthogonalize(x_BRC, STEPS, COEFFICIENTS, out)], x_BRC.device, protocol)


def optimizer_of(recipe: str, device: torch.device) -> tuple[Optimizer, float]:
    """An optimizer with random weights and gradients of a recipe's model, and the model's training FLOPs a token."""
    config = recipes.pretrain(recipe)
    model = K3.empty(config.model, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    optimizer = build_optimizer(model, config.optim)
    for name, parameter in optimizer.parameters.items():
        gradient = torch.randn_like(parameter, dtype=torch.float32).mul_(1e-4)
        if name in optimizer.masters:
            optimizer._wide_gradients[name] = gradient
        else:
            parameter.grad = gradient
    return optimizer, account(config.model).training_flops(8192).total


def measure_optimizer(row: Row, device: torch.device, protocol: Protocol) -> dict[str, Any]:
    """Times of the step by kernels, and by torch with bfloat16 products."""
    optimizer, flops = optimizer_of(row.recipe, device)
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in optimizer.parameters.values())}
    protocol = Protocol(min(protocol.repeats, 5), min(protocol.warmups, 2))
    found["ours_ms"] = median_ms([lambda: optimizer.step(1e-4)], device, protocol)
    definition = muon.newton_schulz
    muon.newton_schulz = plain
    os.environ["OPENK3_BACKEND"] = "reference"
    try:
        found["torch_ms"] = median_ms([lambda: optimizer.step(1e-4)], device, Protocol(2, 1))
    except torch.OutOfMemoryError as error:
        found["failed"] = {"torch": str(error)[:200]}
    finally:
        muon.newton_schulz = definition
        os.environ.pop("OPENK3_BACKEND")
        dismiss(optimizer)
    goal = GOAL_MFU.get(row.recipe, 0.25)
    found["training_step_ms"] = TOKENS * flops / (goal * PEAK_FLOPS) * 1e3
    found["share_of_step"] = found["ours_ms"] / found["training_step_ms"]
    # Gradient, momentum, master and bfloat16 weight read or written, the bfloat16 matrix between them, the norm.
    found["floor_bytes"] = found["parameters"] * (4 + 14 + 2 + 12)
    return found


def line(found: dict[str, Any]) -> str:
    """A row for a reader."""
    times = [f"{name[:-3]} {value:.3f} ms" for name, value in found.items() if name.endswith("_ms") and value]
    ratio = f"torch / ours {found['torch_ms'] / found['ours_ms']:.2f}" if "torch_ms" in found else "torch failed"
    errors = [
        f"{name} {kind} {value:.1e}" for name, each in found.get("errors", {}).items() for kind, value in each.items()
    ]
    share = [f"{found['share_of_step']:.2%} of a training step"] if "share_of_step" in found else []
    return f"{found['work']:<32} " + ", ".join([*times, ratio, *share, *errors])


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; write the rows as JSON if asked to."""
    options = row_flags.parse(__doc__, arguments, quick="median of 5 after 2, without torch.compile")
    device = torch.device(options.device)
    protocol = Protocol(5, 2) if options.quick or options.small else Protocol()
    rate = copy_rate(device, protocol)
    rows = [row for row in ROWS if any(part in row.name for part in options.rows)]
    results = []
    for row in [small(row) for row in rows] if options.small else rows:
        if row.recipe:
            found = measure_optimizer(row, device, protocol)
        else:
            found = measure_matrices(row, device, protocol, device.type == "cuda" and not options.quick)
        floor = found.pop("floor_bytes", row.floor_bytes) / rate * 1e3
        goal = GOAL_SHARE * found["training_step_ms"] if row.recipe else row.goal_ms
        results.append({"work": row.name} | found | {"floor_ms": floor, "goal_ms": goal})
        print(line(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"copy_tb_s": rate / 1e12, "rows": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
