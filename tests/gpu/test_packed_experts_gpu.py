"""Packed experts and MXFP8 by kernels on a GPU: bit-equal unpacking, float64, same bits, no waiting, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from kda_kernel_checks import poisoned_memory
from torch import Tensor

from openk3.model.moe import LatentMoE, keep_packed
from openk3.ops.latent_moe import packed
from openk3.ops.latent_moe.experts_fused import Form
from openk3.ops.latent_moe.packed import ExpertTiles
from openk3.ops.latent_moe.packed_fused import Way, _Launch, mix_packed, move_columns, packed_tile_rows
from openk3.ops.latent_moe.route_fused import Choice, Routed, route, sort
from openk3.ops.mxfp import dequantize_mxfp4, quantize_mxfp4
from openk3.ops.mxfp8 import RULES, dequantize_mxfp8, fake_quantize_mxfp8, quantize_mxfp8
from openk3.recipes import small

pytestmark = pytest.mark.gpu
FORM = Form(4.0, 25.0, 1e-5)
WAYS = [*(Way("few", rows) for rows in (8, 16, 32)), Way("many", 64), Way("many", 128), Way("triton", 16)]


def draw_bytes(*shape: int, below: int) -> Tensor:
    """Random bytes."""
    return torch.randint(below, shape, device="cuda", dtype=torch.int32).to(torch.uint8)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_unit_vectors_give_the_matrix_bit_for_bit(way: Way, wide: bool) -> None:
    """Every code under every scale byte that stays finite, unpacked on the way to tensor cores."""
    E, size = 3, 256
    codes = draw_bytes(E, size, size // 2, below=256)
    scale = draw_bytes(E, size, size // 32, below=253 if wide else packed.MOST_PLAIN + 1).clamp_min(8)
    tiles = packed.tile_mxfp4(codes, scale)
    ids = torch.arange(E * size, device="cuda")[:, None] % E
    logits = torch.zeros(E * size, E, device="cuda").scatter_(1, ids, 9.0)
    plan = sort(route(logits, torch.zeros(E, device="cuda"), Choice(1, True, 1.0)), way.rows)
    eye = torch.eye(size, device="cuda").bfloat16().repeat(E, 1)
    y = torch.empty(E * size, size, device="cuda", dtype=torch.bfloat16)
    launch = _Launch(plan, ExpertTiles(tiles, tiles, size, wide), FORM, way, eye)
    launch.run("down", move_columns(eye) if way.kind == "many" else eye, tiles, y)
    assert torch.equal(y.view(E, size, size).mT, dequantize_mxfp4(codes, scale, torch.bfloat16))


def draw(E: int, C: int, inner: int) -> tuple[ExpertTiles, list[Tensor]]:
    """Quantised random experts: packed, and their values in float64."""
    shapes = ((E, inner, C), (E, inner, C), (E, C, inner))
    w1, w3, w2 = (quantize_mxfp4(torch.randn(shape, device="cuda") * shape[-1] ** -0.5) for shape in shapes)
    gate_up = packed.tile_mxfp4(*(packed.interleave(a, b) for a, b in zip(w1, w3)))
    values = [dequantize_mxfp4(*w, torch.float64) for w in (w1, w3, w2)]
    return ExpertTiles(gate_up, packed.tile_mxfp4(*w2), inner, False), values


def definition(z: Tensor, routed: Routed, values: list[Tensor]) -> Tensor:
    """The normed weighted sum in float64."""
    w1, w3, w2 = values
    u, x = torch.zeros(z.shape, dtype=torch.float64, device="cuda"), z.double()
    for e in range(len(w1)):
        token, choice = (routed.ids_Tk == e).nonzero(as_tuple=True)
        gate, up = x[token] @ w1[e].T, x[token] @ w3[e].T
        act = 100 * torch.tanh(gate / 4) * torch.sigmoid(gate) * torch.tanh(up / 25)
        u.index_add_(0, token, routed.weights_Tk[token, choice].double()[:, None] * (act @ w2[e].T))
    return u * (u.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


@pytest.mark.parametrize(("E", "k", "C", "inner"), [(80, 4, 384, 384), (12, 5, 1024, 768), (10, 3, 160, 96)])
@pytest.mark.parametrize("T", [0, 1, 7, 16, 31, 200, 3001])
def test_experts_against_float64(
    T: int, E: int, k: int, C: int, inner: int, measured: list[tuple[str, str, dict[str, float]]]
) -> None:
    """Every number of tokens and width; the same bits amid NaN."""
    tiles, values = draw(E, C, inner)
    z = torch.randn(T, C, device="cuda").bfloat16()
    routed = route(torch.randn(T, E, device="cuda"), torch.zeros(E, device="cuda"), Choice(k, True, 1.0))
    plan = sort(routed, packed_tile_rows(z, k, tiles))
    norm = torch.ones(C, device="cuda").bfloat16(), FORM
    got = mix_packed(z, routed.weights_Tk, plan, tiles, norm)
    with poisoned_memory():
        assert torch.equal(mix_packed(z, routed.weights_Tk, plan, tiles, norm), got)
    if T:
        want = definition(z, routed, values)
        error = float((got.double() - want).norm() / want.norm())
        measured.append(("mx4", f"T {T} E {E} k {k} C {C} I {inner}", {"out": error}))
        assert error < 1e-2


def layer() -> LatentMoE:
    """A layer of recipe small in bfloat16 with packed experts."""
    text = small.model().text
    moe = LatentMoE(text, 1)
    keep_packed(moe, text)
    generator = torch.Generator().manual_seed(0)
    for leaf, shape in (("w1_EIC", (384, 384)), ("w3_EIC", (384, 384)), ("w2_ECI", (384, 384))):
        for expert in range(text.num_experts):
            moe.experts.load(leaf, expert, *quantize_mxfp4(torch.randn(shape, generator=generator) * 0.05))
    for value in moe.parameters():
        value.data.normal_(std=0.02, generator=generator) if value.ndim > 1 else value.data.fill_(1.0)
    moe.router.bias.zero_()
    moe = moe.to("cuda", torch.bfloat16)
    moe.router.bias = moe.router.bias.float()
    return moe.requires_grad_(False)


@pytest.mark.parametrize("T", [1, 16, 300, 4096])
def test_a_layer_neither_waits_nor_differs_from_its_definition(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole layer; then captured as a graph, which gives the same bits for other inputs."""
    moe, x_TD = layer(), torch.randn(T, 768, device="cuda").bfloat16()
    got = moe(x_TD)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert got.shape == moe(x_TD).shape
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        moe(x_TD)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe(x_TD)
    graph.replay()
    assert torch.equal(captured, got)
    x_TD.normal_()
    graph.replay()
    assert torch.equal(captured, moe(x_TD))
    monkeypatch.setenv("OPENK3_BACKEND", "reference")
    want = moe(x_TD).double()
    assert float((captured.double() - want).norm()) < 1.5e-2 * float(want.norm())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mxfp8_equals_the_definition(dtype: torch.dtype, rule: str) -> None:
    """Values, scales and what they stand for, as on a CPU; blocks of all sizes and a broken one."""
    x = torch.randn(3000, 3584, device="cuda") * torch.exp2(torch.randint(-14, 14, (3000, 1), device="cuda"))
    x[5, 77], x[6, :32] = float("nan"), 0
    x = x.to(dtype)
    codes, scale = quantize_mxfp8(x, rule)
    want_codes, want_scale = quantize_mxfp8(x.cpu(), rule)
    assert torch.equal(codes.cpu().view(torch.uint8), want_codes.view(torch.uint8))
    assert torch.equal(scale.cpu(), want_scale)
    want = dequantize_mxfp8(want_codes, want_scale, dtype)
    for got in (dequantize_mxfp8(codes, scale, dtype), fake_quantize_mxfp8(x, rule)):
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)
