"""Triton kernel that reads depth for a few tokens: the sum of the last write, the mixture, and its norm, at once.

All sources are asked for before any is used: with one token, what takes time is the way to memory and back.
"""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.few.product_kernel import wait_for_inputs


@triton.jit
def _plus(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["eps"])
def depth_kernel(
    sources, addend, query, norm_weight, out_weight, newest, normed, probs, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token: the norm of the mixture, weights [tokens, L], and the last source with what is added to it."""
    L: tl.constexpr = len(sources)
    column = tl.arange(0, BLOCK)
    live = column < D
    vector = tl.load(query + column, mask=live, other=0.0).to(tl.float32)
    vector *= tl.load(norm_weight + column, mask=live, other=0.0).to(tl.float32)
    scale = tl.load(out_weight + column, mask=live, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = token * D + column
    values = ()
    for i in tl.static_range(L):
        values = values + (tl.load(sources[i] + at, mask=live, other=0.0),)
    last = values[L - 1]
    if addend is not None:
        more = tl.load(addend + at, mask=live, other=0.0)
        last = (last.to(tl.float32) + more.to(tl.float32)).to(last.dtype)
        tl.store(newest + at, last, mask=live)
    top = float("-inf")
    scores = ()
    for i in tl.static_range(L):
        wide = (last if i == L - 1 else values[i]).to(tl.float32)
        size, score = tl.reduce((wide * wide, wide * vector), 0, _plus)
        score *= tl.rsqrt(size * (1.0 / D) + eps)
        scores = scores + (score,)
        top = tl.maximum(top, score)
    total = 0.0
    mixture = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(L):
        weight = tl.exp(scores[i] - top)
        total += weight
        mixture += weight * (last if i == L - 1 else values[i]).to(tl.float32)
    for i in tl.static_range(L):
        tl.store(probs + token * L + i, tl.exp(scores[i] - top) / total)
    rounded = (mixture / total).to(last.dtype)
    wide = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) * (1.0 / D) + eps)
    y = (wide * inverse).to(last.dtype).to(tl.float32) * scale
    tl.store(normed + at, y.to(normed.dtype.element_ty), mask=live)


MOST_SOURCES, MOST_WIDTH = 10, 2048


def settings(width: int) -> tuple[dict[str, int], int]:
    """(constants, warps): 8 values of a source a thread."""
    block = max(128, triton.next_power_of_2(width))
    return {"D": width, "BLOCK": block}, max(4, min(16, block // 256))


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles in bfloat16: reads of 8 and of 2 sources with a sum, and of 10 without."""
    cases = []
    early = {"launch_pdl": True} if arch >= 90 else {}
    for width, L, added in ((768, 8, True), (1536, 2, True), (2048, 10, False)):
        constants, warps = settings(width)
        known: dict[str, Any] = {"sources": ("*bf16",) * L, "probs": "*fp32", "eps": "fp32", "EARLY": arch >= 90}
        known |= constants | ({} if added else {"addend": None, "newest": None})
        arguments = {name: known.get(name, "*bf16") for name in depth_kernel.arg_names}
        cases.append((depth_kernel, arguments, {"num_warps": warps, "num_stages": 1} | early))
    return cases
