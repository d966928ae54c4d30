"""Routed experts kept in MXFP4: their matrices in the order in which kernels read them, and back.

A matrix of O rows and K columns lies in units of 32 rows and 128 columns, 2,048 bytes of codes and 128 of scales each.
Lane g * 4 + q of a warp reads, with 16 bytes at a time, the codes of columns 32 q .. 32 q + 31 of row g, then of row
g + 8, for the first 16 rows of a unit and then for the other 16: what tensor cores want from it. One byte of scale
belongs to each of the four. Within a word of eight codes the bits lie so that a shift and a mask turn two codes at a
time into bfloat16 numbers that are 2^-126 of the codes' values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.mxfp import BLOCK, dequantize_mxfp4

ROWS, COLUMNS = 32, 128  # of a unit
GROUP = 4  # units over which rows are padded: what the warps of a program take
WORDS, SCALES = ROWS * COLUMNS // 8, ROWS * COLUMNS // BLOCK // 4  # int32 values of a unit
MOST_PLAIN = 128  # the largest scale byte for which 2^(s - 1) is finite in bfloat16


@dataclass(frozen=True)
class Tiles:
    """The matrices [O, K] of E experts; rows and columns are padded with zeros."""

    codes_EUSW: Tensor  # int32 [E, units of rows, units of columns, WORDS]
    scales_EUSX: Tensor  # int32, four scale bytes each
    rows: int
    columns: int

    @property
    def units(self) -> int:
        """Units of rows."""
        return self.codes_EUSW.shape[1]

    @property
    def steps(self) -> int:
        """Units of columns."""
        return self.codes_EUSW.shape[2]

    @property
    def num_bytes(self) -> int:
        """Of codes and scales, padding included."""
        return 4 * (self.codes_EUSW.numel() + self.scales_EUSX.numel())


@dataclass(frozen=True)
class ExpertTiles:
    """The experts of a layer: w1 and w3 in turns of 16 rows, and w2."""

    gate_up: Tiles
    down: Tiles
    inner: int
    wide: bool  # some scale is too large for one multiplication, see `is_wide`

    @property
    def experts(self) -> int:
        """How many."""
        return len(self.down.codes_EUSW)


def tiles_shape(rows: int, columns: int) -> tuple[int, int]:
    """(units of rows, units of columns) of a matrix."""
    return -(-rows // (ROWS * GROUP)) * GROUP, -(-columns // COLUMNS)


def tile_mxfp4(codes_EOX: Tensor, scale_EOY: Tensor) -> Tiles:
    """Tiles of matrices [E, O, K]: codes [E, O, K/2] and scale bytes [E, O, K/32] as `quantize_mxfp4` gives them."""
    E, O, half = codes_EOX.shape
    units, steps = tiles_shape(O, 2 * half)
    codes = codes_EOX.new_zeros(E, units * ROWS, steps * COLUMNS // 2)
    codes[:, :O, :half] = codes_EOX
    scale = scale_EOY.new_zeros(E, units * ROWS, steps * COLUMNS // BLOCK)
    scale[:, :O, : scale_EOY.shape[2]] = scale_EOY
    # [E, unit, part, half of 16, g, step, q, word] -> [E, unit, step, part, half of 16, g, q, word]
    words = codes.view(torch.int32).view(E, units, 2, 2, 8, steps, 4, 4).permute(0, 1, 5, 2, 3, 4, 6, 7)
    # [E, unit, part, half of 16, g, step, q] -> [E, unit, step, g, q, part, half of 16]
    scales = scale.view(E, units, 2, 2, 8, steps, 4).permute(0, 1, 5, 4, 6, 2, 3).contiguous()
    return Tiles(
        spread_bits(words.reshape(E, units, steps, WORDS)),
        scales.view(E, units, steps, -1).view(torch.int32),
        O,
        2 * half,
    )


def untile_mxfp4(tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes that `tile_mxfp4` was given, byte for byte."""
    E, units, steps, _ = tiles.codes_EUSW.shape
    words = gather_bits(tiles.codes_EUSW).view(E, units, steps, 2, 2, 8, 4, 4).permute(0, 1, 3, 4, 5, 2, 6, 7)
    codes = words.reshape(E, units * ROWS, -1).view(torch.uint8)
    scales = tiles.scales_EUSX.view(torch.uint8).view(E, units, steps, 8, 4, 2, 2).permute(0, 1, 5, 6, 3, 2, 4)
    scale = scales.reshape(E, units * ROWS, -1)
    O, K = tiles.rows, tiles.columns
    return codes[:, :O, : K // 2].contiguous(), scale[:, :O, : K // BLOCK].contiguous()


def values_of(tiles: Tiles, dtype: torch.dtype) -> Tensor:
    """The matrices [E, O, K] that the tiles stand for."""
    return dequantize_mxfp4(*untile_mxfp4(tiles), dtype)


def interleave(first_EOX: Tensor, second_EOX: Tensor) -> Tensor:
    """Rows of two matrices in turns of 16, each padded to a multiple of 16: both products of a gate in one unit."""
    E, O, X = first_EOX.shape
    blocks = -(-O // 16)
    both = first_EOX.new_zeros(E, blocks, 2, 16, X)
    for part, matrix in enumerate((first_EOX, second_EOX)):
        padded = matrix.new_zeros(E, blocks * 16, X)
        padded[:, :O] = matrix
        both[:, :, part] = padded.view(E, blocks, 16, X)
    return both.view(E, blocks * 32, X)


def separate(both_EOX: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The two matrices of `rows` rows each that `interleave` was given."""
    E, _, X = both_EOX.shape
    both = both_EOX.view(E, -1, 2, 16, X)
    first, second = (both[:, :, part].reshape(E, -1, X)[:, :rows] for part in range(2))
    return first, second


def is_wide(scale: Tensor) -> bool:
    """Whether some scale byte is beyond what one multiplication of bfloat16 numbers can apply; asks the device."""
    return bool((scale.view(torch.uint8) > MOST_PLAIN).any())


def _moves() -> list[tuple[int, int, int]]:
    """(mask, bit of a word of codes in order, bit of a word as kernels read it) of runs of bits that move together.

    Code 2 p + h of a word, h the odd one of a pair, belongs into half h of the pair's register: its sign in bit 15, its
    exponent and mantissa in bits 8 to 6. Pair 0 lies there; pair 1 comes by a shift of 4 to the left, pair 2 by a
    rotation of 10, pair 3 by a shift of 6, but for bit 8, which a shift of 2 to the right brings.
    """
    moves = []
    for pair in range(4):
        for half in range(2):
            low, high = 8 * pair + 4 * half, 16 * half
            left = (0, 4, 10, 6)[pair]
            moves.append((1, low + 3, (high + 15 - left) % 32))
            if pair < 3:
                moves.append((7, low, (high + 6 - left) % 32))
            else:
                moves += [(3, low, high + 6 - left), (1, low + 2, high + 8 + 2)]
    return moves


def spread_bits(words: Tensor) -> Tensor:
    """Words of eight codes in order (int32) -> as kernels read them."""
    out = torch.zeros_like(words)
    for mask, source, target in _moves():
        out |= ((words >> source) & mask) << target
    return out


def gather_bits(words: Tensor) -> Tensor:
    """The inverse of `spread_bits`."""
    out = torch.zeros_like(words)
    for mask, source, target in _moves():
        out |= ((words >> target) & mask) << source
    return out
