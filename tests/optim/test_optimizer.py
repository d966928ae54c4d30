"""The optimizer as a whole: AdamW against torch, clipping, refused steps, bfloat16 masters, saved state."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from openk3.config.train import OptimConfig
from openk3.optim.optimizer import NonFiniteGradient, Optimizer

CONFIG = OptimConfig(lr=0.1, min_lr=0.0, clip_norm=1e9)


def make(
    config: OptimConfig = CONFIG, dtype: torch.dtype = torch.float32
) -> tuple[Optimizer, nn.Parameter, nn.Parameter]:
    """An optimizer with a Muon matrix "m" [8, 6] in two blocks and an AdamW vector "v" [5]."""
    generator = torch.Generator().manual_seed(0)
    matrix = nn.Parameter(torch.randn(8, 6, generator=generator).to(dtype))
    vector = nn.Parameter(torch.randn(5, generator=generator).to(dtype))
    optimizer = Optimizer(config)
    optimizer.add("m", matrix, blocks=2, decays=True)
    optimizer.add("v", vector, blocks=0, decays=True)
    return optimizer, matrix, vector


def backward(matrix: nn.Parameter, vector: nn.Parameter, seed: int) -> None:
    """Random gradients through autograd."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in (matrix, vector)]
    ((matrix * weights[0]).sum() + (vector * weights[1]).sum()).backward()


def test_parameters_do_not_keep_it_alive() -> None:
    """An optimizer with masters goes with its last user, though hooks of parameters call it; they still work then."""
    optimizer, matrix, vector = make(dtype=torch.bfloat16)
    seen = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert seen() is None
    backward(matrix, vector, 0)
    assert matrix.grad is not None and vector.grad is not None


