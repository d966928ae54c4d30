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

WIDTH = tl.constexpr(16)  # columns that an epilogue with SiTU works on at a time: more would need too many registers


@triton.jit
def _tile_of(program, tiles, NUM: tl.constexpr, GROUP: tl.constexpr):
    """(tile of rows, block of columns): all NUM blocks of GROUP tiles before the next tiles, so that L2 serves both."""
    group = program // (GROUP * NUM)
    size = tl.minimum(tiles - group * GROUP, GROUP)
    inside = program % (GROUP * NUM)
    return group * GROUP + inside % size, inside // size


@triton.jit
def _rows_of(tile_row, start, tile, expert, BM: tl.constexpr):
    """Rows of a tile, and which of them are its expert's."""
    rows = tl.load(tile_row + tile) + tl.arange(0, BM)
    return rows, rows < tl.load(start + expert + 1)


@triton.jit
def _tokens(slot, rows, live, K: tl.constexpr):
    """The token of each row; row numbers where there is no table of slots."""
    token = tl.where(live, rows, 0)
    if slot is not None:
        token = tl.load(slot + rows, mask=live, other=0) // K
    return token.to(tl.int64)


@triton.jit
def _within(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Indices that exist; those beyond the end repeat the first ones and must not be written."""
    inside = index
    if SIZE % BLOCK != 0:
        inside = tl.where(index < SIZE, index, 0)
    return inside


@triton.jit
def _load(at, index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of weights, zero where the index along the products' sum is beyond SIZE."""
    if SIZE % BLOCK == 0:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=index < SIZE, other=0.0)
    return tile


