"""Triton kernels of products that read depth on their own: mixture and norm are computed anew by every program.

A warp holds some rows of a weight; a program asks for every source of a token at once, which are a few kilobytes. So a
read of depth costs no launch, and its weights arrive while another kernel still runs.
"""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.few.depth_kernel import _plus
from openk3.ops.few.product_kernel import wait_for_inputs
from openk3.ops.situ_kernel import situ_value

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def load_tiles(weight, row, rows, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Rows of a matrix of D columns as a tuple of pieces [R, CHUNK]; zeros beyond the ends."""
    pieces = ()
    for c in tl.static_range(CHUNKS):
        column = c * CHUNK + tl.arange(0, CHUNK)
        at = weight + row.to(tl.int64)[:, None] * D + column[None, :]
        pieces = pieces + (tl.load(at, mask=(row < rows)[:, None] & (column < D)[None, :], other=0.0),)
    return pieces


@triton.jit
def _plus_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def load_query(
    query, norm_weight, out_weight,
    D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SOURCES: tl.constexpr,
):  # fmt: skip
    """(what scores are made with, the weight of the norm behind the mixture): pieces [CHUNK].

    As sums over the first row of a tile, so that they lie where tiles of sources need them before these are there.
    """
    row = tl.arange(0, SOURCES)[:, None]
    vectors, scales = (), ()
    for c in tl.static_range(CHUNKS):
        column = c * CHUNK + tl.arange(0, CHUNK)[None, :] + row * 0
        live = (column < D) & (row == 0)
        vector = tl.load(query + column, mask=live, other=0.0).to(tl.float32)
        vector *= tl.load(norm_weight + column, mask=live, other=0.0).to(tl.float32)
        vectors = vectors + (tl.sum(vector, 0),)
        scale = tl.sum(tl.load(out_weight + column, mask=live, other=0.0).to(tl.float32), 0)
        scales = scales + (scale.to(out_weight.dtype.element_ty),)  # exactly, in half the registers
    return vectors, scales


@triton.jit
def normed_depth(
    stream, distance, sources, known, eps,
    D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SOURCES: tl.constexpr,
):  # fmt: skip
    """Norm of the mixture of one token's sources, which lie `distance` apart: pieces [CHUNK] in float32, rounded.

    A warp scores sources of its own, and has every column of what is mixed.
    """
    source = tl.arange(0, SOURCES)
    rows = stream + source.to(tl.int64)[:, None] * distance
    values = ()
    for c in tl.static_range(CHUNKS):
        column = c * CHUNK + tl.arange(0, CHUNK)
        live = (source < sources)[:, None] & (column < D)[None, :]
        values = values + (tl.load(rows + column[None, :], mask=live, other=0.0),)
    squares = tl.zeros([SOURCES, CHUNK], tl.float32)
    products = tl.zeros([SOURCES, CHUNK], tl.float32)
    for c in tl.static_range(CHUNKS):
        wide = values[c].to(tl.float32)
        squares += wide * wide
        products += wide * known[0][c][None, :]
    if INTERPRETED:  # where a reduction of one's own goes number by number
        size, score = tl.sum(squares, 1), tl.sum(products, 1)
    else:
        size, score = tl.reduce((squares, products), 1, _plus)
    score = tl.where(source < sources, score * tl.rsqrt(size * (1.0 / D) + eps), float("-inf"))
    weight = tl.exp(score - tl.max(score, 0))
    weight = (weight / tl.sum(weight, 0))[:, None]
    sums = ()
    if INTERPRETED or CHUNKS % 3 != 0:
        for c in tl.static_range(CHUNKS):
            sums = sums + (tl.sum(values[c].to(tl.float32) * weight, 0),)
    else:  # three go through shared memory at once
        for c in tl.static_range(0, CHUNKS, 3):
            a, b = values[c].to(tl.float32) * weight, values[c + 1].to(tl.float32) * weight
            sums = sums + tl.reduce((a, b, values[c + 2].to(tl.float32) * weight), 0, _plus_three)
    mixed = ()
    squared = tl.zeros([CHUNK], tl.float32)
    for c in tl.static_range(CHUNKS):
        piece = sums[c].to(values[c].dtype)
        squared += piece.to(tl.float32) * piece.to(tl.float32)
        mixed = mixed + (piece,)
    inverse = tl.rsqrt(tl.sum(squared, 0) * (1.0 / D) + eps)
    normed = ()
    for c in tl.static_range(CHUNKS):
        unit = (mixed[c].to(tl.float32) * inverse).to(mixed[c].dtype).to(tl.float32)
        normed = normed + ((unit * known[1][c].to(tl.float32)).to(mixed[c].dtype).to(tl.float32),)
    return normed


@triton.jit
def times(pieces, x, CHUNKS: tl.constexpr):
    """Products [R] of rows and a vector, both in pieces."""
    total = pieces[0].to(tl.float32) * x[0][None, :]
    for c in tl.static_range(1, CHUNKS):
        total += pieces[c].to(tl.float32) * x[c][None, :]
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=["sources", "eps"])
def read_linear_kernel(
    stream, query, norm_weight, out_weight, weight, out, sources, eps,
    ROWS: tl.constexpr, D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SOURCES: tl.constexpr,
    R: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [tokens, ROWS] = (norm of the depth that each token reads) weight^T."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    matrix = load_tiles(weight, row, ROWS, D, CHUNKS, CHUNK)
    known = load_query(query, norm_weight, out_weight, D, CHUNKS, CHUNK, SOURCES)
    wait_for_inputs(EARLY)
    for token in tl.static_range(TOKENS):
        x = normed_depth(stream + token * D, TOKENS * D, sources, known, eps, D, CHUNKS, CHUNK, SOURCES)
        value = times(matrix, x, CHUNKS)
        tl.store(out + token * ROWS + row, value.to(out.dtype.element_ty), mask=row < ROWS)


@triton.jit(do_not_specialize=["sources", "eps"])
def read_project_kernel(
    stream, query, norm_weight, out_weight, router, down, gate, up, logits, latents, act,
    sources, eps,
    E: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BETA: tl.constexpr, LINEAR: tl.constexpr,
    D: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SOURCES: tl.constexpr, R: tl.constexpr,
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
            matrix = load_tiles(router, row, E, D, CHUNKS, CHUNK)
        elif program < SECOND:
            row = (program - FIRST) * R + lane
            matrix = load_tiles(down, row, C, D, CHUNKS, CHUNK)
        else:
            row = (program - SECOND) * R + lane
            matrix = load_tiles(gate if act is not None else down, row, S, D, CHUNKS, CHUNK)
    else:
        matrix = load_tiles(gate, row, S, D, CHUNKS, CHUNK)
    if act is not None:
        carried = load_tiles(up, row, tl.where(program < SECOND, 0, S), D, CHUNKS, CHUNK)
    known = load_query(query, norm_weight, out_weight, D, CHUNKS, CHUNK, SOURCES)
    wait_for_inputs(EARLY)
    for token in tl.static_range(TOKENS):
        x = normed_depth(stream + token * D, TOKENS * D, sources, known, eps, D, CHUNKS, CHUNK, SOURCES)
        value = times(matrix, x, CHUNKS)
        if E > 0:
            tl.store(logits + token * E + row, value, mask=(row < E) & (program < FIRST))
            inside = (row < C) & (program >= FIRST) & (program < SECOND)
            tl.store(latents + token * C + row, value.to(latents.dtype.element_ty), mask=inside)
        if act is not None:
            if program >= SECOND:
                KIND: tl.constexpr = act.dtype.element_ty
                g = value.to(KIND).to(tl.float32)
                u = times(carried, x, CHUNKS).to(KIND).to(tl.float32)
                y = situ_value(g, u, BETA, LINEAR, tl.bfloat16 == KIND)
                tl.store(act + token * S + row, y.to(KIND), mask=row < S)


def read_settings(width: int, sources: int, matrices: int = 1) -> tuple[dict[str, int], int]:
    """(constants, warps): a warp holds two rows of a weight, or one of each of two."""
    chunk = min(256, max(64, triton.next_power_of_2(width)))
    warps = 4 if width <= 1024 else 8
    known = {"D": width, "CHUNKS": triton.cdiv(width, chunk), "CHUNK": chunk, "R": 2 * warps // matrices}
    return known | {"SOURCES": max(warps, triton.next_power_of_2(sources))}, warps


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
            own, warps = read_settings(width, 8, 1 if kernel is read_linear_kernel else 2)
            absent = {} if S else {"gate": None, "up": None, "act": None}
            absent |= {} if E else {"router": None, "down": None, "logits": None, "latents": None}
            given = known | own | {"ROWS": rows} | here | (absent if here else {})
            arguments = {name: given.get(name, "*bf16") for name in kernel.arg_names}
            cases.append((kernel, arguments, {"num_warps": warps, "num_stages": 1} | early))
    return cases
