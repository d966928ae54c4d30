"""Triton kernels of Attention Residuals for narrow rows: all sources of a token lie in registers at once.

A row is cut into parts whose length is a power of two, so that no lane idles; all loads of a token are under way before
anything is added up, and one reduction across a program's warps serves up to eight sums. Backward they also add what
later reads of the same sources handed back, so that no other pass has to.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

FIRST, LAST, ANY = tl.constexpr("evict_first"), tl.constexpr("evict_last"), tl.constexpr("")


@triton.jit
def _row(pointer, at, D: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr):
    """The parts of a row. KEEP: which cached rows are to go first; readings that differ in it stay two readings."""
    found = ()
    for k in tl.static_range(PARTS):
        column = k * BLOCK + tl.arange(0, BLOCK)
        if PARTS * BLOCK == D:
            found = found + (tl.load(pointer + at + column, eviction_policy=KEEP),)
        else:
            found = found + (tl.load(pointer + at + column, mask=column < D, other=0.0, eviction_policy=KEEP),)
    return found


@triton.jit
def _store(pointer, at, part, value, D: tl.constexpr, PARTS: tl.constexpr):
    column = part * value.shape[0] + tl.arange(0, value.shape[0])
    value = value.to(pointer.dtype.element_ty)
    if PARTS * value.shape[0] == D:
        tl.store(pointer + at + column, value)
    else:
        tl.store(pointer + at + column, value, mask=column < D)


@triton.jit
def _scored(query, norm_weight, D: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Parts of norm weight times query."""
    a = _row(query, 0, D, PARTS, BLOCK, LAST)
    b = _row(norm_weight, 0, D, PARTS, BLOCK, LAST)
    found = ()
    for k in tl.static_range(PARTS):
        found = found + (a[k].to(tl.float32) * b[k].to(tl.float32),)
    return found


