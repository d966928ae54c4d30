"""Triton kernel of a router's logits: products of 16-bit values summed as exactly as float32 products are.

The released router casts input and weights to float32 and multiplies there. Products of two bfloat16 (or float16)
values are exact in float32, so tensor cores lose nothing by taking the 16-bit values. But they cut off each addition to
a long sum: one of 7,168 products, left to them, errs 20 times as much as one in float32, and then more tokens choose
another expert. So each sum of BK products starts anew, and is added by a rounded addition.
"""

from typing import Any

import triton
import triton.language as tl

from openk3.ops.latent_moe.experts_kernel import Block, _load, _load_rows, _within


@triton.jit(do_not_specialize=["T", "depth"])
def logits_kernel(
    x, weight, logits, T, depth, one,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """logits = x weight^T in float32. `depth` is D and `one` is 1: what is known when compiling would be folded."""
    BLOCKS: tl.constexpr = (E + BN - 1) // BN
    rows = tl.program_id(0) // BLOCKS * BM + tl.arange(0, BM)
    column = tl.program_id(0) % BLOCKS * BN + tl.arange(0, BN)
    live = rows < T
    wide = tl.where(live, rows, 0).to(tl.int64)[:, None]
    k = tl.arange(0, BK)[None, :]
    x_at = x + wide * D + k
    w_at = weight + _within(column, E, BN).to(tl.int64)[:, None] * D + k
    acc = tl.zeros([BM, BN], tl.float32)
    for low in range(0, depth, BK):
        part = tl.dot(
            _load_rows(x_at, live, low + k, D, BK),
            tl.trans(_load(w_at, low + k, D, BK)),
            tl.zeros([BM, BN], tl.float32),
            input_precision="ieee",
        )
        acc = part * one + acc  # a plain addition would become the product's own
        x_at += BK
        w_at += BK
    tl.store(logits + wide * E + column[None, :], acc, mask=live[:, None] & (column < E)[None, :])


HOPPER, OTHERS, FEW = Block(128, 128, 64, 8, 3), Block(64, 64, 32, 4, 3), Block(16, 64, 64, 4, 3)


def block_for(tokens: int, experts: int, arch: int) -> Block:
    """Tokens, experts and depth of a program on a GPU of compute capability arch / 10."""
    if tokens <= 64:
        return FEW
    return (HOPPER if experts > 64 else HOPPER._replace(columns=64)) if arch == 90 else OTHERS


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles in bfloat16 for the released layer and for a small one, and for a few tokens."""
    cases = []
    for tokens, D, E in ((8192, 7168, 896), (8192, 1024, 128), (1, 1024, 128)):
        BM, BN, BK, warps, stages = block_for(tokens, E, arch)
        known: dict[str, Any] = {"D": D, "E": E, "logits": "*fp32", "T": "i32", "depth": "i32", "one": "fp32"}
        known |= {"BM": BM, "BN": BN, "BK": BK}
        arguments = {name: known.get(name, "*bf16") for name in logits_kernel.arg_names}
        cases.append((logits_kernel, arguments, {"num_warps": warps, "num_stages": stages}))
    return cases
