"""Triton kernels of the output gate of attention: one pass forward, one backward."""

from typing import Any

import triton
import triton.language as tl


@triton.jit
def _opened(gate, at, live):
    """The sigmoid in the gate's format."""
    z = tl.load(gate + at, mask=live, other=0.0)
    return (1.0 / (1.0 + tl.exp(-z.to(tl.float32)))).to(z.dtype).to(tl.float32)


@triton.jit
def gate_kernel(o, gate, out, size, BLOCK: tl.constexpr):
    """out = o sigmoid(gate)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    value = tl.load(o + at, mask=live, other=0.0) * _opened(gate, at, live)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=live)


@triton.jit
def gate_backward_kernel(d_out, o, gate, d_o, d_gate, size, BLOCK: tl.constexpr):
    """Gradients of o and of the gate."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    opened = _opened(gate, at, live)
    d = tl.load(d_out + at, mask=live, other=0.0).to(tl.float32) * opened
    slope = d * (1.0 - opened) * tl.load(o + at, mask=live, other=0.0)
    tl.store(d_o + at, d, mask=live)
    tl.store(d_gate + at, slope.to(d_gate.dtype.element_ty), mask=live)


BLOCK, WARPS = 2048, 8  # eight values a thread


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile for bfloat16 gates; on every GPU the same."""
    kinds = {"o": "*fp32", "gate": "*bf16", "out": "*bf16", "d_out": "*bf16", "d_o": "*fp32", "d_gate": "*bf16"}
    known = kinds | {"size": "i32:16", "BLOCK": BLOCK}
    kernels = gate_kernel, gate_backward_kernel
    options = {"num_warps": WARPS, "num_stages": 3}
    return [(kernel, {name: known[name] for name in kernel.arg_names}, options) for kernel in kernels]
