"""CPU settings: exact products or none, and restored when the check fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from openk3.runtime import cpu


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave the process as it was for other tests."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before


def test_products_stay_float32() -> None:
    """Whatever this machine allows, products of float32 matrices keep float32 accuracy afterwards."""
    held = cpu.tune_cpu()
    assert held.keys() == {"onednn_float32", "keep_memory"}
    assert held["onednn_float32"] == (torch.backends.mkldnn.matmul.fp32_precision == "bf16")
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(3, 100, 100, generator=generator) for _ in range(2))
    error = (a @ b - a.double() @ b.double()).abs()
    assert (error < 2e-6 * (a.double().abs() @ b.double().abs())).all()
    assert cpu.tune_cpu() == held


def test_rounded_products_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the permission makes products rounded to bfloat16, it is taken back."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    exact = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: exact(a.bfloat16(), b.bfloat16()).float())
    assert not cpu.allow_onednn_float32()
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without oneDNN is left alone."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not cpu.allow_onednn_float32()
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_other_systems_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting to change: not Linux, or a C library without mallopt."""
    monkeypatch.setattr(cpu.sys, "platform", "darwin")
    assert not cpu.keep_memory()
    monkeypatch.setattr(cpu.sys, "platform", "linux")
    monkeypatch.setattr(cpu.ctypes, "CDLL", lambda name: object())
    assert not cpu.keep_memory()
