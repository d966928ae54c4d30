"""Newton-Schulz by kernels on a GPU: against float64 at full size, never worse than plain bfloat16 products."""

from __future__ import annotations

import pytest
import torch
from kda_kernel_checks import poisoned_memory
from test_newton_schulz_kernel import definition, error, plain
from torch import Tensor

from openk3.ops.newton_schulz import newton_schulz

pytestmark = pytest.mark.gpu
SHAPES = [(96, 128, 7168), (40, 128, 768), (30, 768, 128), (12, 192, 256), (8, 384, 384), (6, 512, 384), (4, 384, 512)]
SHAPES += [(1, 1536, 3072), (1, 3072, 1536), (3, 100, 131), (3, 131, 100), (2, 1000, 1501), (5, 16, 40), (4, 1, 9)]


def draw(shape: tuple[int, ...], kind: str = "normal") -> Tensor:
    """Standard normal values; or with singular values 1/n^2; or one value far above all others."""
    x_BMN = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(sum(shape)), device="cuda")
    if kind == "spread":
        left, _, right = torch.linalg.svd(x_BMN, full_matrices=False)
        values = torch.arange(1, left.shape[-1] + 1, device="cuda", dtype=torch.float32) ** -2
        return (left * values) @ right
    if kind == "outlier":
        x_BMN[:, 0, 0] = 1e4
    return x_BMN


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape: tuple[int, ...], measured: list[tuple[str, str, dict[str, float]]]) -> None:
    """Every size, and kinds of matrices whose Gram matrix is hard.

    Both sides round X to bfloat16 first, ours after a power of two, plain after the norm, and small singular values
    multiply that rounding by hundreds: with some of them it is most of the error, and which of two draws of it is
    larger is chance in a small matrix. So where all is done by one Gram matrix, each side's arithmetic is judged on the
    matrix that it works with: ours is no further from the exact iteration on it than plain from that on its own. Larger
    sizes do the same arithmetic as plain, with other roundings, and are judged by the whole error.
    """
    for kind in ("normal", "spread", "outlier"):
        x_BMN = draw(shape if kind == "normal" else (min(shape[0], 4), *shape[1:]), kind)
        want, got, simple = definition(x_BMN), newton_schulz(x_BMN), plain(x_BMN)
        norm = torch.linalg.vector_norm(x_BMN, dim=(1, 2), keepdim=True)
        exact, exact_simple = (definition(x.bfloat16()) for x in (x_BMN, x_BMN / norm))
        found = {"ours": error(got, want), "plain": error(simple, want), "input": error(exact, want)}
        found |= {"own": error(got, exact), "plain's own": error(simple, exact_simple)}
        measured.append(("muon", f"{shape} {kind}", found))
        if min(shape[1:]) <= 128:
            assert found["own"] <= max(found["plain's own"], 4e-3), (kind, found)
        else:
            assert found["ours"] <= max(1.1 * found["plain"], 4e-3), (kind, found)


@pytest.mark.parametrize("shape", [(9, 128, 640), (9, 640, 128), (5, 384, 512), (5, 300, 200)], ids=str)
def test_same_bits(shape: tuple[int, ...]) -> None:
    """Every run, amid memory that holds NaN, alone and among others; times a power of two."""
    x_BMN = draw(shape)
    want = newton_schulz(x_BMN)
    with poisoned_memory():
        assert torch.equal(newton_schulz(x_BMN), want)
    assert torch.equal(newton_schulz(x_BMN[3:4]), want[3:4])
    assert torch.equal(newton_schulz(x_BMN * 2.0**-100), want)
    x_BMN[2, 0, 0] = torch.nan
    got = newton_schulz(x_BMN)
    assert got[2].isnan().all() and torch.equal(got[[0, 1, 3, 4]], want[[0, 1, 3, 4]])


def test_more_steps() -> None:
    """Rounds on new Gram matrices, and plain products."""
    for shape in ((4, 128, 1024), (4, 256, 512)):
        x_BMN = draw(shape, "spread")
        want = definition(x_BMN, 12)
        assert error(newton_schulz(x_BMN, 12), want) <= max(1.1 * error(plain(x_BMN, 12), want), 4e-3)
