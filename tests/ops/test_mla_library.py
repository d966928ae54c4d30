"""When cuDNN stands in for the attention kernels: on request, and only where its answer is the same question's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openk3.config.model import ConfigError
from openk3.ops.mla.attention_library import applies
from openk3.ops.mla.attention_views import Job
from openk3.ops.mla.reference import mla_attention
from openk3.ops.mla.tiles import Bands


def on_gpu(dtype: torch.dtype = torch.bfloat16) -> Any:
    """What `applies` looks at of a query tensor on a GPU."""
    return SimpleNamespace(device=torch.device("cuda"), dtype=dtype)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """On request, on a GPU of Hopper's kind."""
    monkeypatch.setenv("OPENK3_LIBRARY_ATTENTION", "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


WHOLE = Job(Bands((0, 8), (0, 8)), 0.1)


def test_one_document_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, and nobody asks for largest scores."""
    assert applies(WHOLE, on_gpu(), return_max=False) and applies(WHOLE, on_gpu(torch.float16), return_max=False)
    assert not applies(WHOLE, on_gpu(), return_max=True)
    assert not applies(WHOLE, on_gpu(torch.float32), return_max=False)
    for bands in (((0, 3, 8), (0, 3, 8)), ((0, 3), (0, 8)), ((0, 0), (0, 0))):
        assert not applies(Job(Bands(*bands), 0.1), on_gpu(), return_max=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not applies(WHOLE, on_gpu(), return_max=False)


def test_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs are rounded: nobody gets them unasked, and a CPU never does."""
    q = torch.ones(4, 1, 16, dtype=torch.bfloat16)
    assert mla_attention(q, q, q, torch.tensor([0, 4]), scale=0.1).dtype == torch.float32
    assert not applies(WHOLE, q, return_max=False)
    monkeypatch.setenv("OPENK3_LIBRARY_ATTENTION", "yes")
    with pytest.raises(ConfigError, match="OPENK3_LIBRARY_ATTENTION=yes: must be 0 or 1"):
        applies(WHOLE, on_gpu(), return_max=False)
    monkeypatch.delenv("OPENK3_LIBRARY_ATTENTION")
    assert not applies(WHOLE, on_gpu(), return_max=False)
