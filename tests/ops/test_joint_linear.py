"""Several linear maps of one input: values, gradients, unused outputs, frozen weights, autocast."""

from __future__ import annotations

import pytest
import torch
from op_checks import random
from torch.nn import functional as F

from openk3.ops import joint_linear as module
from openk3.ops.joint_linear import evenly, joint_linear, joint_linear_beside


def test_against_separate_maps() -> None:
    """Values are the same bits, gradients those of separate maps; no tokens give zero gradients."""
    for tokens in (5, 1, 0):
        x = random(tokens, 8, grad=True)
        weights = [random(width, 8, seed=width, grad=True) for width in (3, 1, 16)]
        outs = joint_linear(x, weights)
        want = [F.linear(x, weight) for weight in weights]
        assert all(torch.equal(a, b) for a, b in zip(outs, want))
        loss, other = (sum((y.square().sum() for y in ys), torch.zeros(())) for ys in (outs, want))
        for ours, theirs in zip(torch.autograd.grad(loss, [x, *weights]), torch.autograd.grad(other, [x, *weights])):
            torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(lambda x, *w: joint_linear(x, w), (random(3, 4, grad=True), *weights_for(4)))


def test_narrow_maps_by_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: values and gradients of separate maps, of which some go nowhere or are frozen; one product less."""
    monkeypatch.setattr(module, "_joins_narrow", lambda device: True)
    test_against_separate_maps_up_to_rounding()
    test_what_is_not_used_gets_no_gradient()
    products = []
    linear = F.linear
    monkeypatch.setattr(module.F, "linear", lambda x, w: products.append(w.shape) or linear(x, w))
    joint_linear(random(3, 6, grad=True), [random(rows, 6, seed=rows) for rows in (128, 129, 6)])
    assert products == [(129, 6), (136, 6)]
    products.clear()
    joint_linear(random(3, 6, grad=True), [random(rows, 6, seed=rows) for rows in (128, 129)])
    assert products == [(128, 6), (129, 6)]


def test_against_separate_maps_up_to_rounding() -> None:
    """Weights of other heights; gradients that are not contiguous."""
    x, weights = random(5, 8, grad=True), [random(rows, 8, seed=rows, grad=True) for rows in (7, 130, 6, 3)]
    upstream = [random(rows, 5, seed=rows).T for rows in (7, 130, 6, 3)]
    ours = torch.autograd.grad(joint_linear(x, weights), [x, *weights], upstream)
    theirs = torch.autograd.grad([F.linear(x, weight) for weight in weights], [x, *weights], upstream)
    for got, want in zip(ours, theirs):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(lambda x, *w: joint_linear(x, w), (random(3, 4, grad=True), *weights_for(4)))


def test_input_for_another_reader() -> None:
    """The other one's gradient is what products add to, if there is any; nothing changes under autocast."""
    x, weights = random(5, 8, grad=True), weights_for(8)
    (want,) = torch.autograd.grad(sum(y.sum() for y in joint_linear(x, weights)) + (x.exp() * 2).sum(), x)
    first, second, rest = joint_linear_beside(x, weights)
    assert torch.equal(rest, x)
    (got,) = torch.autograd.grad(first.sum() + second.sum() + (rest.exp() * 2).sum(), x, retain_graph=True)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    (got,) = torch.autograd.grad(rest.exp().sum(), x, retain_graph=True)
    torch.testing.assert_close(got, x.exp().detach(), rtol=1e-13, atol=1e-13)
    (got,) = torch.autograd.grad(second.sum(), x)
    torch.testing.assert_close(got, weights[1].sum(0).expand(5, -1).detach(), rtol=1e-13, atol=1e-13)
    x32 = x.detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        *outs, rest = joint_linear_beside(x32, [w.detach().float() for w in weights])
        assert rest is x32 and outs[0].dtype == torch.bfloat16
    with torch.no_grad():
        assert joint_linear_beside(x32, [w.float() for w in weights])[2] is x32


def weights_for(width: int) -> list[torch.Tensor]:
    """Two small weights."""
    return [random(rows, width, seed=rows, grad=True) for rows in (2, 3)]


def test_what_is_not_used_gets_no_gradient() -> None:
    """An output that goes nowhere costs nothing; a frozen weight or input gets none."""
    x, weights = random(4, 6, grad=True), weights_for(6)
    first, _ = joint_linear(x, weights)
    first.sum().backward()
    assert x.grad is not None and weights[0].grad is not None and weights[1].grad is None
    frozen = random(2, 6, seed=9)
    grads = torch.autograd.grad(joint_linear(x.detach(), [frozen, weights[1]])[1].sum(), weights[1:])
    torch.testing.assert_close(grads[0], x.detach().sum(0).expand(3, -1))


def test_autocast_and_errors() -> None:
    """Under autocast outputs are narrow and gradients wide, as of F.linear; widths must fit."""
    x, weights = random(4, 6).float().requires_grad_(), [w.detach().float().requires_grad_() for w in weights_for(6)]
    with torch.autocast("cpu", torch.bfloat16):
        outs = joint_linear(x, weights)
    assert all(y.dtype == torch.bfloat16 for y in outs)
    torch.cat(outs, 1).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        joint_linear(x, [torch.ones(2, 5), torch.ones(2, 6)])


def test_weights_that_lie_together() -> None:
    """Without gradients one product of all, if each begins where the last one ends; values as of separate maps."""
    block, x = random(12, 6), random(3, 6, seed=1)
    with torch.no_grad():
        outs = joint_linear(x, block.split([5, 1, 6]))
        assert [y.data_ptr() - outs[0].data_ptr() for y in outs] == [0, 5 * 8, 6 * 8]
        for got, weight in zip(outs, block.split([5, 1, 6])):
            torch.testing.assert_close(got, F.linear(x, weight), rtol=1e-13, atol=1e-13)
        for others in ((block[6:], block[:6]), (block[:5], block[6:]), (block[:5], block[5:].clone())):
            assert joint_linear(x, others)[1].is_contiguous()
        many = random(257, 6)
        assert joint_linear(many, (block[:5], block[5:]))[1].is_contiguous()


def test_even_rows() -> None:
    """A product whose rows begin at multiples of eight numbers is the same product."""
    x, weight = random(5, 12).float(), random(13, 12, seed=1).float()
    got = evenly(x, weight)
    torch.testing.assert_close(got, x @ weight.T)
    assert got.shape == (5, 13) and got.stride() == (16, 1)
