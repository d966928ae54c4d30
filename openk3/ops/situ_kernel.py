"""SiTU-GLU in Triton: value and derivatives for other kernels, and kernels of its own for dense layers."""

from typing import Any

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _inverse(x):
    """1 / x in one instruction, for x between 1 and 8."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _decay(x):
    """(e^-|x|, 1 - e^-|x|), the second without cancellation where x is small."""
    x = tl.abs(x)
    e = tl.exp2(x * -LOG2E)
    series = x * (1.0 - x * (0.5 - x * (0.16666667 - x * 0.041666668)))
    return e, tl.where(x < 0.125, series, 1.0 - e)


@triton.jit
def _signed(x, by):
    """x with the sign of `by`, which may be NaN."""
    return tl.where(by < 0, -x, x)


@triton.jit
def situ_value(g, u, BETA: tl.constexpr, LINEAR: tl.constexpr):
    """beta tanh(g / beta) sigmoid(g) l tanh(u / l), or times u where l is None; float32, one reciprocal."""
    e1, rest1 = _decay(g * (2.0 / BETA))
    e2 = tl.exp2(tl.abs(g) * -LOG2E)
    value = tl.where(g < 0, -rest1 * e2, rest1)
    total = (1.0 + e1) * (1.0 + e2)
    if LINEAR is None:
        return value * (u * BETA) * _inverse(total)
    else:
        e3, rest3 = _decay(u * (2.0 / LINEAR))
        return value * _signed(rest3, u) * (BETA * LINEAR) * _inverse(total * (1.0 + e3))


@triton.jit
def situ_gradient(g, u, BETA: tl.constexpr, LINEAR: tl.constexpr):
    """(value, its derivative by g, by u), exact also where tanh and sigmoid saturate."""
    e1, rest1 = _decay(g * (2.0 / BETA))
    e2 = tl.exp2(tl.abs(g) * -LOG2E)
    if LINEAR is None:
        inverse = _inverse((1.0 + e1) * (1.0 + e2))
        capped = u
        slope = 1.0
    else:
        e3, rest3 = _decay(u * (2.0 / LINEAR))
        all_but = (1.0 + e1) * (1.0 + e2)
        inverse = _inverse(all_but * (1.0 + e3))
        third = inverse * all_but
        inverse *= 1.0 + e3
        capped = _signed(rest3, u) * third * LINEAR
        slope = 4.0 * e3 * third * third  # 1 - tanh^2
    first = inverse * (1.0 + e2)
    second = inverse * (1.0 + e1)
    tanh = _signed(rest1, g) * first
    sigmoid = tl.where(g < 0, e2, 1.0) * second
    act = tanh * sigmoid * BETA
    by_gate = 4.0 * e1 * first * first * sigmoid + act * tl.where(g < 0, 1.0, e2) * second
    return act * capped, by_gate * capped, act * slope


@triton.jit(do_not_specialize=["size"])
def situ_kernel(gate, up, out, size, BETA: tl.constexpr, LINEAR: tl.constexpr, BLOCK: tl.constexpr):
    """SiTU-GLU of `size` pairs."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    g = tl.load(gate + at, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + at, situ_value(g, u, BETA, LINEAR).to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["size"])
def situ_backward_kernel(
    gate, up, d_out, d_gate, d_up, size, BETA: tl.constexpr, LINEAR: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradients of `size` pairs."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    g = tl.load(gate + at, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=live, other=0.0).to(tl.float32)
    d = tl.load(d_out + at, mask=live, other=0.0).to(tl.float32)
    _, by_gate, by_up = situ_gradient(g, u, BETA, LINEAR)
    tl.store(d_gate + at, (d * by_gate).to(d_gate.dtype.element_ty), mask=live)
    tl.store(d_up + at, (d * by_up).to(d_up.dtype.element_ty), mask=live)


BLOCK, WARPS = 2048, 8  # eight values a thread: 16 bytes of each tensor


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile for K3's constants in bfloat16; on every GPU the same."""
    constants = {"size": "i32", "BETA": 4.0, "LINEAR": 25.0, "BLOCK": BLOCK}
    options = {"num_warps": WARPS, "num_stages": 3}
    forward = dict.fromkeys(("gate", "up", "out"), "*bf16")
    backward = dict.fromkeys(("gate", "up", "d_out", "d_gate", "d_up"), "*bf16")
    return [(situ_kernel, forward | constants, options), (situ_backward_kernel, backward | constants, options)]
