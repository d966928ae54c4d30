"""SiTU-GLU and output gates of rows that lie apart, in Triton's interpreter: as of rows that lie together."""

from __future__ import annotations

import pytest
import torch
from op_checks import random

from openk3.ops import rows_fused, sigmoid_gate_fused, situ_fused
from openk3.ops.sigmoid_gate import sigmoid_gate
from openk3.ops.situ import situ_glu


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs kernels."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")


@pytest.mark.parametrize(("rows", "width"), [(1, 3), (5, 40), (2, 1100), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_of_columns(rows: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as of copies; with gradients, copies are made."""
    joint = random(rows, 2 * width + 5).to(dtype)
    gate, up, o = joint[:, :width], joint[:, width : 2 * width], random(rows, width, seed=1).float()
    want = situ_glu(gate, up, 4.0, 25.0), sigmoid_gate(o, gate, dtype)
    calls: list[str] = []
    for module, name in ((situ_fused, "situ_rows"), (sigmoid_gate_fused, "gate_rows")):
        real = getattr(rows_fused, name)
        monkeypatch.setattr(module, name, lambda *given, real=real, name=name: (calls.append(name), real(*given))[1])
    with torch.no_grad():
        got = situ_glu(gate, up, 4.0, 25.0), sigmoid_gate(o, gate, dtype)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert rows < 2 or calls == ["situ_rows", "gate_rows"]
