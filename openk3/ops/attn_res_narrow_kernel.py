"""Triton kernels of Attention Residuals for narrow rows: all sources of a few tokens lie in registers at once.

Backward they also add what later reads of the same sources handed back, so that no other pass has to.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl


@triton.jit
def _tile(pointer, at, live):
    return tl.load(pointer + at, mask=live, other=0.0)


@triton.jit
def _vector(pointer, column, D: tl.constexpr):
    return tl.load(pointer + column, mask=column < D, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["T", "eps", "norm_eps"])
def narrow_forward_kernel(
    sources, addend, query, norm_weight, out_weight, newest, mixed, normed, stats, T, eps, norm_eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Mixtures, their norms, last sources with what is added to them; stats [3, L, T]: weights, scores, sizes."""
    L: tl.constexpr = len(sources)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    here = token < T
    live = here[:, None] & (column < D)[None, :]
    at = token[:, None].to(tl.int64) * D + column[None, :]
    vector = _vector(query, column, D) * _vector(norm_weight, column, D)
    values, found = (), ()
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for i in tl.static_range(L):
        value = _tile(sources[i], at, live)
        if (i == L - 1) & (addend is not None):
            value = (value.to(tl.float32) + _tile(addend, at, live).to(tl.float32)).to(value.dtype)
            tl.store(newest + at, value, mask=live)
        wide = value.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 1) * (1.0 / D) + eps)
        score = tl.sum(wide * vector, 1) * inverse
        tl.store(stats + ((2 * L + i) * T + token), inverse, mask=here)
        tl.store(stats + ((L + i) * T + token), score, mask=here)
        top = tl.maximum(top, score)
        values = values + (value,)
        found = found + (score,)
    total = tl.zeros([ROWS], tl.float32)
    mixture = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(L):
        weight = tl.exp(found[i] - top)
        total += weight
        mixture += weight[:, None] * values[i].to(tl.float32)
    for i in tl.static_range(L):
        tl.store(stats + (i * T + token), tl.exp(found[i] - top) / total, mask=here)
    rounded = (mixture / total[:, None]).to(sources[0].dtype.element_ty)
    if mixed is not None:
        tl.store(mixed + at, rounded, mask=live)
    if normed is not None:
        wide = rounded.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 1) * (1.0 / D) + norm_eps)
        y = (wide * inverse[:, None]).to(rounded.dtype).to(tl.float32) * _vector(out_weight, column, D)
        tl.store(normed + at, y.to(normed.dtype.element_ty), mask=live)


@triton.jit
def _norm_gradient(d_y, out_weight, mixture, norm_eps, D: tl.constexpr):
    """Gradient of the mixture from that of its norm, and what each value adds to the out weight's gradient."""
    inverse = tl.rsqrt(tl.sum(mixture * mixture, 1) * (1.0 / D) + norm_eps)[:, None]
    scaled = d_y * out_weight
    along = tl.sum(scaled * mixture, 1)[:, None] * (1.0 / D)
    return inverse * (scaled - inverse * inverse * along * mixture), d_y * mixture * inverse


