"""Newton-Schulz by kernels: which way matrices of a size go, in what pieces, and where the results are put."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from openk3.ops.backend import on_device
from openk3.ops.kda.scan_kernel import compute_capability
from openk3.ops.newton_schulz_kernel import (
    LARGEST_GRAM,
    Tiling,
    apply_kernel,
    chain_kernel,
    gram_kernel,
    gram_rows,
    gram_tilings,
    product_tiling,
    square_tiling,
    symmetric_kernel,
)
from openk3.ops.optimizer_kernel import VALUES, narrow_kernel

# Steps on one Gram matrix: rounding makes some of its eigenvalues negative, and each step multiplies those by a^2.
GRAM_STEPS = 5
_PROGRAMS = 132  # that X X^T is cut into at least, where it has so many columns
_COLUMNS = 512  # that a piece of it has at least
# Values of matrices at work at once: bounds the memory of what lies between the kernels.
CHUNK_VALUES = 1 << 27


class Update(NamedTuple):
    """Weights as the target of an orthogonalisation: w <- keep * w - rate * result, by block.

    `table` [4, B] int64 holds addresses: of each block's gradient, momentum, float32 weight and bfloat16 weight (or 0:
    then `narrow` is False). `peaks` [2, B] int32: see `momentum_kernel`.
    """

    table: Tensor
    peaks: Tensor
    keep: float
    rate: float
    narrow: bool
    aligned: bool


class _Shape(NamedTuple):
    """B matrices [M, N] with M <= N, stored as [R, C]: tall ones the other way round."""

    B: int
    R: int
    C: int
    arch: int

    @property
    def tall(self) -> bool:
        return self.R > self.C

    @property
    def M(self) -> int:
        return min(self.R, self.C)

    @property
    def N(self) -> int:
        return max(self.R, self.C)


def chunks(blocks: int, size: int) -> Iterator[slice]:
    """Runs of blocks of `size` values that are worked on at once."""
    step = max(1, CHUNK_VALUES // max(1, size))
    return (slice(low, min(low + step, blocks)) for low in range(0, blocks, step))


def newton_schulz_kernels(x_BMN: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """`newton_schulz` of matrices of any norm: products of bfloat16, sums in float32, result in x's dtype."""
    x_BMN = x_BMN.contiguous()
    out, size = torch.empty_like(x_BMN), x_BMN[0].numel()
    for part in chunks(len(x_BMN), size):
        x = x_BMN[part]
        peaks = torch.linalg.vector_norm(x, float("inf"), (1, 2), dtype=torch.float32)
        narrow = torch.empty_like(x, dtype=torch.bfloat16)
        with on_device(x):
            grid = (len(x) * triton.cdiv(size, VALUES),)
            narrow_kernel[grid](x, narrow, peaks, size, VALUES, size % VALUES == 0, num_warps=8)
        orthogonalize(narrow, steps, coefficients, out[part])
    return out


def orthogonalize(x_BRC: Tensor, steps: int, coefficients: tuple[float, float, float], target: Tensor | Update) -> None:
    """Newton-Schulz of B contiguous bfloat16 matrices, which are overwritten, into a tensor [B, R, C] or weights.

    The largest value of each matrix must lie within 2^-40 .. 2^40, or be 0.
    """
    B, R, C = x_BRC.shape
    run = _by_gram if min(R, C) <= LARGEST_GRAM else _by_products
    with on_device(x_BRC):
        run(x_BRC, _Shape(B, R, C, compute_capability(x_BRC.device)), steps, coefficients, target)


