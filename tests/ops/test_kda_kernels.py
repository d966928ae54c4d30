"""KDA by kernels, interpreted on the CPU at small sizes: what the tests of the GPU check at full size."""

from __future__ import annotations

import pytest
import torch
from kda_checks import kda_inputs, run_with_gradients
from kda_kernel_checks import (
    Case,
    assert_causal,
    assert_checkpoints,
    assert_deterministic,
    assert_exact,
    assert_extreme_logits,
    assert_reads_no_garbage,
    assert_sequences_are_alone,
)

from openk3.ops import chunk_kda, recurrent_kda
from openk3.ops.kda import workspace
from openk3.ops.kda.fused_backward import checkpointed_kda, fused_kda

SMALL = {"H": 2, "K": 16, "V": 16}
PACKED = (0, 33, 1, 0, 64, 5, 0)


@pytest.mark.parametrize("T", [1, 16, 129, 257])
def test_the_judge(T: int) -> None:
    """The chunk form in float64 equals the recurrence in outputs, states and all gradients, far below any kernel's
    error, at the width of real heads."""
    inputs = kda_inputs([T], H=1, K=128, V=128, seed=T)
    want, got = run_with_gradients(recurrent_kda, inputs), run_with_gradients(chunk_kda, inputs)
    assert all((got[name] - want[name]).norm() <= 1e-12 * (1 + want[name].norm()) for name in want)


@pytest.mark.parametrize("gates", ["mixed", "bound", "open", "low"])
@pytest.mark.parametrize("keys", ["random", "near"])
def test_float32_is_exact(gates: str, keys: str) -> None:
    """Packed float32 tokens, with gates at either end and with keys that are nearly one."""
    assert_exact(fused_kda, Case(PACKED, gates=gates, keys=keys, dtype=torch.float32, **SMALL))


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (1,), (31,), (32,), (33,), (1, 1, 1, 1), (96,)])
def test_lengths(lengths: tuple[int, ...]) -> None:
    """No sequence, no token, one token, and lengths around a tile's."""
    assert_exact(fused_kda, Case(lengths, dtype=torch.float32, seed=len(lengths), **SMALL))


@pytest.mark.parametrize(("K", "V"), [(16, 32), (32, 16), (64, 32)])
def test_widths(K: int, V: int) -> None:
    """Keys and values of other widths than each other."""
    assert_exact(fused_kda, Case((40, 3), H=1, K=K, V=V, dtype=torch.float32))


@pytest.mark.parametrize("gates", ["mixed", "bound", "open"])
@pytest.mark.parametrize("state", [True, False])
def test_bfloat16(gates: str, state: bool) -> None:
    """bfloat16 tokens, with and without states before them."""
    assert_exact(fused_kda, Case((50, 0, 20), gates=gates, state=state, **SMALL))


@pytest.mark.parametrize(("name", "limit"), [("FEW_HEADS", 0), ("FEW_TILES", 5)])
@pytest.mark.parametrize("gates", ["mixed", "open"])
def test_bfloat16_as_with_many_heads(gates: str, name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what few heads, or those of few tiles, keep in two parts: further off, within the same limits."""
    case = Case((50, 0, 20), gates=gates, **SMALL)  # three tiles of two heads
    few = assert_exact(fused_kda, case)
    monkeypatch.setattr(workspace, name, limit)
    assert assert_exact(fused_kda, case)["d_state"] > 3 * few["d_state"]
    monkeypatch.setattr(workspace, name, 6)
    assert assert_exact(fused_kda, case) == few


def test_bfloat16_and_nearly_identical_keys() -> None:
    """Keys that are nearly one with beta near 1."""
    assert_exact(fused_kda, Case((70,), keys="near", **SMALL))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal(dtype: torch.dtype) -> None:
    """No bit of an output depends on what comes after it, inside one tile neither."""
    first_H = (1, 2, 5, 15, 16, 30, 31, 32, 40, 69)
    assert_causal(fused_kda, Case((70,), H=len(first_H), K=16, V=16, dtype=dtype), first_H)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits(dtype: torch.dtype) -> None:
    """Gates and betas that are off or on entirely, rows of zeros."""
    assert_extreme_logits(fused_kda, Case((70, 3), dtype=dtype, **SMALL))


def test_deterministic() -> None:
    """The same bits every time."""
    assert_deterministic(fused_kda, Case(PACKED, **SMALL))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_nobody_wrote_is_never_read(dtype: torch.dtype) -> None:
    """With NaN in every fresh tensor the results are the same."""
    assert_reads_no_garbage(fused_kda, Case(PACKED, dtype=dtype, **SMALL))


def test_a_nan_stays_in_its_sequence() -> None:
    """A NaN spoils its own sequence and nothing else."""
    assert_sequences_are_alone(fused_kda, Case(PACKED, **SMALL))


@pytest.mark.parametrize("positions", [(1, 33, 34, 50, 98), (66,), ()])
def test_checkpoints(positions: tuple[int, ...]) -> None:
    """States at any positions of packed sequences: at ends, right behind a start, inside a tile."""
    assert_checkpoints(checkpointed_kda, Case(PACKED, dtype=torch.float32, **SMALL), positions)
