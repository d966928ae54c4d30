"""Triton kernels at a step's two ends: where its sequences lie, logits with the most likely token, and the counting."""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.few.product_kernel import dots, load_rows, shape_for, store_rows, tokens_for, wait_for_inputs

NONE = tl.constexpr(2**31 - 1)  # behind every token


@triton.jit(do_not_specialize=["tokens", "nobody"])
def begin_kernel(slots, lengths, target, position, page, length, tokens, nobody, PN: tl.constexpr):
    """Of each sequence: its row of memory (`nobody` without a slot) twice, its tokens without and with this one."""
    n = tl.arange(0, PN)
    live = n < tokens
    slot = tl.load(slots + n, mask=live, other=0)
    row = tl.where(slot < 0, nobody, slot)
    before = tl.load(lengths + row, mask=live, other=0)
    tl.store(target + n, row.to(tl.int64), mask=live)
    tl.store(position + n, before.to(tl.int64), mask=live)
    tl.store(page + n, row, mask=live)
    tl.store(length + n, before + 1, mask=live)


@triton.jit(do_not_specialize=["tokens", "eps"])
def head_kernel(
    x, norm, weight, logits, best, which, tokens, eps,
    STRIDE: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    R: tl.constexpr, TOKENS: tl.constexpr, PASSES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """logits = RMSNorm(x) weight^T; of each program's rows the largest one and the first row that has it."""
    program = tl.program_id(0)
    row = program * R + tl.arange(0, R)
    pieces = load_rows(weight, row, ROWS, K, CHUNKS, CHUNK)
    wait_for_inputs(EARLY)
    for n in range(PASSES):
        token = n * TOKENS + tl.arange(0, TOKENS)
        value = dots(pieces, x, STRIDE, token, tokens, norm, eps, K, CHUNKS, CHUNK, R)
        store_rows(logits, value, token, tokens, row, ROWS)
        rounded = value.to(logits.dtype.element_ty).to(tl.float32)
        rounded = tl.where((row < ROWS)[:, None], rounded, float("-inf"))
        top = tl.max(rounded, 0)
        first = tl.min(tl.where((rounded == top[None, :]) & (row < ROWS)[:, None], row[:, None], NONE), 0)
        at = token * tl.num_programs(0) + program
        tl.store(best + at, top, mask=token < tokens)
        tl.store(which + at, first, mask=token < tokens)


@triton.jit(do_not_specialize=["programs"])
def likeliest_kernel(best, which, ids, programs, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """A token's most likely next one, of equals the first."""
    token = tl.program_id(0)
    wait_for_inputs(EARLY)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    first = tl.full([BLOCK], NONE, tl.int32)
    for begin in range(0, programs, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(best + token * programs + at, mask=at < programs, other=float("-inf"))
        row = tl.load(which + token * programs + at, mask=at < programs, other=NONE)
        better = (value > top) | ((value == top) & (row < first))
        top, first = tl.where(better, value, top), tl.where(better, row, first)
    found = tl.min(tl.where(top == tl.max(top, 0), first, NONE), 0)
    tl.store(ids + token, tl.where(found == NONE, 0, found).to(ids.dtype.element_ty))


def head_settings(rows: int, depth: int, tokens: int) -> tuple[dict[str, int], int]:
    """(constants, warps) of `head_kernel`."""
    how = shape_for(rows, depth)
    return {"ROWS": rows, "K": depth} | how.constants | tokens_for(tokens, how), how.warps


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16 for vocabularies of `small` and `medium`."""
    cases = []
    early = {"launch_pdl": True} if arch >= 90 else {}
    for rows, depth, tokens in ((32768, 768, 1), (65536, 1536, 2), (32768, 768, 8)):
        own, warps = head_settings(rows, depth, tokens)
        known: dict[str, Any] = own | {"tokens": "i32", "eps": "fp32", "STRIDE": depth, "EARLY": arch >= 90}
        known |= {"best": "*fp32", "which": "*i32"}
        arguments = {name: known.get(name, "*bf16") for name in head_kernel.arg_names}
        cases.append((head_kernel, arguments, {"num_warps": warps, "num_stages": 1} | early))
    given: dict[str, Any] = {"best": "*fp32", "which": "*i32", "ids": "*i64", "programs": "i32"}
    cases.append((likeliest_kernel, given | {"BLOCK": 4096, "EARLY": arch >= 90}, {"num_warps": 8} | early))
    places: dict[str, Any] = dict.fromkeys(("slots", "lengths", "page", "length"), "*i32")
    places |= {"target": "*i64", "position": "*i64", "tokens": "i32", "nobody": "i32", "PN": 16}
    cases.append((begin_kernel, {name: places[name] for name in begin_kernel.arg_names}, {"num_warps": 1}))
    return cases
