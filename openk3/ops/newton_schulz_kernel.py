"""Triton kernels of Newton-Schulz over a batch of matrices of one shape, with the update of weights as a possible end.

Two ways, both on bfloat16 matrices with float32 sums. Up to LARGEST_GRAM rows the whole iteration runs on the Gram
matrix: P(X X^T) is made of small products, kept in two bfloat16 halves, and X is read twice. Larger matrices iterate as
the definition does; X X^T and b A + c A A are symmetric, so that only tiles on and below the diagonal are computed. The
weight update is part of the last product: neither the orthogonal matrix nor a second copy of a weight is written.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from openk3.ops.optimizer_kernel import pointer_at

LARGEST_GRAM = 128  # rows whose Gram matrix one program holds


@triton.jit
def _tile(x, row, column, rows, columns, lead, WHOLE: tl.constexpr):
    """A tile of a matrix with `lead` values from row to row; WHOLE: all of it exists."""
    at = x + row[:, None] * lead + column[None, :]
    if WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)


@triton.jit
def _slab(x, row, column, M, N, TALL: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of X [M, N], which a tall matrix holds as [N, M]."""
    if TALL:
        return tl.trans(_tile(x, column, row, N, M, M, WHOLE))
    else:
        return _tile(x, row, column, M, N, N, WHOLE)


@triton.jit
def _inverse_square(traces, block, shares):
    """1 / (squared Frobenius norm) from the shares of a block; 0 for a matrix of zeros, NaN for one that is broken."""
    total = 0.0
    for share in range(shares):
        total += tl.load(traces + block * shares + share)
    return tl.where(total == 0, 0.0, 1 / total)


@triton.jit
def _diagonal(SIZE: tl.constexpr):
    return tl.arange(0, SIZE)[:, None] == tl.arange(0, SIZE)[None, :]


@triton.jit
def _trace(square, SIZE: tl.constexpr):
    return tl.sum(tl.sum(tl.where(_diagonal(SIZE), square, 0.0), 1), 0)


