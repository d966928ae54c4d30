"""Kernels for few tokens in Triton's interpreter: products, LatentMoE and reads of depth against float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from op_checks import random
from torch import Tensor

from openk3.ops import attn_res, routing
from openk3.ops.few import linear as products
from openk3.ops.few.mixture import Rest, mix_few, mixes_few, read_few, reads_few
from openk3.ops.latent_moe.layer import RoutedForm, RoutedWeights
from openk3.ops.norm import rms_norm
from openk3.ops.situ import situ_glu

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter runs kernels; nothing is recorded."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    with torch.no_grad():
        yield


@contextmanager
def defined() -> Iterator[None]:
    """Inside, operations are their definitions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENK3_BACKEND", "reference")
        yield


def off(got: Tensor, want: Tensor) -> float:
    """Distance relative to what is wanted."""
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("T", "O", "D", "dtype"),
    [
        (1, 13, 40, torch.bfloat16),
        (5, 600, 300, torch.bfloat16),
        (8, 33, 520, torch.float32),
        (3, 2100, 256, torch.float16),
        (7, 1, 1, torch.float32),
    ],
)
def test_products(T: int, O: int, D: int, dtype: torch.dtype) -> None:
    """Odd sizes, tokens that lie apart, with a norm before and without; the same bits again."""
    x = random(T, D + 8).to(dtype)[:, :D]
    weight, norm = (random(O, D, seed=1) / D**0.5).to(dtype), (random(D, seed=2).abs() + 0.5).to(dtype)
    got = products.linear(x, weight)
    assert off(got, x.double() @ weight.double().T) < TOLERANCE[dtype]
    assert torch.equal(got, products.linear(x, weight))
    with defined():
        unit = rms_norm(x.double(), norm.double(), 1e-6)
    assert off(products.linear(x, weight, (norm, 1e-6)), unit @ weight.double().T) < 2 * TOLERANCE[dtype]


def test_what_takes_other_paths() -> None:
    """More tokens, deeper matrices and formats that differ are the library's; so are layers that are not plain."""
    weight = random(4, 8).float()
    for x in (random(9, 8).float(), random(2, 2, 8).float(), random(0, 8).float()):
        assert not products.takes(x, 8)
        torch.testing.assert_close(products.linear(x, weight), x @ weight.T)
    assert not products.takes(random(2, 8).float(), products.MOST_DEPTH + 1)
    layer = torch.nn.Linear(8, 4, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    x, seen = random(2, 8).float(), []
    torch.testing.assert_close(products.through(layer, x), x @ weight.T)
    layer.register_forward_hook(lambda *given: seen.append(given))
    torch.testing.assert_close(products.through(layer, x), x @ weight.T)
    assert len(seen) == 1


def layer_of(D: int, C: int, I: int, S: int, E: int, dtype: torch.dtype) -> tuple[RoutedWeights, Rest]:
    """Random weights of a layer of these widths."""

    def matrix(*shape: int) -> Tensor:
        return (random(*shape, seed=sum(shape)) / shape[-1] ** 0.5).to(dtype)

    experts = matrix(E, I, C), matrix(E, I, C) + 0.01, matrix(E, C, I)
    norm = (random(C, seed=5).abs() + 0.5).to(dtype)
    weights = RoutedWeights(matrix(C, D), 2 * matrix(E, D), 0.1 * random(E).float(), experts, norm)
    return weights, Rest(matrix(D, C), (matrix(S, D), matrix(S, D) + 0.01, matrix(D, S)) if S else None)


@defined()
def definition(x: Tensor, weights: RoutedWeights, form: RoutedForm, rest: Rest) -> Tensor:
    """The layer in float64."""
    wide = [each.double() for each in (weights.down_CD, weights.router_ED, *weights.experts, weights.norm_C)]
    (down, router, w1, w3, w2, norm), x = wide, x.double()
    scores = torch.sigmoid(x @ router.T)
    routes = routing.route(scores, weights.bias_E.double(), form.k, renormalize=form.renormalize, scale=form.scale)
    z, sums = x @ down.T, torch.zeros(len(x), len(down), dtype=torch.float64)
    for t in range(len(x)):
        for e, p in zip(routes.expert_ids_Tk[t].tolist(), routes.weights_Tk[t]):
            sums[t] += p * (w2[e] @ situ_glu(w1[e] @ z[t], w3[e] @ z[t], form.beta, form.linear_beta))
    y = rms_norm(sums, norm, form.eps) @ rest.up_DC.double().T
    if rest.shared is None:
        return y
    gate, up, out = (each.double() for each in rest.shared)
    return y + situ_glu(x @ gate.T, x @ up.T, form.beta, form.linear_beta) @ out.T


@pytest.mark.parametrize(
    ("T", "D", "C", "I", "S", "E", "k", "dtype"),
    [
        (1, 40, 24, 20, 36, 5, 2, torch.bfloat16),
        (3, 300, 40, 20, 0, 7, 3, torch.float32),
        (1, 40, 40, 264, 0, 7, 1, torch.float32),  # no product has both widths: those past a block in turn
        (8, 24, 16, 16, 16, 40, 1, torch.bfloat16),
        (5, 32, 8, 9, 7, 3, 3, torch.float16),
    ],
)
def test_mixture(T: int, D: int, C: int, I: int, S: int, E: int, k: int, dtype: torch.dtype) -> None:
    """Whole layers with shared experts and without, odd widths, one choice and all; the same bits again."""
    weights, rest = layer_of(D, C, I, S, E, dtype)
    form = RoutedForm(k, True, 1.5, 4.0, 25.0 if k != 3 else None, 1e-5)
    x = random(T, D, seed=9).to(dtype)
    assert mixes_few(x, weights, form, rest)
    want, got = definition(x, weights, form, rest), mix_few(x, weights, form, rest)
    assert off(got, want) < 3 * TOLERANCE[dtype]
    assert torch.equal(got, mix_few(x, weights, form, rest))


def test_choice_is_the_definitions() -> None:
    """Ties go to the lower index, as in the definition: equal experts of equal scores, one of which stands out."""
    D, C, E, k = 16, 8, 6, 3
    weights, rest = layer_of(D, C, 8, 0, E, torch.float32)
    weights.router_ED[1:] = weights.router_ED[0]
    weights.bias_E[:] = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0, -1.0])
    form = RoutedForm(k, False, 1.0, 4.0, None, 1e-5)
    x = random(4, D, seed=3).float()
    assert off(mix_few(x, weights, form, rest), definition(x, weights, form, rest)) < 5e-6


