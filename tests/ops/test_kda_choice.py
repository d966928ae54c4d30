"""KDA's public functions reach the kernels where these apply, and only there (kernels in Triton's interpreter)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from kda_checks import assert_same, cu_seqlens, kda_inputs, run, run_with_gradients
from torch import Tensor

from openk3.config.model import ConfigError
from openk3.ops import KdaGate, chunk_kda, recurrent_kda
from openk3.ops.kda import fused_backward
from openk3.ops.kda.segment import segment_kda

LENGTHS = [35, 0, 3]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.dtype]]:
    """Kernels are forced; the dtype of q of every call that reaches them."""
    seen: list[torch.dtype] = []
    fused = fused_backward.fused_kda

    def watched(q_THK: Tensor, *rest: Tensor, **options: object) -> tuple[Tensor, ...]:
        seen.append(q_THK.dtype)
        return fused(q_THK, *rest, **options)

    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    monkeypatch.setattr(fused_backward, "fused_kda", watched)
    yield seen


def definition(run_: Callable[..., dict[str, Tensor]], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The recurrence in float64."""
    wide = {name: value.double() for name, value in inputs.items()}
    return {name: value.float() for name, value in run_(recurrent_kda, wide, LENGTHS).items()}


def test_chunk_kda_runs_the_kernels(calls: list[torch.dtype]) -> None:
    """Outputs, final states and all gradients of the public function."""
    inputs = kda_inputs(LENGTHS, 1, 16, 16, dtype=torch.float32)
    got = run_with_gradients(chunk_kda, inputs, LENGTHS)
    assert calls == [torch.float32]
    assert_same(got, definition(run_with_gradients, inputs), atol=2e-5)


def test_mixed_formats_run_in_the_widest(calls: list[torch.dtype]) -> None:
    """q and k in bfloat16 beside float32 values: nothing but q and k is rounded, and outputs come in v's format."""
    inputs = kda_inputs(LENGTHS, 1, 16, 16, dtype=torch.float32)
    inputs |= {name: inputs[name].bfloat16() for name in ("q", "k")}
    o, state = run(chunk_kda, inputs, LENGTHS)
    assert calls == [torch.float32] and o.dtype == torch.float32
    want = run(recurrent_kda, {name: value.double() for name, value in inputs.items()}, LENGTHS)
    torch.testing.assert_close(o.double(), want[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(state.double(), want[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("K", "bound", "dtype", "message"),
    [
        (8, -5.0, torch.float32, "a head has 8 and 16 channels"),
        (16, None, torch.float32, "they need the bounded gate"),
        (16, -5.0, torch.float64, "q_THK is torch.float64"),
    ],
)
def test_what_kernels_cannot_do(
    calls: list[torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
    K: int,
    bound: float | None,
    *,
    dtype: torch.dtype,
    message: str,
) -> None:
    """Forced, it is an error that says why; not forced, the PyTorch form runs it."""
    inputs = kda_inputs(LENGTHS, 1, K, 16, dtype=dtype)
    with pytest.raises(ConfigError, match=message):
        run(chunk_kda, inputs, LENGTHS, bound)
    monkeypatch.delenv("OPENK3_BACKEND")
    o, _ = run(chunk_kda, inputs, LENGTHS, bound)
    assert calls == []
    torch.testing.assert_close(o, run(recurrent_kda, inputs, LENGTHS, bound)[0], rtol=0, atol=1e-5)


def test_segments_by_kernels(calls: list[torch.dtype]) -> None:
    """Applied to entering states they give the leaving ones; gradients reach every input."""
    inputs = kda_inputs(LENGTHS, 1, 16, 32, dtype=torch.float32)
    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    rest = (leaves[name] for name in ("k", "v", "decay_logit", "beta_logit"))
    maps = segment_kda(*rest, KdaGate(leaves["A_log"], leaves["dt_bias"]), cu_seqlens=cu_seqlens(LENGTHS))
    assert calls == [torch.float32] * 2
    got = maps.apply(leaves["state"])
    wide = {name: value.detach().double().requires_grad_() for name, value in inputs.items()}
    _, want = run(recurrent_kda, wide, LENGTHS)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)
    names = [name for name in inputs if name != "q"]
    got_grads = torch.autograd.grad(got.square().sum(), [leaves[name] for name in names])
    want_grads = torch.autograd.grad(want.square().sum(), [wide[name] for name in names])
    for name, a, b in zip(names, got_grads, want_grads):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
