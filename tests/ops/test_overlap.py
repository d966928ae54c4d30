"""Two computations side by side: on a CPU one after the other, with their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from openk3.ops import overlap
from openk3.ops.overlap import side_by_side


def test_both_results_and_gradients() -> None:
    """What each gives, in order."""
    x = torch.arange(3.0, requires_grad=True)
    first, second = side_by_side(x, lambda: 2 * x, lambda: x * x)
    assert torch.equal(first, 2 * x) and torch.equal(second, x * x)
    (gradient,) = torch.autograd.grad((first + second).sum(), x)
    assert torch.equal(gradient, 2 + 2 * x)


class OnGpu(Tensor):
    """Says that it lies on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """A GPU's."""
        return torch.device("cuda")


def test_many_rows_leave_the_current_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are asked for only where there are few enough rows."""
    asked = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: asked.append(device) or 1 / 0)
    x = torch.zeros(overlap.MOST_ROWS + 1, 1).as_subclass(OnGpu)
    one = torch.ones(1)
    assert side_by_side(x, lambda: one, lambda: -one) == (one, -one) and not asked
    with pytest.raises(ZeroDivisionError):
        side_by_side(x[1:], lambda: one, lambda: -one)
    assert len(asked) == 1
