"""Newton-Schulz by its effect on singular values, at every scale, and with broken matrices."""

from __future__ import annotations

import pytest
import torch
from op_checks import random
from torch import Tensor

from openk3.ops.newton_schulz import COEFFICIENTS, newton_schulz


def quintic(values: Tensor, steps: int) -> Tensor:
    """What the iteration does to a singular value."""
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return values


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8), (1, 16, 16), (4, 1, 9), (2, 9, 1)])
@pytest.mark.parametrize("steps", [1, 5])
def test_acts_on_singular_values_only(shape: tuple[int, ...], steps: int) -> None:
    """U diag(s) V^T over its norm becomes U diag(p(s)) V^T, whichever side is the smaller one."""
    x_BMN = random(*shape, seed=1)
    got_BMN = newton_schulz(x_BMN, steps)
    u, s, vh = torch.linalg.svd(x_BMN, full_matrices=False)
    moved = quintic(s / s.square().sum(-1, keepdim=True).sqrt(), steps)
    torch.testing.assert_close(got_BMN, (u * moved.unsqueeze(-2)) @ vh, rtol=1e-10, atol=1e-12)


def test_nearly_orthogonal() -> None:
    """Five steps bring well-conditioned matrices to singular values around 1."""
    singular = torch.linalg.svdvals(newton_schulz(random(20, 24, 64, seed=2, dtype=torch.float32)))
    assert singular.min() > 0.65 and singular.max() < 1.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_update_at_every_scale(dtype: torch.dtype) -> None:
    """U01: a unit 64x64 direction times 1 .. 1e-20 (and up to 1e30) gives the same update within 1e-3."""
    direction = random(1, 64, 64, seed=3)
    direction /= direction.norm()
    unit = newton_schulz(direction.to(dtype)).float()
    assert 5 < unit.norm() < 9
    for scale in (1e-6, 1e-8, 1e-10, 1e-20, 1e-35, 1e30):
        scaled = newton_schulz((direction * scale).to(dtype)).float()
        torch.testing.assert_close(scaled, unit, rtol=0, atol=1e-3 if dtype == torch.float32 else 2e-2)


def test_zero_rank_one_and_rows() -> None:
    """U01: zero gives exactly zero; a rank-one matrix and a row keep their direction."""
    x_BMN = torch.zeros(3, 6, 5)
    column, row = random(6, seed=4, dtype=torch.float32), random(5, seed=5, dtype=torch.float32)
    x_BMN[1] = torch.outer(column, row) * 1e-12
    got_BMN = newton_schulz(x_BMN)
    assert (got_BMN[0] == 0).all() and (got_BMN[2] == 0).all()
    gain = quintic(torch.tensor(1.0), 5)
    direction = torch.outer(column / column.norm(), row / row.norm())
    torch.testing.assert_close(got_BMN[1], gain * direction, rtol=0, atol=1e-4)
    line = random(1, 1, 9, seed=6, dtype=torch.float32)
    torch.testing.assert_close(newton_schulz(line), gain * line / line.norm(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_matrices_stay_alone(bad: float) -> None:
    """U01: one NaN makes its own matrix NaN, so that a caller sees it, and leaves the others as they were."""
    x_BMN = random(3, 8, 12, seed=7, dtype=torch.float32)
    want_BMN = newton_schulz(x_BMN)
    x_BMN[1, 2, 3] = bad
    got_BMN = newton_schulz(x_BMN)
    assert got_BMN[1].isnan().any()
    torch.testing.assert_close(got_BMN[[0, 2]], want_BMN[[0, 2]])


def test_batch_equals_single() -> None:
    """A matrix does not see its batch, nor whether it is stored transposed."""
    x_BMN = random(5, 6, 10, seed=8)
    got_BMN = newton_schulz(x_BMN)
    for x_MN, want_MN in zip(x_BMN, got_BMN):
        torch.testing.assert_close(newton_schulz(x_MN.unsqueeze(0))[0], want_MN, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(newton_schulz(x_BMN.mT), got_BMN.mT, rtol=1e-12, atol=1e-12)


def test_shapes() -> None:
    """dtype is kept, an empty batch stays empty, a bare matrix is refused."""
    assert newton_schulz(torch.ones(2, 3, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert newton_schulz(torch.empty(0, 3, 4)).shape == (0, 3, 4)
    with pytest.raises(ValueError, match="batch of matrices"):
        newton_schulz(torch.ones(3, 4))
