"""Inside a chunk of KDA: scores against their definition, decay factors at most one, the triangular inverse."""

from __future__ import annotations

import pytest
import torch
from op_checks import random

from openk3.ops.kda.scores import decay_factors, score_backward, score_forward, unit_lower_inverse

TILES = [1, 16]


def rows(C: int, X: int = 4, K: int = 5) -> tuple[torch.Tensor, ...]:
    """Random q, k, w [X, C, K] and log decay between 0 and -5."""
    q, k, w = (random(X, C, K, seed=i) for i in range(3))
    return q, k, w, -5 * torch.sigmoid(random(X, C, K, seed=3))


def relative(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, inner: torch.Tensor | None, tile: int):
    """Read and write rows relative to the middle of their tile."""
    q, k, w = (x.unflatten(1, (-1, tile)) for x in (q, k, w))
    inner = torch.ones_like(q) if inner is None else inner
    return torch.stack([q * inner, k * inner], 2), w / inner


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("C", [16, 32, 64])
def test_scores_are_their_definition(C: int, tile: int) -> None:
    """score[i, j] = sum_K r_i w_j exp(G_i - G_j) for j <= i (queries) or j < i (keys), with its gradients."""
    q, k, w, g = rows(C)
    factors = decay_factors(g, tile)
    reads, writes = relative(q, k, w, factors.inner, tile)
    got = score_forward(reads, writes, factors)
    for x in (q, k, w):
        x.requires_grad_()
    G = g.cumsum(1)
    between = (G.unsqueeze(2) - G.unsqueeze(1)).exp()
    want = [torch.einsum("xik,xjk,xijk->xij", r, w, between).tril(d) for r, d in ((q, 0), (k, -1))]
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=1e-12)
    grad = [random(*want[0].shape, seed=4 + i) for i in range(2)]
    d_q, d_k, d_w = torch.autograd.grad(want, (q, k, w), grad)
    stacked = torch.stack([x.unflatten(1, (-1, tile)) for x in grad], 2)
    d_reads, d_writes = score_backward(stacked, reads, writes, factors)
    want_reads, want_writes = relative(d_q, d_k, d_w, None if factors.inner is None else 1 / factors.inner, tile)
    torch.testing.assert_close(d_reads, want_reads, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(d_writes, want_writes, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("tile", TILES)
def test_factors(tile: int) -> None:
    """Reading, writing and the whole chunk against running sums; nothing exceeds one, and inside a tile at the bound
    the exponent stays within 40."""
    g = rows(32)[3]
    factors = decay_factors(g, tile)
    G, middle = g.cumsum(1), torch.arange(32 // tile) * tile + tile // 2
    torch.testing.assert_close(factors.read[:, :, 0, 0], G[:, middle].exp())
    torch.testing.assert_close(factors.write[:, :, 0, 0], (G[:, -1:] - G[:, middle]).exp())
    torch.testing.assert_close(factors.total, G[:, -1].exp())
    assert list(factors.halves) == [tile << i for i in range((32 // tile).bit_length() - 1)]
    for x in (factors.read, factors.write, factors.total, *factors.halves.values()):
        assert x.max() <= 1
    if tile > 1:
        inner = decay_factors(torch.full_like(g, -5), tile).inner
        assert inner is not None and inner.log().abs().max() <= 40 + 1e-9


@pytest.mark.parametrize("C", [16, 32, 64])
def test_inverse(C: int) -> None:
    """(I + L)^-1 whatever is on and above the diagonal, which is not read."""
    lower = random(3, C, C, seed=C).tril(-1) / 4
    want = torch.linalg.inv(torch.eye(C) + lower)
    torch.testing.assert_close(unit_lower_inverse(lower), want, rtol=1e-10, atol=1e-10)
    assert torch.equal(unit_lower_inverse(lower + torch.full((C, C), torch.nan).triu()), unit_lower_inverse(lower))


def test_inverse_of_equal_keys() -> None:
    """All ones below the diagonal: the powers reach 1e17 while the inverse holds only 0 and +-1, and float32 gets
    it exactly; with 1.9 in place of 1 it keeps seven digits, where powers lose them all."""
    ones = torch.ones(1, 64, 64).tril(-1)
    want = torch.eye(64) - torch.ones(63).diag(-1)
    assert torch.equal(unit_lower_inverse(ones)[0], want)
    assert torch.linalg.matrix_power(ones.double(), 32).max() > 1e16
    hard = 1.9 * 0.999 ** torch.arange(64.0)[:, None] * ones
    exact = torch.linalg.inv(torch.eye(64).double() + hard.double())
    assert (unit_lower_inverse(hard) - exact).abs().max() < 1e-4 * exact.abs().max()
