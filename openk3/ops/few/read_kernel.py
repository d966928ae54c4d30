"""Triton kernels of products that read depth on their own: mixture and norm are computed anew by every program.

A program holds some rows of a weight, spread over all its threads, and asks for every source of a token at once; all of
them are a few kilobytes. So a read of depth costs no launch, and its weights arrive while another kernel still runs.
"""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.few.depth_kernel import _plus
from openk3.ops.few.product_kernel import wait_for_inputs
from openk3.ops.situ_kernel import situ_value

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def load_tile(weight, row, rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [R, BLOCK] of a matrix of D columns; zeros beyond the ends."""
    column = tl.arange(0, BLOCK)
    at = weight + row.to(tl.int64)[:, None] * D + column[None, :]
    return tl.load(at, mask=(row < rows)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def load_query(query, norm_weight, out_weight, D: tl.constexpr, BLOCK: tl.constexpr):
    """(what scores are made with, the weight of the norm behind the mixture), [BLOCK] each in float32."""
    column = tl.arange(0, BLOCK)
    live = column < D
    vector = tl.load(query + column, mask=live, other=0.0).to(tl.float32)
    vector *= tl.load(norm_weight + column, mask=live, other=0.0).to(tl.float32)
    return vector, tl.load(out_weight + column, mask=live, other=0.0).to(tl.float32)


@triton.jit
def normed_depth(
    stream, distance, sources, vector, scale, eps, D: tl.constexpr, BLOCK: tl.constexpr, SOURCES: tl.constexpr
):  # fmt: skip
    """Norm of the mixture of one token's sources, which lie `distance` apart: [BLOCK] float32, rounded as a tensor."""
    column = tl.arange(0, BLOCK)
    source = tl.arange(0, SOURCES)
    live = (source < sources)[:, None] & (column < D)[None, :]
    values = tl.load(stream + source.to(tl.int64)[:, None] * distance + column[None, :], mask=live, other=0.0)
    wide = values.to(tl.float32)
    if INTERPRETED:  # where a reduction of one's own goes number by number
        size, score = tl.sum(wide * wide, 1), tl.sum(wide * vector[None, :], 1)
    else:
        size, score = tl.reduce((wide * wide, wide * vector[None, :]), 1, _plus)
    score = tl.where(source < sources, score * tl.rsqrt(size * (1.0 / D) + eps), float("-inf"))
    weight = tl.exp(score - tl.max(score, 0))
    mixture = tl.sum(wide * weight[:, None], 0) / tl.sum(weight, 0)
    rounded = mixture.to(values.dtype).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(rounded * rounded, 0) * (1.0 / D) + eps)
    return ((rounded * inverse).to(values.dtype).to(tl.float32) * scale).to(values.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["sources", "eps"])
