"""Micro-batches side by side give the very bits that they give one after another, faults included."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_models import random_batch, small_model, small_run

from openk3.model.k3 import K3
from openk3.optim.optimizer import Optimizer
from openk3.train.side_by_side import gradients_in_order
from openk3.train.state import TrainState
from openk3.train.step import train_step


@pytest.fixture(autouse=True)
def one_thread():
    """Operations sum in one order only with one thread each, as they have inside the pool."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(workers: int, steps: int = 3, micro_batches: int = 5, **changes: object) -> tuple[TrainState, list[dict]]:
    state = TrainState.build(small_run(workers=workers, **changes))
    rows = []
    for step in range(steps):
        batches = [random_batch(10 * step + n, images=n % 2) for n in range(micro_batches)]
        rows.append(train_step(state, batches))
    return state, rows


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_any_number_of_workers_gives_the_same_bits(workers):
    one, one_rows = trained(1)
    many, many_rows = trained(workers)
    assert one_rows == many_rows
    for (name, a), b in zip(one.model.named_parameters(), many.model.parameters()):
        assert torch.equal(a, b), name
    for (name, a), b in zip(one.model.named_buffers(), many.model.buffers()):
        assert torch.equal(a, b), name


def test_gradients_narrower_than_float32_are_summed_in_float32_either_way():
    one, _ = trained(1, dtype="bfloat16")
    two, _ = trained(2, dtype="bfloat16")
    assert one.optimizer.masters
    for name, master in one.optimizer.masters.items():
        assert torch.equal(master, two.optimizer.masters[name]), name


def test_a_fault_in_one_micro_batch_reaches_the_caller_and_leaves_the_state():
    state, _ = trained(2, steps=1)
    before = [p.clone() for p in state.model.parameters()]

    def broken(model, packed, trace):
        if packed.num_tokens == 13:
            raise ValueError("this one")
        return model.loss(packed, trace)

    batches = [random_batch(1), random_batch(2, lengths=(13,)), random_batch(3)]
    with pytest.raises(ValueError, match="this one"):
        train_step(state, batches, broken)
    assert state.step == 1
    assert all(torch.equal(a, b) for a, b in zip(before, state.model.parameters()))
    assert train_step(state, [random_batch(4), random_batch(5)])["loss"] > 0


def test_gradients_come_in_the_order_of_the_jobs_and_none_where_unused():
    x, y = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    jobs = [lambda n=n: (x * n).sum() + (y.sum() if n == 2 else 0) for n in range(5)]
    found = list(gradients_in_order(jobs, [x, y], workers=2))
    assert [float(g[0][0]) for g in found] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [g[1] is None for g in found] == [True, True, False, True, True]


def test_added_gradients_equal_those_of_a_backward_pass_and_share_no_memory():
    model = K3.build(small_model(), seed=0)
    optimizer = Optimizer(small_run().optim)
    for name, parameter in model.named_parameters():
        optimizer.add(name, parameter, blocks=0, decays=False)
    losses = [model.loss(random_batch(n)).total for n in range(2)]
    apart = [
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True) for loss in losses
    ]
    for loss in losses:
        loss.backward()
    expected = {name: g.clone() for name, g in optimizer.gradients().items()}
    optimizer.zero_grad()
    for gradients in apart:
        optimizer.add_gradients(gradients)
    assert optimizer.gradients().keys() == expected.keys()
    for name, gradient in optimizer.gradients().items():
        assert torch.equal(gradient, expected[name]), name
    kept = [g.clone() for g in apart[0] if g is not None]
    for gradient in optimizer.gradients().values():
        gradient.zero_()
    assert all(torch.equal(a, b) for a, b in zip(kept, (g for g in apart[0] if g is not None)))


def test_workers_must_be_positive():
    with pytest.raises(ValueError, match="workers: must be at least 1"):
        dataclasses.replace(small_run(), workers=0)
