"""The short convolution's kernels in Triton's interpreter, against its definition in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import random
from torch import Tensor

from openk3.ops.short_conv import short_conv, short_convs
from openk3.ops.short_conv_fused import Layout, _Launch, convolve


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public calls run the kernels."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")


def bounds(lengths: list[int]) -> Tensor:
    """cu_seqlens of packed sequences."""
    return torch.tensor([0, *lengths]).cumsum(0)


def run(x: Tensor, weight: Tensor, window: Tensor | None, lengths: list[int], activation: bool = True) -> list[Tensor]:
    """Output, new windows and the gradients of a fixed combination of both."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (x, weight, window) if leaf is not None]
    given_window = None if window is None else leaves[2]
    y, new = short_conv(
        leaves[0], leaves[1], window_NCW=given_window, cu_seqlens=bounds(lengths), activation=activation
    )
    factors = (random(*result.shape, seed=n).bfloat16().double() for n, result in ((3, y), (4, new)))
    loss = sum((result.double() * factor).sum() for result, factor in zip((y, new), factors))
    return [y.detach(), new.detach(), *torch.autograd.grad(loss, leaves)]


def definition(*arguments: object, **options: object) -> list[Tensor]:
    """`run` in float64 on the PyTorch path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENK3_BACKEND", "reference")
        wide = [value.double() if isinstance(value, Tensor) else value for value in arguments]
        return run(*wide, **options)  # type: ignore[arg-type]


@settings(max_examples=12)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 5, 16, 17, 33]), min_size=1, max_size=5),
    W=st.integers(1, 5),
    C=st.sampled_from([3, 8]),
    activation=st.booleans(),
    windowed=st.booleans(),
)
def test_equals_the_definition(lengths: list[int], W: int, C: int, activation: bool, windowed: bool) -> None:
    """Outputs, windows and every gradient; sequences empty, shorter than W, and across the borders of runs."""
    x = random(sum(lengths), C, dtype=torch.float32)
    weight = random(C, W, seed=1, dtype=torch.float32)
    window = random(len(lengths), C, W, seed=2, dtype=torch.float32) if windowed else None
    got = run(x, weight, window, lengths, activation)
    want = definition(x, weight, window, lengths, activation=activation)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    assert torch.equal(got[1].double(), want[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Accumulated in float32: within one rounding of the exact result; weights stay float32."""
    lengths = [19, 0, 2, 40]
    x, window = random(61, 8).to(dtype), random(4, 8, 4, seed=2).to(dtype)
    weight = random(8, 4, seed=1).float()
    got = run(x, weight, window, lengths)
    want = definition(x, weight, window, lengths)
    eps = torch.finfo(dtype).eps
    for a, b, kind in zip(got, want, (dtype, dtype, dtype, torch.float32, dtype), strict=True):
        assert a.dtype == kind
        atol = 1e-5 if kind == torch.float32 else eps / 100
        torch.testing.assert_close(a.double(), b, rtol=eps, atol=atol)


def test_three_inputs_in_one_launch_are_three_convolutions() -> None:
    """Bit for bit, gradients included; also with one input's gradient missing."""
    lengths, weight = [20, 3, 0, 15], [random(8, 4, seed=n).float() for n in range(3)]
    x = [random(38, 8, seed=10 + n).float() for n in range(3)]
    window = [random(4, 8, 4, seed=20 + n).float() for n in range(3)]
    together, alone = [], []
    for collect in (together, alone):
        leaves = [leaf.clone().requires_grad_() for leaf in (*x, *weight, *window)]
        parts = leaves[:3], leaves[3:6], leaves[6:]
        if collect is together:
            y, new = short_convs(*parts[:2], windows_NCW=parts[2], cu_seqlens=bounds(lengths))
        else:
            pairs = [short_conv(a, b, window_NCW=c, cu_seqlens=bounds(lengths)) for a, b, c in zip(*parts)]
            y, new = zip(*pairs)
        loss = sum(
            (part * random(*part.shape, seed=30 + n).float()).sum() for n, part in enumerate((*y, new[0], new[2]))
        )
        collect += [*y, *new, *torch.autograd.grad(loss, leaves)]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_inputs_of_different_shapes() -> None:
    """Each is convolved by itself; more than three are, too."""
    x = [random(9, C, seed=C).float() for C in (3, 8, 3, 3)]
    weight = [random(part.shape[1], 4, seed=1).float() for part in x]
    y, new = short_convs(x, weight, cu_seqlens=bounds([4, 5]))
    for n in range(4):
        want = short_conv(x[n], weight[n], cu_seqlens=bounds([4, 5]))
        assert torch.equal(y[n], want[0]) and torch.equal(new[n], want[1])


