"""Triton kernels over rows that lie apart: parts of one product's columns are activated and gated where they are."""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.sigmoid_gate_kernel import _opened
from openk3.ops.situ_kernel import situ_value

BLOCK, WARPS = 1024, 4  # columns of a program: eight values a thread


@triton.jit
def situ_rows_kernel(
    gate, up, out,
    GATE_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr, WIDTH: tl.constexpr, BETA: tl.constexpr, LINEAR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """SiTU-GLU of rows of gate and up; a program takes BLOCK columns of one."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    SHORT: tl.constexpr = out.dtype.element_ty == tl.bfloat16
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    live = column < WIDTH
    g = tl.load(gate + row * GATE_STRIDE + column, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + row * UP_STRIDE + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, situ_value(g, u, BETA, LINEAR, SHORT).to(out.dtype.element_ty), mask=live)


@triton.jit
def gate_rows_kernel(o, gate, out, GATE_STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """out = o sigmoid(gate); rows of the gate lie apart."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    live = column < WIDTH
    value = tl.load(o + row * WIDTH + column, mask=live, other=0.0) * _opened(gate, row * GATE_STRIDE + column, live)
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=live)


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16 for shared experts of 1536 and six heads; on every GPU the same."""
    situ = dict.fromkeys(("gate", "up", "out"), "*bf16") | {"GATE_STRIDE": 3072, "UP_STRIDE": 3072, "WIDTH": 1536}
    situ |= {"BETA": 4.0, "LINEAR": 25.0, "BLOCK": BLOCK}
    gates = {"o": "*fp32", "gate": "*bf16", "out": "*bf16", "GATE_STRIDE": 1344, "WIDTH": 768, "BLOCK": BLOCK}
    options = {"num_warps": WARPS, "num_stages": 1}
    return [(situ_rows_kernel, situ, options), (gate_rows_kernel, gates, options)]
