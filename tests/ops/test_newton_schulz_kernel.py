"""Newton-Schulz by kernels in Triton's interpreter: against float64, and never worse than the plain iteration."""

from __future__ import annotations

import pytest
import torch
from op_checks import random
from torch import Tensor

from openk3.ops import newton_schulz_fused as fused
from openk3.ops.newton_schulz import COEFFICIENTS, newton_schulz


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public call runs the kernels."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")


def definition(x_BMN: Tensor, steps: int = 5) -> Tensor:
    """In float64 by the PyTorch path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENK3_BACKEND", "reference")
        return newton_schulz(x_BMN.double(), steps)


def plain(x_BMN: Tensor, steps: int = 5) -> Tensor:
    """The iteration as Muon usually runs it: every product's result rounded to bfloat16."""
    a, b, c = COEFFICIENTS
    wide = x_BMN.mT if x_BMN.shape[1] > x_BMN.shape[2] else x_BMN

    def rounded(x: Tensor) -> Tensor:
        return x.bfloat16().float()

    x = rounded(wide.float() / torch.linalg.vector_norm(wide.float(), dim=(1, 2), keepdim=True))
    for _ in range(steps):
        gram = rounded(x @ x.mT)
        x = rounded(a * x + rounded(b * gram + c * (gram @ gram)) @ x)
    return x.mT if wide is not x_BMN else x


def spectrum(values: Tensor, M: int, N: int, seed: int = 0) -> Tensor:
    """A matrix [1, M, N] with these singular values."""
    left, right = (torch.linalg.qr(random(size, M, seed=seed + size)).Q for size in (M, N))
    return ((left * values) @ right.T).float().unsqueeze(0)


def error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm, the largest of the batch."""
    norms = torch.linalg.vector_norm(got.double() - want, dim=(1, 2)) / torch.linalg.vector_norm(want, dim=(1, 2))
    return float(norms.max())


SHAPES = [(1, 128, 256), (1, 256, 128), (2, 100, 131), (1, 131, 100), (3, 16, 48), (1, 1, 5), (2, 9, 1), (1, 33, 33)]
SHAPES += [(1, 192, 256), (1, 150, 201), (1, 201, 150), (1, 256, 256)]
WAYS = {"gram": (24, 144), "products": (70, 96)}


@pytest.fixture(params=WAYS)
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Rows and columns, small ones, for each of the two ways."""
    monkeypatch.setattr(fused, "LARGEST_GRAM", 64)
    return WAYS[request.param]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_definition(shape: tuple[int, ...]) -> None:
    """Both ways, wide and tall, sizes that fit tiles and sizes that do not; close to float64, and as close as plain."""
    x_BMN = random(*shape, seed=1, dtype=torch.float32)
    got, want = newton_schulz(x_BMN), definition(x_BMN)
    assert got.dtype == torch.float32 and got.shape == x_BMN.shape
    assert error(got, want) < max(1.05 * error(plain(x_BMN), want), 4e-3)


@pytest.mark.parametrize("steps", [1, 2, 7, 10])
def test_any_number_of_steps(steps: int, size: tuple[int, int]) -> None:
    """More steps than one Gram matrix bears are done in rounds, each of which reads X again."""
    x_BMN = random(1, *size, seed=2, dtype=torch.float32)
    want = definition(x_BMN, steps)
    assert error(newton_schulz(x_BMN, steps), want) < max(1.05 * error(plain(x_BMN, steps), want), 4e-3)


def decays() -> dict[str, Tensor]:
    """Singular values of gradients that a Gram matrix squares away."""
    n = torch.arange(1, 65, dtype=torch.float64)
    small = torch.full((63,), 2e-3, dtype=torch.float64)
    return {
        "1/n": 1 / n,
        "1/n^2": n**-2,
        "exponential": 10 ** (-4 * (n - 1) / 63),
        "half zero": (n <= 32).double(),
        "one large": torch.cat([torch.ones(1, dtype=torch.float64), small]),
        "rank one": torch.cat([torch.ones(1, dtype=torch.float64), 0 * small]),
    }


@pytest.mark.parametrize("name", list(decays()))
def test_ill_conditioned_matrices(name: str) -> None:
    """The Gram form squares the condition; its halves keep it at least as exact as the plain iteration in bfloat16."""
    x_BMN = spectrum(decays()[name], 64, 320)
    want = definition(x_BMN)
    got, usual = newton_schulz(x_BMN), plain(x_BMN)
    assert error(got, want) <= 1.02 * error(usual, want)
    spectral = [float(torch.linalg.matrix_norm(y.double() - want, 2)) for y in (got, usual)]
    assert spectral[0] <= 1.02 * spectral[1]


def test_same_result_at_every_scale(size: tuple[int, int]) -> None:
    """U01: times 2^-100 and 2^100 it gives the same bits; times 1e-35 nearly the same. Zero gives zero."""
    x_BMN = random(1, *size, seed=3, dtype=torch.float32)
    want = newton_schulz(x_BMN, 2)
    for power in (-100, 100):
        assert torch.equal(newton_schulz(x_BMN * 2.0**power, 2), want)
    assert error(newton_schulz(x_BMN * 1e-35, 2), want.double()) < 1e-2
    assert not newton_schulz(torch.zeros(2, *size), 2).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_matrices_stay_alone(bad: float, size: tuple[int, int]) -> None:
    """U01: one NaN makes its own matrix NaN and leaves the others, bit for bit."""
    x_BMN = random(2, *size, seed=7, dtype=torch.float32)
    want = newton_schulz(x_BMN, 2)
    x_BMN[0, 2, 3] = bad
    got = newton_schulz(x_BMN, 2)
    assert got[0].isnan().all() and torch.equal(got[1], want[1])


def test_neighbours_and_chunks_change_no_bit(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix alone, in a batch, in a batch that is cut, and in memory that held NaN."""
    x_BMN = random(2, *size, seed=8, dtype=torch.bfloat16)
    want = newton_schulz(x_BMN, 2)
    assert want.dtype == torch.bfloat16
    assert torch.equal(newton_schulz(x_BMN[1:], 2), want[1:])
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert torch.equal(newton_schulz(x_BMN, 2), want)
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(fused, "CHUNK_VALUES", 100)
    assert torch.equal(newton_schulz(x_BMN, 2), want)


def test_columns_are_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """X X^T in one piece or in several, the last one shorter: the same up to float32 sums."""
    x_BMN = random(1, 16, 1000, seed=9, dtype=torch.float32)
    several = newton_schulz(x_BMN)
    monkeypatch.setattr(fused, "_PROGRAMS", 1)
    torch.testing.assert_close(several, newton_schulz(x_BMN), rtol=2e-2, atol=1e-4)
    assert error(several, definition(x_BMN)) < 4e-3
