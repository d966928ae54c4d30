"""Inside one chunk of Kimi Delta Attention: decay factors, query and key scores, and the triangular inverse.

Tokens of a chunk read with q and k and write with w = beta * k. The score of reader i and writer j <= i is
sum_K r_i w_j exp(G_i - G_j), where G is the running sum of the log decay. It must be a matrix product, so the
exponential is split at a reference point between i and j. Inside a tile the reference is the tile's middle token;
across tiles it is the border between the halves of a block of 2, 4, 8, ... tiles, where both parts of the exponent
are <= 0. With 16-token tiles and a gate bounded at -5 the exponents inside a tile stay within +-40, safe in float32.
With one-token tiles no exponent is ever positive, so the unbounded gate cannot overflow (report §2.1.1).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from openk3.ops.device_tables import device_table

_SOLVE = 16  # size of the triangles that are solved directly


@dataclass(frozen=True)
class Factors:
    """exp of sums of log decay; all but `inner` are <= 1, and shaped [X, tiles, 1, 1, K] to multiply read rows."""

    inner: Tensor | None  # token against the middle of its tile; None for one-token tiles, where it is 1
    read: Tensor  # chunk start -> tile middle
    write: Tensor  # tile middle -> chunk end
    halves: dict[int, Tensor]  # half-block length -> tile middle to (or from) the border of the two halves
    total: Tensor  # the whole chunk


@lru_cache(maxsize=32)
def _spans(chunk: int, tile: int) -> Tensor:
    """Rows of +-1 and 0 that sum the log decay of a chunk into every exponent of `Factors`, in that order."""
    token = torch.arange(chunk)
    middle = torch.arange(chunk // tile) * tile + tile // 2
    running = (token[None, :] <= middle[:, None]).double()
    rows = [running, 1 - running]
    half = tile
    while half < chunk:
        border = (middle // (2 * half)) * 2 * half + half
        after = (middle >= border)[:, None]
        reading = (token >= border[:, None]) & (token <= middle[:, None])
        writing = (token > middle[:, None]) & (token < border[:, None])
        rows.append(torch.where(after, reading, writing).double())
        half *= 2
    rows.append(torch.ones(1, chunk, dtype=torch.double))
    if tile > 1:
        inclusive = torch.ones(chunk, chunk, dtype=torch.double).tril()
        rows.insert(0, inclusive - running.repeat_interleave(tile, 0))
    return torch.cat(rows)


@device_table(32)
def _spans_on(chunk: int, tile: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _spans(chunk, tile).to(device, dtype)


def decay_factors(g_XCK: Tensor, tile: int) -> Factors:
    """All decay factors of X chunks of log decay g [X, C, K], by one matrix product and one exponential."""
    X, C, _ = g_XCK.shape
    num_tiles = C // tile
    spans_RC = _spans_on(C, tile, g_XCK.dtype, g_XCK.device)
    all_XRK = torch.bmm(spans_RC.expand(X, -1, -1), g_XCK).exp_()
    inner = None
    if tile > 1:
        inner = all_XRK[:, :C].unflatten(1, (num_tiles, tile))
        all_XRK = all_XRK[:, C:]
    read, write, *halves = (part[:, :, None, None] for part in all_XRK[:, :-1].split(num_tiles, 1))
    return Factors(inner, read, write, {tile << i: half for i, half in enumerate(halves)}, all_XRK[:, -1])


def _half_blocks(x: Tensor, half: int, tile: int) -> tuple[Tensor, Tensor]:
    """Split the tile axis (1) of x into blocks of two halves: first halves and second halves, tile axis kept."""
    blocks = x.unflatten(1, (-1, 2, half // tile))
    return blocks[:, :, 0], blocks[:, :, 1]


def _cross_operands(reads: Tensor, writes: Tensor, factor: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Operands of the scores between the two halves of each block, flattened to one batch of matrices."""
    tile, K = reads.shape[-2:]
    write_factor, read_factor = _half_blocks(factor, half, tile)
    rows = _half_blocks(reads, half, tile)[1] * read_factor
    columns = _half_blocks(writes, half, tile)[0] * write_factor[:, :, :, 0]
    return rows.view(-1, 2 * half, K), columns.view(-1, half, K)


def _tile_mask(tile: int, like: Tensor) -> Tensor:
    """[2, tile, tile]: a query reads its own token's write, a key only earlier ones."""
    ones = torch.ones(tile, tile, dtype=like.dtype, device=like.device)
    return torch.stack([ones.tril(), ones.tril(-1)])