def test_strided_inputs() -> None:
    """Columns of a wider tensor, and a transposed window."""
    wide, weight, window = random(20, 24).float(), random(8, 4, seed=1).float(), random(1, 4, 8, seed=2).float().mT
    want = short_conv(wide[:, 8:16].contiguous(), weight, window_NCW=window.contiguous())
    got = short_conv(wide[:, 8:16], weight, window_NCW=window)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_no_tokens() -> None:
    """Nothing to convolve: windows stay, the weight's gradient is zero."""
    window = random(2, 8, 4).float()
    weight = random(8, 4, seed=1).float().requires_grad_()
    y, new = short_conv(torch.zeros(0, 8), weight, window_NCW=window, cu_seqlens=bounds([0, 0]))
    assert y.shape == (0, 8) and torch.equal(new, window)
    (grad,) = torch.autograd.grad(y.sum(), weight)
    assert torch.equal(grad, torch.zeros(8, 4))
    y, new = short_conv(torch.zeros(0, 8), weight, cu_seqlens=bounds([]))
    assert y.shape == (0, 8) and new.shape == (0, 8, 4)


def test_pieces_equal_the_whole_bit_for_bit() -> None:
    """A sequence cut anywhere, windows carried on, gives the same bits."""
    x, weight = random(50, 8).bfloat16(), random(8, 4, seed=1).float()
    whole, window = short_conv(x, weight)
    pieces, carried = [], None
    for piece in x.split([1, 2, 16, 7, 24]):
        y, carried = short_conv(piece, weight, window_NCW=carried)
        pieces.append(y)
    assert torch.equal(torch.cat(pieces), whole) and carried is not None and torch.equal(carried, window)


def test_a_nan_stays_in_its_sequence() -> None:
    """The inputs of one sequence never touch another, in either pass, not even as zero times NaN."""
    x, weight = random(60, 3, dtype=torch.float32), random(3, 4, seed=1).float().requires_grad_()
    x[18:20] = math.nan
    x.requires_grad_()
    y, window = short_conv(x, weight, cu_seqlens=bounds([20, 20, 20]))
    assert y[:18].isfinite().all() and y[20:].isfinite().all() and window[1:].isfinite().all()
    (grad,) = torch.autograd.grad(y[20:].sum() + y[:18].sum(), x)
    assert grad[20:].isfinite().all() and grad[:15].isfinite().all()
    y, window = short_conv(x[20:], weight, window_NCW=window[:2], cu_seqlens=bounds([20, 20]))
    assert y[:3].isnan().all() and y[3:].isfinite().all()


def test_every_value_is_written() -> None:
    """Memory that held NaN before gives the same results."""
    arguments = random(37, 8).float(), random(8, 4, seed=1).float(), random(3, 8, 4, seed=2).float(), [20, 1, 16]
    want = run(*arguments)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert torch.empty(3).isnan().all()
        got = run(*arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_windows_without_gradient() -> None:
    """Carried windows that need none, and a loss of the outputs alone."""
    x, weight, window = random(20, 3).float().requires_grad_(), random(3, 4, seed=1).float(), random(2, 3, 4).float()
    y, _ = short_conv(x, weight, window_NCW=window, cu_seqlens=bounds([2, 18]))
    (got,) = torch.autograd.grad(y.square().sum(), x)
    want = definition_gradient(x, weight, window)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def definition_gradient(x: Tensor, weight: Tensor, window: Tensor) -> Tensor:
    """Of the sum of squares of the outputs of sequences of 2 and 18 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENK3_BACKEND", "reference")
        x = x.detach().double().requires_grad_()
        y, _ = short_conv(x, weight.double(), window_NCW=window.double(), cu_seqlens=bounds([2, 18]))
        return torch.autograd.grad(y.square().sum(), x)[0]


def test_shapes_must_fit() -> None:
    """A weight or window of other channels is an error before any memory is touched."""
    x = random(5, 8).float()
    with pytest.raises(ValueError, match=r"weight_CW \[7, 4\] does not fit x_TC \[5, 8\]"):
        short_conv(x, torch.ones(7, 4))
    with pytest.raises(ValueError, match=r"window_NCW: expected \[1, 8, 4\] for 1 sequences, got \[2, 8, 4\]"):
        short_conv(x, torch.ones(8, 4), window_NCW=torch.zeros(2, 8, 4))


def test_runs_cover_all_tokens() -> None:
    """For any size of input there are programs for every token, and no more runs than fill a GPU."""
    from openk3.ops.short_conv_kernel import BACKWARD, FORWARD

    for tuning in (FORWARD, BACKWARD):
        for T in (1, 15, 16, 17, 8192, 131_072, 2**31 - 1):
            launch = _Launch(3, T, 12_288, 1, 4, torch.device("cpu"), tuning)
            assert (launch.runs - 1) * launch.run < T <= launch.runs * launch.run
            assert launch.run % tuning.unroll == 0 and launch.runs * launch.blocks < 132 * tuning.waves + launch.blocks


def test_layout_without_bounds() -> None:
    """One sequence needs no tensor of bounds."""
    device = torch.device("cpu")
    assert Layout(1, (0, 7), True).cu_seqlens(device) is None
    assert Layout(1, (0, 3, 7), True).cu_seqlens(device).tolist() == [0, 3, 7]  # type: ignore[union-attr]
    assert convolve(Layout(1, (0, 0), True), [torch.zeros(0, 0)], [torch.zeros(0, 4)], None)[0][0].shape == (0, 0)
