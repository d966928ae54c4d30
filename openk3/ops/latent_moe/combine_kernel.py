"""Triton kernels around the experts: the weighted sum of each token's rows with its RMSNorm, and gradients by rows.

Every sum over a token's k rows runs in the order of its choices, in float32.
"""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.situ_kernel import situ_gradient


@triton.jit
def _sum_rows(y, row, weights, token, live, column, C: tl.constexpr, K: tl.constexpr):
    """Sum over K of (weights times) each token's rows, in float32."""
    inside = (column < C)[None, :]
    total = tl.zeros([token.shape[0], column.shape[0]], tl.float32)
    for i in tl.static_range(K):
        place = tl.load(row + token * K + i, mask=live, other=0).to(tl.int64)[:, None]
        part = tl.load(y + place * C + column[None, :], mask=live[:, None] & inside, other=0.0).to(tl.float32)
        if weights is not None:
            part *= tl.load(weights + token * K + i, mask=live, other=0.0)[:, None]
        total += part
    return total


@triton.jit(do_not_specialize=["T"])
def combine_kernel(
    y, row, weights, norm, u, out, inverse, T, eps,
    C: tl.constexpr, BC: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """u = sum_i p_i y[row_i] of each token; if wanted, out = RMSNorm(u) and the reciprocal of its root."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    live = token < T
    column = tl.arange(0, BC)
    there = live[:, None] & (column < C)[None, :]
    at = token[:, None] * C + column[None, :]
    value = _sum_rows(y, row, weights, token, live, column, C, K).to(u.dtype.element_ty)
    tl.store(u + at, value, mask=there)
    if out is not None:
        wide = value.to(tl.float32)
        root = tl.rsqrt(tl.sum(wide * wide, 1) / C + eps)
        tl.store(inverse + token, root, mask=live)
        weight = tl.load(norm + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
        normal = (wide * root[:, None]).to(u.dtype.element_ty).to(tl.float32)
        tl.store(out + at, (normal * weight).to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["T", "programs"])
def combine_backward_kernel(
    d_out, u, inverse, norm, d_u, d_norm, T, programs, C: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr
):
    """d_u of the norm, and each program's share of d_norm [programs, C]; a program takes every programs-th token.

    The next tokens are asked for before these are worked on.
    """
    column = tl.arange(0, BC)
    weight = tl.load(norm + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([BT, BC], tl.float32)  # by row of the block: rows lie in several warps, which would wait each time
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    there = (token < T)[:, None] & (column < C)[None, :]
    next_u = tl.load(u + token[:, None] * C + column[None, :], mask=there, other=0.0)
    next_d = tl.load(d_out + token[:, None] * C + column[None, :], mask=there, other=0.0)
    next_root = tl.load(inverse + token, mask=token < T, other=0.0)
    for _ in range(tl.cdiv(T, programs * BT)):
        at = token[:, None] * C + column[None, :]
        here = there
        root = next_root[:, None]
        normal = next_u.to(tl.float32) * root
        d = next_d.to(tl.float32)
        token += programs * BT
        there = (token < T)[:, None] & (column < C)[None, :]
        next_u = tl.load(u + token[:, None] * C + column[None, :], mask=there, other=0.0)
        next_d = tl.load(d_out + token[:, None] * C + column[None, :], mask=there, other=0.0)
        next_root = tl.load(inverse + token, mask=token < T, other=0.0)
        total += d * normal
        d *= weight
        along = tl.sum(d * normal, 1)[:, None] / C
        tl.store(d_u + at, ((d - normal * along) * root).to(d_u.dtype.element_ty), mask=here)
    tl.store(d_norm + tl.program_id(0) * C + column, tl.sum(total, 0), mask=column < C)


@triton.jit(do_not_specialize=["T", "M", "blocks"])
def slot_gradient_kernel(
    d_rows, shares, row, d_z, d_weights, T, M, blocks,
    C: tl.constexpr, BC: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """d_z, the sum of each token's rows, and d_weights [T, K], the sum over shares [blocks, M] of each row."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    live = token < T
    column = tl.arange(0, BC)
    total = _sum_rows(d_rows, row, None, token, live, column, C, K)
    at = token[:, None] * C + column[None, :]
    tl.store(d_z + at, total.to(d_z.dtype.element_ty), mask=live[:, None] & (column < C)[None, :])
    choice = tl.arange(0, CHOICES)
    chosen = live[:, None] & (choice < K)[None, :]
    slot = token[:, None] * K + choice[None, :]
    place = tl.load(row + slot, mask=chosen, other=0)
    grad = tl.zeros([BT, CHOICES], tl.float32)
    for n in range(blocks):
        grad += tl.load(shares + n * M.to(tl.int64) + place, mask=chosen, other=0.0)
    tl.store(d_weights + slot, grad, mask=chosen)


@triton.jit
def act_rows_kernel(
    d, gate, up, weights, slot, d_up, scaled, shares,
    I: tl.constexpr, BLOCK: tl.constexpr, BETA: tl.constexpr, LINEAR: tl.constexpr,
):  # fmt: skip
    """What `act_gradient_kernel` does behind its product d, of one row: d becomes d_gate, and there is one share."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + tl.load(slot + row))
    SHORT: tl.constexpr = scaled.dtype.element_ty == tl.bfloat16
    share = tl.zeros([BLOCK], tl.float32)
    for low in tl.static_range(0, I, BLOCK):
        column = low + tl.arange(0, BLOCK)
        there = column < I
        at = row * I + column
        g = tl.load(gate + at, mask=there, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=there, other=0.0).to(tl.float32)
        by_act = tl.load(d + at, mask=there, other=0.0).to(tl.float32)
        value, by_gate, by_up = situ_gradient(g, u, BETA, LINEAR, SHORT)
        value = value.to(scaled.dtype.element_ty).to(tl.float32)  # what w2 saw
        share += by_act * value
        by_act *= weight
        tl.store(d + at, (by_act * by_gate).to(d.dtype.element_ty), mask=there)
        tl.store(d_up + at, (by_act * by_up).to(d_up.dtype.element_ty), mask=there)
        tl.store(scaled + at, (value * weight).to(scaled.dtype.element_ty), mask=there)
    tl.store(shares + row, tl.sum(share, 0))


def act_rows_settings(width: int) -> tuple[dict[str, int], dict[str, int]]:
    """Constants and launch options of `act_rows_kernel`: eight values a thread, few threads for narrow rows."""
    block = 1024 if width > 1024 else min(256, triton.next_power_of_2(width))
    if block == 256 and width % 256:
        block = 128  # 384: half of a block would be idle
    return {"I": width, "BLOCK": block}, {"num_warps": 4 if width > 1024 else 1}


def row_settings(width: int) -> dict[str, int]:
    """Columns and rows of a program that holds whole rows of `width`: 4096 values of them, or one row."""
    columns = max(16, triton.next_power_of_2(width))
    return {"C": width, "BC": columns, "BT": max(1, 2048 // columns)}


def row_warps(width: int) -> int:
    """Warps for `row_settings`: 16 values a thread."""
    return 8 if width > 2048 else 4


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16 for latents of 3584 and 512; on every GPU the same."""
    constants, options = act_rows_settings(3072)
    known = dict.fromkeys(("weights", "shares"), "*fp32") | {"slot": "*i32", "BETA": 4.0, "LINEAR": 25.0} | constants
    arguments = {name: known.get(name, "*bf16") for name in act_rows_kernel.arg_names}
    cases: list[tuple[Any, dict[str, Any], dict[str, int]]] = [
        (act_rows_kernel, arguments, options | {"num_stages": 3})
    ]
    for width, k in ((3584, 16), (3584, 8), (512, 8)):
        known = dict.fromkeys(("row",), "*i32") | dict.fromkeys(("weights", "inverse", "d_norm", "shares"), "*fp32")
        known |= row_settings(width) | {"K": k, "CHOICES": triton.next_power_of_2(k), "eps": "fp32"}
        known |= dict.fromkeys(("T", "M", "blocks", "programs"), "i32") | {"d_weights": "*fp32"}
        kernels = [combine_kernel, slot_gradient_kernel, *([combine_backward_kernel] if k == 8 else [])]
        for kernel in kernels:
            arguments = {name: known.get(name, "*bf16") for name in kernel.arg_names}
            cases.append((kernel, arguments, {"num_warps": row_warps(width), "num_stages": 3}))
    return cases