def _diagonal_blocks(x_XCC: Tensor, size: int) -> Tensor:
    """View of the square blocks on the diagonal: [X, C / size, size, size]."""
    grid = x_XCC.unflatten(1, (-1, size)).unflatten(3, (-1, size))
    return grid.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def score_forward(reads: Tensor, writes: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
    """Scores of queries (own token included) and of keys (earlier tokens only), each [X, C, C].

    reads [X, tiles, 2, tile, K] holds each tile's queries, then its keys; writes [X, tiles, tile, K].
    """
    X, num_tiles, _, tile, K = reads.shape
    C = num_tiles * tile
    query_XCC, key_XCC = reads.new_zeros(2, X, C, C)
    inside = torch.bmm(reads.view(-1, 2 * tile, K), writes.view(-1, tile, K).mT).view(X, num_tiles, 2, tile, tile)
    mask = _tile_mask(tile, reads)
    torch.mul(inside[:, :, 0], mask[0], out=_diagonal_blocks(query_XCC, tile))
    torch.mul(inside[:, :, 1], mask[1], out=_diagonal_blocks(key_XCC, tile))
    for half, factor in factors.halves.items():
        rows, columns = _cross_operands(reads, writes, factor, half)
        across = torch.bmm(rows, columns.mT).view(X, -1, half // tile, 2, tile, half)
        for part, target in enumerate((query_XCC, key_XCC)):
            block = _diagonal_blocks(target, 2 * half)[:, :, half:, :half]
            block.unflatten(2, (-1, tile)).copy_(across[:, :, :, part])
    return query_XCC, key_XCC


def score_backward(grad: Tensor, reads: Tensor, writes: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
    """Gradients of reads and writes from that of the scores, grad [X, tiles, 2, tile, C] (unmasked)."""
    X, num_tiles, _, tile, K = reads.shape
    mask = _tile_mask(tile, reads)
    inside = grad.new_empty(X, num_tiles, 2, tile, tile)
    tiles = grad.unflatten(4, (num_tiles, tile)).diagonal(dim1=1, dim2=4).movedim(-1, 1)
    torch.mul(tiles, mask, out=inside)
    inside = inside.view(-1, 2 * tile, tile)
    d_reads = torch.bmm(inside, writes.view(-1, tile, K)).view_as(reads)
    d_writes = torch.bmm(inside.mT, reads.view(-1, 2 * tile, K)).view_as(writes)
    for half, factor in factors.halves.items():
        rows, columns = _cross_operands(reads, writes, factor, half)
        grid = grad.unflatten(4, (-1, 2, half))[..., 0, :].unflatten(1, (-1, 2, half // tile))[:, :, 1]
        across = grid.diagonal(dim1=1, dim2=5).movedim(-1, 1).reshape(-1, 2 * half, half)
        write_factor, read_factor = _half_blocks(factor, half, tile)
        target = _half_blocks(d_reads, half, tile)[1]
        target.addcmul_(torch.bmm(across, columns).view(target.shape), read_factor)
        target = _half_blocks(d_writes, half, tile)[0]
        target.addcmul_(torch.bmm(across.mT, rows).view(target.shape), write_factor[:, :, :, 0])
    return d_reads, d_writes


def unit_lower_inverse(lower_XCC: Tensor) -> Tensor:
    """(I + lower)^-1 by substitution; only the part strictly below the diagonal is read. C is 16 times a power of 2.

    Triangles of 16 are solved directly, then merged: the corner of [[A, 0], [B, D]]^-1 is -D^-1 B A^-1. No powers:
    for nearly equal keys they grow like binomials and cancel.
    """
    C = lower_XCC.shape[1]
    eye = torch.eye(_SOLVE, dtype=lower_XCC.dtype, device=lower_XCC.device)
    inverse = torch.zeros_like(lower_XCC)
    tiles = _diagonal_blocks(lower_XCC, _SOLVE)
    solved = torch.linalg.solve_triangular(tiles, eye, upper=False, unitriangular=True)
    _diagonal_blocks(inverse, _SOLVE).copy_(solved)
    half = _SOLVE
    while half < C:
        for start in range(0, C, 2 * half):
            first, second = slice(start, start + half), slice(start + half, start + 2 * half)
            corner = torch.bmm(inverse[:, second, second], lower_XCC[:, second, first])
            inverse[:, second, first] = torch.bmm(corner, inverse[:, first, first]).neg_()
        half *= 2
    return inverse
