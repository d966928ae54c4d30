"""Triton kernel of the two projections that read a layer's input: to the latents, and to the router's logits.

The released router multiplies in float32 what it casts from bfloat16. Products of two bfloat16 (or float16) values are
exact in float32, so tensor cores that take the 16-bit values and add in float32 compute the same sums in another order.
"""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.latent_moe.experts_kernel import Block, _load, _load_rows, _tile_of


@triton.jit(do_not_specialize=["T", "depth"])
def project_kernel(
    x, down, router, z, logits, T, depth,
    D: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """z = x down^T in x's format, and logits = x router^T in float32; depth is D."""
    LATENT: tl.constexpr = (C + BN - 1) // BN
    tile, block = _tile_of(tl.program_id(0), tl.cdiv(T, BM), LATENT + (E + BN - 1) // BN, GROUP)
    rows = tile * BM + tl.arange(0, BM)
    live = (rows < T)[:, None]
    wide = rows.to(tl.int64)[:, None]
    latent = block < LATENT
    column = tl.where(latent, block, block - LATENT) * BN + tl.arange(0, BN)
    inside = column < tl.where(latent, C, E)
    k = tl.arange(0, BK)[None, :]
    x_at = x + tl.where(rows < T, rows, 0).to(tl.int64)[:, None] * D + k
    w_at = tl.where(latent, down, router) + tl.where(inside, column, 0).to(tl.int64)[:, None] * D + k
    acc = tl.zeros([BM, BN], tl.float32)
    for low in range(0, depth, BK):
        tile_x = _load_rows(x_at, rows < T, low + k, D, BK)
        acc = tl.dot(tile_x, tl.trans(_load(w_at, low + k, D, BK)), acc, input_precision="ieee")
        x_at += BK
        w_at += BK
    there = live & inside[None, :]
    if latent:
        tl.store(z + wide * C + column[None, :], acc.to(z.dtype.element_ty), mask=there)
    else:
        tl.store(logits + wide * E + column[None, :], acc, mask=there)


LARGE, SMALL = Block(128, 128, 64, 8, 3), Block(128, 64, 32, 4, 3)
GROUP = 8


def block_for(arch: int) -> Block:
    """Rows, columns and depth of a program on a GPU of compute capability arch / 10."""
    return LARGE if arch == 90 else SMALL


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles in bfloat16 for the released layer and for a small one."""
    BM, BN, BK, warps, stages = block_for(arch)
    cases = []
    for D, C, E in ((7168, 3584, 896), (1024, 512, 128)):
        known: dict[str, Any] = {"D": D, "C": C, "E": E, "logits": "*fp32", "T": "i32", "depth": "i32"}
        known |= {"BM": BM, "BN": BN, "BK": BK, "GROUP": GROUP}
        arguments = {name: known.get(name, "*bf16") for name in project_kernel.arg_names}
        cases.append((project_kernel, arguments, {"num_warps": warps, "num_stages": stages}))
    return cases