@triton.jit(do_not_specialize=["T", "norm_eps"])
def narrow_backward_kernel(
    sources, later, grads, query, norm_weight, out_weight, d_mixed, d_normed, stats, d_vectors, d_outs, T, norm_eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WANTED: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """Gradients of the sources (of source i if bit i of WANTED is set), and this program's share of the vectors'.

    Where bit i of LATER is set, `later[i]` is the gradient that source i has from later reads, and is added.
    """
    L: tl.constexpr = len(sources)
    column = tl.arange(0, BLOCK)
    d_vector = tl.zeros([ROWS, BLOCK], tl.float32)
    d_out = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, T, tl.num_programs(0) * ROWS):
        token = first + tl.arange(0, ROWS)
        here = token < T
        live = here[:, None] & (column < D)[None, :]
        at = token[:, None].to(tl.int64) * D + column[None, :]
        values, weights = (), ()
        for i in tl.static_range(L):
            values = values + (_tile(sources[i], at, live),)
            weights = weights + (tl.load(stats + (i * T + token), mask=here, other=0.0),)
        if d_normed is not None:
            # not rounded, see attn_res_kernel._mixture
            mixture = tl.zeros([ROWS, BLOCK], tl.float32)
            for i in tl.static_range(L):
                mixture += weights[i][:, None] * values[i].to(tl.float32)
            d_y = _tile(d_normed, at, live).to(tl.float32)
            grad, share = _norm_gradient(d_y, _vector(out_weight, column, D), mixture, norm_eps, D)
            d_out += share
            if d_mixed is not None:
                grad += _tile(d_mixed, at, live).to(tl.float32)
        else:
            grad = _tile(d_mixed, at, live).to(tl.float32)
        mean = tl.zeros([ROWS], tl.float32)
        d_weights = ()
        for i in tl.static_range(L):
            d_weight = tl.sum(grad * values[i].to(tl.float32), 1)
            mean += weights[i] * d_weight
            d_weights = d_weights + (d_weight,)
        vector = _vector(query, column, D) * _vector(norm_weight, column, D)
        for i in tl.static_range(L):
            inverse = tl.load(stats + ((2 * L + i) * T + token), mask=here, other=0.0)
            score = tl.load(stats + ((L + i) * T + token), mask=here, other=0.0)
            toward = weights[i] * (d_weights[i] - mean) * inverse
            value = values[i].to(tl.float32)
            d_vector += toward[:, None] * value
            if (WANTED >> i) & 1:
                # score = inverse * (value . vector), and d inverse / d value = -inverse^3 * value / D
                d_value = weights[i][:, None] * grad + toward[:, None] * vector
                d_value -= (toward * score * inverse * (1.0 / D))[:, None] * value
                if (LATER >> i) & 1:
                    d_value += _tile(later[i], at, live).to(tl.float32)
                tl.store(grads[i] + at, d_value.to(values[i].dtype), mask=live)
    share = tl.program_id(0) * D + column
    tl.store(d_vectors + share, tl.sum(d_vector, 0), mask=column < D)
    if d_outs is not None:
        tl.store(d_outs + share, tl.sum(d_out, 0), mask=column < D)


MOST_WIDTH, MOST_SOURCES, MOST_TOKENS = 2048, 10, 1 << 26
PROGRAMS = 4  # of the backward kernel, for each multiprocessor
_TILE = 1024  # values of a program's tokens at a time: 8 a thread, 16 bytes of each row


class Settings(NamedTuple):
    """How tokens of one width are worked on."""

    constants: dict[str, int]
    options: dict[str, int]


@lru_cache(maxsize=64)
def settings(D: int) -> Settings:
    """For rows of D values."""
    block = max(16, triton.next_power_of_2(D))
    return Settings({"D": D, "BLOCK": block, "ROWS": max(1, _TILE // block)}, {"num_warps": max(4, block // 256)})


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16 for rows of 768 and 1536: layers' reads with sum and norm, bare ones.

    Later reads may have handed back gradients of all sources, or only of the newest one.
    """
    found = []
    reads = [(768, 9, True, 511), (1536, 9, True, 511), (768, 2, False, 3)]
    reads += [(768, L, True, later) for L in (2, 5) for later in (2**L - 1, 2 ** (L - 1))]
    for D, L, normed, later in reads:
        constants, options = settings(D)
        rows = dict.fromkeys(("sources", "later", "grads"), ("*bf16",) * L)
        absent = ("mixed", "d_mixed") if normed else ("addend", "newest", "out_weight", "normed", "d_normed", "d_outs")
        known: dict[str, Any] = rows | dict.fromkeys(("stats", "d_vectors", "d_outs"), "*fp32") | constants
        known |= {"T": "i32", "eps": "fp32", "norm_eps": "fp32", "WANTED": 2**L - 1, "LATER": later}
        for kernel in (narrow_forward_kernel, narrow_backward_kernel):
            arguments = {x: None if x in absent else known.get(x, "*bf16") for x in kernel.arg_names}
            found.append((kernel, arguments, options | {"num_stages": 3}))
    return found
