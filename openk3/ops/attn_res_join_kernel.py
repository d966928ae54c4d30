"""Triton kernels of two-phase Attention Residuals in training: joining a read to its phase-one mixture, and gradients.

A read takes the mixture o of the finished blocks, the log l of its sum of exponentials, and the running block v:
a = sigmoid(l - score of v), and what is normed is a o + (1 - a) v. Backward each read leaves d = a g, g being the
gradient of what was normed, and two numbers for each token; when all reads of a block are done, three kernels make the
gradients of the finished blocks and of the queries for all reads at once:

    c_qi = p_qi (d_q . v_i + e_q)      e_q = -a_q g_q . (a_q o_q + (1 - a_q) v)
    d v_i = sum_q (p_qi d_q + c_qi r_i w_q) - sum_q c_qi s_qi r_i^2 / D v_i      d w_q = sum_i c_qi r_i v_i

Behind a norm e is zero up to eps, and where the running block has little weight the c_qi of a query nearly cancel: what
is left is less than the roundings of o and d. So d_q . v_i is taken from d_q + x o_q, with the x for which
sum_i p_qi d_q . v_i is what the read knows it to be.
"""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.attn_res_kernel import _add_two, _rounded, _row, _store_row, constants


@triton.jit
def _shares_of(difference):
    """(1 / (1 + e^x), 1 / (1 + e^-x)): weights of the finished blocks and of the running one, x ahead by score."""
    return tl.div_rn(1.0, 1.0 + tl.exp(difference)), tl.div_rn(1.0, 1.0 + tl.exp(-difference))