def test_small_gradients_are_added_together() -> None:
    """Inside `adding` the same bits as one by one, also where a parameter has its first gradient late."""
    found = []
    for together in (False, True):
        optimizer, matrix, vector = make(dtype=torch.bfloat16)
        late, other = nn.Parameter(torch.ones(3, 4).bfloat16()), nn.Parameter(torch.ones(4, 3).bfloat16())
        optimizer.add("late", late, blocks=0, decays=True)
        optimizer.add("other", other, blocks=0, decays=True)
        for seed in range(3):
            with optimizer.adding() if together else contextlib.nullcontext():
                backward(matrix, vector, seed)
                if seed:
                    (late * other.detach().T * seed).sum().backward()
                    other.mT.square().sum().backward()  # a gradient that is not contiguous
                assert not together or "m" not in optimizer.gradients() or seed
        assert all(p.grad is None for p in (matrix, vector, late, other))
        found.append(optimizer.gradients())
    assert set(found[0]) == set(found[1]) == {"m", "v", "late", "other"}
    assert all(x.dtype == torch.float32 and torch.equal(x, found[1][name]) for name, x in found[0].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_wait_for_the_norm(dtype: torch.dtype) -> None:
    """What is prepared beside the norm changes nothing before it is called."""
    optimizer, matrix, vector = make(dtype=dtype)
    backward(matrix, vector, 0)
    before = copy.deepcopy([matrix.detach(), vector.detach(), optimizer.state_dict()])
    updates = optimizer._updates(optimizer.gradients(), 0.1)
    for old, now in zip(before[:2], (matrix, vector)):
        assert torch.equal(old, now)
    assert all(torch.equal(before[2][name], now) for name, now in optimizer.state_dict().items())
    for update in updates:
        update(1.0)
    assert not torch.equal(before[0], matrix) and int(optimizer.state_dict()["count.v"]) == 1


def test_adamw_equals_torch() -> None:
    """Five steps with changing learning rate, to the last bits of float32."""
    optimizer, matrix, vector = make()
    theirs = nn.Parameter(vector.detach().clone())
    oracle = torch.optim.AdamW([theirs], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(5):
        optimizer.zero_grad()
        backward(matrix, vector, step)
        assert vector.grad is not None
        theirs.grad = vector.grad.clone()
        oracle.param_groups[0]["lr"] = 0.1 / (step + 1)
        oracle.step()
        optimizer.step(0.1 / (step + 1))
        torch.testing.assert_close(vector, theirs, rtol=1e-6, atol=1e-7)


def test_global_norm_is_clipped() -> None:
    """The norm over all parameters is reported as it was; AdamW's first moment sees the clipped gradient."""
    optimizer, matrix, vector = make(OptimConfig(lr=0.1, min_lr=0.0, clip_norm=0.5))
    backward(matrix, vector, 0)
    assert matrix.grad is not None and vector.grad is not None
    gradient = vector.grad.clone()
    norm = float(torch.cat([matrix.grad.flatten(), gradient]).norm())
    assert norm > 0.5
    assert optimizer.step(0.1) == pytest.approx(norm, rel=1e-6)
    torch.testing.assert_close(optimizer.adamw["v"].mean, 0.1 * gradient * 0.5 / norm)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_gradient_is_refused_by_name(bad: float) -> None:
    """U01: one NaN or infinity refuses the step, names the parameter, and touches neither weights nor state."""
    optimizer, matrix, vector = make()
    backward(matrix, vector, 0)
    optimizer.step(0.1)
    saved = {name: value.clone() for name, value in optimizer.state_dict().items()}
    weights = matrix.detach().clone(), vector.detach().clone()
    optimizer.zero_grad()
    backward(matrix, vector, 1)
    assert matrix.grad is not None
    matrix.grad[3, 2] = bad
    with pytest.raises(NonFiniteGradient, match=r"m \(1 of 48 values\)"):
        optimizer.step(0.1)
    assert torch.equal(matrix, weights[0]) and torch.equal(vector, weights[1])
    assert all(torch.equal(value, saved[name]) for name, value in optimizer.state_dict().items())
    optimizer.zero_grad()
    backward(matrix, vector, 2)
    optimizer.step(0.1)
    assert torch.isfinite(matrix).all() and torch.isfinite(vector).all()


def test_overflowing_norm_is_refused() -> None:
    """Finite gradients whose squares overflow are reported as such."""
    optimizer, matrix, vector = make()
    backward(matrix, vector, 0)
    assert matrix.grad is not None
    matrix.grad *= 1e25
    with pytest.raises(NonFiniteGradient, match="squares overflow"):
        optimizer.step(0.1)


def test_parameters_without_gradient_are_left_alone() -> None:
    """A vision tower in a step without images neither moves nor decays."""
    optimizer, matrix, vector = make()
    (vector.sum()).backward()
    before = matrix.detach().clone()
    optimizer.step(0.1)
    assert torch.equal(matrix, before)
    optimizer.zero_grad()
    assert optimizer.step(0.1) == 0.0


def test_bfloat16_weights_have_float32_masters() -> None:
    """Updates far below bfloat16's resolution add up; the model holds the rounded master."""
    optimizer, matrix, vector = make(dtype=torch.bfloat16)
    reference, matrix32, vector32 = make()
    with torch.no_grad():
        matrix32.copy_(matrix)
        vector32.copy_(vector)
    for step in range(20):
        optimizer.zero_grad()
        reference.zero_grad()
        backward(matrix, vector, step % 2)
        for wide, name in ((matrix32, "m"), (vector32, "v")):
            wide.grad = optimizer.gradients()[name].clone()
            assert wide.grad.dtype == torch.float32
        optimizer.step(1e-4)
        reference.step(1e-4)
    torch.testing.assert_close(optimizer.weight("m"), matrix32.detach())
    torch.testing.assert_close(optimizer.weight("v"), vector32.detach())
    assert matrix.dtype == torch.bfloat16 and torch.equal(matrix, matrix32.to(torch.bfloat16))


def test_bfloat16_gradients_accumulate_in_float32() -> None:
    """256 small micro-batch gradients beside a large one: bfloat16 sums would lose them."""
    optimizer, matrix, vector = make(dtype=torch.bfloat16)
    (vector.sum() * 256).backward()
    for _ in range(256):
        (vector.sum() * 0.25).backward()
    assert vector.grad is None
    assert torch.equal(optimizer.gradients()["v"], torch.full((5,), 320.0))
    optimizer.zero_grad()
    assert optimizer.gradients() == {}


def test_state_goes_on_bit_for_bit() -> None:
    """A copy that loads the state takes the same steps."""
    optimizer, matrix, vector = make()
    for step in range(3):
        optimizer.zero_grad()
        backward(matrix, vector, step)
        optimizer.step(0.1)
    other, matrix2, vector2 = make()
    with torch.no_grad():
        matrix2.copy_(matrix)
        vector2.copy_(vector)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for o, m, v in ((optimizer, matrix, vector), (other, matrix2, vector2)):
        o.zero_grad()
        backward(m, v, 7)
        o.step(0.1)
    assert torch.equal(matrix, matrix2) and torch.equal(vector, vector2)
    with pytest.raises(KeyError, match=r"momentum\.m"):
        other.load_state_dict({})
