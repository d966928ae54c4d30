"""Routed experts alone, in bfloat16 and in MXFP4, beside torch's grouped products; and MXFP8 activations, in one run.

    python benchmarks/experts.py                       # every row, half a minute on an H200
    python benchmarks/experts.py --rows MXFP4          # rows whose name contains one of these
    python benchmarks/experts.py --device cpu --small  # try the script: definitions on tiny shapes

From routes that are there already: gate and up, SiTU, down, and the weighted sum with its norm; on a GPU forward
passes are replayed graphs. `torch` does the same by `grouped_mm` from gathered rows with our SiTU between, and a
gather and a weighted sum of torch's; `products` are its grouped products alone, three forward and nine with
gradients. MXFP4 (few tokens): the floor is the packed bytes of the experts that the routes of this run choose, at the
copy rate, and calls take turns with eight different routes, so that weights come from memory; goal 75 % of its speed.
MXFP4 (many): the goal is 70 % of the speed of our bfloat16 experts. bfloat16: the goal is torch's time. MXFP8 rows
convert 8192 x 3584 values. Median of 10 after 3.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import latent_moe  # noqa: E402
import row_flags  # noqa: E402
import torch  # noqa: E402
from kda_timing import Protocol, copy_rate, median_ms, replayed  # noqa: E402
from mxfp4 import pack  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from openk3.model.moe import LatentMoE  # noqa: E402
from openk3.ops.mxfp8 import dequantize_mxfp8, fake_quantize_mxfp8, quantize_mxfp8  # noqa: E402
from openk3.ops.norm import rms_norm  # noqa: E402
from openk3.ops.routing import route, sort_by_expert  # noqa: E402
from openk3.ops.situ import situ_glu  # noqa: E402

FEW, ROUTES, PACKED_BITS = 16, 8, 4.25
OF_FLOOR, OF_BF16 = 0.75, 0.70


@dataclass(frozen=True)
class Row:
    """T tokens of C latents through E experts of inner width I, of which k work; `kind`: bf16, mxfp4 or mxfp8."""

    kind: str
    what: str
    T: int
    C: int
    I: int = 0
    E: int = 0
    k: int = 0
    backward: bool = False

    @property
    def name(self) -> str:
        """As in results."""
        if self.kind == "mxfp8":
            return f"MXFP8 {self.what} {self.T} x {self.C}"
        title = {"bf16": "experts in BF16", "mxfp4": "experts in MXFP4"}[self.kind]
        return f"{title}, {self.what}, T={self.T}" + ", forward and backward" * self.backward

    @property
    def layer(self) -> latent_moe.Row:
        """What `latent_moe.build` makes a layer of."""
        return latent_moe.Row(self.name, self.T, self.C, self.C, self.I, self.E, self.k, 0, self.backward)

    @property
    def flops(self) -> float:
        """Of the grouped products."""
        return (3 if self.backward else 1) * 6.0 * self.T * self.k * self.C * self.I


SMALL, MEDIUM, SHARD = (384, 384, 80, 4), (768, 768, 80, 4), (3584, 3072, 112, 16)
MANY = (("small", 65536, SMALL), ("medium", 32768, MEDIUM), ("released widths, 112 experts", 1024, SHARD))
ROWS = [Row("mxfp4", "released widths, 112 experts", T, *SHARD) for T in (1, 2, 4, 8, 16)]
ROWS += [Row("mxfp4", what, T, *sizes) for what, T, sizes in MANY]
ROWS += [Row("bf16", what, T, *sizes, both) for both in (False, True) for what, T, sizes in MANY]
ROWS += [Row("mxfp8", what, 8192, 3584) for what in ("quantise", "dequantise", "round trip")]


def small(row: Row) -> Row:
    """The same row in a tiny shape."""
    return replace(row, T=min(row.T, 40), C=32, I=32 * bool(row.I), E=8 * bool(row.E), k=2 * bool(row.k))


def routed(moe: LatentMoE, row: Row, seed: int, device: torch.device) -> Any:
    """Random routes, as our router gives them on a GPU, or by the definition."""
    generator = torch.Generator(device).manual_seed(seed)
    logits_TE = torch.randn(row.T, row.E, generator=generator, device=device)
    bias_E = torch.zeros(row.E, device=device)
    if device.type == "cuda":
        from openk3.ops.latent_moe.route_fused import Choice
        from openk3.ops.latent_moe.route_fused import route as choose

        return choose(logits_TE, bias_E, Choice(row.k, True, 1.0))
    return route(torch.sigmoid(logits_TE), bias_E, row.k)


def ours(moe: LatentMoE, row: Row, z_TC: Tensor, routes: Any) -> Callable[[], Tensor]:
    """Our experts on given routes, sorted beforehand."""
    norm = moe.latent_norm
    if z_TC.device.type != "cuda":
        order_M, counts_E = sort_by_expert(routes.expert_ids_Tk, row.E)
        token_M = order_M // row.k
        return lambda: torch.zeros_like(z_TC).index_add(0, token_M, moe.experts(z_TC[token_M], counts_E))
    from openk3.ops.latent_moe.experts_fused import Form, mix_experts, tile_rows
    from openk3.ops.latent_moe.packed_fused import mix_packed, packed_tile_rows
    from openk3.ops.latent_moe.route_fused import sort

    form = Form(moe.experts.beta, moe.experts.linear_beta, norm.eps)
    if row.kind == "mxfp4":
        packed = moe.experts.tiles()  # pyrefly: ignore[not-callable]
        plan = sort(routes, packed_tile_rows(z_TC, row.k, packed))
        return lambda: mix_packed(z_TC, routes.weights_Tk, plan, packed, (norm.weight, form))
    plan = sort(routes, tile_rows(z_TC, row.k, row.E))
    weights = moe.experts.w1_EIC, moe.experts.w3_EIC, moe.experts.w2_ECI
    return lambda: mix_experts(z_TC, routes.weights_Tk, plan, weights, (norm.weight, form))  # pyrefly: ignore


def by_torch(moe: LatentMoE, row: Row, z_TC: Tensor, ids_Tk: Tensor, weights_Tk: Tensor) -> Callable[[], Tensor]:
    """The same by torch's grouped products, sorted beforehand."""
    experts, norm = moe.experts, moe.latent_norm
    slots = ids_Tk.flatten()
    order = torch.argsort(slots, stable=True)
    counts = slots.new_zeros(row.E).scatter_add_(0, slots, torch.ones_like(slots))
    ends, token = counts.cumsum(0, dtype=torch.int32), order // row.k
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))

    def call() -> Tensor:
        rows = z_TC.index_select(0, token)
        gate = F.grouped_mm(rows, experts.w1_EIC.mT, offs=ends)
        up = F.grouped_mm(rows, experts.w3_EIC.mT, offs=ends)
        act = situ_glu(gate, up, experts.beta, experts.linear_beta)
        y = F.grouped_mm(act, experts.w2_ECI.mT, offs=ends)
        y = y.index_select(0, back).view(row.T, row.k, -1)
        u = (y.float() * weights_Tk.unsqueeze(-1)).sum(1).to(z_TC.dtype)
        return rms_norm(u, norm.weight, norm.eps)

    return call


