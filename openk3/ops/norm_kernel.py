"""RMSNorm in Triton, also times weight and a sigmoid gate: rows in one pass forward, and in one pass backward."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["rows", "eps"])
def norm_forward_kernel(
    x,
    gate,
    weight,
    out,
    inverse,
    rows,
    eps,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Normed rows of `x`, which lie STRIDE apart, and their reciprocal roots; with a gate times its sigmoid.

    Without one, what is normed is rounded to x's format before the weight; with one, once at the end.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    live = (row < rows)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    v = tl.load(x + (row[:, None] * STRIDE + column[None, :]), mask=live, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(v * v, 1) * (1.0 / D) + eps)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    y = v * root[:, None]
    if gate is None:
        y = y.to(x.dtype.element_ty).to(tl.float32) * w
    else:
        y = y * w * _sigmoid(tl.load(gate + at, mask=live, other=0.0).to(tl.float32))
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live)
    tl.store(inverse + row, root, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def norm_backward_kernel(
    d_out,
    x,
    gate,
    weight,
    inverse,
    d_x,
    d_gate,
    shares,
    rows,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradients of rows and gates, and each program's share of the weight's, [programs, D]."""
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    share = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        live = (row < rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        d = tl.load(d_out + at, mask=live, other=0.0).to(tl.float32)
        v = tl.load(x + (row[:, None] * STRIDE + column[None, :]), mask=live, other=0.0).to(tl.float32)
        root = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        normal = v * root
        if gate is None:
            product = d * normal
        else:
            opened = _sigmoid(tl.load(gate + at, mask=live, other=0.0).to(tl.float32))
            d = d * opened
            product = d * normal
            tl.store(d_gate + at, (product * w * (1.0 - opened)).to(d_gate.dtype.element_ty), mask=live)
        share += product
        along = tl.sum(product * w, 1)[:, None] * (1.0 / D)
        tl.store(d_x + at, ((d * w - normal * along) * root).to(d_x.dtype.element_ty), mask=live)
    total = tl.sum(share, 0)
    tl.store(shares + tl.program_id(0).to(tl.int64) * D + column, total, mask=column < D)


class Settings(NamedTuple):
    """How rows of one width are worked on."""

    constants: dict[str, int]
    options: dict[str, int]


PROGRAMS = 6  # of the backward kernel, for each multiprocessor
_TILES = 4096, 2048  # values of a program's rows at a time, forward and backward: 32 and 16 a thread


def settings(D: int, stride: int, *, backward: bool) -> Settings:
    """For rows of D values that lie `stride` apart."""
    block, tile = max(16, triton.next_power_of_2(D)), _TILES[backward]
    constants = {"STRIDE": stride, "D": D, "BLOCK": block, "ROWS": max(1, tile // block)}
    return Settings(constants, {"num_warps": max(4, min(16, 4 * block // tile)), "num_stages": 2})


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16: K3's width, its latents beside a shared key, and gated heads."""
    found = []
    for kind, D, stride, gated in (("bf16", 7168, 7168, False), ("bf16", 512, 576, False), ("fp32", 128, 128, True)):
        rows = dict.fromkeys(("x", "out", "d_out", "d_x"), "*bf16") | {"weight": f"*{kind}", "inverse": "*fp32"}
        gates = dict.fromkeys(("gate", "d_gate"), "*bf16" if gated else None)
        known = rows | gates | {"shares": "*fp32", "rows": "i32", "eps": "fp32"}
        for kernel in (norm_forward_kernel, norm_backward_kernel):
            constants, options = settings(D, stride, backward=kernel is norm_backward_kernel)
            found.append((kernel, {name: (known | constants)[name] for name in kernel.arg_names}, options))
    return found
