"""Triton kernels of products for few tokens: a warp takes whole rows of a weight, all tokens at once, in float32.

A matrix is read once, in rows that lie in registers before the tokens are needed. Where the GPU can start a kernel
before the one in front of it has ended (compute capability 9.0 and later), weights are read meanwhile: a program loads
them, waits for its inputs, and only then reads or writes what other kernels write or read.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Let the next kernel start, and wait until all that the kernels before have written is there."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def wait_then_release(EARLY: tl.constexpr):
    """As `wait_for_inputs`, but the next kernel starts behind the wait: what it reads before its own wait may be what
    the kernel before this one has written."""
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def load_rows(weight, row, rows, K: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Rows [R, 1, CHUNK] of a matrix of `rows` rows of K values, as a tuple of CHUNKS pieces; zeros beyond the ends."""
    pieces = ()
    for c in tl.static_range(CHUNKS):
        column = c * CHUNK + tl.arange(0, CHUNK)[None, None, :]
        at = weight + row.to(tl.int64)[:, None, None] * K + column
        pieces = pieces + (tl.load(at, mask=(row < rows)[:, None, None] & (column < K), other=0.0),)
    return pieces


@triton.jit
def load_tokens(x, stride, token, tokens, c, K: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr):
    """Piece c of some tokens [R, TOKENS, CHUNK], alike in every row: each warp has them beside its weights."""
    column = c * CHUNK + tl.arange(0, CHUNK)[None, None, :] + tl.zeros([R, 1, 1], tl.int32)
    live = (token < tokens)[None, :, None] & (column < K)
    return tl.load(x + token.to(tl.int64)[None, :, None] * stride + column, mask=live, other=0.0)


@triton.jit
def load_vector(vector, c, K: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr):
    """Piece c of K values [R, 1, CHUNK] in float32, alike in every row."""
    column = c * CHUNK + tl.arange(0, CHUNK)[None, None, :] + tl.zeros([R, 1, 1], tl.int32)
    return tl.load(vector + column, mask=column < K, other=0.0).to(tl.float32)


@triton.jit
def roots(x, stride, token, tokens, eps, K: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr):
    """Reciprocal roots of the mean squares of tokens [R, TOKENS, 1], alike in every row."""
    total = tl.zeros([R, token.shape[0], CHUNK], tl.float32)
    for c in tl.static_range(CHUNKS):
        value = load_tokens(x, stride, token, tokens, c, K, CHUNK, R).to(tl.float32)
        total += value * value
    return tl.rsqrt(tl.sum(total, 2) * (1.0 / K) + eps)[:, :, None]


@triton.jit
def dots(
    pieces, x, stride, token, tokens, norm, eps,
    K: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Products [R, TOKENS] of loaded rows and tokens, or of their RMSNorm if there is a norm weight.

    Tokens of another format are rounded to that of the rows.
    """
    total = tl.zeros([R, token.shape[0], CHUNK], tl.float32)
    if norm is not None:
        inverse = roots(x, stride, token, tokens, eps, K, CHUNKS, CHUNK, R)
    for c in tl.static_range(CHUNKS):
        value = load_tokens(x, stride, token, tokens, c, K, CHUNK, R).to(pieces[c].dtype)
        if norm is not None:  # rounded before the weight, and behind it
            unit = (value.to(tl.float32) * inverse).to(value.dtype).to(tl.float32)
            value = (unit * load_vector(norm, c, K, CHUNK, R)).to(value.dtype)
        total += pieces[c].to(tl.float32) * value.to(tl.float32)
    return tl.sum(total, 2)


@triton.jit
def store_rows(out, value, token, tokens, row, rows, before=None):
    """Values [R, TOKENS] of rows of tokens, rounded, and added to those `before`, which may be `out`, if given."""
    at = token.to(tl.int64)[None, :] * rows + row[:, None]
    live = (token < tokens)[None, :] & (row < rows)[:, None]
    value = value.to(out.dtype.element_ty)
    if before is not None:
        value = (value.to(tl.float32) + tl.load(before + at, mask=live, other=0.0).to(tl.float32)).to(value.dtype)
    tl.store(out + at, value, mask=live)


@triton.jit(do_not_specialize=["tokens", "eps"])
def linear_kernel(
    x, norm, weight, before, out, tokens, eps,
    STRIDE: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    R: tl.constexpr, TOKENS: tl.constexpr, PASSES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out = x weight^T, or RMSNorm(x) weight^T if there is a norm weight; tokens of x lie STRIDE apart.

    Added to `before`, if given, which may be `out`.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)
    pieces = load_rows(weight, row, ROWS, K, CHUNKS, CHUNK)
    wait_for_inputs(EARLY)
    for n in range(PASSES):
        token = n * TOKENS + tl.arange(0, TOKENS)
        value = dots(pieces, x, STRIDE, token, tokens, norm, eps, K, CHUNKS, CHUNK, R)
        store_rows(out, value, token, tokens, row, ROWS, before)


CHUNK = 256  # values of a row that a warp takes at a time: 8 of 16 bits a lane
MOST_DEPTH = 2048  # values of a row that registers hold
_AT_ONCE = 3072  # values of rows that a warp holds, unless one row has more
MOST_TOGETHER, _REGISTERS = 8, 128  # tokens of a pass, and registers of a lane for them


class Shape(NamedTuple):
    """How many rows a program takes, a warp for each or for two, and in how many pieces."""

    constants: dict[str, int]
    warps: int

    @property
    def rows(self) -> int:
        """Of a program."""
        return self.constants["R"]


def shape_for(rows: int, depth: int, matrices: int = 1) -> Shape:
    """For products of `rows` rows of `depth` values, by so many matrices at once.

    Many rows share programs by two to a warp; few are spread over all multiprocessors.
    """
    warps = 4 if rows >= 512 else 2
    double = rows > 2048 and 2 * depth * matrices <= _AT_ONCE
    pieces = triton.cdiv(depth, CHUNK)
    return Shape({"CHUNKS": pieces, "CHUNK": CHUNK, "R": 2 * warps if double else warps}, warps)


def tokens_for(tokens: int, shape: Shape) -> dict[str, int]:
    """Tokens of a pass, a power of two, and passes: sums, and the tokens' values, have to fit into registers."""
    each = shape.rows // shape.warps * (8 + 4 * shape.constants["CHUNKS"])
    together = 1
    while together < min(tokens, MOST_TOGETHER) and 2 * together * each <= _REGISTERS:
        together *= 2
    return {"TOKENS": together, "PASSES": triton.cdiv(max(1, tokens), together)}


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles in bfloat16: layers of 768 and 1536, norms of 256, 1 to 8 tokens."""
    cases = []
    early = {"launch_pdl": True} if arch >= 90 else {}
    for rows, depth, tokens, with_norm in ((3206, 768, 1, False), (3206, 768, 8, False), (1152, 256, 4, True),
                                           (6412, 1536, 8, False), (768, 2048, 8, True)):  # fmt: skip
        how = shape_for(rows, depth)
        known: dict[str, Any] = {"tokens": "i32", "eps": "fp32", "STRIDE": depth, "ROWS": rows, "K": depth}
        known |= how.constants | tokens_for(tokens, how) | {"EARLY": arch >= 90}
        known |= {"norm": "*bf16", "before": None} if with_norm else {"norm": None}
        arguments = {name: known.get(name, "*bf16") for name in linear_kernel.arg_names}
        cases.append((linear_kernel, arguments, {"num_warps": how.warps, "num_stages": 1} | early))
    return cases
