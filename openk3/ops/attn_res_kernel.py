"""Triton kernels of Attention Residuals: mixing depth sources with the norm that follows, and the backward pass.

A program owns one token. Forward: sources pass through registers one by one under a running softmax, so each is read
once; the next is on its way while one is summed. Backward: a program takes every so many tokens and goes over a token's
sources two or three times, of which the first is from memory and the others from a cache: for the mixture if a norm
followed, for the products with the gradient, and for what is written. Sums over tokens stay with their program; a
kernel of its own adds the programs' shares in one order.
"""

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl


@triton.jit
def _add_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _chosen(pointers, i):
    """The i-th of several pointers."""
    chosen = pointers[0]
    for j in tl.static_range(1, len(pointers)):
        chosen = tl.where(i == j, pointers[j], chosen)
    return chosen


@triton.jit
def _raw(pointer, at, index, D: tl.constexpr):
    """A row of D values from offset `at` on, zeros past the end."""
    if index.shape[0] == D:
        return tl.load(pointer + (at + index))
    else:
        return tl.load(pointer + (at + index), mask=index < D, other=0.0)


@triton.jit
def _row(pointer, at, index, D: tl.constexpr):
    """The same in float32."""
    return _raw(pointer, at, index, D).to(tl.float32)


@triton.jit
def _store_row(pointer, at, row, index, D: tl.constexpr):
    """Write a row, rounded to the format there."""
    if index.shape[0] == D:
        tl.store(pointer + (at + index), row.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer + (at + index), row.to(pointer.dtype.element_ty), mask=index < D)


@triton.jit
def _rounded(row, like):
    """A row in float32 as it would be after a detour through the format behind a pointer."""
    return row.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _vector(query, norm_weight, index, D: tl.constexpr):
    """norm weight * query, all that scores depend on."""
    return _row(query, 0, index, D) * _row(norm_weight, 0, index, D)


