"""The output gate of attention: its definition, and its kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from op_checks import random

from openk3.config.model import ConfigError
from openk3.ops.sigmoid_gate import sigmoid_gate


def test_definition() -> None:
    """o / (1 + e^-gate), rounded once at the end; numerical derivatives; shapes must fit."""
    o, gate = random(5, 6, grad=True), random(5, 6, seed=1, grad=True)
    torch.testing.assert_close(sigmoid_gate(o, gate, torch.float64), o / (1 + (-gate).exp()), rtol=1e-14, atol=0)
    assert torch.autograd.gradcheck(lambda a, b: sigmoid_gate(a, b, torch.float64), (o, gate))
    narrow = sigmoid_gate(o.float(), gate.bfloat16(), torch.bfloat16)
    assert torch.equal(narrow, (o.float() * gate.bfloat16().sigmoid()).bfloat16())
    with pytest.raises(ValueError, match="need one shape"):
        sigmoid_gate(o, gate[:, :3], torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (37, 61), (0, 8), (3, 2048)])
def test_kernels(shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and both gradients are those of float64 up to rounding of the formats; also of what is not contiguous."""
    o, gate = 3 * random(*shape).float(), (5 * random(shape[1], shape[0], seed=1)).to(dtype).T
    d_out, found = random(*shape, seed=2).to(dtype), []
    for way, wide in (("triton", False), ("reference", True)):
        monkeypatch.setenv("OPENK3_BACKEND", way)
        leaves = [(x.double() if wide else x).detach().requires_grad_() for x in (o, gate)]
        out = sigmoid_gate(*leaves, torch.float64 if wide else dtype)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, d_out.double() if wide else d_out)])
    for got, want, kind in zip(*found, (dtype, torch.float32, dtype), strict=True):
        assert got.dtype == kind
        limit = 1e-6 if dtype == torch.float32 else 2**-7
        assert (got.double() - want).norm() <= limit * want.norm() + 1e-12


def test_what_kernels_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are not float32 are the definition's; where kernels are forced that is an error that says so."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    with pytest.raises(ConfigError, match="they multiply float32"):
        sigmoid_gate(random(2, 2).bfloat16(), random(2, 2).bfloat16(), torch.bfloat16)