@triton.jit(do_not_specialize=["b", "c"])
def symmetric_kernel(
    x, out, traces, M, N, b, c,
    BM: tl.constexpr, BK: tl.constexpr, TALL: tl.constexpr, WHOLE: tl.constexpr, POLYNOMIAL: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """A = X X^T of each block, or b A + c A A of a symmetric one: a tile on or below the diagonal, and its mirror.

    FIRST: X has any norm. Its square's trace is left in traces [blocks, tiles of a side] by the first product, and the
    polynomial divides by it.
    """
    tiles = tl.cdiv(M, BM)
    pairs = tiles * (tiles + 1) // 2
    block = tl.program_id(0) // pairs
    pair = tl.program_id(0) % pairs
    i = ((tl.sqrt(8.0 * pair + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > pair, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= pair, i + 1, i)
    j = pair - i * (i + 1) // 2
    x += block.to(tl.int64) * M * N
    out += block.to(tl.int64) * M * M
    row = i * BM + tl.arange(0, BM)
    column = j * BM + tl.arange(0, BM)
    square = tl.zeros([BM, BM], tl.float32)
    for start in range(0, N, BK):
        inner = start + tl.arange(0, BK)
        left = _slab(x, row, inner, M, N, TALL, WHOLE)
        right = _slab(x, column, inner, M, N, TALL, WHOLE)
        square = tl.dot(left, tl.trans(right), square)
    if POLYNOMIAL:
        linear = _tile(x, row, column, M, M, M, WHOLE).to(tl.float32)
        if FIRST:
            inverse = _inverse_square(traces, block, tiles)
            linear *= inverse
            square *= inverse * inverse
        square = b * linear + c * square
    else:
        if FIRST:
            if i == j:
                tl.store(traces + block * tiles + i, _trace(square, BM))
    value = square.to(tl.bfloat16)
    tl.store(out + row[:, None] * M + column[None, :], value, mask=(row < M)[:, None] & (column < M)[None, :])
    if i != j:
        mirrored = out + column[:, None] * M + row[None, :]
        tl.store(mirrored, tl.trans(value), mask=(column < M)[:, None] & (row < M)[None, :])


@triton.jit(do_not_specialize=["parts"])
def gram_kernel(
    x, shares, M, N, parts, part, BM: tl.constexpr, BK: tl.constexpr, TALL: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """X X^T over `part` columns of X, into shares [blocks, parts, BM, BM] in float32; rows from M on are zeros."""
    start = tl.program_id(0) % parts * part
    count = tl.minimum(part, N - start)
    tl.assume(count > 0)  # else the first product does not begin by itself
    x += (tl.program_id(0) // parts).to(tl.int64) * M * N
    row = tl.arange(0, BM)
    square = tl.zeros([BM, BM], tl.float32)
    for column in range(0, count, BK):
        slab = _slab(x, row, start + column + tl.arange(0, BK), M, N, TALL, WHOLE)
        square = tl.dot(slab, tl.trans(slab), square)
    tl.store(shares + tl.program_id(0).to(tl.int64) * (BM * BM) + row[:, None] * BM + row[None, :], square)


@triton.jit
def _halves_product(left, right, BM: tl.constexpr, BK: tl.constexpr):
    """left @ right of matrices [BM, BM] stored as [2, BM, BM]: high and low halves in bfloat16."""
    side = tl.arange(0, BM)
    product = tl.zeros([BM, BM], tl.float32)
    for start in range(0, BM, BK):
        inner = start + tl.arange(0, BK)
        at_left = left + side[:, None] * BM + inner[None, :]
        at_right = right + inner[:, None] * BM + side[None, :]
        left_high = tl.load(at_left)
        right_high = tl.load(at_right)
        left_low = tl.load(at_left + BM * BM)
        right_low = tl.load(at_right + BM * BM)
        product = tl.dot(left_low, right_high, product)
        product = tl.dot(left_high, right_low, product)
        product = tl.dot(left_high, right_high, product)
    return product


@triton.jit
def _load_halves(matrix, BM: tl.constexpr):
    at = matrix + tl.arange(0, BM)[:, None] * BM + tl.arange(0, BM)[None, :]
    return tl.load(at).to(tl.float32) + tl.load(at + BM * BM).to(tl.float32)


@triton.jit
def _store_halves(matrix, value, BM: tl.constexpr):
    """Write a matrix that all threads of the program may have read before, and read next."""
    at = matrix + tl.arange(0, BM)[:, None] * BM + tl.arange(0, BM)[None, :]
    high = value.to(tl.bfloat16)
    tl.debug_barrier()
    tl.store(at, high)
    tl.store(at + BM * BM, (value - high.to(tl.float32)).to(tl.bfloat16))
    tl.debug_barrier()


@triton.jit(do_not_specialize=["parts", "steps", "a", "b", "c"])
def chain_kernel(
    shares, work, polynomial, parts, steps, a, b, c, BM: tl.constexpr, BK: tl.constexpr, NORMALIZE: tl.constexpr
):  # fmt: skip
    """P, for which P X is the result of `steps` iterations on X, from A = X X^T: a program takes a block.

    A step is Q = a + b A + c A A, P <- Q P, A <- (A Q) Q. shares [blocks, parts, BM, BM] add up to A; work [blocks, 3,
    2, BM, BM] holds A, Q and A Q in two bfloat16 halves, polynomial [blocks, 2, BM, BM] takes P. NORMALIZE: X has any
    norm, by which P divides.
    """
    size: tl.constexpr = BM * BM
    block = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BM)[:, None] * BM + tl.arange(0, BM)[None, :]
    shares += block * parts * size
    square = tl.zeros([BM, BM], tl.float32)
    for part in range(parts):
        square += tl.load(shares + part * size + at)
    scale = 1.0
    if NORMALIZE:
        total = _trace(square, BM)
        inverse = tl.where(total == 0, 0.0, 1 / total)
        square *= inverse
        scale = tl.sqrt(inverse)
    gram = work + block * (6 * size)
    factor = gram + 2 * size
    product = factor + 2 * size
    polynomial += block * (2 * size)
    _store_halves(gram, square, BM)
    _store_halves(polynomial, tl.where(_diagonal(BM), scale, 0.0), BM)
    for step in range(steps):
        square = c * _halves_product(gram, gram, BM, BK) + b * _load_halves(gram, BM)
        _store_halves(factor, tl.where(_diagonal(BM), square + a, square), BM)
        _store_halves(polynomial, _halves_product(factor, polynomial, BM, BK), BM)
        if step + 1 < steps:
            _store_halves(product, _halves_product(gram, factor, BM, BK), BM)
            _store_halves(gram, _halves_product(product, factor, BM, BK), BM)


@triton.jit(do_not_specialize=["blocks", "shares", "keep", "rate", "a"])
def apply_kernel(
    x, polynomial, out, traces, table, peaks, blocks, M, N, lead, shares, a, keep, rate,
    BR: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, TALL: tl.constexpr, WHOLE: tl.constexpr,
    HALVES: tl.constexpr, FIRST: tl.constexpr, NARROW: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """a X + P X of each block, into out or as the update of its weight; X is [M, N], a tall one [N, M], P symmetric.

    P has rows of `lead` values. HALVES: it comes as [2, lead, lead] with lead = BK, and a is part of it. FIRST: the
    result is divided by the norm whose square traces [blocks, shares] add up to. With a table (see `momentum_kernel`)
    each weight becomes keep * weight - rate * result, and NARROW: a copy in bfloat16 is written, too; blocks whose
    gradient was zero only decay.
    """
    R = N if TALL else M
    C = M if TALL else N
    tiles_C = tl.cdiv(C, BC)
    tiles = tl.cdiv(R, BR) * tiles_C
    block = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    x += block.to(tl.int64) * M * N
    halves: tl.constexpr = 2 if HALVES else 1
    polynomial += block.to(tl.int64) * (halves * lead * lead)
    row = tile // tiles_C * BR + tl.arange(0, BR)
    column = tile % tiles_C * BC + tl.arange(0, BC)
    offsets = row[:, None] * C + column[None, :]
    inside = None
    if not WHOLE:
        inside = (row < R)[:, None] & (column < C)[None, :]
    if table is not None:  # asked for before the product, which hides the wait
        weights = pointer_at(table, 2, blocks, block, tl.float32, ALIGNED) + offsets
        weight = tl.load(weights, mask=inside)
        moves = tl.load(peaks + blocks + block) > 0
    result = tl.zeros([BR, BC], tl.float32)
    if HALVES:
        inner = tl.arange(0, BK)
        if TALL:
            left = _tile(x, row, inner, R, M, M, WHOLE)
            right = _tile(polynomial, inner, column, M, M, lead, WHOLE)
            low = _tile(polynomial + lead * lead, inner, column, M, M, lead, WHOLE)
            result = tl.dot(left, right, tl.dot(left, low, result))
        else:
            left = _tile(polynomial, row, inner, M, M, lead, WHOLE)
            low = _tile(polynomial + lead * lead, row, inner, M, M, lead, WHOLE)
            right = _tile(x, inner, column, M, C, C, WHOLE)
            result = tl.dot(left, right, tl.dot(low, right, result))
    else:
        for start in range(0, M, BK):
            inner = start + tl.arange(0, BK)
            left = _tile(x if TALL else polynomial, row, inner, R, M, M, WHOLE)
            right = _tile(polynomial if TALL else x, inner, column, M, C, C, WHOLE)
            result = tl.dot(left, right, result)
    if not HALVES:
        result += a * tl.load(x + offsets, mask=inside).to(tl.float32)
    if FIRST:
        result *= tl.sqrt(_inverse_square(traces, block, shares))
    if table is None:
        tl.store(out + block.to(tl.int64) * M * N + offsets, result.to(out.dtype.element_ty), mask=inside)
    else:
        weight = weight * keep - tl.where(moves, rate * result, 0.0)
        tl.store(weights, weight, mask=inside)
        if NARROW:
            narrow = pointer_at(table, 3, blocks, block, tl.bfloat16, ALIGNED) + offsets
            tl.store(narrow, weight.to(tl.bfloat16), mask=inside)


class Tiling(NamedTuple):
    """Sizes of a product's tiles, and how it is compiled."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """Launch options."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def square_tiling(M: int, arch: int, *, polynomial: bool) -> Tiling:
    """Tiles of X X^T or of the polynomial, for matrices of M rows on a compute capability such as 90."""
    if M % 128 and M < 512:
        return Tiling(64, 64, 64, 4, 4 if arch in (80, 90) else 3)
    # The polynomial holds a tile of A besides, for which four warps have no registers left.
    return Tiling(128, 128, 64, 4 if arch == 90 and not polynomial else 8, 4 if arch == 80 else 3)


def product_tiling(R: int, C: int, arch: int, *, updates: bool) -> Tiling:
    """Tiles of P X as it is stored, [R, C]; `updates` weights, which are held in registers."""
    if min(R, C) % 128 and min(R, C) < 512:
        return Tiling(64, 64, 64, 4, 4 if arch in (80, 90) else 3)
    if arch == 90 and not updates:
        return Tiling(128, 256, 64, 8, 3) if C % 256 == 0 else Tiling(128, 128, 64, 4, 3)
    return Tiling(128, 128, 64, 8, 4 if arch in (80, 90) else 3)


def gram_rows(M: int) -> int:
    """M up to a size that tensor cores take."""
    return max(16, triton.next_power_of_2(M))


def gram_tilings(BM: int, arch: int) -> tuple[Tiling, Tiling, Tiling]:
    """Tiles of X X^T, of the chain and of P X in halves, for matrices padded to BM rows."""
    large = BM > 64
    ample = arch in (80, 90)
    gram = Tiling(BM, BM, 64, 8 if large else 4, 4)
    chain = Tiling(BM, BM, min(BM, 64 if ample else 16 if arch == 89 else 32), 8 if large else 4, 2)
    return gram, chain, Tiling(BM, 128, BM, 8 if large else 4, 1)


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile for blocks of 128 to 512 x 1024, wide and tall, and for sizes that fit no tile."""
    return [*_gram_cases(arch), *_product_cases(arch)]


def _gram_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    cases: list[tuple[Any, dict[str, Any], dict[str, int]]] = []
    factors = dict.fromkeys(("a", "b", "c"), "fp32")
    for M in (128, 96, 16):
        BM, whole = gram_rows(M), M != 96
        gram, chain, _ = gram_tilings(BM, arch)
        sizes = {"M": "i32:16", "N": "i32:16" if whole else "i32", "parts": "i32", "part": "i32:16"}
        for tall in (False, True):
            shape = {"BM": BM, "BK": gram.inner, "TALL": tall, "WHOLE": whole}
            cases.append((gram_kernel, {"x": "*bf16", "shares": "*fp32"} | sizes | shape, gram.options))
        given = {"shares": "*fp32", "work": "*bf16", "polynomial": "*bf16", "parts": "i32", "steps": "i32"}
        cases.append((chain_kernel, given | factors | {"BM": BM, "BK": chain.inner, "NORMALIZE": True}, chain.options))
    return cases


def _product_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    cases: list[tuple[Any, dict[str, Any], dict[str, int]]] = []
    matrices = {"x": "*bf16", "out": "*bf16", "traces": "*fp32", "b": "fp32", "c": "fp32"}
    for M, whole in ((512, True), (200, False)):
        for tall, polynomial in ((False, False), (True, False), (False, True)):
            tiling = square_tiling(M, arch, polynomial=polynomial)
            shape = {"BM": tiling.rows, "BK": tiling.inner, "WHOLE": whole, "M": "i32:16", "N": "i32:16"}
            for first in (True, False):
                flags = {"TALL": tall, "POLYNOMIAL": polynomial, "FIRST": first}
                cases.append((symmetric_kernel, matrices | shape | flags, tiling.options))
    scalars = dict.fromkeys(("blocks", "shares"), "i32") | dict.fromkeys(("a", "keep", "rate"), "fp32")
    common = scalars | {"x": "*bf16", "polynomial": "*bf16", "M": "i32:16", "N": "i32:16", "lead": "i32:16"}
    writing = {"out": "*bf16", "table": None, "peaks": None, "NARROW": False, "ALIGNED": True}
    updating = {"out": None, "table": "*i64", "peaks": "*i32", "NARROW": True, "ALIGNED": True}
    sizes = [(R, C) for M in (512, 200, 128) for R, C in ((M, 1024), (1024, M))]
    for R, C in (*sizes, (1024, 384)):
        gram = min(R, C) <= LARGEST_GRAM
        for target, first in ((updating, False), (writing, False), (writing, True))[: 2 if gram else 3]:
            tiling = product_tiling(R, C, arch, updates=target is updating)
            if gram:
                tiling = gram_tilings(gram_rows(min(R, C)), arch)[2]
            shape = {"BR": tiling.rows, "BC": tiling.columns, "BK": tiling.inner}
            kind: dict[str, Any] = {"TALL": R > C, "WHOLE": min(R, C) != 200, "HALVES": gram, "FIRST": first}
            kind["traces"] = "*fp32" if first else None
            cases.append((apply_kernel, common | shape | kind | target, tiling.options))
    return cases
