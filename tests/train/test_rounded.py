"""Training with MXFP4 experts: the model computes with rounded weights, masters keep what rounding drops."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_models import small_run

from openk3.inputs.packed import Packed
from openk3.ops.mxfp import dequantize_mxfp4, fake_quantize_mxfp4, quantize_mxfp4
from openk3.train.rounded import EXPERTS, round_experts
from openk3.train.state import TrainState
from openk3.train.step import train_step


def state(dtype: str, start: float) -> TrainState:
    """A small model of ten steps, whose experts are rounded from `start` on."""
    return TrainState.build(dataclasses.replace(small_run(), dtype=dtype, steps=10, mxfp4_from=start, device="cpu"))


def experts(of: TrainState) -> dict[str, torch.Tensor]:
    """The stacks of expert weights."""
    return {name: value for name, value in of.model.named_parameters() if name.endswith(EXPERTS)}


def test_rounds_from_its_step_on() -> None:
    """Before that the weights are the masters' bfloat16 values; other weights are never touched."""
    run = state("bfloat16", 0.3)
    others = {n: p.clone() for n, p in run.model.named_parameters() if not n.endswith(EXPERTS)}
    before = {name: value.clone() for name, value in experts(run).items()}
    run.step = 2
    assert not round_experts(run)
    assert before and all(torch.equal(value, before[name]) for name, value in experts(run).items())
    run.step = 3
    assert round_experts(run)
    for name, value in experts(run).items():
        assert torch.equal(value, fake_quantize_mxfp4(run.optimizer.masters[name]).to(torch.bfloat16))
        assert not torch.equal(value, before[name])
    assert all(torch.equal(p, others[n]) for n, p in run.model.named_parameters() if n in others)


def test_export_holds_exactly_what_was_trained_with() -> None:
    """Rounding what is rounded changes nothing."""
    run = state("bfloat16", 0.0)
    round_experts(run)
    for value in experts(run).values():
        assert torch.equal(dequantize_mxfp4(*quantize_mxfp4(value), dtype=torch.bfloat16), value)


def test_small_updates_gather_in_the_masters() -> None:
    """Steps too small to move a rounded weight still move its master."""
    run = state("bfloat16", 0.0)
    round_experts(run)
    masters = {name: run.optimizer.masters[name].clone() for name in experts(run)}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 60, (48,), generator=generator).tolist()
    train_step(run, [Packed.join([ids])])
    round_experts(run)
    assert any(not torch.equal(run.optimizer.masters[name], masters[name]) for name in masters)
    for name, value in experts(run).items():
        assert torch.equal(value, fake_quantize_mxfp4(run.optimizer.masters[name]).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", ["float32"])
def test_weights_without_masters_are_left_alone(dtype: str) -> None:
    """In float32 a rounded weight would be all that is left of it."""
    run = state(dtype, 0.0)
    before = {name: value.clone() for name, value in experts(run).items()}
    assert not round_experts(run)
    assert all(torch.equal(value, before[name]) for name, value in experts(run).items())
