"""Interpreted kernels round, multiply and loop as compiled ones do."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def narrow_kernel(x, y, n, COUNT: tl.constexpr):
    """y = x in y's format, and back in x."""
    at = tl.arange(0, COUNT)
    for i in range(n):
        value = tl.load(x + i * COUNT + at).to(y.dtype.element_ty)
        tl.store(y + i * COUNT + at, value)
        tl.store(x + i * COUNT + at, value.to(tl.float32))


@triton.jit
def product_kernel(a, b, y, n):
    """y = n times a @ b, of [16, 16]."""
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    total = tl.zeros((16, 16), tl.float32)
    for _ in tl.range(0, tl.load(n), num_stages=2):
        total += tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee")
    tl.store(y + at, total)


def test_bfloat16_is_rounded_to_the_nearest() -> None:
    """Random values, ties, the largest one, infinities, zeros and a NaN, in as many rounds as an argument says."""
    edges = [
        1 + 2**-8,
        1 + 3 * 2**-8,
        -1 - 2**-8,
        3.3895e38,
        3.4e38,
        torch.inf,
        -torch.inf,
        0.0,
        -0.0,
        torch.nan,
        1e-40,
    ]
    values = torch.cat([torch.tensor(edges), torch.randn(64 - len(edges), generator=torch.Generator().manual_seed(0))])
    x, y = values.clone(), torch.empty(64, dtype=torch.bfloat16)
    narrow_kernel[(1,)](x, y, 4, 16)
    want = values.bfloat16()
    torch.testing.assert_close(y, want, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(x, want.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(y.signbit() | y.isnan(), want.signbit() | want.isnan())


def test_products_of_bfloat16() -> None:
    """Products of bfloat16 matrices, added up in float32 as often as a value in memory says."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator).bfloat16() for _ in range(2))
    y = torch.empty(16, 16)
    product_kernel[(1,)](a, b, y, torch.tensor([3]))
    torch.testing.assert_close(y, 3 * a.float() @ b.float(), rtol=1e-5, atol=1e-5)