@triton.jit
def _load_rows(at, live, index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of rows, zero where there is no row and where the index along the products' sum is beyond SIZE."""
    if SIZE % BLOCK == 0:
        tile = tl.load(at, mask=live[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=live[:, None] & (index < SIZE), other=0.0)
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


@triton.jit(do_not_specialize=["tiles", "depth"])
def gate_up_kernel(
    z, w1, w3, gate, up, act, slot, start, tile_expert, tile_row, tiles, depth,
    C: tl.constexpr, I: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BETA: tl.constexpr, LINEAR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """act = SiTU-GLU(z w1^T, z w3^T) for each expert's rows; gate and up are written if they are wanted."""
    tile, block = _tile_of(tl.program_id(0), tiles, (I + BN - 1) // BN, GROUP)
    expert = tl.load(tile_expert + tile)
    if expert >= E:
        return
    rows, live = _rows_of(tile_row, start, tile, expert, BM)
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
    # With nothing but `act` to write, narrow parts would be computed all at once, and take too many registers.
    NARROW: tl.constexpr = WIDTH if gate is not None else 2 * WIDTH
    PARTS: tl.constexpr = BN // NARROW
    gs = _parts(g, PARTS)
    us = _parts(u, PARTS)
    for n in tl.static_range(PARTS):
        column = block * BN + n * NARROW + tl.arange(0, NARROW)
        there = live[:, None] & (column < I)[None, :] if I % BN != 0 else live[:, None]
        at = rows.to(tl.int64)[:, None] * I + column[None, :]
        g = gs[n].to(act.dtype.element_ty)
        u = us[n].to(act.dtype.element_ty)
        if gate is not None:
            tl.store(gate + at, g, mask=there)
            tl.store(up + at, u, mask=there)
        value = situ_value(g.to(tl.float32), u.to(tl.float32), BETA, LINEAR)
        tl.store(act + at, value.to(act.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tiles", "depth"])
def down_kernel(
    act, w2, y, start, tile_expert, tile_row, tiles, depth,
    I: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y = act w2^T for each expert's rows."""
    tile, block = _tile_of(tl.program_id(0), tiles, (C + BN - 1) // BN, GROUP)
    expert = tl.load(tile_expert + tile)
    if expert >= E:
        return
    rows, live = _rows_of(tile_row, start, tile, expert, BM)
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
    d_u, w2, gate, up, weights, d_gate, d_up, scaled, shares, slot, start, tile_expert, tile_row, tiles, M, depth,
    C: tl.constexpr, I: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BETA: tl.constexpr, LINEAR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Gradients behind w2 of y's weighted sum: of gate and up, and of each weight as shares [blocks, M] of its sum.

    With d = d_u w2 of a row's token, before its weight p: d_p = <d, act>, and p d goes on to gate and up. What w2's
    gradient needs beside d_u is `scaled` = p act. Neither y nor act is kept from the forward pass.
    """
    tile, block = _tile_of(tl.program_id(0), tiles, (I + BN - 1) // BN, GROUP)
    expert = tl.load(tile_expert + tile)
    if expert >= E:
        return
    rows, live = _rows_of(tile_row, start, tile, expert, BM)
    column = block * BN + tl.arange(0, BN)
    inside = _within(column, I, BN)
    k = tl.arange(0, BK)
    d_at = d_u + _tokens(slot, rows, live, K)[:, None] * C + k[None, :]
    w_at = w2 + expert.to(tl.int64) * (C * I) + k[:, None] * I + inside[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for low in range(0, depth, BK):
        d = _load_rows(d_at, live, low + k[None, :], C, BK)
        acc = tl.dot(d, _load(w_at, low + k[:, None], C, BK), acc, input_precision="ieee")
        d_at += BK
        w_at += BK * I
    weight = tl.load(weights + tl.load(slot + rows, mask=live, other=0), mask=live, other=0.0)
    share = tl.zeros([BM], tl.float32)
    PARTS: tl.constexpr = BN // WIDTH
    parts = _parts(acc, PARTS)
    for n in tl.static_range(PARTS):
        column = block * BN + n * WIDTH + tl.arange(0, WIDTH)
        there = live[:, None] & (column < I)[None, :] if I % BN != 0 else live[:, None]
        at = rows.to(tl.int64)[:, None] * I + column[None, :]
        g = tl.load(gate + at, mask=there, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=there, other=0.0).to(tl.float32)
        value, by_gate, by_up = situ_gradient(g, u, BETA, LINEAR)
        value = value.to(scaled.dtype.element_ty).to(tl.float32)  # what w2 saw
        share += tl.sum(tl.where(there, parts[n] * value, 0.0), 1)
        d = parts[n] * weight[:, None]
        tl.store(d_gate + at, (d * by_gate).to(d_gate.dtype.element_ty), mask=there)
        tl.store(d_up + at, (d * by_up).to(d_up.dtype.element_ty), mask=there)
        tl.store(scaled + at, (value * weight[:, None]).to(scaled.dtype.element_ty), mask=there)
    tl.store(shares + block.to(tl.int64) * M + rows, share, mask=live)


@triton.jit(do_not_specialize=["tiles", "depth"])
def row_gradient_kernel(
    d_gate, d_up, w1, w3, d_z, start, tile_expert, tile_row, tiles, depth,
    I: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """d_z = d_gate w1 + d_up w3 for each expert's rows."""
    tile, block = _tile_of(tl.program_id(0), tiles, (C + BN - 1) // BN, GROUP)
    expert = tl.load(tile_expert + tile)
    if expert >= E:
        return
    rows, live = _rows_of(tile_row, start, tile, expert, BM)
    column = block * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row_at = tl.where(live, rows, 0).to(tl.int64)[:, None] * I + k[None, :]
    w_at = expert.to(tl.int64) * (I * C) + k[:, None] * C + _within(column, C, BN)[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for part in tl.static_range(2):
        d_at = (d_gate if part == 0 else d_up) + row_at
        at = (w1 if part == 0 else w3) + w_at
        for low in range(0, depth, BK):
            d = _load_rows(d_at, live, low + k[None, :], I, BK)
            acc = tl.dot(d, _load(at, low + k[:, None], I, BK), acc, input_precision="ieee")
            d_at += BK
            at += BK * C
    _store(d_z + rows.to(tl.int64)[:, None] * C + column[None, :], acc, live, column, C, BN)


@triton.jit
def gate_up_weight_kernel(
    d_gate, d_up, z, d_w1, d_w3, slot, start,
    I: tl.constexpr, C: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """d_w1 = d_gate^T z and d_w3 = d_up^T z over each expert's rows: BM rows and BN columns of both."""
    blocks: tl.constexpr = (I + BM - 1) // BM * ((C + BN - 1) // BN)
    expert = tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks // ((C + BN - 1) // BN) * BM + tl.arange(0, BM)
    column = tl.program_id(0) % blocks % ((C + BN - 1) // BN) * BN + tl.arange(0, BN)
    low = tl.load(start + expert)
    high = tl.load(start + expert + 1)
    inner = _within(row, I, BM)[None, :]
    outer = _within(column, C, BN)[None, :]
    k = tl.arange(0, BK)
    acc1 = tl.zeros([BM, BN], tl.float32)
    acc3 = tl.zeros([BM, BN], tl.float32)
    following = _tokens(slot, low + k, low + k < high, K)
    for first in range(low, high, BK):
        rows = first + k
        live = rows < high
        token = following
        following = _tokens(slot, rows + BK, rows + BK < high, K)
        x = tl.load(z + token[:, None] * C + outer, mask=live[:, None], other=0.0)
        at = rows.to(tl.int64)[:, None] * I + inner
        g = tl.load(d_gate + at, mask=live[:, None], other=0.0)
        u = tl.load(d_up + at, mask=live[:, None], other=0.0)
        acc1 = tl.dot(tl.trans(g), x, acc1, input_precision="ieee")
        acc3 = tl.dot(tl.trans(u), x, acc3, input_precision="ieee")
    at = expert.to(tl.int64) * (I * C) + row[:, None] * C + column[None, :]
    _store(d_w1 + at, acc1, row < I, column, C, BN)
    _store(d_w3 + at, acc3, row < I, column, C, BN)


@triton.jit
def down_weight_kernel(
    d_u, scaled, d_w2, slot, start,
    C: tl.constexpr, I: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """d_w2 = d_u^T (p act) over each expert's rows: BM rows and BN columns."""
    blocks: tl.constexpr = (C + BM - 1) // BM * ((I + BN - 1) // BN)
    expert = tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks // ((I + BN - 1) // BN) * BM + tl.arange(0, BM)
    column = tl.program_id(0) % blocks % ((I + BN - 1) // BN) * BN + tl.arange(0, BN)
    low = tl.load(start + expert)
    high = tl.load(start + expert + 1)
    outer = _within(row, C, BM)[None, :]
    inner = _within(column, I, BN)[None, :]
    k = tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    following = _tokens(slot, low + k, low + k < high, K)
    for first in range(low, high, BK):
        rows = first + k
        live = rows < high
        token = following
        following = _tokens(slot, rows + BK, rows + BK < high, K)
        d = tl.load(d_u + token[:, None] * C + outer, mask=live[:, None], other=0.0)
        x = tl.load(scaled + rows.to(tl.int64)[:, None] * I + inner, mask=live[:, None], other=0.0)
        acc = tl.dot(tl.trans(d), x, acc, input_precision="ieee")
    at = expert.to(tl.int64) * (C * I) + row[:, None] * I + column[None, :]
    _store(d_w2 + at, acc, row < C, column, I, BN)


class Tile(NamedTuple):
    """What a program makes at a time, and with how many warps and stages of loads."""

    columns: int
    depth: int
    warps: int
    stages: int


class Block(NamedTuple):
    """The same of a weight gradient's program."""

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
        "gate_up": Tile(128, 64, 8, 3),
        "down": Tile(256, 64, 8, 3),
        "act_gradient": Tile(128, 64, 8, 3),
        "row_gradient": Tile(256, 64, 8, 3),
    },
    64: {
        "gate_up": Tile(128, 64, 4, 3),
        "down": Tile(256, 64, 4, 3),
        "act_gradient": Tile(128, 64, 4, 3),
        "row_gradient": Tile(256, 64, 4, 3),
    },
    16: {
        "gate_up": Tile(64, 128, 4, 3),
        "down": Tile(128, 128, 4, 3),
        "act_gradient": Tile(64, 128, 4, 3),
        "row_gradient": Tile(64, 128, 4, 3),
    },
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
    "hopper": {"gate_up_weight": Block(128, 128, 64, 8, 3), "down_weight": Block(128, 256, 64, 8, 3)},
    "ampere": {"gate_up_weight": Block(128, 64, 32, 8, 3), "down_weight": Block(128, 128, 32, 8, 3)},
    "float32": dict.fromkeys(("gate_up_weight", "down_weight"), Block(32, 32, 32, 4, 2)),
}


def kind_of(arch: int, bytes_each: int) -> str:
    """Which table a GPU of compute capability arch / 10 takes for values of this size."""
    return "float32" if bytes_each == 4 else "hopper" if arch == 90 else "ampere"


def row_tiles(kind: str) -> dict[int, dict[str, Tile]]:
    """Tiles of the row products by rows of a tile."""
    return {"hopper": HOPPER, "ampere": AMPERE, "float32": FLOAT32}[kind]


def tile_for(kind: str, rows: int, name: str, width: int) -> Tile:
    """The tile of a row product of so many columns: half as wide where the table's does not divide them."""
    tile = row_tiles(kind)[rows][name]
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
    for (C, I), rows in (((3584, 3072), 128), ((512, 512), 64), ((512, 512), 16)):
        known: dict[str, Any] = {"C": C, "I": I, "E": 128, "K": 8, "BETA": 4.0, "LINEAR": 25.0, "GROUP": GROUP}
        known |= dict.fromkeys(("slot", "start", "tile_expert", "tile_row"), "*i32")
        known |= {"weights": "*fp32", "shares": "*fp32"} | dict.fromkeys(("tiles", "M", "depth"), "i32")
        shapes = {name: (rows, *tile) for name, tile in row_tiles(kind)[rows].items()}
        if rows != 16:
            shapes |= WEIGHT_BLOCKS[kind]
        for name, (BM, BN, BK, warps, stages) in shapes.items():
            tile = {"BM": BM, "BN": BN, "BK": BK}
            arguments = {x: (known | tile).get(x, "*bf16") for x in KERNELS[name].arg_names}
            options = {"num_warps": warps, "num_stages": stages}
            if rows != 16 or name == "down":
                cases.append((KERNELS[name], arguments, options))
            if name == "gate_up":
                cases.append((KERNELS[name], arguments | {"gate": None, "up": None}, options))
    return cases