def _by_gram(x: Tensor, shape: _Shape, steps: int, coefficients: tuple[float, ...], target: Tensor | Update) -> None:
    """Rounds of at most GRAM_STEPS steps: X X^T, its polynomial, and one product."""
    B, M, N = shape.B, shape.M, shape.N
    BM = gram_rows(M)
    gram, chain, product = gram_tilings(BM, shape.arch)
    parts = max(1, min(triton.cdiv(_PROGRAMS, B), N // _COLUMNS))
    part = triton.cdiv(triton.cdiv(N, parts), gram.inner) * gram.inner
    parts = triton.cdiv(N, part)
    whole = M == BM and N % gram.inner == 0
    shares = x.new_empty(B, parts, BM, BM, dtype=torch.float32)
    work, polynomial = x.new_empty(B, 3, 2, BM, BM), x.new_empty(B, 2, BM, BM)
    for done in range(0, steps, GRAM_STEPS):
        count = min(GRAM_STEPS, steps - done)
        last = done + count == steps
        flags = {"BM": BM, "BK": gram.inner, "TALL": shape.tall, "WHOLE": whole}
        gram_kernel[(B * parts,)](x, shares, M, N, parts, part, **flags, **gram.options)
        flags = {"BM": BM, "BK": chain.inner, "NORMALIZE": done == 0}
        chain_kernel[(B,)](shares, work, polynomial, parts, count, *coefficients, **flags, **chain.options)
        other = x if last else torch.empty_like(x)
        _apply(shape, product, (x, polynomial, None, target if last else other), 0.0)
        x = other


def _by_products(
    x: Tensor, shape: _Shape, steps: int, coefficients: tuple[float, ...], target: Tensor | Update
) -> None:
    """Each step: X X^T, its polynomial, and the product with X; the first one divides by the norm on the way."""
    a, b, c = coefficients
    B, M, N = shape.B, shape.M, shape.N
    squares = {polynomial: square_tiling(M, shape.arch, polynomial=polynomial) for polynomial in (False, True)}
    tiles = triton.cdiv(M, squares[False].rows)
    traces = x.new_empty(B, tiles, dtype=torch.float32)
    gram, polynomial = x.new_empty(B, M, M), x.new_empty(B, M, M)
    other = torch.empty_like(x) if steps > 1 else x
    grid = (B * (tiles * (tiles + 1) // 2),)
    for step in range(steps):
        first, last = step == 0, step + 1 == steps
        for source, out, columns, tall in ((x, gram, N, shape.tall), (gram, polynomial, M, False)):
            square = squares[out is polynomial]
            whole = M % square.rows == 0 and columns % square.inner == 0
            flags = {"BM": square.rows, "BK": square.inner, "FIRST": first}
            kind = {"TALL": tall, "WHOLE": whole, "POLYNOMIAL": out is polynomial}
            symmetric_kernel[grid](source, out, traces, M, columns, b, c, **flags, **kind, **square.options)
        following = target if last else other
        product = product_tiling(shape.R, shape.C, shape.arch, updates=isinstance(following, Update))
        _apply(shape, product, (x, polynomial, traces if first else None, following), a)
        x, other = other, x


def _apply(shape: _Shape, tiling: Tiling, tensors: tuple[Any, ...], a: float) -> None:
    """Launch the product with X; tensors: X, P, traces or None, target."""
    x, polynomial, traces, target = tensors
    B, R, C = shape.B, shape.R, shape.C
    update = target if isinstance(target, Update) else None
    tiles = triton.cdiv(R, tiling.rows) * triton.cdiv(C, tiling.columns)
    apply_kernel[(B * tiles,)](
        *(x, polynomial, None if update else target, traces),
        *((update.table, update.peaks) if update else (None, None)),
        *(B, shape.M, shape.N, polynomial.shape[-1], 0 if traces is None else traces.shape[1], a),
        *((update.keep, update.rate) if update else (0.0, 0.0)),
        BR=tiling.rows,
        BC=tiling.columns,
        BK=tiling.inner,
        TALL=shape.tall,
        WHOLE=R % tiling.rows == 0 and C % tiling.columns == 0 and shape.M % tiling.inner == 0,
        HALVES=polynomial.ndim == 4,
        FIRST=traces is not None,
        NARROW=update is not None and update.narrow,
        ALIGNED=update is None or update.aligned,
        **tiling.options,
    )
