"""A decoding step on states in pages is the step on pools, by the definition and by the kernel; other pages stay."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from openk3.ops import KdaGate
from openk3.ops.kda.decode import DecodePool, DecodeWeights, Projected, decode_kda
from openk3.ops.kda.paged_decode import DecodePages, decode_pages

H, K, W, P = 2, 16, 4, 5
C = H * K


class Draw:
    """Random layers and tokens."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.wide = dtype, torch.promote_types(dtype, torch.float32)
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal values."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype or self.dtype)

    def weights(self) -> DecodeWeights:
        """A layer's parameters."""
        gate = KdaGate(self.normal(H, dtype=self.wide), self.normal(H, K, dtype=self.wide))
        filters = (self.normal(C, W, dtype=self.wide) for _ in range(3))
        return DecodeWeights(*filters, gate, self.normal(K, dtype=self.wide), 1e-5)

    def tokens(self, rows: int) -> Projected:
        """Projections."""
        return Projected(*(self.normal(rows, width) for width in (C, C, C, C, H)))

    def pages(self) -> tuple[DecodePages, Tensor, Tensor]:
        """P pages, and the pieces of memory that they are views of, in which other things lie too."""
        states = self.normal(P, 3, H, K, K, dtype=self.wide)
        inputs = self.normal(P, 7 + 3 * C * (W - 1))
        return DecodePages(states[:, 1], inputs[:, 7:].unflatten(-1, (3 * C, W - 1))), states, inputs


@pytest.mark.parametrize("backend", ["reference", *(["triton"] if find_spec("triton") else [])])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_step(monkeypatch: pytest.MonkeyPatch, backend: str, dtype: torch.dtype) -> None:
    """Outputs, states and inputs as from pools; what lies between and on other pages keeps its bits."""
    if (backend, dtype) == ("triton", torch.float64):
        backend = "reference"  # there are no kernels for it
    draw = Draw(dtype)
    weights, tokens, gate = draw.weights(), draw.tokens(4), draw.normal(4, C)
    pages, states, inputs = draw.pages()
    page_N = torch.tensor([3, -1, 0, 4], dtype=torch.int32)
    live = page_N >= 0
    before = states.clone(), inputs.clone()
    windows = [torch.zeros(P, C, W, dtype=dtype) for _ in range(3)]
    for window, part in zip(windows, pages.inputs_PXW.split(C, 1)):
        window[..., 1:] = part
    pool = DecodePool(pages.state_PHKV.clone(), *windows)
    monkeypatch.setenv("OPENK3_BACKEND", backend)
    got = decode_pages(tokens, gate, weights, pages, page_N)
    monkeypatch.setenv("OPENK3_BACKEND", "reference")
    want = decode_kda(tokens, gate, weights, pool, page_N)
    digits = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, want, rtol=digits, atol=digits)
    assert not got[~live].any()
    torch.testing.assert_close(pages.state_PHKV, pool.state_SHKV, rtol=1e-5, atol=1e-5)
    assert torch.equal(pages.inputs_PXW, torch.cat([x[..., 1:] for x in pool.tensors()[1:]], 1))
    assert torch.equal(states[:, ::2], before[0][:, ::2]) and torch.equal(inputs[:, :7], before[1][:, :7])
    for page in (1, 2):
        assert torch.equal(states[page], before[0][page]) and torch.equal(inputs[page], before[1][page])


def test_no_requests() -> None:
    """Nothing happens."""
    draw = Draw(torch.float32)
    pages, states, _ = draw.pages()
    before = states.clone()
    none = torch.empty(0, dtype=torch.int32)
    assert decode_pages(draw.tokens(0), draw.normal(0, C), draw.weights(), pages, none).shape == (0, C)
    assert torch.equal(states, before)


def test_refusals() -> None:
    """Shapes that do not fit, pages twice, numbers of a page that do not lie side by side."""
    draw = Draw(torch.float32)
    weights, tokens, gate = draw.weights(), draw.tokens(2), draw.normal(2, C)
    pages, _, _ = draw.pages()

    def step(pages: DecodePages, ids: list[int]) -> None:
        decode_pages(tokens, gate, weights, pages, torch.tensor(ids, dtype=torch.int32))

    for wrong, ids, message in (
        (pages, [1, 1], "distinct"),
        (pages, [1, 5], "slot 5"),
        (pages, [1], "1 pages for 2"),
        (DecodePages(pages.state_PHKV, pages.inputs_PXW[..., 1:]), [0, 1], "inputs_PXW: expected"),
        (DecodePages(pages.state_PHKV.mT, pages.inputs_PXW), [0, 1], "side by side"),
        (DecodePages(pages.state_PHKV[1:], pages.inputs_PXW), [0, 1], "pages: "),
    ):
        with pytest.raises(ValueError, match=message):
            step(wrong, ids)
