"""Tensors that wait for a backward pass: kept, made again, rounded; what is held meanwhile and what is let go."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from openk3.ops.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from openk3.ops.saved import REST, again, name, recomputes, remake, remake_linear, saving


def chain(x: Tensor, weight: Tensor, make: Callable[[Tensor], Tensor] = torch.tanh) -> Tensor:
    """sum of (make(x) W^T)^2, with make(x) in the group "a" and the product in "b"."""
    h = make(x)
    remake("a", [h], make, x)
    y = h @ weight.T
    remake_linear("b", y, h, weight)
    return (y * y).sum()


@pytest.fixture
def leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 24, generator=generator).requires_grad_()
    return x, torch.randn(8, 24, generator=generator).requires_grad_()


@pytest.mark.parametrize("policy", [{}, {"a": "recompute"}, {"b": "recompute"}, {"a": "recompute", "b": "recompute"}])
def test_gradients_are_the_same_bits(leaves: tuple[Tensor, Tensor], policy: dict[str, str]) -> None:
    """Whatever is made again, from what is kept or made again itself."""
    want = torch.autograd.grad(chain(*leaves), leaves)
    with saving(policy):
        loss = chain(*leaves)
    assert all(map(torch.equal, torch.autograd.grad(loss, leaves), want))


def test_one_making_serves_all_that_wait(leaves: tuple[Tensor, Tensor]) -> None:
    """Made once in the forward pass, once for two users in the backward pass; and for a graph that is kept, anew."""
    x, _ = leaves
    calls = []

    def make(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(x.requires_grad)
        return x * 2, x * 3

    with saving({"a": "recompute"}):
        h, other = make(x)
        remake("a", [h, other], make, x)
        loss = (h.exp() * h.sin() * other.sin()).sum()
    h, other = x * 2, x * 3
    want = torch.autograd.grad((h.exp() * h.sin() * other.sin()).sum(), x)[0]
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert calls == [True, False]
    second = torch.autograd.grad(loss, x)[0]
    assert torch.equal(first, want) and torch.equal(second, want)


def test_what_is_made_again_is_let_go(leaves: tuple[Tensor, Tensor]) -> None:
    """After the forward pass nothing holds it; after the backward pass nothing holds what it was made from."""
    x, weight = leaves
    with saving({"a": "recompute"}):
        source = x * 1.5
        h = source * 2
        remake("a", [h], partial(torch.mul, other=2), source)
        loss = (h @ weight.T).sum()
    made, kept = (StorageWeakRef(y.untyped_storage()) for y in (h, source))
    del h, source
    gc.collect()
    assert made.expired() and not kept.expired()
    loss.backward()
    gc.collect()
    assert kept.expired()


def test_rounded_tensors(leaves: tuple[Tensor, Tensor]) -> None:
    """The backward pass reads MXFP8, the forward pass does not; a view reads its part; memory is a quarter."""
    x, weight = leaves
    w = weight.detach()
    with saving({"a": "fp8"}, beside=[x, weight]) as books:
        h = x * 2
        name("a", h)
        loss = (h[3:, 8:] @ weight[:, 8:].T).sum()
        held = books.bytes()
    assert loss == ((x * 2)[3:, 8:] @ w[:, 8:].T).sum()
    assert held == {"a": 40 * 24 + 40 * 24 // 32}
    values, scale = quantize_mxfp8((x.detach() * 2).flatten())
    rounded = dequantize_mxfp8(values, scale).view(40, 24)
    want = torch.zeros_like(w)
    want[:, 8:] = torch.ones(8, 37) @ rounded[3:, 8:]
    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (0, 32), (3, 64)])
def test_rounded_tensors_of_any_size(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Sizes that are no multiples of a block, none at all; the format comes back."""
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    with saving({"a": "fp8"}):
        h = x * 3
        name("a", h)
        loss = (h * h).sum()
    (grad,) = torch.autograd.grad(loss, x)
    assert grad.dtype == dtype and torch.equal(grad, torch.full_like(x, 18))