def test_refused_layers() -> None:
    """Formats that differ and widths that registers cannot hold are left to other kernels."""
    weights, rest = layer_of(16, 8, 8, 8, 4, torch.float32)
    form = RoutedForm(2, True, 1.0, 4.0, None, 1e-5)
    assert mixes_few(random(2, 16).float(), weights, form, rest)
    assert not mixes_few(random(2, 16).bfloat16(), weights, form, rest)
    assert not mixes_few(random(9, 16).float(), weights, form, rest)


@pytest.mark.parametrize(("T", "D", "L", "added"), [(1, 40, 1, True), (3, 130, 4, True), (8, 24, 9, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_depth(T: int, D: int, L: int, added: bool, dtype: torch.dtype) -> None:
    """Mixture, norm, sum and weights; the public function takes the kernel."""
    sources = [random(T, D, seed=i).to(dtype) for i in range(L)]
    addend = random(T, D, seed=20).to(dtype) if added else None
    vectors = [(random(D, seed=30 + i)).to(dtype) for i in range(3)]
    assert reads_few(sources, vectors, addend)
    normed, newest, probs = read_few(sources, vectors, 1e-5, addend)
    wide = [each.double() for each in sources]
    if addend is not None:
        wide[-1] = newest.double()
        torch.testing.assert_close(newest, sources[-1] + addend)
    with defined():
        mixed, weights = attn_res.mix_depth(wide, vectors[0].double(), vectors[1].double(), 1e-5)
        want = rms_norm(mixed, vectors[2].double(), 1e-5)
    torch.testing.assert_close(probs.double(), weights, rtol=1e-4, atol=1e-6)
    assert off(normed, want) < TOLERANCE[dtype]
    found = attn_res.mix_depth_normed(sources, *vectors, 1e-5, addend_TD=addend)
    assert torch.equal(found.normed_TD, normed) and torch.equal(found.newest_TD, newest)
    assert torch.equal(found.probs_TL, probs) and len(found.earlier) == L - 1
