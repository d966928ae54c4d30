"""Triton kernels of attention over the cached latents of one sequence, for its newest token: shared out evenly.

As `mla.latent_kernel` does it for any number of requests, but a program knows its keys from the length alone, and asks
for the first of them before the token's query and latent are there. The second kernel puts the parts together, all of
them at once.
"""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.few.product_kernel import wait_for_inputs
from openk3.ops.mla.attention_kernel import wide
from openk3.ops.mla.latent_kernel import _page, _rows


@triton.jit
def _places(pages, j, key, length, page_stride, token_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the keys of a block, from token j on, lie; those beyond the length lie where the last one does."""
    if PAGE % BLOCK == 0:
        return _page(pages + j // PAGE) * page_stride + wide(j % PAGE + key) * token_stride
    else:
        token = tl.minimum(j + key, length - 1)
        return _page(pages + token // PAGE) * page_stride + wide(token % PAGE) * token_stride


@triton.jit
def _attend(state, k_c, k_s, queries, seen, scale, PRECISION: tl.constexpr):
    """(peak, sums, context) with a block of keys more."""
    peak, sums, context = state
    scores = tl.dot(k_c, tl.trans(queries[0]), input_precision=PRECISION)
    scores = tl.dot(k_s, tl.trans(queries[1]), scores, input_precision=PRECISION)
    scores = tl.where(seen[:, None], scores, float("-inf"))
    largest = tl.maximum(peak, tl.max(scores, 0))
    probs = tl.exp2((scores - largest[None, :]) * scale)
    shrink = tl.exp2((peak - largest) * scale)
    sums = sums * shrink + tl.sum(probs, 0)
    context = tl.dot(tl.trans(k_c), probs.to(k_c.dtype), context * shrink[None, :], input_precision=PRECISION)
    return largest, sums, context


@triton.jit
def attend_kernel(
    q_latent, q_shared, latents, pages, length_ptr, parts, logs, scale, page_stride, token_stride,
    SHARED_STRIDE: tl.constexpr, H: tl.constexpr, C: tl.constexpr, S: tl.constexpr, PC: tl.constexpr, PS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, RUNS: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """parts [RUNS, H, C] and their log-sums [RUNS, H] of one token; `scale` is that of the scores times log2 e.

    The last token's latent is read behind the wait, all others are older.
    """
    run = tl.program_id(0)
    length = tl.load(length_ptr)
    blocks = (length + BLOCK - 1) // BLOCK
    first, last = run * blocks // RUNS, (run + 1) * blocks // RUNS
    key, row, channel = tl.arange(0, BLOCK), tl.arange(0, ROWS), tl.arange(0, PC)
    j = first * BLOCK
    at = _places(pages, tl.minimum(j, length - 1), key, length, page_stride, token_stride, PAGE, BLOCK)
    older = (j + key < length - 1) & (first < last)
    k_c, k_s = _rows(latents, at, older, C, PC), _rows(latents + C, at, older, S, PS)
    wait_for_inputs(EARLY)
    if first < last:
        newest = j + key == length - 1
        k_c = tl.where(newest[:, None], _rows(latents, at, newest, C, PC), k_c)
        k_s = tl.where(newest[:, None], _rows(latents + C, at, newest, S, PS), k_s)
        live = row < H
        queries = _rows(q_latent, row * C, live, C, PC), _rows(q_shared, row * SHARED_STRIDE, live, S, PS)
        state = (
            tl.full([ROWS], float("-inf"), tl.float32),
            tl.zeros([ROWS], tl.float32),
            tl.zeros([PC, ROWS], tl.float32),
        )
        state = _attend(state, k_c, k_s, queries, j + key < length, scale, PRECISION)
        peak, sums, context = state
        for i in tl.range(j + BLOCK, last * BLOCK, BLOCK):
            at = _places(pages, i, key, length, page_stride, token_stride, PAGE, BLOCK)
            seen = i + key < length
            k_c, k_s = _rows(latents, at, seen, C, PC), _rows(latents + C, at, seen, S, PS)
            peak, sums, context = _attend((peak, sums, context), k_c, k_s, queries, seen, scale, PRECISION)
        to = parts + (run * H + row)[None, :] * C + channel[:, None]
        tl.store(to, context / sums[None, :], mask=live[None, :] & (channel < C)[:, None])
        tl.store(logs + run * H + row, peak * scale + tl.log2(sums), mask=live)
    else:
        tl.store(logs + run * H + row, tl.full([ROWS], float("-inf"), tl.float32), mask=row < H)


@triton.jit
def join_kernel(
    parts, logs, out, H: tl.constexpr, C: tl.constexpr, RUNS: tl.constexpr, PR: tl.constexpr, B: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out [H, C] of `attend_kernel`'s parts: a program has B channels of a head."""
    BLOCKS: tl.constexpr = (C + B - 1) // B
    head, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    run, channel = tl.arange(0, PR), block * B + tl.arange(0, B)
    wait_for_inputs(EARLY)
    at = (run * H + head)[:, None] * C + channel[None, :]
    values = tl.load(parts + at, mask=(run < RUNS)[:, None] & (channel < C)[None, :], other=0.0)
    log = tl.load(logs + run * H + head, mask=run < RUNS, other=float("-inf"))
    weight = tl.exp2(log - tl.max(log, 0))
    # Nothing was written where a run had no keys.
    values = tl.where((weight > 0)[:, None], values * weight[:, None], 0.0)
    tl.store(out + head * C + channel, tl.sum(values, 0) / tl.sum(weight, 0), mask=channel < C)


RUNS = 128  # programs that share a sequence's keys


def attend_settings(heads: int, latent: int, shared: int, element_bytes: int) -> tuple[dict[str, int], int]:
    """(constants, warps) of `attend_kernel`."""
    power = triton.next_power_of_2
    known = {"H": heads, "C": latent, "S": shared, "PC": max(16, power(latent)), "PS": max(16, power(shared))}
    block = 32 if element_bytes == 2 and latent <= 256 else 16
    return known | {"ROWS": max(16, power(heads)), "BLOCK": block, "RUNS": RUNS}, 8


def join_settings(heads: int, latent: int) -> tuple[dict[str, int], int]:
    """(constants, warps) of `join_kernel`."""
    return {"H": heads, "C": latent, "RUNS": RUNS, "PR": triton.next_power_of_2(RUNS), "B": 16}, 4


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16 for `small` and `medium`, without pages and with them."""
    cases = []
    early = {"launch_pdl": True} if arch >= 90 else {}
    for H, C, page in ((6, 256, 2**30), (12, 512, 6144)):
        known: dict[str, Any] = {"pages": "*i32", "length_ptr": "*i32", "parts": "*fp32", "logs": "*fp32"}
        known |= {"scale": "fp32", "page_stride": "i32:16", "token_stride": "i32:16", "SHARED_STRIDE": 192}
        known |= {"PAGE": page, "PRECISION": "tf32x3", "EARLY": arch >= 90}
        for kernel, (own, warps) in (
            (attend_kernel, attend_settings(H, C, 64, 2)),
            (join_kernel, join_settings(H, C)),
        ):
            here = known | own | ({"out": "*fp32"} if kernel is join_kernel else {})
            arguments = {name: here.get(name, "*bf16") for name in kernel.arg_names}
            cases.append((kernel, arguments, {"num_warps": warps, "num_stages": 1} | early))
    return cases
