"""Packed experts: the order of their bits and bytes, and the Triton kernels in the interpreter against definitions."""

from __future__ import annotations

import math

import pytest
import torch
from op_checks import random
from torch import Tensor

from openk3.ops.latent_moe import packed
from openk3.ops.latent_moe.experts_fused import Form
from openk3.ops.latent_moe.packed import ExpertTiles
from openk3.ops.latent_moe.packed_fused import Way, mix_packed, move_columns, packed_tile_rows, way_for
from openk3.ops.latent_moe.packed_kernel import place_of
from openk3.ops.latent_moe.route_fused import Choice, Plan, Routed, route, sort
from openk3.ops.mxfp import LEVELS, dequantize_mxfp4, quantize_mxfp4


def draw_bytes(*shape: int, below: int = 256, seed: int = 0) -> Tensor:
    """Random bytes."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (32, 128), (80, 96), (129, 160), (256, 384)])
def test_tiles_hold_every_byte(rows: int, columns: int) -> None:
    """There and back is the identity, whatever the padding; two matrices in turns as well."""
    codes, scale = draw_bytes(3, rows, columns // 2), draw_bytes(3, rows, columns // 32, seed=1)
    tiles = packed.tile_mxfp4(codes, scale)
    assert tiles.units % packed.GROUP == 0 and tiles.units * packed.ROWS >= rows
    assert tiles.steps * packed.COLUMNS >= columns
    assert tiles.num_bytes == tiles.units * tiles.steps * 3 * (2048 + 128)
    for got, want in zip(packed.untile_mxfp4(tiles), (codes, scale)):
        assert torch.equal(got, want)
    got, want = packed.values_of(tiles, torch.float64), dequantize_mxfp4(codes, scale, torch.float64)
    assert torch.equal(got.view(torch.int64), want.view(torch.int64)) or torch.equal(got.isnan(), want.isnan())
    both = packed.interleave(codes, codes.flip(1))
    assert both.shape[1] == 2 * 16 * math.ceil(rows / 16)
    for got, want in zip(packed.separate(both, rows), (codes, codes.flip(1))):
        assert torch.equal(got, want)


def test_lanes_read_what_products_want() -> None:
    """Word w of lane 4 g + q: eight codes in order, of columns 32 q + 8 w .. of row g (or g + 8, or those + 16)."""
    codes, scale = draw_bytes(1, 32, 64), draw_bytes(1, 32, 4, seed=1)
    tiles = packed.tile_mxfp4(codes, scale)
    lanes = packed.gather_bits(tiles.codes_EUSW)[0, 0, 0].view(2, 2, 8, 4, 4)
    scales = tiles.scales_EUSX.view(torch.uint8)[0, 0, 0].view(8, 4, 2, 2)
    words = codes.view(torch.int32)[0]
    for part in range(2):
        for half in range(2):
            for g in range(8):
                row = 16 * part + 8 * half + g
                assert torch.equal(lanes[part, half, g].flatten(), words[row])
                assert torch.equal(scales[g, :, part, half], scale[0, row])


def test_two_codes_at_a_time() -> None:
    """What kernels do with a word: four shifted and masked registers hold 2^-126 of the codes' values in two halves."""
    words = torch.randint(-(2**31), 2**31, (500,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    assert torch.equal(packed.gather_bits(packed.spread_bits(words)), words)
    x, mask = packed.spread_bits(words).long() & 0xFFFFFFFF, 0x81C081C0
    turned = (x << 10 | x >> 22) & 0xFFFFFFFF
    registers = (x & mask, x << 4 & mask, turned & mask, (x << 6 & 0x80C080C0) | (x >> 2 & 0x01000100))
    values = torch.tensor([*LEVELS, *(-level for level in LEVELS)], dtype=torch.float64)
    for pair, register in enumerate(registers):
        for half in range(2):
            bits = (register >> 16 * half & 0xFFFF).to(torch.int32) << 16
            got = bits.view(torch.float32).double() * 2.0**126
            want = values[(words >> (8 * pair + 4 * half) & 15).long()]
            assert torch.equal(got, want) and torch.equal(got.signbit(), want.signbit())


def experts(E: int, C: int, inner: int) -> tuple[ExpertTiles, list[Tensor]]:
    """Quantised random experts: packed, and their values in float64."""
    shapes = ((E, inner, C), (E, inner, C), (E, C, inner))
    w1, w3, w2 = (quantize_mxfp4(random(*shape, seed=i) * shape[-1] ** -0.5) for i, shape in enumerate(shapes))
    gate_up = packed.tile_mxfp4(*(packed.interleave(a, b) for a, b in zip(w1, w3)))
    values = [dequantize_mxfp4(*w, torch.float64) for w in (w1, w3, w2)]
    return ExpertTiles(gate_up, packed.tile_mxfp4(*w2), inner, packed.is_wide(w1[1])), values


def definition(z: Tensor, routed: Routed, values: list[Tensor], form: Form) -> Tensor:
    """The normed weighted sum in float64."""
    w1, w3, w2 = (w[routed.ids_Tk] for w in values)
    gate, up = (torch.einsum("tkic,tc->tki", w, z.double()) for w in (w1, w3))
    up = up if form.linear_beta is None else form.linear_beta * torch.tanh(up / form.linear_beta)
    act = form.beta * torch.tanh(gate / form.beta) * torch.sigmoid(gate) * up
    u = torch.einsum("tk,tkci,tki->tc", routed.weights_Tk.double(), w2, act)
    return u * (u.square().mean(-1, keepdim=True) + form.eps).rsqrt()


@pytest.mark.parametrize(
    ("T", "E", "k", "C", "inner", "dtype", "linear"),
    [
        (5, 4, 2, 64, 32, torch.float32, 25.0),
        (1, 3, 1, 160, 96, torch.bfloat16, 25.0),
        (70, 3, 2, 128, 32, torch.bfloat16, None),
    ],
)
def test_experts_against_float64(
    T: int, E: int, k: int, C: int, inner: int, dtype: torch.dtype, linear: float | None
) -> None:
    """Tiles of 16 and 64 rows, widths that no unit divides, one token; the same bits twice."""
    tiles, values = experts(E, C, inner)
    form, z = Form(4.0, linear, 1e-5), random(T, C).to(dtype)
    routed = route(random(T, E, seed=7).float(), torch.zeros(E), Choice(k, True, 1.0))
    plan = sort(routed, packed_tile_rows(z, k, tiles))
    got = mix_packed(z, routed.weights_Tk, plan, tiles, (torch.ones(C, dtype=dtype), form))
    want = definition(z, routed, values, form)
    limit = 2e-6 if dtype == torch.float32 else 8e-3
    assert float((got.double() - want).norm()) < limit * float(want.norm())
    assert torch.equal(got, mix_packed(z, routed.weights_Tk, plan, tiles, (torch.ones(C, dtype=dtype), form)))


def test_unit_vectors_give_the_matrix_bit_for_bit() -> None:
    """Every code under every scale byte that stays finite: what kernels unpack is what the definition does."""
    from openk3.ops.latent_moe.packed_fused import _Launch

    scale = torch.arange(253).repeat(2)[:512].view(1, 1, -1).to(torch.uint8)[..., :4].expand(1, 64, 4).clone()
    scale[0] = torch.arange(256).clamp(max=252).view(64, 4).to(torch.uint8)
    codes = draw_bytes(1, 64, 64)
    tiles = packed.tile_mxfp4(codes, scale)
    eye = torch.eye(128)
    start = torch.tensor([0, 128], dtype=torch.int32)
    rows = torch.arange(128, dtype=torch.int32)
    first = torch.tensor([0, 64], dtype=torch.int32)
    plan = Plan(rows[:, None], rows, start, torch.zeros(2, dtype=torch.int32), first, first + 64, 64)
    whole = ExpertTiles(tiles, tiles, 128, True)
    launch = _Launch(plan, whole, Form(4.0, 25.0, 1e-5), Way("triton", 64), eye)
    launch.tiles = 2
    launch.known["C"], launch.known["tiles"] = 64, 2
    y = torch.empty(128, 64)
    launch.run("down", eye, tiles, y)
    assert torch.equal(y.T, dequantize_mxfp4(codes, scale)[0])


def test_columns_are_moved_as_said() -> None:
    """`place_of` is where a column goes, and no two go to one place."""
    x = torch.arange(3 * 256).float().view(3, 256)
    moved = move_columns(x)
    assert sorted(map(place_of, range(256))) == list(range(256))
    assert all(torch.equal(moved[:, place_of(c)], x[:, c]) for c in range(256))
    assert move_columns(x[:0]).shape == (0, 256)


def test_no_token() -> None:
    """An empty result."""
    tiles, _ = experts(2, 32, 32)
    routed = route(torch.zeros(0, 2), torch.zeros(2), Choice(1, True, 1.0))
    z = torch.zeros(0, 32)
    plan = sort(routed, packed_tile_rows(z, 1, tiles))
    assert mix_packed(z, routed.weights_Tk, plan, tiles, (torch.ones(32), Form(4.0, 25.0, 1e-5))).shape == (0, 32)


def test_ways() -> None:
    """A tile holds all rows that an expert can have of few tokens; large ones need moved columns."""
    ways = [way_for(tokens, 16, 896, gluon=True, moved=True) for tokens in (1, 8, 9, 32, 512, 4096, 8192)]
    assert ways == [("few", 8), ("few", 8), ("few", 16), ("few", 16), ("few", 32), ("many", 64), ("many", 128)]
    assert way_for(8192, 16, 896, gluon=True, moved=False) == ("few", 32)
    assert way_for(8192, 16, 896, gluon=False, moved=True) == ("triton", 128)
