"""Time by operation: traces of both kinds of machine, and a whole step of a small model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import random_batch, small_run

from openk3.model.roofline import roofline
from openk3.train.breakdown import breakdown, by_operation, mark, marked
from openk3.train.state import TrainState
from openk3.train.step import train_step


def event(name: str, category: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    """One complete event of a Chrome trace, on thread 1 unless another is named."""
    thread = more.pop("thread", 1)
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": duration, "tid": thread, "args": more}


def launch(start: float, correlation: int, **more: Any) -> dict[str, Any]:
    """A kernel's launch."""
    return event("cudaLaunchKernel", "cuda_runtime", start, 1, correlation=correlation, **more)


def kernel(name: str, duration: float, correlation: int) -> dict[str, Any]:
    """A kernel on the GPU."""
    return event(name, "kernel", 1000 + 100 * correlation, duration, thread="stream", correlation=correlation)


def test_kernels_belong_to_the_mark_around_their_launch() -> None:
    """The innermost one; forward operations hand it to their gradients by sequence number; names tell kernels apart."""
    node = "autograd::engine::evaluate_function: "
    events = [
        event("k3:KDA, rest", "user_annotation", 0, 100),
        event("k3:KDA projections", "user_annotation", 10, 20),
        event("aten::mm", "cpu_op", 12, 10, **{"Sequence number": 7}),
        launch(13, 1),
        event("_ShortConvs", "cpu_op", 40, 10, **{"Sequence number": 8}),
        launch(41, 2),
        launch(60, 3),
        event(node + "MmBackward0", "cpu_op", 0, 50, thread=2, **{"Sequence number": 7}),
        event("aten::mm", "cpu_op", 5, 10, thread=2, **{"Sequence number": 8}),
        launch(6, 4, thread=2),
        event(node + "_ShortConvsBackward", "cpu_op", 60, 10, thread=2, **{"Sequence number": 8}),
        launch(61, 5, thread=2),
        event(node + "torch::autograd::AccumulateGrad", "cpu_op", 80, 10, thread=2),
        launch(81, 6, thread=2),
        launch(95, 7, thread=2),
        kernel("nvjet_gemm", 10, 1),
        kernel("conv_forward_kernel", 20, 2),
        kernel("scan_kernel", 30, 3),
        kernel("nvjet_gemm", 40, 4),
        kernel("conv_backward_kernel", 50, 5),
        kernel("add", 60, 6),
        kernel("momentum_kernel", 70, 7),
        kernel("nobody's", 80, 99),
        event("k3:KDA, rest", "gpu_user_annotation", 1000, 500, thread="stream"),
    ]
    assert by_operation(events) == pytest.approx(
        {
            "other": 80e-6,
            "optimizer": 70e-6,
            "short convolutions": 70e-6,
            "gradient sums": 60e-6,
            "KDA projections": 50e-6,
            "KDA": 30e-6,
        }
    )


def test_a_cpu_counts_the_own_time_of_operations() -> None:
    """An operation inside another is not counted twice."""
    events = [
        event("k3:router", "user_annotation", 0, 100),
        event("aten::linear", "cpu_op", 10, 50),
        event("aten::mm", "cpu_op", 20, 30),
        event("aten::add", "cpu_op", 200, 5),
    ]
    assert by_operation(events) == pytest.approx({"router": 50e-6, "other": 5e-6})
    assert by_operation([]) == {}


def test_a_whole_step() -> None:
    """Every operation that the roofline knows takes time in forward or backward; marks are gone afterwards."""
    state = TrainState.build(small_run())
    batches = [random_batch(0), random_batch(1)]
    train_step(state, batches)

    def step() -> None:
        with mark("head and loss"):
            train_step(state, batches)

    times = breakdown(state.model, step, torch.device("cpu"))
    expected = {operation.name for operation in roofline(state.config.model).operations}
    assert expected - {"optimizer"} <= times.keys() and all(value > 0 for value in times.values())
    assert list(times.values()) == sorted(times.values(), reverse=True)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in state.model.modules())


def test_a_failing_step_leaves_no_marks() -> None:
    """Hooks go, whatever happens inside."""
    state = TrainState.build(small_run())
    with pytest.raises(ZeroDivisionError), marked(state.model):
        raise ZeroDivisionError
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in state.model.modules())
