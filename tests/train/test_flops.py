"""Model FLOPs of packed batches: every sequence by its own length, images by their patches."""

from __future__ import annotations

import pytest
import torch
from small_models import random_batch, small_model

from openk3.inputs.packed import Packed
from openk3.model.accounting import account
from openk3.train.flops import model_flops, utilisation


def test_sequences_count_by_their_own_length() -> None:
    """A batch of packed sequences costs what its sequences cost apart, as `openk3 plan` counts each."""
    books = account(small_model())
    lengths = (40, 1, 23)
    want = sum(n * books.training_flops(n).total for n in lengths)
    packed = random_batch(0, lengths)
    assert model_flops(books, [packed]) == pytest.approx(want, rel=1e-12)
    assert model_flops(books, [random_batch(1, (n,)) for n in lengths]) == pytest.approx(want, rel=1e-12)
    assert model_flops(books, [Packed.join([]), Packed.join([[]])]) == 0
    assert model_flops(books, [random_batch(0, (64,))]) > want


def test_images_count_by_their_patches() -> None:
    """Three forward passes of the tower over each, besides the text model's tokens."""
    books = account(small_model())
    packed = random_batch(0, images=2)
    patches = [t * h * w for _, (t, h, w) in packed.images]
    plain = Packed.join(list(packed.token_ids_T.split(packed.cu_seqlens.diff().tolist())))
    extra = model_flops(books, [packed]) - model_flops(books, [plain])
    assert len(patches) == 2 and extra == pytest.approx(sum(3 * books.image_flops(n) for n in patches))


def test_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on a CPU; on a known GPU a share of its peak, and memory; on another one memory alone."""
    assert utilisation(1e15, 2.0, torch.device("cpu")) == {}
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * 10**9)
    for name, peak in (("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 80GB HBM3", 989e12)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert utilisation(1e15, 2.0, device) == pytest.approx({"mfu": 5e14 / peak, "peak_gb": 5.0})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce")
    assert utilisation(1e15, 2.0, device) == {"peak_gb": 5.0}
