"""Triton kernels of the routed experts: grouped products over rows sorted by expert, with SiTU-GLU inside.

A program of the row products takes one tile of one expert's rows, from the table that the sort leaves, so the host
never learns how many rows an expert has; programs beyond the last tile end at once. Rows of tokens are read where the
tokens lie. Weight gradients take one block of one expert's matrix each and walk over its rows in order, so that sums
have one order and an expert without rows gets exact zeros.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from openk3.ops.situ_kernel import situ_gradient, situ_value

WIDTH = tl.constexpr(16)  # columns on which the gradients of SiTU work at a time: more would need too many registers


@triton.jit
def _tile_of(program, tiles, NUM: tl.constexpr, GROUP: tl.constexpr):
    """(tile of rows, block of columns): all NUM blocks of GROUP tiles before the next tiles, so that L2 serves both."""
    group = program // (GROUP * NUM)
    size = tl.minimum(tiles - group * GROUP, GROUP)
    inside = program % (GROUP * NUM)
    return group * GROUP + inside % size, inside // size


@triton.jit
def _rows_of(tile_row, tile_end, tile, BM: tl.constexpr, SPLIT: tl.constexpr = 1):
    """Rows of a tile, or of the n-th part of SPLIT ones as number tile * SPLIT + n; which of them are its expert's."""
    rows = tl.load(tile_row + tile // SPLIT) + tile % SPLIT * BM + tl.arange(0, BM)
    return rows, rows < tl.load(tile_end + tile // SPLIT)


@triton.jit
def _tokens(slot, rows, live, K: tl.constexpr):
    """The token of each row; row numbers where there is no table of slots."""
    token = tl.where(live, rows, 0)
    if slot is not None:
        token = tl.load(slot + rows, mask=live, other=0) // K
    return token.to(tl.int64)


@triton.jit
def _within(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Indices of rows that exist; those beyond the end repeat the first one and must not be written."""
    inside = index
    if SIZE % BLOCK != 0:
        inside = tl.where(index < SIZE, index, 0)
    return inside


@triton.jit
def _load(at, index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A tile, zero where the index is not below SIZE."""
    if SIZE % BLOCK == 0:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=index < SIZE, other=0.0)
    return tile


@triton.jit
def _load_rows(at, live, index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of rows, zero where there is no row, and where the index along memory is not below SIZE."""
    if SIZE % BLOCK == 0:
        tile = tl.load(at, mask=live[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=live[:, None] & (index < SIZE), other=0.0)
    return tile


@triton.jit
def _load_across(at, k, column, DEPTH: tl.constexpr, BK: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr):
    """A tile [BK, BN] of a matrix [DEPTH, SIZE], zero beyond either end: a clamped column would be read by itself."""
    if DEPTH % BK == 0:
        tile = _load(at, column[None, :], SIZE, BN)
    else:
        tile = _load_rows(at, k < DEPTH, column[None, :], SIZE, BN)
    return tile


@triton.jit
def _store(at, value, live, column, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Write a tile's rows that are live, in the format of the tensor."""
    mask = live[:, None]
    if SIZE % BLOCK != 0:
        mask = mask & (column < SIZE)[None, :]
    tl.store(at, value.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _parts(x, PARTS: tl.constexpr):
    """A tile in PARTS parts of its columns, so that what follows needs fewer registers at a time."""
    parts = (x,)
    if PARTS > 1:
        left, right = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))
        parts = _parts(left, PARTS // 2) + _parts(right, PARTS // 2)
    return parts


@triton.jit
def _put(matrix, value, row, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BN: tl.constexpr, ADD: tl.constexpr):
    """Rows of a block of a matrix [ROWS, COLUMNS] from column `first` on, written, or if ADD added to what is there.

    In parts of 32 columns: what is there would need as many registers as the block.
    """
    PARTS: tl.constexpr = BN // 32 if BN > 32 else 1
    WIDE: tl.constexpr = BN // PARTS
    parts = _parts(value, PARTS)
    for n in tl.static_range(PARTS):
        column = first + n * WIDE + tl.arange(0, WIDE)
        at = matrix + row[:, None] * COLUMNS + column[None, :]
        part = parts[n]
        if ADD:
            mask = (row < ROWS)[:, None]
            if COLUMNS % BN != 0:
                mask = mask & (column < COLUMNS)[None, :]
            part += tl.load(at, mask=mask, other=0.0)
        _store(at, part, row < ROWS, column, COLUMNS, BN)  # a whole part may lie behind the last column


@triton.jit(do_not_specialize=["tiles", "depth"])
def gate_up_kernel(
    z, w1, w3, gate, up, act, slot, tile_expert, tile_row, tile_end, tiles, depth,
    C: tl.constexpr, I: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BETA: tl.constexpr, LINEAR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """act = SiTU-GLU(z w1^T, z w3^T) for each expert's rows; gate and up are written if they are wanted."""
    tile, block = _tile_of(tl.program_id(0), tiles, (I + BN - 1) // BN, GROUP)
    expert = tl.load(tile_expert + tile)
    if expert >= E:
        return
    rows, live = _rows_of(tile_row, tile_end, tile, BM)
    column = block * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)[None, :]
    z_at = z + _tokens(slot, rows, live, K)[:, None] * C + k
    matrix = expert.to(tl.int64) * (I * C)
    w_at = _within(column, I, BN)[:, None] * C + k
    w1_at = w1 + matrix + w_at
    w3_at = w3 + matrix + w_at
    g = tl.zeros([BM, BN], tl.float32)
    u = tl.zeros([BM, BN], tl.float32)
    for low in range(0, depth, BK):
        x = _load_rows(z_at, live, low + k, C, BK)
        g = tl.dot(x, tl.trans(_load(w1_at, low + k, C, BK)), g, input_precision="ieee")
        u = tl.dot(x, tl.trans(_load(w3_at, low + k, C, BK)), u, input_precision="ieee")
        z_at += BK
        w1_at += BK
        w3_at += BK
    SHORT: tl.constexpr = act.dtype.element_ty == tl.bfloat16
    gs = _parts(g, 2)
    us = _parts(u, 2)
    for n in tl.static_range(2):
        column = block * BN + n * (BN // 2) + tl.arange(0, BN // 2)
        there = live[:, None] & (column < I)[None, :] if I % BN != 0 else live[:, None]
        at = rows.to(tl.int64)[:, None] * I + column[None, :]
        g = gs[n].to(act.dtype.element_ty)
        u = us[n].to(act.dtype.element_ty)
        if gate is not None:
            tl.store(gate + at, g, mask=there)
            tl.store(up + at, u, mask=there)
        value = situ_value(g.to(tl.float32), u.to(tl.float32), BETA, LINEAR, SHORT)
        tl.store(act + at, value.to(act.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tiles", "depth"])
def down_kernel(
    act, w2, y, tile_expert, tile_row, tile_end, tiles, depth,
    I: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y = act w2^T for each expert's rows."""
    tile, block = _tile_of(tl.program_id(0), tiles, (C + BN - 1) // BN, GROUP)
    expert = tl.load(tile_expert + tile)
    if expert >= E:
        return
    rows, live = _rows_of(tile_row, tile_end, tile, BM)
    column = block * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)[None, :]
    act_at = act + tl.where(live, rows, 0).to(tl.int64)[:, None] * I + k
    w_at = w2 + expert.to(tl.int64) * (C * I) + _within(column, C, BN)[:, None] * I + k
    acc = tl.zeros([BM, BN], tl.float32)
    for low in range(0, depth, BK):
        x = _load_rows(act_at, live, low + k, I, BK)
        acc = tl.dot(x, tl.trans(_load(w_at, low + k, I, BK)), acc, input_precision="ieee")
        act_at += BK
        w_at += BK
    _store(y + rows.to(tl.int64)[:, None] * C + column[None, :], acc, live, column, C, BN)


@triton.jit(do_not_specialize=["tiles", "M", "depth"])
def act_gradient_kernel(
    d_u, w2, gate, up, weights, d_gate, d_up, scaled, shares, slot, tile_expert, tile_row, tile_end, tiles, M, depth,
    C: tl.constexpr, I: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BETA: tl.constexpr, LINEAR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Gradients behind w2 of y's weighted sum: of gate and up, and of each weight as shares [blocks, M] of its sum.

    With d = d_u w2 of a row's token, before its weight p: d_p = <d, act>, and p d goes on to gate and up. What w2's
    gradient needs beside d_u is `scaled` = p act. Neither y nor act is kept from the forward pass. SPLIT programs share
    the rows of a tile of the table, and `tiles` counts their parts.
    """
    tile, block = _tile_of(tl.program_id(0), tiles, (I + BN - 1) // BN, GROUP)
    expert = tl.load(tile_expert + tile // SPLIT)
    if expert >= E:
        return
    rows, live = _rows_of(tile_row, tile_end, tile, BM, SPLIT)
    if SPLIT > 1:  # parts of a tile may have no rows
        if tl.load(tile_row + tile // SPLIT) + tile % SPLIT * BM >= tl.load(tile_end + tile // SPLIT):
            return
    column = block * BN + tl.arange(0, BN)
    at = rows.to(tl.int64)[:, None] * I + column[None, :]
    g = _load_rows(gate + at, live, column[None, :], I, BN)  # asked for before the products, needed behind them
    u = _load_rows(up + at, live, column[None, :], I, BN)
    slots = tl.load(slot + rows, mask=live, other=0)
    weight = tl.load(weights + slots, mask=live, other=0.0)
    k = tl.arange(0, BK)
    d_at = d_u + (slots // K).to(tl.int64)[:, None] * C + k[None, :]
    w_at = w2 + expert.to(tl.int64) * (C * I) + k[:, None] * I + column[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for low in range(0, depth, BK):
        d = _load_rows(d_at, live, low + k[None, :], C, BK)
        w = _load_across(w_at, low + k, column, C, BK, I, BN)
        acc = tl.dot(d, w, acc, input_precision="ieee")
        d_at += BK
        w_at += BK * I
    SHORT: tl.constexpr = scaled.dtype.element_ty == tl.bfloat16
    PARTS: tl.constexpr = BN // WIDTH
    accs = _parts(acc, PARTS)
    gs = _parts(g, PARTS)
    us = _parts(u, PARTS)
    share = tl.zeros([BM], tl.float32)
    for n in tl.static_range(PARTS):
        column = block * BN + n * WIDTH + tl.arange(0, WIDTH)
        there = live[:, None] & (column < I)[None, :] if I % BN != 0 else live[:, None]
        at = rows.to(tl.int64)[:, None] * I + column[None, :]
        value, by_gate, by_up = situ_gradient(gs[n].to(tl.float32), us[n].to(tl.float32), BETA, LINEAR, SHORT)
        value = value.to(scaled.dtype.element_ty).to(tl.float32)  # what w2 saw
        share += tl.sum(accs[n] * value, 1)
        d = accs[n] * weight[:, None]
        tl.store(d_gate + at, (d * by_gate).to(d_gate.dtype.element_ty), mask=there)
        tl.store(d_up + at, (d * by_up).to(d_up.dtype.element_ty), mask=there)
        # Tied to the product, which lies in another layout: else SiTU would be computed once more in that of the store.
        value = tl.where(accs[n] != accs[n], accs[n], value)
        tl.store(scaled + at, (value * weight[:, None]).to(scaled.dtype.element_ty), mask=there)
    tl.store(shares + block.to(tl.int64) * M + rows, share, mask=live)


@triton.jit(do_not_specialize=["tiles", "depth"])
def row_gradient_kernel(
    d_gate, d_up, w1, w3, d_z, tile_expert, tile_row, tile_end, tiles, depth,
    I: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """d_z = d_gate w1 + d_up w3 for each expert's rows."""
    tile, block = _tile_of(tl.program_id(0), tiles, (C + BN - 1) // BN, GROUP)
    expert = tl.load(tile_expert + tile)
    if expert >= E:
        return
    rows, live = _rows_of(tile_row, tile_end, tile, BM)
    column = block * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row_at = tl.where(live, rows, 0).to(tl.int64)[:, None] * I + k[None, :]
    w_at = expert.to(tl.int64) * (I * C) + k[:, None] * C + column[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for part in tl.static_range(2):
        d_at = (d_gate if part == 0 else d_up) + row_at
        at = (w1 if part == 0 else w3) + w_at
        for low in range(0, depth, BK):
            d = _load_rows(d_at, live, low + k[None, :], I, BK)
            w = _load_across(at, low + k, column, I, BK, C, BN)
            acc = tl.dot(d, w, acc, input_precision="ieee")
            d_at += BK
            at += BK * C
    _store(d_z + rows.to(tl.int64)[:, None] * C + column[None, :], acc, live, column, C, BN)


@triton.jit
def gate_up_weight_kernel(
    d_gate, d_up, z, d_w1, d_w3, slot, start,
    I: tl.constexpr, C: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """d_w1 = d_gate^T z and d_w3 = d_up^T z over each expert's rows: BM rows and BN columns of both.

    ADD: to sums of gradients in float32. They have one order, that of micro-batches, and no rounding between.
    """
    blocks: tl.constexpr = (I + BM - 1) // BM * ((C + BN - 1) // BN)
    expert = tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks // ((C + BN - 1) // BN) * BM + tl.arange(0, BM)
    column = tl.program_id(0) % blocks % ((C + BN - 1) // BN) * BN + tl.arange(0, BN)
    low = tl.load(start + expert)
    high = tl.load(start + expert + 1)
    k = tl.arange(0, BK)
    acc1 = tl.zeros([BM, BN], tl.float32)
    acc3 = tl.zeros([BM, BN], tl.float32)
    following = _tokens(slot, low + k, low + k < high, K)
    for first in range(low, high, BK):
        rows = first + k
        live = rows < high
        token = following
        following = _tokens(slot, rows + BK, rows + BK < high, K)
        x = _load_rows(z + token[:, None] * C + column[None, :], live, column[None, :], C, BN)
        at = rows.to(tl.int64)[:, None] * I + row[None, :]
        g = _load_rows(d_gate + at, live, row[None, :], I, BM)
        u = _load_rows(d_up + at, live, row[None, :], I, BM)
        acc1 = tl.dot(tl.trans(g), x, acc1, input_precision="ieee")
        acc3 = tl.dot(tl.trans(u), x, acc3, input_precision="ieee")
    matrix = expert.to(tl.int64) * (I * C)
    first = tl.program_id(0) % blocks % ((C + BN - 1) // BN) * BN
    _put(d_w1 + matrix, acc1, row, first, I, C, BN, ADD)
    _put(d_w3 + matrix, acc3, row, first, I, C, BN, ADD)


@triton.jit
def down_weight_kernel(
    d_u, scaled, d_w2, slot, start,
    C: tl.constexpr, I: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """d_w2 = d_u^T (p act) over each expert's rows: BM rows and BN columns; ADD as in `gate_up_weight_kernel`."""
    blocks: tl.constexpr = (C + BM - 1) // BM * ((I + BN - 1) // BN)
    expert = tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks // ((I + BN - 1) // BN) * BM + tl.arange(0, BM)
    column = tl.program_id(0) % blocks % ((I + BN - 1) // BN) * BN + tl.arange(0, BN)
    low = tl.load(start + expert)
    high = tl.load(start + expert + 1)
    k = tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    following = _tokens(slot, low + k, low + k < high, K)
    for first in range(low, high, BK):
        rows = first + k
        live = rows < high
        token = following
        following = _tokens(slot, rows + BK, rows + BK < high, K)
        d = _load_rows(d_u + token[:, None] * C + row[None, :], live, row[None, :], C, BM)
        x = _load_rows(scaled + rows.to(tl.int64)[:, None] * I + column[None, :], live, column[None, :], I, BN)
        acc = tl.dot(tl.trans(d), x, acc, input_precision="ieee")
    first = tl.program_id(0) % blocks % ((I + BN - 1) // BN) * BN
    _put(d_w2 + expert.to(tl.int64) * (C * I), acc, row, first, C, I, BN, ADD)


class Tile(NamedTuple):
    """What a program makes at a time, with how many warps and stages of loads; how many share the rows of a tile."""

    columns: int
    depth: int
    warps: int
    stages: int
    split: int = 1


class Block(NamedTuple):
    """Rows too, for a program that has no tile of rows given."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


KERNELS: dict[str, Any] = {
    "gate_up": gate_up_kernel,
    "down": down_kernel,
    "act_gradient": act_gradient_kernel,
    "row_gradient": row_gradient_kernel,
    "gate_up_weight": gate_up_weight_kernel,
    "down_weight": down_weight_kernel,
}
GROUP = 8  # tiles of rows whose blocks of columns run side by side
# By rows of a tile. Elsewhere than on Hopper blocks have 99 KB of shared memory; float32 takes no tensor cores.
HOPPER = {
    128: {
        "gate_up": Tile(64, 64, 8, 3),  # two programs on a multiprocessor: one multiplies while the other one stores
        "down": Tile(256, 64, 8, 3),
        "act_gradient": Tile(64, 64, 4, 3, split=2),
        "row_gradient": Tile(256, 64, 8, 3),
    },
    64: {
        "gate_up": Tile(64, 64, 4, 3),
        "down": Tile(128, 64, 4, 3),
        "act_gradient": Tile(64, 64, 4, 3),
        "row_gradient": Tile(128, 64, 4, 3),
    },
    16: {
        "gate_up": Tile(64, 128, 4, 3),
        "down": Tile(128, 128, 4, 3),
        "act_gradient": Tile(64, 128, 4, 3),
        "row_gradient": Tile(64, 128, 4, 3),
    },
}
# By rows of a tile, on Hopper: other tiles for sums longer than this, of which products are most of the work.
DEEP = {
    (128, "gate_up"): (640, Tile(128, 64, 8, 4)),
    (128, "act_gradient"): (2048, Tile(128, 64, 4, 3, split=2)),
    (64, "act_gradient"): (2048, Tile(128, 64, 4, 3)),
}
AMPERE = {
    128: {
        "gate_up": Tile(64, 32, 8, 4),
        "down": Tile(128, 32, 8, 4),
        "act_gradient": Tile(64, 32, 8, 4),
        "row_gradient": Tile(128, 32, 8, 4),
    },
    64: {
        "gate_up": Tile(64, 32, 8, 3),
        "down": Tile(128, 32, 4, 3),
        "act_gradient": Tile(64, 32, 4, 3),
        "row_gradient": Tile(128, 32, 4, 3),
    },
    16: dict.fromkeys(("gate_up", "down", "act_gradient", "row_gradient"), Tile(64, 64, 4, 3)),
}
FLOAT32 = {
    rows: dict.fromkeys(("gate_up", "down", "act_gradient", "row_gradient"), Tile(32, 32, 4, 2)) for rows in (64, 16)
}
WEIGHT_BLOCKS = {
    "hopper": {"gate_up_weight": Block(64, 128, 64, 4, 3), "down_weight": Block(128, 128, 64, 8, 3)},
    "ampere": {"gate_up_weight": Block(128, 64, 32, 8, 3), "down_weight": Block(128, 128, 32, 8, 3)},
    "float32": dict.fromkeys(("gate_up_weight", "down_weight"), Block(32, 32, 32, 4, 2)),
}


def kind_of(arch: int, bytes_each: int) -> str:
    """Which table a GPU of compute capability arch / 10 takes for values of this size."""
    return "float32" if bytes_each == 4 else "hopper" if arch == 90 else "ampere"


def row_tiles(kind: str) -> dict[int, dict[str, Tile]]:
    """Tiles of the row products by rows of a tile."""
    return {"hopper": HOPPER, "ampere": AMPERE, "float32": FLOAT32}[kind]


def tile_for(kind: str, rows: int, name: str, width: int, depth: int) -> Tile:
    """The tile of a row product of so many columns and sums; half as wide where the table's does not divide them."""
    tile = row_tiles(kind)[rows][name]
    longest, deep = DEEP.get((rows, name), (0, tile))
    if kind == "hopper" and depth > longest:
        tile = deep
    return tile if width % tile.columns == 0 else tile._replace(columns=max(16, tile.columns // 2))


def rows_of_tile(rows: int, experts: int, kind: str) -> int:
    """Rows of a tile for so many rows in all: few where experts have few, for what a tile has too many is lost."""
    mean = rows / experts
    most = 128 if mean > 96 else 64 if mean > 16 else 16
    return max(x for x in row_tiles(kind) if x <= most)


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16 for experts of the released widths, and for small ones with few rows."""
    kind = kind_of(arch, 2)
    cases = []
    for (C, I), rows in (((3584, 3072), 128), ((512, 512), 128), ((512, 512), 64), ((512, 512), 16)):
        known: dict[str, Any] = {"C": C, "I": I, "E": 128, "K": 8, "BETA": 4.0, "LINEAR": 25.0, "GROUP": GROUP}
        known |= dict.fromkeys(("slot", "start", "tile_expert", "tile_row", "tile_end"), "*i32")
        known |= {"weights": "*fp32", "shares": "*fp32", "ADD": False} | dict.fromkeys(("tiles", "M", "depth"), "i32")
        widths = {"gate_up": (I, C), "down": (C, I), "act_gradient": (I, C), "row_gradient": (C, I)}
        shapes = {name: (rows, *tile_for(kind, rows, name, *width)) for name, width in widths.items()}
        if rows > 16:
            shapes |= {name: (*block, 1) for name, block in WEIGHT_BLOCKS[kind].items()}
        for name, (BM, BN, BK, warps, stages, split) in shapes.items():
            tile = {"BM": BM // split, "BN": BN, "BK": BK, "SPLIT": split}
            arguments = {x: (known | tile).get(x, "*bf16") for x in KERNELS[name].arg_names}
            options = {"num_warps": warps, "num_stages": stages}
            if rows > 16 or name == "down":
                cases.append((KERNELS[name], arguments, options))
            if name == "gate_up":
                cases.append((KERNELS[name], arguments | {"gate": None, "up": None}, options))
            if "ADD" in arguments:
                sums = {x: "*fp32" for x in arguments if x.startswith("d_w")}
                cases.append((KERNELS[name], arguments | sums | {"ADD": True}, options))
    return cases