def products_ms(moe: LatentMoE, row: Row, ids_Tk: Tensor, protocol: Protocol) -> float:
    """torch's grouped products by themselves: three forward, nine with gradients."""
    experts, device = moe.experts, ids_Tk.device
    w1, w2 = experts.w1_EIC.detach(), experts.w2_ECI.detach()
    ends = torch.bincount(ids_Tk.flatten(), minlength=row.E).cumsum(0, dtype=torch.int32)
    z_MC, act_MI = (torch.randn(row.T * row.k, width, device=device).bfloat16() for width in (row.C, row.I))
    calls = {2: lambda: F.grouped_mm(z_MC, w1.mT, offs=ends), 1: lambda: F.grouped_mm(act_MI, w2.mT, offs=ends)}
    total = sum(count * median_ms([call], device, protocol) for count, call in calls.items())
    if row.backward:
        more = [(2, lambda: F.grouped_mm(act_MI, w1, offs=ends)), (1, lambda: F.grouped_mm(z_MC, w2, offs=ends))]
        more += [(2, lambda: F.grouped_mm(act_MI.mT, z_MC, offs=ends))]
        more += [(1, lambda: F.grouped_mm(z_MC.mT, act_MI, offs=ends))]
        total += sum(count * median_ms([call], device, protocol) for count, call in more)
    return total


def both_ways(call: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor) -> Tensor:
    """The output; gradients of all leaves are made."""
    out = call()
    torch.autograd.grad(out, leaves, grad)
    return out.detach()


def timed(calls: list[Callable[[], Tensor]], device: torch.device, protocol: Protocol, graphs: bool) -> float:
    """Milliseconds of one of the calls, which take turns."""
    if graphs and device.type == "cuda":
        with torch.no_grad():
            return median_ms([replayed(calls)], device, protocol) / len(calls)
    return median_ms(calls, device, protocol)