@triton.jit(do_not_specialize=["L"])
def mix_forward_kernel(
    sources, addend, query, norm_weight, out_weight, newest, mixed, normed, probs, scores, rrms, L, eps, norm_eps,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mixture of a token's first L sources, the norm of it, or both; and weights, scores and reciprocal sizes [T, L].

    `addend` (or None) is added to the last source first, and the sum written to `newest`.
    """
    at = tl.program_id(0).to(tl.int64) * D
    index = tl.arange(0, BLOCK)
    vector = _vector(query, norm_weight, index, D)
    total, top = 0.0, float("-inf")
    mixture = tl.zeros([BLOCK], tl.float32)
    number = tl.arange(0, len(sources))
    found = tl.full([len(sources)], float("-inf"), tl.float32)
    inverses = tl.zeros([len(sources)], tl.float32)
    ahead = _raw(sources[0], at, index, D)
    for i in range(L):
        value = ahead.to(tl.float32)
        ahead = _raw(_chosen(sources, tl.minimum(i + 1, L - 1)), at, index, D)
        if addend is not None:
            if i == L - 1:
                value = _rounded(value + _row(addend, at, index, D), newest)
                _store_row(newest, at, value, index, D)
        square, along = tl.reduce((value * value, value * vector), 0, _add_two)
        inverse = tl.rsqrt(square / D + eps)
        score = along * inverse
        found = tl.where(number == i, score, found)
        inverses = tl.where(number == i, inverse, inverses)
        highest = tl.maximum(top, score)
        shrink = tl.exp(top - highest)
        weight = tl.exp(score - highest)
        total = total * shrink + weight
        mixture = mixture * shrink + value * weight
        top = highest
    row = tl.program_id(0).to(tl.int64) * L + number
    tl.store(rrms + row, inverses, mask=number < L)
    tl.store(scores + row, found, mask=number < L)
    tl.store(probs + row, tl.div_rn(tl.exp(found - top), total), mask=number < L)
    mixture *= tl.div_rn(1.0, total)
    if mixed is not None:
        _store_row(mixed, at, mixture, index, D)
    if normed is not None:
        mixture = _rounded(mixture, sources[0])
        inverse = tl.rsqrt(tl.sum(mixture * mixture, 0) / D + norm_eps)
        _store_row(normed, at, _rounded(mixture * inverse, sources[0]) * _row(out_weight, 0, index, D), index, D)


@triton.jit
def _mixture(sources, probs, at, index, L, D: tl.constexpr):
    """The mixture of a token's sources by weights that are known, not rounded.

    The gradient of a norm is orthogonal to the mixture it is taken at. Were that the rounded one, the mean of the
    weights' gradients would be nothing but rounding, of the size of what small sources' own weights have.
    """
    mixture = tl.zeros([index.shape[0]], tl.float32)
    ahead = _raw(sources[0], at, index, D)
    for i in range(L):
        value = ahead.to(tl.float32)
        ahead = _raw(_chosen(sources, tl.minimum(i + 1, L - 1)), at, index, D)
        mixture += tl.load(probs + i) * value
    return mixture


@triton.jit(do_not_specialize=["T", "L", "wanted"])
def mix_backward_kernel(
    sources, grads, query, norm_weight, out_weight, d_mixed, d_normed, d_newest, probs, scores, rrms,
    d_vectors, d_outs, T, L, wanted, norm_eps, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the sources (of source i if bit i of `wanted` is set), and this program's share of the vectors'."""
    index = tl.arange(0, BLOCK)
    number = tl.arange(0, len(sources))
    d_vector = tl.zeros([BLOCK], tl.float32)
    token = tl.program_id(0).to(tl.int64)
    share = token * D
    while token < T:
        at = token * D
        if d_normed is not None:
            mixture = _mixture(sources, probs + token * L, at, index, L, D)
            d_y = _row(d_normed, at, index, D)
            scaled = d_y * _row(out_weight, 0, index, D)
            along, size = tl.reduce((scaled * mixture, mixture * mixture), 0, _add_two)
            inverse = tl.rsqrt(size / D + norm_eps)
            so_far = tl.load(d_outs + (share + index), mask=(index < D) & (token >= tl.num_programs(0)), other=0.0)
            _store_row(d_outs, share, so_far + d_y * mixture * inverse, index, D)
            scaled = _row(d_normed, at, index, D) * _row(out_weight, 0, index, D)  # again: registers are short
            grad = inverse * scaled - (inverse * inverse * inverse * along / D) * mixture
            if d_mixed is not None:
                grad += _row(d_mixed, at, index, D)
        else:
            grad = _row(d_mixed, at, index, D)
        d_weights = tl.zeros([len(sources)], tl.float32)
        ahead = _raw(sources[0], at, index, D)
        for i in range(L):
            value = ahead.to(tl.float32)
            ahead = _raw(_chosen(sources, tl.minimum(i + 1, L - 1)), at, index, D)
            d_weights = tl.where(number == i, tl.sum(grad * value, 0), d_weights)
        row = token * L + number
        weights = tl.load(probs + row, mask=number < L, other=0.0)
        inverses = tl.load(rrms + row, mask=number < L, other=0.0)
        # score = inverse * (value . vector), and d inverse / d value = -inverse^3 * value / D
        towards = weights * (d_weights - tl.sum(weights * d_weights, 0)) * inverses
        shrinks = towards * tl.load(scores + row, mask=number < L, other=0.0) * inverses / D
        ahead = _raw(sources[0], at, index, D)
        for i in range(L):
            value = ahead.to(tl.float32)
            ahead = _raw(_chosen(sources, tl.minimum(i + 1, L - 1)), at, index, D)
            vector = _vector(query, norm_weight, index, D)
            toward = tl.sum(tl.where(number == i, towards, 0.0), 0)
            d_vector += toward * value
            if (wanted >> i) & 1:
                shrink = tl.sum(tl.where(number == i, shrinks, 0.0), 0)
                d_value = tl.load(probs + token * L + i) * grad + toward * vector - shrink * value
                if d_newest is not None:
                    if i == L - 1:
                        d_value += _row(d_newest, at, index, D)
                _store_row(_chosen(grads, i), at, d_value, index, D)
        token += tl.num_programs(0)
    _store_row(d_vectors, share, d_vector, index, D)


@triton.jit(do_not_specialize=["programs"])
def mix_vectors_kernel(
    d_vectors, d_outs, query, norm_weight, d_query, d_norm_weight, d_out_weight, programs,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of query, norm weight and out weight: all programs' shares of some columns, summed in one order."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = column < D
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    outs = tl.zeros([ROWS, BLOCK], tl.float32)
    done = 0
    while done < programs:
        row = done + tl.arange(0, ROWS)[:, None]
        at = row.to(tl.int64) * D + column[None, :]
        here = (row < programs) & live[None, :]
        total += tl.load(d_vectors + at, mask=here, other=0.0)
        if d_outs is not None:
            outs += tl.load(d_outs + at, mask=here, other=0.0)
        done += ROWS
    d_vector = tl.sum(total, 0)
    for_query = d_vector * tl.load(norm_weight + column, mask=live, other=0.0).to(tl.float32)
    for_norm = d_vector * tl.load(query + column, mask=live, other=0.0).to(tl.float32)
    tl.store(d_query + column, for_query.to(d_query.dtype.element_ty), mask=live)
    tl.store(d_norm_weight + column, for_norm.to(d_norm_weight.dtype.element_ty), mask=live)
    if d_outs is not None:
        tl.store(d_out_weight + column, tl.sum(outs, 0).to(d_out_weight.dtype.element_ty), mask=live)


MOST_SOURCES, MOST_WIDTH = 16, 16384
FORWARD_WARPS, BACKWARD_WARPS = 8, 16  # at most
VECTORS, VECTORS_OPTIONS = {"BLOCK": 32, "ROWS": 64}, {"num_warps": 4}


@lru_cache
def constants(D: int, most_warps: int) -> tuple[dict[str, int], dict[str, int]]:
    """Constants and launch options of a kernel in which a program takes whole rows of D values."""
    block = triton.next_power_of_2(D)
    return {"D": D, "BLOCK": block}, {"num_warps": min(most_warps, max(1, block // 512))}


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile for rows of 7168 in bfloat16: with sum and norm, as layers read, and without.

    Sums of programs' shares are those of narrower rows, too.
    """
    absent = ("addend", "newest", "out_weight", "normed", "d_normed", "d_newest", "d_outs")
    kernels = (mix_backward_kernel, mix_forward_kernel)
    cases = [_case(kernel, missing) for kernel in kernels for missing in (("mixed", "d_mixed"), absent)]
    known = dict.fromkeys(mix_vectors_kernel.arg_names, "*bf16") | {"programs": "i32", "D": 7168} | VECTORS
    known |= {"d_vectors": "*fp32", "d_outs": "*fp32"}
    for missing in ({}, {"D": 768}, {"d_outs": None, "d_out_weight": None}):
        cases.append((mix_vectors_kernel, known | missing, VECTORS_OPTIONS | {"num_stages": 3}))
    return cases


def _case(kernel: Any, absent: tuple[str, ...]) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """A case of `compile_cases`; arguments named in `absent` are not given."""
    chosen, options = constants(7168, FORWARD_WARPS if kernel is mix_forward_kernel else BACKWARD_WARPS)
    options = options | {"num_stages": 3}
    known: dict[str, Any] = chosen | {"T": "i32", "L": "i32", "wanted": "i32", "eps": "fp32", "norm_eps": "fp32"}
    known |= dict.fromkeys(("probs", "scores", "rrms", "d_vectors", "d_outs"), "*fp32")
    known |= dict.fromkeys(("sources", "grads"), ("*bf16",) * MOST_SOURCES)
    arguments = {name: None if name in absent else known.get(name, "*bf16") for name in kernel.arg_names}
    return kernel, arguments, options
