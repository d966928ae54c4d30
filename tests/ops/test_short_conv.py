"""The short convolution: golden vectors, its definition over packed sequences, carried windows, gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import DTYPES, Watch, assert_golden, golden_input, golden_output, random
from torch import Tensor

from openk3.ops.short_conv import short_conv, short_convs


def bounds(lengths: list[int]) -> Tensor:
    """cu_seqlens of packed sequences."""
    return torch.tensor([0, *lengths]).cumsum(0)


def definition(
    x: Tensor, weight: Tensor, window: Tensor, lengths: list[int], activation: bool
) -> tuple[Tensor, Tensor]:
    """Each output from its W inputs, one at a time."""
    taps = weight.shape[1]
    outputs, windows, start = [], [], 0
    for n, length in enumerate(lengths):
        inputs = [*window[n].T, *x[start : start + length]]
        for t in range(length):
            outputs.append(sum(weight[:, i] * inputs[t + 1 + i] for i in range(taps)))
        windows.append(torch.stack(inputs[-taps:], 1))
        start += length
    y = torch.stack(outputs) if outputs else x
    return F.silu(y) if activation else y, torch.stack(windows)


@pytest.mark.parametrize("case", ["fresh", "state", "short", "single"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_golden(case: str, dtype: torch.dtype) -> None:
    """A fresh start, a carried window, and inputs shorter than it."""
    x, weight = golden_input(f"conv.{case}.x", dtype), golden_input(f"conv.{case}.weight", dtype)[:, 0]
    window = None if case == "fresh" else golden_input(f"conv.{case}.state", dtype)[None]
    y, new_window = short_conv(x, weight, window_NCW=window)
    assert_golden(y, f"conv.{case}.y")
    assert torch.equal(new_window[0], golden_output(f"conv.{case}.new_state").to(dtype))


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    taps=st.sampled_from([1, 2, 4]),
    activation=st.booleans(),
)
def test_is_its_definition(lengths: list[int], taps: int, activation: bool) -> None:
    """Packed sequences down to none and one token, with windows: values, new windows and all gradients."""
    T = sum(lengths)
    leaves = [
        random(T, 3, grad=True),
        random(3, taps, seed=1, grad=True),
        random(len(lengths), 3, taps, seed=2, grad=True),
    ]
    x, weight, window = leaves
    got = short_conv(x, weight, window_NCW=window, cu_seqlens=bounds(lengths), activation=activation)
    want = definition(x, weight, window, lengths, activation)
    grads = []
    for y, new in (got, want):
        loss = (y * random(T, 3, seed=3)).sum() + (new * random(*new.shape, seed=4)).sum()
        grads.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
    for a, b in zip((*got, *grads[0]), (*want, *grads[1])):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@settings(max_examples=15)
@given(cuts=st.lists(st.integers(0, 20), max_size=5))
def test_any_split_with_carried_window(cuts: list[int]) -> None:
    """A sequence in pieces equals the whole bit for bit, windows included."""
    x, weight = random(20, 5, dtype=torch.float32), random(5, 4, seed=1, dtype=torch.float32)
    y, window = short_conv(x, weight)
    pieces, carried, start = [], None, 0
    for end in [*sorted(cuts), 20]:
        piece, carried = short_conv(x[start:end], weight, window_NCW=carried)
        pieces.append(piece)
        start = end
    torch.testing.assert_close(torch.cat(pieces), y, rtol=0, atol=1e-6)
    assert carried is not None and torch.equal(carried, window)


def test_gradcheck() -> None:
    """The hand-written backward pass against numerical derivatives."""
    leaves = (random(9, 3, grad=True), random(3, 4, seed=1, grad=True), random(3, 3, 4, seed=2, grad=True))
    assert torch.autograd.gradcheck(
        lambda x, w, s: short_conv(x, w, window_NCW=s, cu_seqlens=bounds([2, 0, 7])), leaves
    )
    assert torch.autograd.gradcheck(lambda x, w: short_conv(x, w, cu_seqlens=bounds([2, 0, 7]))[0], leaves[:2])


def test_bfloat16_accumulates_in_float32() -> None:
    """Equal to the float32 result rounded once; the window holds the raw inputs."""
    x, weight = random(30, 8).bfloat16(), random(8, 4, seed=1).float()
    y, window = short_conv(x, weight, cu_seqlens=bounds([20, 10]))
    want, wide_window = short_conv(x.float(), weight, cu_seqlens=bounds([20, 10]))
    assert torch.equal(y, want.bfloat16()) and torch.equal(window, wide_window.bfloat16())


def test_a_nan_stays_in_its_sequence() -> None:
    """The last inputs of one sequence never touch the next, in either pass, not even as zero times NaN."""
    x, weight = random(12, 3), random(3, 4, seed=1, grad=True)
    x[4:6] = math.nan
    x.requires_grad_()
    y, window = short_conv(x, weight, cu_seqlens=bounds([6, 6]))
    assert y[:4].isfinite().all() and y[6:].isfinite().all() and window[1].isfinite().all()
    (grad,) = torch.autograd.grad(y[6:].sum(), x)
    assert grad[6:].isfinite().all()


def test_bounds_must_cover_the_tokens() -> None:
    """cu_seqlens that ends early is an error that names the number of tokens."""
    with pytest.raises(ValueError, match="number of tokens, 5"):
        short_conv(random(5, 3), random(3, 4), cu_seqlens=bounds([2, 2]))


def test_operations_do_not_grow_with_sequences() -> None:
    """Fifty sequences take the operations of one: nothing loops over them."""
    calls = []
    for lengths in ([200], [4] * 50):
        with Watch() as watch:
            y, _ = short_conv(random(200, 3, grad=True), random(3, 4, seed=1), cu_seqlens=bounds(lengths))
            y.sum().backward()
        calls.append(sum(watch.calls[name] for name in ("addcmul_", "mul", "index_select", "sum", "cat")))
    assert calls[0] == calls[1]


X, WEIGHT = torch.ones(5, 3), torch.ones(3, 4)
REFUSED = {
    "no inputs": ((), (), None, "no inputs"),
    "a weight too few": ((X, X), (WEIGHT,), None, "2 inputs, 1 weights"),
    "a window too few": ((X, X), (WEIGHT, WEIGHT), (torch.ones(1, 3, 4),), "windows of 1"),
    "the second weight": (
        (X, X),
        (WEIGHT, WEIGHT[:2]),
        None,
        r"weights_CW\[1\] \[2, 4\] does not fit xs_TC\[1\] \[5, 3\]",
    ),
    "fewer tokens": ((X, X, X[:4]), (WEIGHT,) * 3, None, r"xs_TC\[2\]: 4 tokens, but xs_TC\[0\] has 5"),
    "the third in integers": ((X, X, X.long()), (WEIGHT,) * 3, None, r"xs_TC\[2\] must be floating point"),
    "the second window": (
        (X, X),
        (WEIGHT, WEIGHT),
        (torch.ones(1, 3, 4), torch.ones(2, 3, 4)),
        r"windows_NCW\[1\]: expected \[1, 3, 4\]",
    ),
    "windows of none": ((X,) * 3, (WEIGHT,) * 3, (None,) * 3, r"windows_NCW\[0\]: expected a tensor, got NoneType"),
    "an array": ((X.numpy(),), (WEIGHT,), None, "x_TC: expected a tensor, got ndarray"),
    "a list of weights": ((X,), (WEIGHT.tolist(),), None, "weight_CW: expected a tensor, got list"),
    "a batch": ((X[None],), (WEIGHT,), None, r"x_TC: expected \[tokens, channels\], got \[1, 5, 3\]"),
    "no taps": ((X,), (WEIGHT[:, :0],), None, "a tap at least"),
    "no channels": ((X[:, :0],), (WEIGHT[:0],), None, "needs a channel"),
    "integers": ((X.long(),), (WEIGHT,), None, "x_TC must be floating point"),
    "eight bits": ((X.to(torch.float8_e4m3fn),), (WEIGHT,), None, "of 16 bits or more"),
    "weight elsewhere": ((X,), (WEIGHT.to("meta"),), None, "weight_CW must be .* on cpu, got .* on meta"),
    "window elsewhere": ((X,), (WEIGHT,), (torch.ones(1, 3, 4, device="meta"),), "window_NCW must be .* on cpu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    """Nothing is rounded to integers, read elsewhere or left out: one clear line."""
    xs, weights, windows, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        short_convs(xs, weights, windows_NCW=windows)


def test_no_sequences() -> None:
    """No sequence of no tokens: nothing comes out, in the right shapes."""
    y, window = short_conv(X[:0], WEIGHT, window_NCW=torch.ones(0, 3, 4), cu_seqlens=torch.tensor([0]))
    assert y.shape == (0, 3) and window.shape == (0, 3, 4)
    y, window = short_conv(X[:0].clone().requires_grad_(), WEIGHT, cu_seqlens=torch.tensor([0]))
    assert y.shape == (0, 3) and window.shape == (0, 3, 4)
    y.sum().backward()
