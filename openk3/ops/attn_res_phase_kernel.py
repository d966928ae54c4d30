"""Triton kernels of two-phase Attention Residuals: many queries over the finished blocks, then one merge for each.

Phase one scores all queries by matrix products (float32 vectors as three bfloat16 parts, so that nothing is lost) and
mixes the blocks for each; the blocks are read twice however many queries there are. Phase two joins the running block
to one of the mixtures, after adding what is still to be added to it, with the norm that follows.
"""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.attn_res_kernel import _add_two, _rounded, _row, _store_row, constants


@triton.jit
def _scores(value, vector, total, one):
    """total + value @ vector^T in float32; [T, D], [Q, D]. `one` is 1.

    Tensor cores cut off what they add to a long sum: each block of columns is summed from zero and added with rounding.
    """
    part = tl.zeros(total.shape, tl.float32)
    if value.dtype == tl.bfloat16:
        for _ in tl.static_range(3):
            narrow = vector.to(tl.bfloat16)
            vector -= narrow.to(tl.float32)
            part = tl.dot(value, tl.trans(narrow), part)
    else:
        part = tl.dot(value.to(tl.float32), tl.trans(vector), part, input_precision="ieee")
    return part * one + total  # a plain addition would become the product's own


@triton.jit(do_not_specialize=["T", "Q"])
def phase_score_kernel(
    sources, vectors, weights, tops, totals, T, Q, eps, one,
    D: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Softmax of Q queries over L sources: weights [T, L, Q], largest scores and sums of exponentials [Q, T]."""
    L: tl.constexpr = len(sources)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    live = (token < T)[:, None]
    scores = ()
    squares = ()
    for _ in tl.static_range(L):
        scores = scores + (tl.zeros([ROWS, QUERIES], tl.float32),)
        squares = squares + (tl.zeros([ROWS], tl.float32),)
    for start in range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        vector = tl.load(vectors + query[:, None] * D + column, mask=(query < Q)[:, None] & (column < D), other=0.0)
        scored = ()
        squared = ()
        for i in tl.static_range(L):
            at = token[:, None].to(tl.int64) * D + column
            value = tl.load(sources[i] + at, mask=live & (column < D), other=0.0)
            scored = scored + (_scores(value, vector, scores[i], one),)
            wide = value.to(tl.float32)
            squared = squared + (squares[i] + tl.sum(wide * wide, 1),)
        scores = scored
        squares = squared
    found = ()
    top = tl.full([ROWS, QUERIES], float("-inf"), tl.float32)
    for i in tl.static_range(L):
        found = found + (scores[i] * tl.rsqrt(squares[i] / D + eps)[:, None],)
        top = tl.maximum(top, found[i])
    total = tl.zeros([ROWS, QUERIES], tl.float32)
    for i in tl.static_range(L):
        total += tl.exp(found[i] - top)
    live = live & (query < Q)[None, :]
    for i in tl.static_range(L):
        at = (token[:, None].to(tl.int64) * L + i) * Q + query[None, :]
        tl.store(weights + at, tl.div_rn(tl.exp(found[i] - top), total), mask=live)
    at = query[None, :].to(tl.int64) * T + token[:, None]
    tl.store(tops + at, top, mask=live)
    tl.store(totals + at, total, mask=live)


@triton.jit(do_not_specialize=["T", "Q"])
def phase_mix_kernel(sources, weights, mixtures, T, Q, D: tl.constexpr, BLOCK: tl.constexpr):
    """The mixtures [Q, T, D] by weights [T, L, Q]; program = block of a token's columns."""
    L: tl.constexpr = len(sources)
    token = (tl.program_id(0) // tl.cdiv(D, BLOCK)).to(tl.int64)
    column = tl.program_id(0) % tl.cdiv(D, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    values = ()
    for i in tl.static_range(L):
        values = values + (tl.load(sources[i] + token * D + column, mask=column < D, other=0.0).to(tl.float32),)
    at = token * D + column
    for q in range(Q):
        mixture = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(L):
            mixture += tl.load(weights + (token * L + i) * Q + q) * values[i]
        tl.store(mixtures + at, mixture.to(mixtures.dtype.element_ty), mask=column < D)
        at += T.to(tl.int64) * D


@triton.jit(do_not_specialize_on_alignment=["tops", "totals"])
def phase_merge_kernel(
    mixture, tops, totals, partial, addend, vector, out_weight, newest, mixed, normed, eps, norm_eps,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Join a token's running block, plus `addend` if there is one, to its phase-one mixture; mixed, or normed, or both.

    Without `partial` the block is `addend` alone; without either the mixture is the result.
    """
    token = tl.program_id(0).to(tl.int64)
    at = token * D
    index = tl.arange(0, BLOCK)
    total = _row(mixture, at, index, D)
    if partial is not None:
        value = _row(partial, at, index, D)
        if addend is not None:
            value = _rounded(value + _row(addend, at, index, D), newest)
            _store_row(newest, at, value, index, D)
        square, along = tl.reduce((value * value, value * _row(vector, 0, index, D)), 0, _add_two)
        score = along * tl.rsqrt(square / D + eps)
        top = tl.load(tops + token)
        highest = tl.maximum(top, score)
        old = tl.exp(top - highest) * tl.load(totals + token)
        new = tl.exp(score - highest)
        total = total * tl.div_rn(old, old + new) + value * tl.div_rn(new, old + new)
    if mixed is not None:
        _store_row(mixed, at, total, index, D)
    if normed is not None:
        like = mixture
        if partial is not None:
            like = partial
        total = _rounded(total, like)
        inverse = tl.rsqrt(tl.sum(total * total, 0) / D + norm_eps)
        _store_row(normed, at, _rounded(total * inverse, like) * _row(out_weight, 0, index, D), index, D)


def score_constants(D: int, queries: int) -> dict[str, int]:
    """Constants and launch options of the scoring kernel."""
    count = min(32, max(16, triton.next_power_of_2(queries)))
    block = min(64, max(16, triton.next_power_of_2(D)))
    return {"D": D, "ROWS": 16, "QUERIES": count, "BLOCK": block, "num_warps": 4}


def mix_constants(D: int) -> dict[str, int]:
    """Constants and launch options of the mixing kernel."""
    block = min(1024, triton.next_power_of_2(D))
    return {"D": D, "BLOCK": block, "num_warps": min(4, max(1, block // 256))}


def merge_constants(D: int) -> tuple[dict[str, int], dict[str, int]]:
    """Constants and launch options of the merging kernel."""
    return constants(D, 16)


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile for 24 queries over eight blocks of width 7168 in bfloat16 and 8 over four of 768."""
    stats = dict.fromkeys(("weights", "vectors", "vector", "tops", "totals"), "*fp32")
    merging = dict.fromkeys(("mixture", "mixtures", "partial", "addend", "newest", "normed", "out_weight"), "*bf16")
    numbers = {"T": "i32", "Q": "i32", "eps": "fp32", "one": "fp32", "norm_eps": "fp32", "mixed": None}
    cases = []
    for D, L, Q in ((7168, 8, 24), (768, 4, 8)):
        known = stats | merging | numbers | {"sources": ("*bf16",) * L}
        work = {phase_score_kernel: score_constants(D, Q), phase_mix_kernel: mix_constants(D)}
        chosen, options = merge_constants(D)
        work[phase_merge_kernel] = chosen | options
        for kernel, chosen in work.items():
            options = {"num_warps": chosen["num_warps"], "num_stages": 3}
            cases.append((kernel, {name: (known | chosen)[name] for name in kernel.arg_names}, options))
    return cases