def read_linear_kernel(
    stream, query, norm_weight, out_weight, weight, out, sources, eps,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SOURCES: tl.constexpr, R: tl.constexpr,
    TOKENS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [tokens, ROWS] = (norm of the depth that each token reads) weight^T."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    matrix = load_tile(weight, row, ROWS, D, BLOCK)
    vector, scale = load_query(query, norm_weight, out_weight, D, BLOCK)
    wait_for_inputs(EARLY)
    for token in tl.static_range(TOKENS):
        x = normed_depth(stream + token * D, TOKENS * D, sources, vector, scale, eps, D, BLOCK, SOURCES)
        value = tl.sum(matrix.to(tl.float32) * x[None, :], 1)
        tl.store(out + token * ROWS + row, value.to(out.dtype.element_ty), mask=row < ROWS)


@triton.jit(do_not_specialize=["sources", "eps"])
def read_project_kernel(
    stream, query, norm_weight, out_weight, router, down, gate, up, logits, latents, act,
    sources, eps,
    E: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BETA: tl.constexpr, LINEAR: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, SOURCES: tl.constexpr, R: tl.constexpr,
    TOKENS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `mixture_kernel.project_kernel`, of what each token reads of depth.

    Without experts (E and C are 0) it is the first half of a dense feed-forward part.
    """
    FIRST: tl.constexpr = (E + R - 1) // R
    SECOND: tl.constexpr = FIRST + (C + R - 1) // R
    program = tl.program_id(0)
    lane = tl.arange(0, R)
    row = program * R + lane
    if E > 0:
        if program < FIRST:
            matrix = load_tile(router, row, E, D, BLOCK)
        elif program < SECOND:
            row = (program - FIRST) * R + lane
            matrix = load_tile(down, row, C, D, BLOCK)
        else:
            row = (program - SECOND) * R + lane
            matrix = load_tile(gate if act is not None else down, row, S, D, BLOCK)
    else:
        matrix = load_tile(gate, row, S, D, BLOCK)
    if act is not None:
        carried = load_tile(up, row, tl.where(program < SECOND, 0, S), D, BLOCK)
    vector, scale = load_query(query, norm_weight, out_weight, D, BLOCK)
    wait_for_inputs(EARLY)
    for token in tl.static_range(TOKENS):
        x = normed_depth(stream + token * D, TOKENS * D, sources, vector, scale, eps, D, BLOCK, SOURCES)
        value = tl.sum(matrix.to(tl.float32) * x[None, :], 1)
        if E > 0:
            tl.store(logits + token * E + row, value, mask=(row < E) & (program < FIRST))
            inside = (row < C) & (program >= FIRST) & (program < SECOND)
            tl.store(latents + token * C + row, value.to(latents.dtype.element_ty), mask=inside)
        if act is not None:
            if program >= SECOND:
                KIND: tl.constexpr = act.dtype.element_ty
                g = value.to(KIND).to(tl.float32)
                u = tl.sum(carried.to(tl.float32) * x[None, :], 1).to(KIND).to(tl.float32)
                y = situ_value(g, u, BETA, LINEAR, tl.bfloat16 == KIND)
                tl.store(act + token * S + row, y.to(KIND), mask=row < S)


def read_settings(rows: int, width: int, sources: int, matrices: int = 1) -> tuple[dict[str, int], int]:
    """(constants, warps): 8 columns a thread, and few enough rows that the next kernel finds registers beside."""
    block = max(128, triton.next_power_of_2(width))
    R = 4 if matrices > 1 or rows <= 1056 else 8
    known = {"D": width, "BLOCK": block, "SOURCES": max(2, triton.next_power_of_2(sources)), "R": R}
    return known, max(4, min(16, block // 256))


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16 for `small` and `medium`, and a dense part."""
    cases = []
    early = {"launch_pdl": True} if arch >= 90 else {}
    known: dict[str, Any] = {
        "sources": "i32",
        "eps": "fp32",
        "TOKENS": 1,
        "logits": "*fp32",
        "BETA": 4.0,
        "LINEAR": 25.0,
        "EARLY": arch >= 90,
    }
    for rows, width, E, C, S in ((3206, 768, 80, 384, 384), (6412, 1536, 80, 768, 1536), (1344, 768, 0, 0, 2048),
                                 (2624, 1536, 80, 768, 0)):  # fmt: skip
        for kernel, here in ((read_linear_kernel, {}), (read_project_kernel, {"E": E, "C": C, "S": S})):
            many = rows if kernel is read_linear_kernel else E + C + S
            own, warps = read_settings(many, width, 8, 1 if kernel is read_linear_kernel else 2)
            absent = {} if S else {"gate": None, "up": None, "act": None}
            absent |= {} if E else {"router": None, "down": None, "logits": None, "latents": None}
            given = known | own | {"ROWS": rows} | here | (absent if here else {})
            arguments = {name: given.get(name, "*bf16") for name in kernel.arg_names}
            cases.append((kernel, arguments, {"num_warps": warps, "num_stages": 1} | early))
    return cases
