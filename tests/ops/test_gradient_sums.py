"""Kernels that add to float32 sums of gradients: against float64, and as an optimizer sees it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from latent_moe_checks import NAMES, Case, by_definition, draw
from torch import Tensor, nn

from openk3.config.train import OptimConfig
from openk3.ops.gradient_sums import GradientSum, keep_sum, sum_of
from openk3.ops.latent_moe.experts_fused import mix_experts, tile_rows
from openk3.ops.latent_moe.route_fused import sort
from openk3.optim.optimizer import Optimizer

WEIGHTS = ("w1", "w3", "w2")
CASES = [
    Case(30, 4, 2, 16, 48, torch.float32, idle=(2,)),
    Case(33, 3, 2, 80, 40, idle=(1,)),
    Case(20, 2, 1, 24, 136),
]


def backward(case: Case, leaves: dict[str, Tensor], seed: int) -> None:
    """One micro-batch: the gradient of the seed's result by every leaf."""
    _, routed, d_out = draw(Case(case.T, case.E, case.k, case.C, case.I, case.dtype, idle=case.idle, seed=seed))
    z, _, w1, w3, w2, norm = (leaves[name] for name in NAMES)
    plan = sort(routed, tile_rows(z, case.k, case.E))
    mix_experts(z, routed.weights_Tk, plan, (w1, w3, w2), (norm, case.form)).backward(d_out)


def wanted(case: Case, values: dict[str, Tensor], seeds: Sequence[int]) -> dict[str, Tensor]:
    """The sums in float64."""
    totals = {name: torch.zeros(values[name].shape, dtype=torch.float64) for name in WEIGHTS}
    for seed in seeds:
        _, routed, d_out = draw(Case(case.T, case.E, case.k, case.C, case.I, case.dtype, idle=case.idle, seed=seed))
        exact = {name: x.double() for name, x in values.items()} | {"weights": routed.weights_Tk.double()}
        leaves = [exact[name].requires_grad_() for name in WEIGHTS]
        grads = torch.autograd.grad(by_definition(case, exact, routed), leaves, d_out.double())
        for name, grad in zip(WEIGHTS, grads):
            totals[name] += grad
    return totals


def apart(x: Tensor, y: Tensor) -> float:
    """Norm of the difference over the second one's norm."""
    return float((x.double() - y).norm() / y.norm())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_open_sums_take_the_gradients(case: Case) -> None:
    """Two micro-batches: the first begins the sums, weights get no gradients, experts without tokens exact zeros."""
    values, _, _ = draw(case)
    leaves = {name: x.clone().requires_grad_() for name, x in values.items()}
    totals: dict[str, Tensor] = {}
    sums = [GradientSum(totals, name) for name in WEIGHTS]
    for name, total in zip(WEIGHTS, sums):
        keep_sum(leaves[name], total)
        total.is_open = True
    for seed in range(2):
        backward(case, leaves, seed)
    want = wanted(case, values, range(2))
    limit = 2e-6 if case.dtype == torch.float32 else 8e-3
    for name in WEIGHTS:
        assert leaves[name].grad is None and totals[name].dtype == torch.float32
        assert apart(totals[name], want[name]) < limit, name
        assert not totals[name][list(case.idle)].any(), name
    assert leaves["z"].grad is not None and leaves["norm"].grad is not None
    kept = {name: x.clone() for name, x in totals.items()}
    sums[0].is_open = False  # gate and up are one launch: neither is added
    backward(case, leaves, 0)
    assert leaves["w1"].grad is not None and leaves["w3"].grad is not None and leaves["w2"].grad is None
    assert torch.equal(totals["w1"], kept["w1"]) and torch.equal(totals["w3"], kept["w3"])
    assert not torch.equal(totals["w2"], kept["w2"])


def test_sums_begun_apart_and_weights_without_a_sum() -> None:
    """Of one launch both sums are begun or neither; else gradients are returned. A sum lives as long as its weight."""
    case = CASES[1]
    values, _, _ = draw(case)
    leaves = {name: x.clone().requires_grad_() for name, x in values.items()}
    totals = {"w1": torch.ones(values["w1"].shape)}
    for name in ("w1", "w3"):
        keep_sum(leaves[name], GradientSum(totals, name))
        found = sum_of(leaves[name])
        assert found is not None
        found.is_open = True
    backward(case, leaves, 0)
    assert all(leaves[name].grad is not None for name in WEIGHTS)
    assert torch.equal(totals["w1"], torch.ones(values["w1"].shape)) and set(totals) == {"w1"}
    assert sum_of(leaves["w2"]) is None and sum_of(leaves["w1"].clone()) is None


def test_an_optimizer_sees_the_same_sums() -> None:
    """`adding` or not: gradients differ by the rounding of each micro-batch's alone, and nothing is added outside."""
    case = CASES[1]
    values, _, _ = draw(case)
    found = []
    for adds in (False, True):
        optimizer = Optimizer(OptimConfig(lr=0.1, min_lr=0.0))
        parameters = {name: nn.Parameter(values[name].clone()) for name in NAMES if name != "weights"}
        leaves: dict[str, Tensor] = {**parameters, "weights": values["weights"]}
        for name in WEIGHTS:
            optimizer.add(name, parameters[name], blocks=case.E, decays=True)
        for seed in range(2):
            if adds:
                with optimizer.adding():
                    backward(case, leaves, seed)
            else:
                backward(case, leaves, seed)
        found.append(optimizer.gradients())
        assert set(found[-1]) == set(WEIGHTS) and all(leaves[name].grad is None for name in WEIGHTS)
        sums = [sum_of(leaves[name]) for name in WEIGHTS]
        assert all(total is not None and not total.is_open for total in sums)
        optimizer.zero_grad()
        assert not optimizer.gradients()
    want = wanted(case, values, range(2))
    for name in WEIGHTS:
        assert not torch.equal(found[0][name], found[1][name])
        assert apart(found[1][name], found[0][name].double()) < 4e-3
        assert apart(found[1][name], want[name]) <= apart(found[0][name], want[name])