def measure(row: Row, device: torch.device, protocol: Protocol, rate: float) -> dict[str, Any]:
    """Times of every way, how far ours is from torch's, and the goal."""
    moe, z_TC = latent_moe.build(row.layer, device)
    few = row.kind == "mxfp4" and row.T <= FEW
    routes = [routed(moe, row, seed, device) for seed in range(ROUTES if few else 1)]
    ids = [each.ids_Tk if device.type == "cuda" else each.expert_ids_Tk for each in routes]
    found: dict[str, Any] = {"work": row.name, "ours_ms": None}
    leaves = [z_TC, *moe.experts.parameters()]
    run = partial(both_ways, leaves=leaves, grad=torch.randn_like(z_TC)) if row.backward else lambda call: call()
    with torch.set_grad_enabled(row.backward):
        if row.kind == "mxfp4":
            if not few:
                found["bf16_ms"] = timed(
                    [ours(moe, replace(row, kind="bf16"), z_TC, routes[0])], device, protocol, True
                )
        elif device.type == "cuda":
            theirs = by_torch(moe, row, z_TC, ids[0], routes[0].weights_Tk)
            found["torch_ms"] = timed([lambda: run(theirs)], device, protocol, not row.backward)
        if device.type == "cuda" and not few:
            found["products_ms"] = products_ms(moe, row, ids[0], protocol)
        want = theirs() if "torch_ms" in found else None
        if row.kind == "mxfp4":
            pack(moe, row.layer)
        calls = [partial(run, ours(moe, row, z_TC, each)) for each in routes]
        found["ours_ms"] = timed(calls, device, protocol, not row.backward)
        if want is not None:
            found["errors"] = {"ours beside torch": float((calls[0]() - want).norm() / want.norm())}
    chosen = sum(len(each.unique()) for each in ids) / len(ids)
    floor = chosen * 3 * row.C * row.I * PACKED_BITS / 8 / rate * 1e3 if few else None
    goal = floor / OF_FLOOR if floor is not None else found["bf16_ms"] / OF_BF16 if row.kind == "mxfp4" else None
    found |= {"floor_ms": floor, "goal_ms": goal or found.get("torch_ms"), "tflops": row.flops / found["ours_ms"] / 1e9}
    return found if floor is None else found | {"of_floor": floor / found["ours_ms"], "experts": chosen}


def measure_mxfp8(row: Row, device: torch.device, protocol: Protocol, rate: float) -> dict[str, Any]:
    """Milliseconds of a conversion, and of its definition."""
    x_TC = torch.randn(row.T, row.C, device=device).bfloat16()
    codes, scales = quantize_mxfp8(x_TC)
    calls = {"quantise": lambda: quantize_mxfp8(x_TC), "round trip": lambda: fake_quantize_mxfp8(x_TC)}
    calls["dequantise"] = lambda: dequantize_mxfp8(codes, scales, torch.bfloat16)
    call = calls[row.what]
    with latent_moe.forced("reference"):
        theirs = median_ms([call], device, Protocol(3, 1))
    took = timed([call], device, protocol, True)
    floor = row.T * row.C * (4 if row.what == "round trip" else 3 + 1 / 32) / rate * 1e3
    found = {"work": row.name, "ours_ms": took, "definition_ms": theirs, "floor_ms": floor, "goal_ms": None}
    return found | {"of_floor": floor / took}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; write the rows as JSON if asked to."""
    options = row_flags.parse(__doc__, arguments)
    device = torch.device(options.device)
    protocol = Protocol(5, 2) if options.quick or options.small else Protocol(10, 3)
    rate = copy_rate(device, protocol)
    results = []
    for row in [row for row in ROWS if any(part in row.name for part in options.rows)]:
        way = measure_mxfp8 if row.kind == "mxfp8" else measure
        try:
            found = way(small(row) if options.small else row, device, protocol, rate)
        except Exception as error:  # a fault of one row must not cost the others
            found = {
                "ours_ms": None,
                "floor_ms": None,
                "goal_ms": None,
                "error": f"{type(error).__name__}: {error}"[:300],
            }
        results.append(found | {"work": row.name})
        times = ", ".join(f"{name[:-3]} {value:.4f}" for name, value in found.items() if name.endswith("_ms") and value)
        print(f"{row.name}: {times} ms {found.get('errors', '')} {found.get('error', '')}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"copy_tb_s": rate / 1e12, "rows": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
