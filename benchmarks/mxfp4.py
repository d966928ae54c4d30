"""MXFP4 experts: whole LatentMoE layers with packed experts beside the same layers in bfloat16, in one run.

    python benchmarks/mxfp4.py                       # every row
    python benchmarks/mxfp4.py --device cpu --small  # tries the script: the definition on tiny shapes

Forward passes without gradients, shared experts left out, on a GPU as replayed graphs. The floor of few tokens is the
bytes of the experts that they choose (different ones as even choices give) and of the layer's other weights at the copy
rate; goals are 75 % of its speed up to 16 tokens, and 70 % of our bfloat16 layer's speed for many.
"""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import row_flags  # noqa: E402
import torch  # noqa: E402
from kda_timing import Protocol, copy_rate, median_ms, replayed  # noqa: E402
from latent_moe import Row, build  # noqa: E402

from openk3.model.moe import LatentMoE  # noqa: E402
from openk3.model.packed_experts import PackedExperts  # noqa: E402

FEW = 16  # tokens
ROWS = [
    Row(f"{name}, T={T}", T, *sizes, shared=0, backward=False)
    for name, sizes, counts in (
        ("small", (768, 384, 384, 80, 4), (1, 16, 32768)),
        ("medium", (1536, 768, 768, 80, 4), (1, 16, 16384)),
        ("shard", (7168, 3584, 3072, 112, 16), (1, 16, 1024)),
    )
    for T in counts
]
TRIAL = [Row("trial, T=1", 1, 64, 32, 32, 8, 2, 0, False), Row("trial, T=40", 40, 64, 32, 32, 8, 2, 0, False)]


def pack(moe: LatentMoE, row: Row) -> None:
    """Replace the layer's experts by as many in MXFP4 with random codes and weights of the same size."""
    device = moe.router.weight.device
    experts = PackedExperts(row.config).to(device)
    generator = torch.Generator(device).manual_seed(1)
    for codes in (experts.gate_up_codes, experts.down_codes):
        codes.random_(-(2**31), 2**31, generator=generator)
    exponent = 127 - round(math.log2(3 * row.C**0.5))  # codes have a root mean square of about 3
    for scales in (experts.gate_up_scales, experts.down_scales):
        scales.view(torch.uint8).fill_(exponent)
    experts.measure()
    moe.experts = experts


def floor_bytes(row: Row, bits: float) -> float:
    """The least that a forward pass moves: chosen experts at `bits` a weight, the layer's other weights in bfloat16."""
    chosen = row.E * (1 - (1 - row.k / row.E) ** row.T)
    return chosen * 3 * row.C * row.I * bits / 8 + 2 * row.D * (2 * row.C + row.E)


@torch.no_grad()
def measure(row: Row, device: torch.device, protocol: Protocol, rate: float) -> dict[str, Any]:
    """Milliseconds of the packed layer and of the one in bfloat16, with the same tokens."""
    moe, x_TD = build(row, device)
    times = {}
    for name in ("bf16_ms", "ours_ms"):
        if name == "ours_ms":
            pack(moe, row)
        call = partial(moe, x_TD)
        times[name] = median_ms([replayed([call]) if device.type == "cuda" else call], device, protocol)
    few = row.T <= FEW
    floor = floor_bytes(row, 4.25) / rate * 1e3 if few else None
    goal = floor / 0.75 if floor is not None else times["bf16_ms"] / 0.7
    found = {"work": f"MXFP4 layer {row.name}", **times, "floor_ms": floor, "goal_ms": goal}
    return found if floor is None else found | {"of_floor": floor / times["ours_ms"]}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; write the rows as JSON if asked to."""
    options = row_flags.parse(__doc__, arguments)
    device = torch.device(options.device)
    protocol = Protocol(5, 2) if options.quick or options.small else Protocol()
    rate = copy_rate(device, protocol)
    results = []
    for row in [row for row in (TRIAL if options.small else ROWS) if any(part in row.name for part in options.rows)]:
        results.append(measure(row, device, protocol, rate))
        found = results[-1]
        print(f"{found['work']}: {found['ours_ms']:.4f} ms, bfloat16 {found['bf16_ms']:.4f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"copy_tb_s": rate / 1e12, "rows": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