@triton.jit
def _share(x, NEAR: tl.constexpr):
    """Sums of NEAR neighbouring values, which one thread holds."""
    return tl.sum(tl.reshape(x, [x.shape[0] // NEAR, NEAR]), 1)


@triton.jit
def _product(a, b, NEAR: tl.constexpr):
    """Each thread's share of the dot product of two rows."""
    total = a[0].to(tl.float32) * b[0].to(tl.float32)
    for k in tl.static_range(1, len(a)):
        total += a[k].to(tl.float32) * b[k].to(tl.float32)
    return _share(total, NEAR)


@triton.jit
def _added_up(a, b):
    """Sums of the parts of two tuples, or the second one if the first is empty."""
    found = ()
    for i in tl.static_range(len(b)):
        if len(a) == 0:
            found = found + (b[i],)
        else:
            found = found + (a[i] + b[i],)
    return found


@triton.jit
def _mixture(rows, weights, k: tl.constexpr):
    """Part k of the weighted sum of rows."""
    total = weights[0] * rows[0][k].to(tl.float32)
    for i in tl.static_range(1, len(rows)):
        total += weights[i] * rows[i][k].to(tl.float32)
    return total


@triton.jit
def _added(pointer, at, D: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, WANTED: tl.constexpr):
    if WANTED:
        found = _row(pointer, at, D, PARTS, BLOCK, FIRST)
    else:
        found = ()
    return found


@triton.jit
def _two(a, b):
    x, y = tl.split(tl.sum(tl.join(a, b), 0))
    return x, y


@triton.jit
def _four(a, b, c, d):
    low, high = tl.split(tl.sum(tl.join(tl.join(a, b), tl.join(c, d)), 0))
    w, x = tl.split(low)
    y, z = tl.split(high)
    return w, x, y, z


@triton.jit
def _eight(a, b, c, d, e, f, g, h):
    first, second = tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h))
    low, high = tl.split(tl.sum(tl.join(first, second), 0))
    s, t = tl.split(low)
    u, v = tl.split(high)
    found = tl.split(s)
    found = found + tl.split(t)
    found = found + tl.split(u)
    return found + tl.split(v)


@triton.jit
def _sums(x):
    """The sum of each of a tuple of tensors; up to eight share their way across the warps."""
    n: tl.constexpr = len(x)
    found = ()
    for i in tl.static_range(0, n // 8 * 8, 8):
        found = found + _eight(x[i], x[i + 1], x[i + 2], x[i + 3], x[i + 4], x[i + 5], x[i + 6], x[i + 7])
    if n % 8 >= 4:
        m: tl.constexpr = n // 8 * 8
        found = found + _four(x[m], x[m + 1], x[m + 2], x[m + 3])
    if n % 4 >= 2:
        j: tl.constexpr = n // 4 * 4
        found = found + _two(x[j], x[j + 1])
    if n % 2:
        found = found + (tl.sum(x[n - 1], 0),)
    return found


@triton.jit(do_not_specialize=["T", "eps", "norm_eps"])
def narrow_forward_kernel(
    sources, addend, query, norm_weight, out_weight, newest, mixed, normed, stats, T, eps, norm_eps,
    D: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """A token's mixture, its norm, its last source with what is added to it; stats [T, 3, L]: weight, score, size."""
    L: tl.constexpr = len(sources)
    token = tl.program_id(0).to(tl.int64)
    at = token * D
    vector = _scored(query, norm_weight, D, PARTS, BLOCK)
    rows = ()
    for i in tl.static_range(L):
        rows = rows + (_row(sources[i], at, D, PARTS, BLOCK, ANY),)
    if addend is not None:
        more = _row(addend, at, D, PARTS, BLOCK, ANY)
        last = ()
        for k in tl.static_range(PARTS):
            value = (rows[L - 1][k].to(tl.float32) + more[k].to(tl.float32)).to(more[k].dtype)
            _store(newest, at, k, value, D, PARTS)
            last = last + (value,)
        rows = rows[: L - 1] + (last,)
    shares = ()
    for i in tl.static_range(L):
        shares = shares + (_product(rows[i], rows[i], NEAR), _product(rows[i], vector, NEAR))
    sums = _sums(shares)
    place = stats + token * (3 * L)
    scores = ()
    top = float("-inf")
    for i in tl.static_range(L):
        inverse = tl.rsqrt(sums[2 * i] * (1.0 / D) + eps)
        scores = scores + (sums[2 * i + 1] * inverse,)
        top = tl.maximum(top, scores[i])
        tl.store(place + (L + i), scores[i])
        tl.store(place + (2 * L + i), inverse)
    total = 0.0
    weights = ()
    for i in tl.static_range(L):
        weights = weights + (tl.exp(scores[i] - top),)
        total += weights[i]
    for i in tl.static_range(L):
        tl.store(place + i, weights[i] / total)
    rounded = ()
    scale = 1.0 / total
    for k in tl.static_range(PARTS):
        rounded = rounded + ((_mixture(rows, weights, k) * scale).to(sources[0].dtype.element_ty),)
        if mixed is not None:
            _store(mixed, at, k, rounded[k], D, PARTS)
    if normed is not None:
        out = _row(out_weight, 0, D, PARTS, BLOCK, LAST)
        inverse = tl.rsqrt(tl.sum(_product(rounded, rounded, NEAR), 0) * (1.0 / D) + norm_eps)
        for k in tl.static_range(PARTS):
            y = (rounded[k].to(tl.float32) * inverse).to(rounded[k].dtype)
            _store(normed, at, k, y.to(tl.float32) * out[k].to(tl.float32), D, PARTS)


@triton.jit(do_not_specialize=["T", "norm_eps"])
def narrow_backward_kernel(
    sources, later, grads, query, norm_weight, out_weight, d_mixed, d_normed, stats, d_vectors, d_outs, T, norm_eps,
    D: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, NEAR: tl.constexpr, AHEAD: tl.constexpr,
    WANTED: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """Gradients of the sources (of source i if bit i of WANTED is set), and this program's share of the vectors'.

    Where bit i of LATER is set, `later[i]` is the gradient that source i has from later reads, and is added.
    """
    L: tl.constexpr = len(sources)
    d_vector = ()
    d_out = ()
    for _ in tl.static_range(PARTS):
        d_vector = d_vector + (tl.zeros([BLOCK], tl.float32),)
        d_out = d_out + (tl.zeros([BLOCK], tl.float32),)
    for token in tl.range(tl.program_id(0), T, tl.num_programs(0)):
        wide_token = tl.zeros([], tl.int64) + token
        at = wide_token * D
        place = stats + wide_token * (3 * L)
        rows, weights = (), ()
        for i in tl.static_range(L):
            rows = rows + (_row(sources[i], at, D, PARTS, BLOCK, LAST),)
            weights = weights + (tl.load(place + i),)
        # with g the mixture's gradient, each source needs g . v: of a norm g is inverse * (scaled - shrink * mixture)
        if d_normed is not None:
            d_y = _row(d_normed, at, D, PARTS, BLOCK, FIRST)
            out = _row(out_weight, 0, D, PARTS, BLOCK, LAST)
            mixture, scaled = (), ()
        if d_mixed is not None:
            d_m = _row(d_mixed, at, D, PARTS, BLOCK, FIRST)
        shares = ()
        for k in tl.static_range(PARTS):
            part = ()
            if d_normed is not None:
                mixture = mixture + (_mixture(rows, weights, k),)  # not rounded, see attn_res_kernel._mixture
                scaled = scaled + (d_y[k].to(tl.float32) * out[k].to(tl.float32),)
                for i in tl.static_range(L):
                    value = rows[i][k].to(tl.float32)
                    part = part + (_share(scaled[k] * value, NEAR), _share(mixture[k] * value, NEAR))
            if d_mixed is not None:
                for i in tl.static_range(L):
                    part = part + (_share(d_m[k].to(tl.float32) * rows[i][k].to(tl.float32), NEAR),)
            shares = _added_up(shares, part)
        sums = _sums(shares)
        inverse, shrink = 0.0, 0.0
        if d_normed is not None:
            along, square = 0.0, 0.0
            for i in tl.static_range(L):
                along += weights[i] * sums[2 * i]
                square += weights[i] * sums[2 * i + 1]
            inverse = tl.rsqrt(square * (1.0 / D) + norm_eps)
            shrink = inverse * inverse * along * (1.0 / D)
        d_weights = ()
        mean = 0.0
        for i in tl.static_range(L):
            if d_normed is None:
                d_weight = sums[i]
            else:
                d_weight = inverse * (sums[2 * i] - shrink * sums[2 * i + 1])
                if d_mixed is not None:
                    d_weight += sums[2 * L + i]
            d_weights = d_weights + (d_weight,)
            mean += weights[i] * d_weight
        vector = _scored(query, norm_weight, D, PARTS, BLOCK)
        grad = ()
        for k in tl.static_range(PARTS):
            if d_normed is None:
                part = d_m[k].to(tl.float32)
            else:
                part = inverse * (scaled[k] - shrink * mixture[k])
                if d_mixed is not None:
                    part += d_m[k].to(tl.float32)
            grad = grad + (part,)
        if d_normed is not None:
            more = ()
            for k in tl.static_range(PARTS):
                more = more + (d_out[k] + d_y[k].to(tl.float32) * (mixture[k] * inverse),)
            d_out = more
        # once more, from the caches: kept, they would be kept widened, in twice the registers
        again, add = (), ()
        for i in tl.static_range(min(AHEAD, L)):
            again = again + (_row(sources[i], at, D, PARTS, BLOCK, FIRST),)
            add = add + (_added(later[i], at, D, PARTS, BLOCK, (LATER >> i) & 1),)
        for i in tl.static_range(L):
            if i + AHEAD < L:  # loads go ahead of the stores that the compiler keeps them behind
                again = again + (_row(sources[i + AHEAD], at, D, PARTS, BLOCK, FIRST),)
                add = add + (_added(later[i + AHEAD], at, D, PARTS, BLOCK, (LATER >> (i + AHEAD)) & 1),)
            # score = inverse * (value . vector), and d inverse / d value = -inverse^3 * value / D
            inverse_i = tl.load(place + (2 * L + i))
            toward = weights[i] * (d_weights[i] - mean) * inverse_i
            own = toward * tl.load(place + (L + i)) * inverse_i * (1.0 / D)
            more = ()
            for k in tl.static_range(PARTS):
                value = again[i][k].to(tl.float32)
                more = more + (d_vector[k] + toward * value,)
                if (WANTED >> i) & 1:
                    d_value = weights[i] * grad[k]
                    if (LATER >> i) & 1:
                        d_value += add[i][k].to(tl.float32)
                    d_value += toward * vector[k]
                    _store(grads[i], at, k, d_value - own * value, D, PARTS)
            d_vector = more
    share = tl.program_id(0) * D
    for k in tl.static_range(PARTS):
        _store(d_vectors, share, k, d_vector[k], D, PARTS)
        if d_outs is not None:
            _store(d_outs, share, k, d_out[k], D, PARTS)


MOST_WIDTH, MOST_SOURCES, MOST_TOKENS = 2048, 10, (1 << 31) - 1
AHEAD = 3  # sources and gradients of later reads are loaded so many sources before they are used


class Settings(NamedTuple):
    """How a token's rows are worked on; backward by `programs` programs for each multiprocessor."""

    constants: dict[str, int]
    options: dict[str, int]
    programs: int


@lru_cache(maxsize=256)
def settings(D: int, L: int, *, backward: bool) -> Settings:
    """For L rows of D values: at most three parts, few idle lanes; a thread has four values of each part."""
    block = min((size for size in (128, 256, 512, 1024) if 3 * size >= D), key=lambda size: -D % size)
    parts, warps = -(-D // block), block // 128
    constants = {"D": D, "PARTS": parts, "BLOCK": block, "NEAR": 4}
    if not backward:
        return Settings(constants, {"num_warps": warps}, 0)
    constants["AHEAD"] = AHEAD
    if L <= 5:
        return Settings(constants, {"num_warps": warps, "maxnreg": 128}, 16 // warps)
    return Settings(constants, {"num_warps": warps}, (12 if L <= 7 else 8) // warps)


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16: layers' reads with sum and norm, bare ones; widths of 768, 1536, others.

    Later reads may have handed back gradients of all sources, or only of the newest one.
    """
    found = []
    reads = [(1536, L, True, 2**L - 1) for L in (8, 2, 5, 6, 7, 10)] + [(1536, 5, True, 16), (768, 2, False, 3)]
    reads += [(768, 7, True, 127), (2048, 10, True, 1023), (1000, 5, True, 31)]
    for D, L, normed, later in reads:
        rows = dict.fromkeys(("sources", "later", "grads"), ("*bf16",) * L)
        absent = ("mixed", "d_mixed") if normed else ("addend", "newest", "out_weight", "normed", "d_normed", "d_outs")
        for kernel in (narrow_forward_kernel, narrow_backward_kernel):
            how = settings(D, L, backward=kernel is narrow_backward_kernel)
            known: dict[str, Any] = rows | dict.fromkeys(("stats", "d_vectors", "d_outs"), "*fp32") | how.constants
            known |= {"T": "i32", "eps": "fp32", "norm_eps": "fp32", "WANTED": 2**L - 1, "LATER": later}
            arguments = {x: None if x in absent else known.get(x, "*bf16") for x in kernel.arg_names}
            found.append((kernel, arguments, how.options | {"num_stages": 3}))
    return found
