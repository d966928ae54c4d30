"""Remembered device tables: by arguments and stream, pushed out in order, and kept while captured graphs read them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from openk3.ops import device_tables
from openk3.ops.device_tables import device_table

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Gpu:
    """Streams and captures of a GPU that is not there."""

    stream = 0
    capturing = False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """What `device_tables` asks of CUDA."""
    found = Gpu()
    monkeypatch.setattr(device_tables, "_stream", lambda device: found.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    return found


def counted(most: int) -> tuple[list[object], Callable[..., torch.Tensor]]:
    """A function under the decorator, and what it was called with."""
    calls: list[object] = []

    @device_table(most)
    def table(size: int, device: torch.device, *, more: int = 0) -> torch.Tensor:
        calls.append((size, device, more))
        return torch.arange(size + more)

    return calls, table


def test_the_last_results_are_remembered() -> None:
    """On a CPU: as many as said, the ones asked for last."""
    calls, table = counted(2)
    first = table(3, CPU)
    assert table(3, CPU) is first and table(4, CPU) is table(4, CPU) and table(3, CPU) is first
    table(5, CPU, more=1)  # pushes 4 out, which was asked for before 3
    assert table(3, CPU) is first and len(calls) == 3
    table(4, CPU)
    assert len(calls) == 4 and torch.equal(table(5, CPU, more=1), torch.arange(6))


def test_every_stream_has_its_own(gpu: Gpu) -> None:
    """Memory of what is pushed out is given to later work of the stream that read it."""
    calls, table = counted(4)
    first = table(3, GPU)
    gpu.stream = 7
    second = table(3, GPU)
    assert second is not first and table(3, GPU) is second
    gpu.stream = 0
    assert table(3, GPU) is first and len(calls) == 2


def test_captured_graphs_keep_theirs(gpu: Gpu) -> None:
    """Found whatever stream made it, and never made anew, however many others follow; new ones are refused."""
    _, table = counted(2)
    first = table(3, GPU)
    gpu.stream, gpu.capturing = 9, True
    assert table(3, GPU) is first
    with pytest.raises(RuntimeError, match="table: .* run the same call once before the capture"):
        table(4, GPU)
    gpu.capturing = False
    for size in range(10, 20):
        table(size, GPU)
    gpu.capturing = True
    assert table(3, GPU) is first
