"""Attention of Gated MLA: ours (Gluon and Triton) beside cuDNN, flash attention and our definition, in one run.

    python benchmarks/mla.py                       # every row, about a minute on an H200
    python benchmarks/mla.py --rows decode         # rows whose name contains one of these
    python benchmarks/mla.py --device cpu --small  # try the script: the definition on tiny shapes

bfloat16. Training and prefill start from what kv_b gives; libraries get keys put together beforehand, which is not
counted against them, and flash attention values padded to the width of keys. FLOPs are those of causal products, 2.6
times as many backward, whatever a kernel computes beside them. Decoding reads latents of 512 + 64 values from pages,
one new token a request unless more are named; rates are of those bytes and of 2 (576 + 512) FLOPs a latent, head and
token. Floors are at the copy rate and the rate of an 8192^3 product, measured in the same run. Median of 10 after 3,
CUDA events. Errors are norm ratios against float64 of the last 128 queries of two heads, or of two requests.

Goals: 80 % of the faster library's speed forward and 65 % with backward (the twin's, which runs where no library
does); for 64 requests of 32K tokens 80 % of the copy rate up to 24 heads, 60 % of the rate of products with more.
Where requests share the pages of their first tokens, those count once in the floor; `apart` is the same with pages of
everybody's own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import row_flags  # noqa: E402
import torch  # noqa: E402
from kda_timing import Protocol, copy_rate, median_ms, peak_growth  # noqa: E402
from latent_moe import forced, product_rate  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from openk3.ops.mla.latent_decode import LatentPages, latent_attention, plan_latents  # noqa: E402
from openk3.ops.mla.reference import absorbed_attention, joint_attention, mla_attention  # noqa: E402

LATENT, SHARED, PAGE = 512, 64, 6144
Way = Callable[[], Any]


@dataclass(frozen=True)
class Prefill:
    """Packed documents; H heads of own + shared key and V value channels."""

    name: str
    lengths: tuple[int, ...]
    H: int = 96
    own: int = 128
    shared: int = 64
    V: int = 128
    backward: bool = False

    @property
    def flops(self) -> float:
        """Of the causal products."""
        pairs = sum(n * (n + 1) / 2 for n in self.lengths)
        K = self.own + self.shared
        return 2.0 * self.H * pairs * ((K + self.V) + ((3 * K + 2 * self.V) if self.backward else 0))

    @property
    def floor_bytes(self) -> float:
        """Inputs and outputs once, in 2 bytes and the output in 4; backward reads them again and writes gradients."""
        T, H = sum(self.lengths), self.H
        inputs = 2.0 * T * (H * (2 * self.own + self.shared + self.V) + self.shared)
        output = 4.0 * T * H * self.V
        return inputs + output + (2 * inputs + 2 * output if self.backward else 0)


@dataclass(frozen=True)
class Decode:
    """Requests of `tokens` cached latents and `new` new tokens each, H heads."""

    name: str
    tokens: tuple[int, ...]
    H: int
    new: int = 1
    common: int = 0  # of the first tokens, whose pages all requests share

    @property
    def flops(self) -> float:
        """Of both products."""
        return 2.0 * (2 * LATENT + SHARED) * self.H * self.new * sum(self.tokens)

    @property
    def floor_bytes(self) -> float:
        """Latents once, queries and contexts."""
        rows, twice = len(self.tokens) * self.new * self.H, self.common * (len(self.tokens) - 1)
        return 2.0 * (LATENT + SHARED) * (sum(self.tokens) - twice + rows) + 4.0 * LATENT * rows


Row = Prefill | Decode
# Of a library's speed, forward alone and with backward; of copies up to 24 heads, and of products beyond.
OF_LIBRARY, OF_COPIES, OF_PRODUCTS = (0.80, 0.65), 0.80, 0.60
GOAL_TOKENS = 64 * 32768  # of the rows of decoding that have a goal
PACKED = (1300, 547, 2048, 963, 271, 3063)
ROWS: list[Row] = [
    Prefill("forward T=8192 H=96", (8192,)),
    Prefill("forward T=16384 H=96", (16384,)),
    Prefill("forward packed H=96", PACKED),
    Prefill("forward and backward T=8192 H=96", (8192,), backward=True),
    Prefill("forward and backward T=16384 H=96", (16384,), backward=True),
    Prefill("forward and backward packed H=96", PACKED, backward=True),
    Prefill("forward and backward 4 x 8192 H=8, 64+32, 64", (8192,) * 4, 8, 64, 32, 64, backward=True),
    Decode("decode 64 x 32768 H=8", (32768,) * 64, 8),
    Decode("decode 64 x 32768 H=24", (32768,) * 64, 24),
    Decode("decode 64 x 32768 H=96", (32768,) * 64, 96),
    Decode("decode 64 x 32768 H=24, 4 new tokens", (32768,) * 64, 24, 4),
    Decode("decode 64 unequal H=24", tuple(1024 + 977 * n for n in range(64)), 24),
    Decode("decode 64 x 32768 H=24, 24K of them shared", (32768,) * 64, 24, common=4 * PAGE),
    Decode("decode 64 x 32768 H=96, 24K of them shared", (32768,) * 64, 96, common=4 * PAGE),
    Decode("decode 1 x 131072 H=96", (131072,), 96),
    Decode("decode 256 x 4096 H=24", (4096,) * 256, 24),
]


def small(row: Row) -> Row:
    """The same row in a tiny shape."""
    if isinstance(row, Decode):
        return replace(row, tokens=(29, 30), H=2, common=16 if row.common else 0)
    return replace(row, lengths=tuple(5 + n % 7 for n in row.lengths), H=2, own=16, shared=8, V=16)


@contextmanager
def twin(gluon: bool) -> Iterator[None]:
    """OPENK3_GLUON for a while."""
    before = os.environ.get("OPENK3_GLUON")
    os.environ["OPENK3_GLUON"] = "1" if gluon else "0"
    try:
        yield
    finally:
        del os.environ["OPENK3_GLUON"]
        if before is not None:
            os.environ["OPENK3_GLUON"] = before


def prefill_ways(row: Prefill, device: torch.device) -> tuple[dict[str, Way], Callable[[Any], float]]:
    """Each way of a row as a call that gives its output first, and the error of an output."""
    T, H, own = sum(row.lengths), row.H, row.own
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16().requires_grad_(row.backward)

    q, kv, shared = draw(T, H, own + row.shared), draw(T, H, own + row.V), draw(T, row.shared)
    scale = (own + row.shared) ** -0.5
    cu = torch.tensor([0, *accumulate(row.lengths)], dtype=torch.int32)
    d_o = torch.randn(T, H, row.V, generator=generator, device=device)
    k = torch.cat((kv[..., :own], shared.unsqueeze(1).expand(-1, H, -1)), -1).detach().requires_grad_(row.backward)
    v = kv[..., own:].detach().clone().requires_grad_(row.backward)

    def passes(inputs: list[Tensor], forward: Callable[[], Tensor]) -> Any:
        with torch.set_grad_enabled(row.backward):
            o = forward()
        return (o, *torch.autograd.grad(o, inputs, d_o.to(o.dtype))) if row.backward else (o,)

    def joint() -> Tensor:
        return joint_attention(q, kv, shared, cu, scale=scale)[0]

    def sdpa(backend: SDPBackend, pad: int) -> Tensor:
        rows = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, F.pad(v, (0, pad)))]
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(*rows, is_causal=True, scale=scale)
        return o[..., : row.V].squeeze(0).transpose(0, 1)

    def switched(gluon: bool) -> Any:
        with twin(gluon):
            return passes([q, kv, shared], joint)

    def definition() -> Any:
        with forced("reference"):
            return passes([q, kv, shared], joint)

    ways: dict[str, Way] = {"definition": definition}
    if device.type == "cuda":
        ways = {"ours": lambda: switched(True), "triton": lambda: switched(False)} | ways
        if len(row.lengths) == 1:
            ways["cudnn"] = lambda: passes([q, k, v], lambda: sdpa(SDPBackend.CUDNN_ATTENTION, 0))
            flash = own + row.shared - row.V
            ways["flash"] = lambda: passes([q, k, v], lambda: sdpa(SDPBackend.FLASH_ATTENTION, flash))

    def error(found: Any) -> float:
        last, start = min(128, row.lengths[-1]), T - row.lengths[-1]
        some = slice(max(0, H - 2), H)
        bounds = torch.tensor([0, last]), torch.tensor([0, T - start])
        wide = [
            x.detach()[rows, some].double()
            for x, rows in ((q, slice(T - last, T)), (k, slice(start, T)), (v, slice(start, T)))
        ]
        want = mla_attention(*wide, *bounds, scale=scale)
        return float((found[0].detach()[-last:, some].double() - want).norm() / want.norm())

    return ways, error


def decode_ways(row: Decode, device: torch.device) -> tuple[dict[str, Way], Callable[[Any], float]]:
    """As `prefill_ways`; plans are made beforehand, as a model makes one for all its layers."""
    generator = torch.Generator(device).manual_seed(0)
    N, H, new = len(row.tokens), row.H, row.new
    page = PAGE if device.type == "cuda" else 16
    counts = [-(-n // page) for n in row.tokens]
    memory = torch.empty(sum(counts), page, LATENT + SHARED, dtype=torch.bfloat16, device=device)
    for part in memory.split(64):
        part.normal_(generator=generator)
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    table = torch.zeros(N, max(counts), dtype=torch.int32)
    for n, count in enumerate(counts):
        table[n, :count] = torch.tensor([order.pop() for _ in range(count)])
    apart = table.to(device)
    table[:, : row.common // page] = table[0, : row.common // page]
    lengths = torch.tensor(row.tokens, dtype=torch.int32, device=device)
    pages = LatentPages.of_pages(memory, table.to(device), lengths)
    q = torch.randn(N * new, H, LATENT + SHARED, generator=generator, device=device).bfloat16()
    queries = q[..., :LATENT].contiguous(), q[..., LATENT:]
    cu = torch.arange(0, N * new + 1, new, dtype=torch.int32, device=device)

    def rows_of(n: int) -> Tensor:
        return torch.cat([memory[i] for i in table[n].tolist()])[: row.tokens[n]]

    def kernel(gluon: bool) -> Way:
        with twin(gluon):
            plan = plan_latents(pages, cu, H, new)
        return lambda: latent_attention(*queries, pages, cu, scale=0.05, new_tokens=new, plan=plan)

    def definition() -> Tensor:
        with forced("reference"), torch.no_grad():
            return absorbed_attention(*queries, [rows_of(n) for n in range(N)], cu, scale=0.05)

    def error(found: Any) -> float:
        some = sorted({0, N - 1})
        bounds = torch.arange(0, len(some) * new + 1, new)
        chosen = [torch.cat([x[n * new : (n + 1) * new] for n in some]).double() for x in queries]
        want = absorbed_attention(*chosen, [rows_of(n).double() for n in some], bounds, scale=0.05)
        got = torch.cat([found[n * new : (n + 1) * new] for n in some])
        return float((got.double() - want).norm() / want.norm())

    if device.type != "cuda":
        return {"definition": definition}, error
    ways = {"ours": kernel(True), "triton": kernel(False)}
    if row.common:  # the same lengths with pages of everybody's own
        own = LatentPages.of_pages(memory, apart, lengths)
        plan = plan_latents(own, cu, H, new)
        ways["apart"] = lambda: latent_attention(*queries, own, cu, scale=0.05, new_tokens=new, plan=plan)
    return ways, error


def measure(row: Row, device: torch.device, protocol: Protocol, rates: tuple[float, float]) -> dict[str, Any]:
    """Errors, times and memory of every way that runs."""
    ways, error = (decode_ways if isinstance(row, Decode) else prefill_ways)(row, device)
    found: dict[str, Any] = {"errors": {}, "peak_gb": {}, "failed": {}}
    for name, way in ways.items():
        try:
            if name == "apart":  # other values
                way()
            else:
                found["errors"][name] = error(way())
            growth = peak_growth(way, device)
            found["peak_gb"][name] = None if growth is None else growth / 1e9
            found[f"{name}_ms"] = median_ms([way], device, Protocol(2, 1) if name == "definition" else protocol)
        except (torch.OutOfMemoryError, RuntimeError) as failure:
            found["failed"][name] = str(failure)[:200]
    flop_rate, byte_rate = rates
    floor = max(row.flops / flop_rate, row.floor_bytes / byte_rate) * 1e3
    times = {name: value for name, value in found.items() if name.endswith("_ms")}
    first = times.get("ours_ms", min(times.values(), default=float("nan")))
    rows = {
        "floor_ms": floor,
        "goal_ms": goal(row, found, rates),
        "of_floor": floor / first,
        "tflops": row.flops / first / 1e9,
    }
    return found | rows | {"tb_s": row.floor_bytes / first / 1e9}


def goal(row: Row, found: dict[str, Any], rates: tuple[float, float]) -> float | None:
    """Milliseconds that are to be reached; None where nothing was promised, or no library ran to compare with."""
    if isinstance(row, Prefill):
        libraries = [found[key] for key in ("cudnn_ms", "flash_ms") if key in found]
        return min(libraries) / OF_LIBRARY[row.backward] if libraries else None
    if sum(row.tokens) != GOAL_TOKENS or row.new > 1 or row.common:
        return None
    flop_rate, byte_rate = rates
    few = row.H <= 24
    return 1e3 * (row.floor_bytes / byte_rate / OF_COPIES if few else row.flops / flop_rate / OF_PRODUCTS)


def line(found: dict[str, Any]) -> str:
    """A row for a reader."""
    first = found.get("ours_ms")
    parts = []
    for name, value in found.items():
        if name.endswith("_ms") and value is not None:
            ratio = f" ({value / first:.2f})" if first and name not in ("ours_ms", "floor_ms", "goal_ms") else ""
            parts.append(f"{name[:-3]} {value:.3f} ms{ratio}")
    rate = f"{found['tflops']:.0f} TFLOP/s, {found['tb_s']:.2f} TB/s, {found['of_floor']:.0%} of the floor's speed"
    wrong = [f"error of {name} {value:.1e}" for name, value in found["errors"].items()]
    peaks = [f"{name} {value:.2f} GB" for name, value in found["peak_gb"].items() if value is not None]
    return f"{found['work']:<48} " + ", ".join([*parts, rate, *wrong, *peaks, *map(str, found["failed"].items())])


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
