"""RMSNorm's kernels in Triton's interpreter: values and gradients against float64, odd sizes, rows that lie apart."""

from __future__ import annotations

import pytest
import torch
from op_checks import random
from torch import Tensor

from openk3.config.model import ConfigError
from openk3.ops.norm import gated_rms_norm, rms_norm

EPS = 1e-5


def run(norm: object, leaves: list[Tensor], d_out: Tensor) -> tuple[Tensor, ...]:
    """Output and the gradients of all leaves."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = norm(*leaves, EPS)  # type: ignore[operator]
    return out.detach(), *torch.autograd.grad(out, leaves, d_out)


def compare(norm: object, leaves: list[Tensor], d_out: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are as close to float64 as rounding to their formats allows, and twice the same."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    got, again = (run(norm, leaves, d_out) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(got, again))
    monkeypatch.setenv("OPENK3_BACKEND", "reference")
    want = run(norm, [x.double() for x in leaves], d_out.double())
    plain = run(norm, leaves, d_out)
    for ours, exact, theirs in zip(got, want, plain):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        limit = 2e-6 if theirs.dtype == torch.float32 and d_out.dtype == torch.float32 else 2**-7
        assert (ours.double() - exact).norm() <= limit * exact.norm() + 1e-12


@pytest.mark.parametrize("shape", [(1, 3), (7, 48), (3, 5, 130), (700, 32), (0, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths that are no powers of two, several turns of a program, any leading dimensions, no rows."""
    x, d_out = random(*shape).to(dtype), random(*shape, seed=1).to(dtype)
    compare(rms_norm, [x, 1 + 0.3 * random(shape[-1], seed=2).to(dtype)], d_out, monkeypatch)


def test_rounds_as_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 rows are rounded before the weight; a float32 weight gives float32."""
    x, weight = random(9, 96).bfloat16(), 1 + random(96, seed=1).bfloat16()
    for w in (weight, weight.float()):
        monkeypatch.setenv("OPENK3_BACKEND", "triton")
        got = rms_norm(x, w, EPS)
        monkeypatch.setenv("OPENK3_BACKEND", "reference")
        want = rms_norm(x, w, EPS)
        assert got.dtype == want.dtype and (got == want).float().mean() > 0.99


def test_rows_that_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of wider rows is read where it lies, and its gradient goes to the right place."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    wide = random(11, 80).float().requires_grad_()
    weight = torch.ones(48, requires_grad=True)
    part, _ = wide.split((48, 32), -1)
    rms_norm(part, weight, EPS).square().sum().backward()
    assert wide.grad is not None and not wide.grad[:, 48:].any()
    copied = part.detach().clone().requires_grad_()
    rms_norm(copied, weight, EPS).square().sum().backward()
    assert torch.equal(wide.grad[:, :48], copied.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kinds", [(torch.float32,) * 3, (torch.bfloat16, torch.bfloat16, torch.float32)])
def test_gated(kinds: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 48 channels with a gate, weights of another format; one rounding at the end."""
    o, gate, weight = (random(*s, seed=n).to(k) for n, (s, k) in enumerate(zip(((70, 3, 48),) * 2 + ((48,),), kinds)))
    compare(gated_rms_norm, [o, 3 * gate, 1 + 0.3 * weight], random(70, 3, 48, seed=3).to(kinds[1]), monkeypatch)


def test_what_kernels_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float64 rows or weights are the definition's; where kernels are forced that is an error that says so."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    with pytest.raises(ConfigError, match="norm cannot use its kernels"):
        rms_norm(random(3, 8).float(), random(8), EPS)
    with pytest.raises(ConfigError, match="16384 wide"):
        rms_norm(torch.ones(1, 20000), torch.ones(20000), EPS)