def test_tensors_of_one_allocation_are_rounded_together() -> None:
    """A kernel's two results in one piece of memory: neither keeps the other from being let go."""
    x = torch.ones(64, requires_grad=True)

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # noqa: ANN001, ANN205
            both = torch.stack((x, x * 2))
            name("a", both[0], both[1])
            ctx.save_for_backward(both[0], both[1])
            return x * 4

        @staticmethod
        def backward(ctx, d):  # noqa: ANN001, ANN205
            one, two = ctx.saved_tensors
            return d * (one + two)

    with saving({"a": "fp8"}, beside=[x]) as books:
        loss = Two.apply(x).sum()
        assert books.bytes() == {"a": 128 + 4}
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((64,), 3.0))


def test_books(leaves: tuple[Tensor, Tensor]) -> None:
    """By group, each piece of memory once, without what was there before."""
    x, weight = leaves
    with saving({}, beside=leaves) as books:
        loss = chain(x, weight)
        assert books.bytes() == {"a": 40 * 24 * 4, "b": 40 * 8 * 4}
    with saving({}, beside=[weight]) as books:
        h = x.exp()
        loss = loss + (h @ weight.T).sum()
        assert books.bytes() == {REST: 40 * 24 * 4}


def test_again(leaves: tuple[Tensor, Tensor]) -> None:
    """Nothing inside is held but the input; the part runs once more, and only there without a policy of its own."""
    x, weight = leaves
    seen = []

    def part(x: Tensor) -> Tensor:
        seen.append((recomputes("part"), recomputes("a")))
        return again("a", lambda x: (x @ weight.T).tanh().exp(), x)

    want = torch.autograd.grad(part(x * 2).sin().sum(), leaves)
    with saving({"part": "recompute", "a": "recompute"}, beside=leaves) as books:
        h = x * 2
        loss = again("part", part, h).sin().sum()
        held = books.bytes()
    assert held == {REST: 40 * 24 * 4 + 40 * 8 * 4}  # its input, and its output for the sine
    assert all(map(torch.equal, torch.autograd.grad(loss, leaves), want))
    assert seen == [(False, False)] * 3


def test_again_from_a_rounded_input(leaves: tuple[Tensor, Tensor]) -> None:
    """Only the input's FP8 form waits."""
    x, weight = leaves
    with saving({"x": "fp8", "part": "recompute"}, beside=leaves) as books:
        h = x * 2
        name("x", h)
        y = again("part", lambda x: x @ weight.T, h)
        assert books.bytes() == {"x": 960 + 30}
    grad = torch.autograd.grad(y.sum(), weight)[0]
    exact = torch.autograd.grad(((x * 2) @ weight.T).sum(), weight)[0]
    assert not torch.equal(grad, exact)
    assert float((grad - exact).norm()) < 0.05 * float(exact.norm())


def test_without_a_policy_nothing_happens(leaves: tuple[Tensor, Tensor]) -> None:
    """No hooks where everything is kept, none without gradients, none behind the block."""
    with saving({"a": "keep"}) as books:
        chain(*leaves)
        assert not recomputes("a") and books.bytes() == {}
    with saving({"a": "recompute"}), torch.no_grad():
        assert not recomputes("a")
        assert again("a", lambda x: x + 1, leaves[0]).equal(leaves[0] + 1)
    assert not recomputes("a")


def test_many_names() -> None:
    """Names of tensors that are gone are forgotten, and their memory may come back under another name."""
    with saving({"a": "fp8"}, beside=[]) as books:
        for _ in range(2000):
            name("a", torch.empty(8))
        assert len(books._names) < 600
        x = torch.ones(8, requires_grad=True)
        h = x * 2
        name("b", h)
        loss = (h * h).sum()
        assert books.bytes() == {"b": 32}
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.full((8,), 8.0))
