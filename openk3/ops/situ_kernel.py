"""SiTU-GLU in Triton: value and derivatives for other kernels, and kernels of its own for dense layers."""

from typing import Any

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exp2(x):
    """2^x in one instruction; results below 2^-126 are zero."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _inverse(x):
    """1 / x in one instruction."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _decay(x):
    """(e^-|x|, 1 - e^-|x|), the second without cancellation where x is small."""
    x = tl.abs(x)
    e = _exp2(x * -LOG2E)
    series = x * (1.0 - x * (0.5 - x * (0.16666667 - x * 0.041666668)))
    return e, tl.where(x < 0.125, series, 1.0 - e)


@triton.jit
def _signed(x, by):
    """x with the sign of `by`, which may be NaN."""
    return tl.where(by < 0, -x, x)


@triton.jit
def _tanh(x):
    """tanh to 2^-11 of itself, in one instruction: an eighth of what bfloat16 resolves."""
    if INTERPRETED:
        e, rest = _decay(2.0 * x)
        return _signed(rest, x) / (1.0 + e)
    else:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def situ_value(g, u, BETA: tl.constexpr, LINEAR: tl.constexpr, SHORT: tl.constexpr):
    """beta tanh(g / beta) sigmoid(g) l tanh(u / l), or times u where l is None; float32.

    SHORT: for results that are rounded to bfloat16. Else exact to some units in the last place of float32.
    """
    if SHORT:
        value = _tanh(g * (1.0 / BETA)) * _inverse(1.0 + _exp2(g * -LOG2E))
        if LINEAR is None:
            return value * (u * BETA)
        else:
            return value * (_tanh(u * (1.0 / LINEAR)) * (BETA * LINEAR))
    else:
        e1, rest1 = _decay(g * (2.0 / BETA))
        e2 = _exp2(tl.abs(g) * -LOG2E)
        value = tl.where(g < 0, -rest1 * e2, rest1)
        total = (1.0 + e1) * (1.0 + e2)
        if LINEAR is None:
            return value * (u * BETA) * _inverse(total)
        else:
            e3, rest3 = _decay(u * (2.0 / LINEAR))
            return value * _signed(rest3, u) * (BETA * LINEAR) * _inverse(total * (1.0 + e3))


@triton.jit
def _tanh_of(x, rest, inverse, SHORT: tl.constexpr):
    """tanh x, also as (1 - e) / (1 + e) from e = e^-2|x|: `rest` over the reciprocal of `inverse`."""
    if SHORT:
        return _tanh(x)
    else:
        return _signed(rest, x) * inverse


@triton.jit
def situ_gradient(g, u, BETA: tl.constexpr, LINEAR: tl.constexpr, SHORT: tl.constexpr):
    """(value, its derivative by g, by u), exact also where tanh and sigmoid saturate; SHORT as in `situ_value`.

    Of a multiprocessor's special functions there is one for eight multiplications: one reciprocal serves all three
    denominators, and K3's beta of 4 makes e^-|g| a square.
    """
    e1, rest1 = _decay(g * (2.0 / BETA))
    if BETA == 4:
        e2 = e1 * e1
    else:
        e2 = _exp2(tl.abs(g) * -LOG2E)
    tanh_part = 1.0 + e1
    sigmoid_part = 1.0 + e2
    both = tanh_part * sigmoid_part
    if LINEAR is None:
        by_tanh = _inverse(both)
        by_sigmoid = tanh_part * by_tanh
        by_tanh *= sigmoid_part
    else:
        e3, rest3 = _decay(u * (2.0 / LINEAR))
        up_part = 1.0 + e3
        inverse = _inverse(both * up_part)
        by_up_part = both * inverse
        inverse *= up_part
        by_sigmoid = tanh_part * inverse
        by_tanh = sigmoid_part * inverse
    tanh = _tanh_of(g * (1.0 / BETA), rest1, by_tanh, SHORT)
    sigmoid = tl.where(g < 0, e2, 1.0) * by_sigmoid
    rest = tl.where(g < 0, 1.0, e2) * by_sigmoid  # 1 - sigmoid
    act = tanh * sigmoid * BETA
    by_gate = 4.0 * e1 * by_tanh * by_tanh * sigmoid + act * rest
    if LINEAR is None:
        return act * u, by_gate * u, act
    else:
        capped = _tanh_of(u * (1.0 / LINEAR), rest3, by_up_part, SHORT) * LINEAR
        return act * capped, by_gate * capped, act * (4.0 * e3 * by_up_part * by_up_part)


@triton.jit
def situ_kernel(gate, up, out, size, BETA: tl.constexpr, LINEAR: tl.constexpr, BLOCK: tl.constexpr):
    """SiTU-GLU of `size` pairs."""
    SHORT: tl.constexpr = out.dtype.element_ty == tl.bfloat16
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    g = tl.load(gate + at, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + at, situ_value(g, u, BETA, LINEAR, SHORT).to(out.dtype.element_ty), mask=live)


@triton.jit
def situ_backward_kernel(
    gate, up, d_out, d_gate, d_up, size, BETA: tl.constexpr, LINEAR: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradients of `size` pairs."""
    SHORT: tl.constexpr = d_gate.dtype.element_ty == tl.bfloat16
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    g = tl.load(gate + at, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=live, other=0.0).to(tl.float32)
    d = tl.load(d_out + at, mask=live, other=0.0).to(tl.float32)
    _, by_gate, by_up = situ_gradient(g, u, BETA, LINEAR, SHORT)
    tl.store(d_gate + at, (d * by_gate).to(d_gate.dtype.element_ty), mask=live)
    tl.store(d_up + at, (d * by_up).to(d_up.dtype.element_ty), mask=live)


BLOCK, WARPS = 2048, 8  # eight values a thread: 16 bytes of each tensor


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile for K3's constants in bfloat16; on every GPU the same."""
    constants = {"size": "i32:16", "BETA": 4.0, "LINEAR": 25.0, "BLOCK": BLOCK}
    options = {"num_warps": WARPS, "num_stages": 3}
    forward = dict.fromkeys(("gate", "up", "out"), "*bf16")
    backward = dict.fromkeys(("gate", "up", "d_out", "d_gate", "d_up"), "*bf16")
    return [(situ_kernel, forward | constants, options), (situ_backward_kernel, backward | constants, options)]