@triton.jit(do_not_specialize=["T"])
def join_forward_kernel(
    mixture, logs, partial, addend, vector, out_weight, newest, normed, stats, T, eps, norm_eps,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's norm, and its block sum with `addend`; stats [3, T] of that: score less log, score, reciprocal size."""
    token = tl.program_id(0).to(tl.int64)
    at = token * D
    index = tl.arange(0, BLOCK)
    value = _row(partial, at, index, D)
    if addend is not None:
        value = _rounded(value + _row(addend, at, index, D), newest)
        _store_row(newest, at, value, index, D)
    square, along = tl.reduce((value * value, value * _row(vector, 0, index, D)), 0, _add_two)
    inverse = tl.rsqrt(square / D + eps)
    score = along * inverse
    difference = score - tl.load(logs + token)
    old, new = _shares_of(difference)
    tl.store(stats + token, difference)
    tl.store(stats + T + token, score)
    tl.store(stats + 2 * T + token, inverse)
    total = _row(mixture, at, index, D) * old + value * new
    total = _rounded(total, mixture)
    inverse = tl.rsqrt(tl.sum(total * total, 0) / D + norm_eps)
    _store_row(normed, at, _rounded(total * inverse, mixture) * _row(out_weight, 0, index, D), index, D)


@triton.jit(do_not_specialize=["T"])
def join_backward_kernel(
    mixture, partial, vector, out_weight, d_normed, d_newest, stats, d_mixture, d_partial, sums, rests,
    d_vectors, d_outs, T, norm_eps,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d, d . o and e of each token, the gradient of the block sum, and shares of those of vector and out weight."""
    index = tl.arange(0, BLOCK)
    token = tl.program_id(0).to(tl.int64)
    share = token * D
    d_vector = tl.zeros([BLOCK], tl.float32)
    while token < T:
        at = token * D
        old, new = _shares_of(tl.load(stats + token))
        # not rounded, see attn_res_kernel._mixture
        total = _row(mixture, at, index, D) * old + _row(partial, at, index, D) * new
        d_y = _row(d_normed, at, index, D)
        scaled = d_y * _row(out_weight, 0, index, D)
        along, size = tl.reduce((scaled * total, total * total), 0, _add_two)
        inverse = tl.rsqrt(size / D + norm_eps)
        so_far = tl.load(d_outs + (share + index), mask=(index < D) & (token >= tl.num_programs(0)), other=0.0)
        _store_row(d_outs, share, so_far + d_y * total * inverse, index, D)
        grad = inverse * scaled - (inverse * inverse * inverse * along / D) * total
        _store_row(d_mixture, at, old * grad, index, D)
        value = _row(partial, at, index, D)  # again: registers are short
        by_old, by_new = tl.reduce((grad * _row(mixture, at, index, D), grad * value), 0, _add_two)
        tl.store(sums + token, old * by_old)
        tl.store(rests + token, -old * (old * by_old + new * by_new))
        score = tl.load(stats + T + token)
        inverse = tl.load(stats + 2 * T + token)
        toward = old * new * (by_new - by_old) * inverse
        d_vector += toward * value
        d_value = new * grad + toward * _row(vector, 0, index, D) - toward * score * inverse / D * value
        if d_newest is not None:
            d_value += _row(d_newest, at, index, D)
        _store_row(d_partial, at, d_value, index, D)
        token += tl.num_programs(0)
    _store_row(d_vectors, share, d_vector, index, D)


@triton.jit
def _pointers(sources, number):
    """The pointers numbered so, as a tensor; the first one beyond the last."""
    chosen = tl.where(number == 0, sources[0], sources[0])
    for j in tl.static_range(1, len(sources)):
        chosen = tl.where(number == j, sources[j], chosen)
    return chosen


@triton.jit(do_not_specialize=["T", "Q"])
def phase_dots_kernel(
    sources, mixtures, d_mixtures, weights, logs, sums, rests, shares, shrinks, T, Q, eps,
    D: tl.constexpr, QUERIES: tl.constexpr, SOURCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's c_qi r_i [T, L, Q] from mixtures and their gradients [Q, T, D]; shrinks [T, L] of blocks."""
    L: tl.constexpr = len(sources)
    token = tl.program_id(0).to(tl.int64)
    query = tl.arange(0, QUERIES)
    number = tl.arange(0, SOURCES)
    rows = _pointers(sources, number)[:, None] + token * D
    asked = query < Q
    there = (number < L)[:, None]
    dots = tl.zeros([QUERIES, SOURCES], tl.float32)
    along = tl.zeros([QUERIES, SOURCES], tl.float32)
    square = tl.zeros([SOURCES], tl.float32)
    for start in range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        at = (query[:, None] * T.to(tl.int64) + token) * D + column
        d = tl.load(d_mixtures + at, mask=asked[:, None] & (column < D), other=0.0)
        o = tl.load(mixtures + at, mask=asked[:, None] & (column < D), other=0.0)
        value = tl.load(rows + column, mask=there & (column < D), other=0.0)
        wide = value.to(tl.float32)
        square += tl.sum(wide * wide, 1)
        dots = tl.dot(d, tl.trans(value), dots, input_precision="ieee")
        along = tl.dot(o, tl.trans(value), along, input_precision="ieee")
    inverse = tl.rsqrt(square / D + eps)
    inside = asked[:, None] & (number < L)[None, :]
    at = (token * L + number[None, :]) * Q + query[:, None]
    weight = tl.load(weights + at, mask=inside, other=0.0)
    log = tl.load(logs + query * T.to(tl.int64) + token, mask=asked, other=0.0)
    rest = tl.load(rests + query * T.to(tl.int64) + token, mask=asked, other=0.0)
    known = tl.load(sums + query * T.to(tl.int64) + token, mask=asked, other=0.0)
    size = tl.sum(weight * along, 1)
    missing = tl.where(size > 0, (known - tl.sum(weight * dots, 1)) / tl.where(size > 0, size, 1.0), 0.0)
    toward = weight * (dots + missing[:, None] * along + rest[:, None])
    score = tl.where(weight > 0, tl.log(tl.where(weight > 0, weight, 1.0)) + log[:, None], 0.0)
    tl.store(shares + at, toward * inverse[None, :], mask=inside)
    shrink = tl.sum(toward * score, 0) * inverse * inverse / D
    tl.store(shrinks + token * L + number, shrink, mask=number < L)


@triton.jit(do_not_specialize=["T", "Q"])
def phase_sources_kernel(
    sources, grads, d_mixtures, vectors, weights, shares, shrinks, T, Q,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    """Gradients of the finished blocks (of block i if bit i of WANTED is set) for some tokens and columns."""
    L: tl.constexpr = len(sources)
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    here = token < T
    live = here[:, None] & (column < D)[None, :]
    at = token[:, None] * D + column[None, :]
    sums = ()
    for _ in tl.static_range(L):
        sums = sums + (tl.zeros([ROWS, BLOCK], tl.float32),)
    for q in range(Q):
        d = tl.load(d_mixtures + (q * T.to(tl.int64) * D + at), mask=live, other=0.0).to(tl.float32)
        vector = tl.load(vectors + (q * D + column), mask=column < D, other=0.0)[None, :]
        following = ()
        for i in tl.static_range(L):
            weight = tl.load(weights + ((token * L + i) * Q + q), mask=here, other=0.0)
            toward = tl.load(shares + ((token * L + i) * Q + q), mask=here, other=0.0)
            following = following + (sums[i] + weight[:, None] * d + toward[:, None] * vector,)
        sums = following
    for i in tl.static_range(L):
        if (WANTED >> i) & 1:
            shrink = tl.load(shrinks + (token * L + i), mask=here, other=0.0)
            value = tl.load(sources[i] + at, mask=live, other=0.0).to(tl.float32)
            tl.store(grads[i] + at, (sums[i] - shrink[:, None] * value).to(grads[i].dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["T", "Q", "tokens"])
def phase_vectors_kernel(
    sources, shares, d_vectors, T, Q, tokens,
    D: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sum over `tokens` tokens of c_qi r_i v_i for some columns, into [programs, Q, D]; c r as bfloat16 parts."""
    L: tl.constexpr = len(sources)
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    part = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    query = tl.arange(0, QUERIES)
    end = tl.minimum((part + 1) * tokens, T)
    total = tl.zeros([QUERIES, BLOCK], tl.float32)
    for low in range(part * tokens, end, ROWS):
        token = (low + tl.arange(0, ROWS)).to(tl.int64)
        here = token < end
        for i in tl.static_range(L):
            at = token[:, None] * D + column[None, :]
            value = tl.load(sources[i] + at, mask=here[:, None] & (column < D)[None, :], other=0.0)
            at = (token * L + i)[None, :] * Q + query[:, None]
            toward = tl.load(shares + at, mask=here[None, :] & (query < Q)[:, None], other=0.0)
            if value.dtype == tl.bfloat16:
                for _ in tl.static_range(2):
                    narrow = toward.to(tl.bfloat16)
                    toward -= narrow.to(tl.float32)
                    total = tl.dot(narrow, value, total)
            else:
                total = tl.dot(toward, value.to(tl.float32), total, input_precision="ieee")
    at = (part.to(tl.int64) * Q + query[:, None]) * D + column[None, :]
    tl.store(d_vectors + at, total, mask=(query < Q)[:, None] & (column < D)[None, :])


MOST_QUERIES, MOST_SOURCES = 32, 16
Settings = tuple[dict[str, int], dict[str, int]]


def join_constants(D: int, *, backward: bool) -> Settings:
    """Constants and launch options of the joining kernels, which hold whole rows."""
    return constants(D, 16 if backward else 8)


def dots_constants(D: int, Q: int) -> Settings:
    """Constants and launch options of `phase_dots_kernel`."""
    block = min(128, max(16, triton.next_power_of_2(D)))
    known = {"D": D, "QUERIES": max(16, triton.next_power_of_2(Q)), "SOURCES": 16, "BLOCK": block}
    return known, {"num_warps": 2, "num_stages": 3}


def sources_constants(D: int, wanted: int) -> Settings:
    """Constants and launch options of `phase_sources_kernel`."""
    block = min(256, triton.next_power_of_2(D))
    return {"D": D, "ROWS": 4, "BLOCK": block, "WANTED": wanted}, {"num_warps": 4, "num_stages": 2}


def vectors_constants(D: int, Q: int) -> Settings:
    """Constants and launch options of `phase_vectors_kernel`."""
    block = min(128, max(16, triton.next_power_of_2(D)))
    known = {"D": D, "QUERIES": max(16, triton.next_power_of_2(Q)), "ROWS": 32, "BLOCK": block}
    return known, {"num_warps": 4, "num_stages": 1}


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile for 24 reads over eight blocks of width 7168 and 8 over four of 768, in bfloat16."""
    floats = ("logs", "vector", "vectors", "stats", "sums", "rests", "d_vectors", "d_outs")
    floats = (*floats, "weights", "shares", "shrinks")
    cases = []
    for D, L, Q in ((7168, 8, 24), (768, 4, 8)):
        known: dict[str, Any] = dict.fromkeys(floats, "*fp32") | dict.fromkeys(("T", "Q", "tokens"), "i32")
        known |= {"eps": "fp32", "norm_eps": "fp32", "sources": ("*bf16",) * L, "grads": ("*bf16",) * L}
        for kernel, (chosen, options) in (
            (join_forward_kernel, join_constants(D, backward=False)),
            (join_backward_kernel, join_constants(D, backward=True)),
            (phase_dots_kernel, dots_constants(D, Q)),
            (phase_sources_kernel, sources_constants(D, 2**L - 1)),
            (phase_vectors_kernel, vectors_constants(D, Q)),
        ):
            arguments = {name: (known | chosen).get(name, "*bf16") for name in kernel.arg_names}
            cases.append((kernel, arguments, {"num_stages": 3} | options))
    return cases
