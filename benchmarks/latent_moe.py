"""LatentMoE layers: ours beside torch's grouped products put together by hand, and beside our definition, in one run.

    python benchmarks/latent_moe.py                       # every row, about a minute on an H200
    python benchmarks/latent_moe.py --rows small          # rows whose name contains one of these
    python benchmarks/latent_moe.py --device cpu --small  # try the script: the definition on tiny shapes

Whole layers in bfloat16, shared experts included, at a router that spreads tokens evenly but for chance: forward alone
without gradients, or forward and backward to the input and all weights. The composition waits for nothing either:
torch's products (the router's in float32, as released), top-k, stable sort, `grouped_mm`, and our SiTU kernel. The
floor is the larger of the layer's FLOPs at the rate of a product of 8192 x 8192 x 8192 and its bytes (weights, and
what must be kept or handed on between products, each once) at the copy rate, both measured in the same run. Median of
10 after 3, CUDA events. Errors are norm ratios of output and input gradient against float64 where that fits.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import row_flags  # noqa: E402
import torch  # noqa: E402
from kda_timing import Protocol, copy_rate, median_ms, peak_growth, replayed  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from openk3.config.model import TextConfig  # noqa: E402
from openk3.model.moe import LatentMoE  # noqa: E402
from openk3.ops.norm import rms_norm  # noqa: E402
from openk3.ops.situ import situ_glu  # noqa: E402

Way = Callable[[LatentMoE, Tensor], Tensor]
LARGEST_IN_FLOAT64 = 2**29  # weights


@dataclass(frozen=True)
class Row:
    """T tokens of width D; latents of C, inner layers of I, E experts of which k work, and shared ones."""

    name: str
    T: int
    D: int
    C: int
    I: int
    E: int
    k: int
    shared: int = 2
    backward: bool = True

    @property
    def config(self) -> TextConfig:
        """What a layer needs to know."""
        return TextConfig(
            hidden_size=self.D,
            num_experts=self.E,
            num_experts_per_token=self.k,
            num_shared_experts=self.shared,
            moe_intermediate_size=self.I,
            routed_expert_hidden_size=self.C,
        )

    @property
    def flops(self) -> float:
        """Of all products, forward (and twice that for the backward pass)."""
        M, times = self.T * self.k, 3 if self.backward else 1
        routed = 6.0 * M * self.C * self.I + 2.0 * self.T * self.D * (2 * self.C + self.E)
        return times * (routed + 6.0 * self.T * self.D * self.I * self.shared)

    @property
    def floor_bytes(self) -> float:
        """Weights, gradients of weights, and bfloat16 values between products, each written or read once."""
        M = self.T * self.k
        weights = 3 * self.E * self.C * self.I + (2 * self.C + self.E + 3 * self.I * self.shared) * self.D
        forward = weights + M * (2 * self.I + 2 * self.C) + 2 * self.T * (self.D + 2 * self.C)
        if (
            self.backward
        ):  # gate and up kept and read; their gradients and the weighted act written, read twice and once
            forward += 2 * weights + M * (2 * self.I + 2 * self.I + 8 * self.I + 2 * self.C) + 4 * self.T * self.D
        return 2.0 * forward


ROWS = [
    Row("small, forward and backward", 32_768, 768, 384, 384, 80, 4, 1),
    Row("small, forward", 32_768, 768, 384, 384, 80, 4, 1, backward=False),
    Row("medium, forward and backward", 16_384, 1536, 768, 768, 80, 4),
    Row("medium, forward", 16_384, 1536, 768, 768, 80, 4, backward=False),
    Row("128 experts, 8 a token, forward and backward", 16_384, 1024, 512, 512, 128, 8),
    Row("released, an eighth of the experts, forward and backward", 1024, 7168, 3584, 3072, 112, 16),
    Row("released, forward", 8192, 7168, 3584, 3072, 896, 16, backward=False),
]


def small(row: Row) -> Row:
    """The same row in a tiny shape."""
    return replace(row, T=9, D=32, C=16, I=16, E=6, k=2)


def composition(moe: LatentMoE, x_TD: Tensor) -> Tensor:
    """The layer by torch's own operations, none of which waits for the GPU."""
    router, experts, k = moe.router, moe.experts, moe.router.k
    scores = torch.sigmoid(F.linear(x_TD.float(), router.weight.float()))
    ids = (scores + router.bias).topk(k, dim=-1).indices
    p = scores.gather(1, ids)
    p = p / (p.sum(-1, keepdim=True) + 1e-20) * router.scale
    slots = ids.flatten()
    order = torch.argsort(slots, stable=True)
    counts = slots.new_zeros(moe.num_experts).scatter_add_(0, slots, torch.ones_like(slots))
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = moe.down_proj(x_TD).index_select(0, order // k)
    gate = F.grouped_mm(rows, experts.w1_EIC.mT, offs=ends)
    up = F.grouped_mm(rows, experts.w3_EIC.mT, offs=ends)
    y = F.grouped_mm(situ_glu(gate, up, experts.beta, experts.linear_beta), experts.w2_ECI.mT, offs=ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    u = (y.index_select(0, back).view(*ids.shape, -1).float() * p.unsqueeze(-1)).sum(1).to(x_TD.dtype)
    y_TD = moe.up_proj(rms_norm(u, moe.latent_norm.weight, moe.latent_norm.eps))
    return y_TD if moe.shared is None else y_TD + moe.shared(x_TD)


def ours(moe: LatentMoE, x_TD: Tensor) -> Tensor:
    """The layer as the model runs it."""
    return moe(x_TD)


def definition(moe: LatentMoE, x_TD: Tensor) -> Tensor:
    """The layer by the PyTorch definition."""
    with forced("reference"):
        return moe(x_TD)


@contextmanager
def forced(backend: str) -> Iterator[None]:
    """OPENK3_BACKEND for a while."""
    before = os.environ.get("OPENK3_BACKEND")
    os.environ["OPENK3_BACKEND"] = backend
    try:
        yield
    finally:
        if before is None:
            del os.environ["OPENK3_BACKEND"]
        else:
            os.environ["OPENK3_BACKEND"] = before


def pass_of(way: Way, moe: LatentMoE, x_TD: Tensor, backward: bool) -> tuple[Tensor, ...]:
    """Output, and gradients of input and weights."""
    if not backward:
        with torch.no_grad():
            return (way(moe, x_TD),)
    y_TD = way(moe, x_TD)
    return y_TD.detach(), *torch.autograd.grad(y_TD, [x_TD, *moe.parameters()], x_TD.detach())


def build(row: Row, device: torch.device) -> tuple[LatentMoE, Tensor]:
    """A layer in bfloat16, and its input."""
    with torch.device(device):
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            moe = LatentMoE(row.config, 1)
        finally:
            torch.set_default_dtype(dtype)
    generator = torch.Generator(device).manual_seed(0)
    for weight in moe.parameters():
        weight.data.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
    moe.latent_norm.weight.data.fill_(1)
    moe.router.bias = torch.zeros(row.E, device=device)
    x_TD = torch.randn(row.T, row.D, generator=generator, device=device).bfloat16()
    return moe, x_TD.requires_grad_(row.backward)


def errors(way: Way, row: Row, moe: LatentMoE, x_TD: Tensor) -> dict[str, float]:
    """Output and input gradient against float64."""
    if 3 * row.E * row.C * row.I > LARGEST_IN_FLOAT64:
        return {}
    wide = copy.deepcopy(moe).double()
    want = pass_of(definition, wide, x_TD.detach().double().requires_grad_(row.backward), row.backward)
    pairs = zip(("y", "d_x"), pass_of(way, moe, x_TD, row.backward), want)
    return {name: float((a.double() - b).norm() / b.norm()) for name, a, b in pairs}


def product_rate(device: torch.device, protocol: Protocol) -> float:
    """FLOP/s of a large bfloat16 product."""
    size = 8192 if device.type == "cuda" else 256
    a, b = torch.randn(2, size, size, device=device).bfloat16()
    return 2.0 * size**3 / median_ms([lambda: a @ b], device, protocol) * 1e3


def measure(row: Row, device: torch.device, protocol: Protocol, rates: tuple[float, float]) -> dict[str, Any]:
    """Errors, times and memory of every way; ours as a replayed graph too."""
    moe, x_TD = build(row, device)
    found: dict[str, Any] = {"errors": {}, "peak_gb": {}, "failed": {}}
    for name, way in {"ours": ours, "composition": composition, "definition": definition}.items():

        def call(way: Way = way) -> tuple[Tensor, ...]:
            return pass_of(way, moe, x_TD, row.backward)

        try:
            found["errors"][name] = errors(way, row, moe, x_TD)
            growth = peak_growth(call, device)
            found["peak_gb"][name] = None if growth is None else growth / 1e9
            few = Protocol(3, 1) if name == "definition" else protocol
            found[f"{name}_ms"] = median_ms([call], device, few)
            if name == "ours" and device.type == "cuda":
                found["graph_ms"] = median_ms([replayed([call])], device, protocol)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            found["failed"][name] = str(error)[:200]
    flop_rate, byte_rate = rates
    floor = max(row.flops / flop_rate, row.floor_bytes / byte_rate) * 1e3
    best = min(found[name] for name in ("ours_ms", "graph_ms") if name in found)
    return found | {"floor_ms": floor, "tflops": row.flops / best / 1e9, "of_floor": floor / best}


def line(found: dict[str, Any]) -> str:
    """A row for a reader."""
    times = [f"{name[:-3]} {value:.3f} ms" for name, value in found.items() if name.endswith("_ms")]
    peaks = [f"{name} {value:.2f} GB" for name, value in found["peak_gb"].items() if value is not None]
    wrong = [f"{name} {kind} {value:.1e}" for name, each in found["errors"].items() for kind, value in each.items()]
    rate = f"{found['of_floor']:.1%} of the floor's speed, {found['tflops']:.0f} TFLOP/s"
    return f"{found['work']:<58} " + ", ".join([*times, rate, *peaks, *wrong, *map(str, found["failed"].items())])


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; write the rows as JSON if asked to."""
    options = row_flags.parse(__doc__, arguments)
    device = torch.device(options.device)
    protocol = Protocol(5, 2) if options.quick or options.small else Protocol(10, 3)
    rates = product_rate(device, protocol), copy_rate(device, protocol)
    print(f"products {rates[0] / 1e12:.0f} TFLOP/s, copies {rates[1] / 1e12:.2f} TB/s", flush=True)
    results = []
    for row in [row for row in ROWS if any(part in row.name for part in options.rows)]:
        found = measure(small(row) if options.small else row, device, protocol, rates)
        results.append({"work": row.name} | found)
        print(line(results[-1]), flush=True)
    if options.json:
        made = {"product_tflops": rates[0] / 1e12, "copy_tb_s": rates[1] / 1e12, "rows": results}
        options.json.write_text(json.dumps(made, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
