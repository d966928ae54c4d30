"""Several linear maps of one input: values, gradients, unused outputs, frozen weights, autocast."""

from __future__ import annotations

import pytest
import torch
from op_checks import random
from torch.nn import functional as F

from openk3.ops.joint_linear import joint_linear


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
