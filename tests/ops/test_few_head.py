"""Both ends of a step of few tokens in Triton's interpreter: places, logits and the most likely token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from op_checks import random
from test_few_tokens import TOLERANCE, defined, off

from openk3.ops.few.head import _places_by_kernel, head, places_of
from openk3.ops.norm import rms_norm


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter runs kernels; nothing is recorded."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("N", "D", "V", "dtype"), [(1, 40, 77, torch.bfloat16), (3, 24, 130, torch.float32)])
def test_head(N: int, D: int, V: int, dtype: torch.dtype) -> None:
    """Logits against float64; of equal logits the first one's token."""
    h, norm = random(N, D).to(dtype), (random(D, seed=1).abs() + 0.5).to(dtype)
    weight = (random(V, D, seed=2) / D**0.5).to(dtype)
    for n in range(N):  # two rows that nothing else reaches
        row = 3 * h[n] / h[n].float().norm()
        weight[5 + n], weight[V - 1 - n] = row, row
    logits, ids = torch.full((N, V), float("nan"), dtype=dtype), torch.full((N,), -1)
    head(h, (norm, 1e-5), weight, logits, ids)
    with defined():
        want = rms_norm(h.double(), norm.double(), 1e-5) @ weight.double().T
    assert off(logits, want) < 2 * TOLERANCE[dtype]
    assert ids.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]


def test_head_of_many() -> None:
    """More tokens than the kernels take are the library's."""
    h, weight = random(9, 8).float(), random(20, 8, seed=1).float()
    logits, ids = torch.empty(9, 20), torch.empty(9, dtype=torch.int64)
    with defined():
        head(h, (torch.ones(8), 1e-5), weight, logits, ids)
        torch.testing.assert_close(logits, rms_norm(h, torch.ones(8), 1e-5) @ weight.T)
    assert torch.equal(ids, logits.argmax(-1))


def test_places() -> None:
    """By the kernel as by the definition, with a place that stands empty."""
    slots, lengths = torch.tensor([2, -1, 0], dtype=torch.int32), torch.tensor([4, 9, 7, 0], dtype=torch.int32)
    want = places_of(slots, lengths)
    assert [x.tolist() for x in want] == [[2, 3, 0], [7, 0, 4], [[2], [3], [0]], [8, 1, 5]]
    for found, expected in zip(_places_by_kernel(slots, lengths), want, strict=True):
        assert torch.equal(found, expected) and found.dtype == expected.dtype
