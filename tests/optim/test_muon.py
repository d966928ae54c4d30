"""Per-Head Muon against torch.optim.Muon, at every gradient scale, and per block."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.optim.muon import Member, muon_step, muon_update


def step_once(gradient: torch.Tensor, blocks: int = 1, *, lr: float = 0.1, decay: float = 0.0) -> torch.Tensor:
    """What one step from zero momentum adds to a zero weight, divided by -lr."""
    weight = torch.zeros_like(gradient)
    muon_step([(Member.of("w", weight, blocks, decay), gradient)], lr)
    return weight / -lr


def random_matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    """A standard normal tensor."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(64, 32), (32, 64), (48, 48)])
def test_equals_torch_muon_on_a_one_head_matrix(shape: tuple[int, int]) -> None:
    """Four steps of torch.optim.Muon (which orthogonalises in bfloat16): the same path to that precision."""
    ours, theirs = random_matrix(*shape, seed=1), torch.nn.Parameter(random_matrix(*shape, seed=1))
    oracle = torch.optim.Muon(
        [theirs], lr=0.05, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    member = Member.of("w", ours, 1, 0.1)
    start = ours.clone()
    for seed in range(4):
        gradient = random_matrix(*shape, seed=10 + seed)
        muon_step([(member, gradient)], 0.05)
        theirs.grad = gradient.clone()
        oracle.step()
    moved = (ours - start).norm()
    assert (ours - theirs.detach()).norm() < 0.02 * moved


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-8, 1e-10, 1e-20])
def test_tiny_gradients_give_the_same_update(scale: float) -> None:
    """U01: a layer whose gradient is tiny still learns; the update does not depend on the gradient's scale."""
    direction = random_matrix(64, 64)
    direction /= direction.norm()
    full = step_once(direction)
    assert (step_once(direction * scale) - full).norm() < 1e-3 * full.norm()


def test_zero_rank_one_and_row_gradients() -> None:
    """U01: zero gives a zero update with the decay still applied; rank one and a single row stay finite and aligned."""
    weight = random_matrix(8, 8)
    before = weight.clone()
    member = Member.of("w", weight, 1, 0.5)
    muon_step([(member, torch.zeros(8, 8))], 0.1)
    assert torch.allclose(weight, before * 0.95) and torch.isfinite(member.momentum_BMN).all()
    u, v = random_matrix(16, 1, seed=1), random_matrix(1, 8, seed=2)
    for gradient in (u @ v, v):
        update = step_once(gradient)
        assert torch.isfinite(update).all()
        assert torch.cosine_similarity(update.flatten(), gradient.flatten(), dim=0) > 0.999


def test_update_is_orthogonal_and_not_the_gradient() -> None:
    """U02: five quintic steps bring the singular values of a random 64x32 into 0.6..1.2 before scaling."""
    gradient = random_matrix(64, 32)
    update = step_once(gradient) / (0.2 * math.sqrt(64))
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.6 and values.max() < 1.2
    assert torch.cosine_similarity(update.flatten(), gradient.flatten(), dim=0) < 0.99


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 20), st.integers(1, 20), st.integers(0, 9))
def test_heads_are_blocks_of_their_own(heads: int, rows: int, columns: int, seed: int) -> None:
    """A matrix in `heads` blocks equals its blocks apart, and a stack of them; the scale is the block's."""
    gradient = random_matrix(heads * rows, columns, seed=seed)
    whole = muon_update(gradient, heads)
    parts = [muon_update(part) for part in gradient.split(rows)]
    torch.testing.assert_close(whole, torch.cat(parts))
    torch.testing.assert_close(muon_update(gradient.view(heads, rows, columns)).view_as(gradient), whole)
    torch.testing.assert_close(step_once(gradient, heads), whole, rtol=1e-4, atol=1e-5)


def test_a_head_does_not_feel_the_others() -> None:
    """U02: changing one head's gradient leaves every other head's update as it was; whole, it would not."""
    gradient = random_matrix(64, 32)
    changed = gradient.clone()
    changed[:16] *= 100
    torch.testing.assert_close(muon_update(changed, 4)[16:], muon_update(gradient, 4)[16:])
    assert (muon_update(changed)[16:] - muon_update(gradient)[16:]).norm() > 0.1


def test_members_of_one_shape_are_independent() -> None:
    """A batched step over several weights, tall and wide, equals a step of each."""
    weights = [torch.zeros(24, 16), torch.zeros(16, 24), torch.zeros(2, 24, 16)]
    gradients = [random_matrix(*w.shape, seed=n) for n, w in enumerate(weights)]
    members = [Member.of(str(n), w, w.shape[0] if w.ndim == 3 else 1, 0.0) for n, w in enumerate(weights)]
    assert {member.shape for member in members} == {(16, 24)}
    muon_step(zip(members, gradients), 0.1)
    for weight, gradient in zip(weights, gradients):
        torch.testing.assert_close(weight / -0.1, step_once(gradient, 2 if weight.ndim == 3 else 1))


def test_idle_block_only_decays() -> None:
    """E01: a block with momentum and an exactly zero gradient keeps its weights but for decay."""
    weight = random_matrix(2, 8, 8)
    member = Member.of("experts", weight, 2, 0.1)
    muon_step([(member, random_matrix(2, 8, 8, seed=1))], 0.1)
    before, momentum = weight.clone(), member.momentum_BMN.clone()
    gradient = random_matrix(2, 8, 8, seed=2)
    gradient[1] = 0
    muon_step([(member, gradient)], 0.1)
    torch.testing.assert_close(weight[1], before[1] * (1 - 0.1 * 0.1), rtol=0, atol=1e-7)
    torch.testing.assert_close(member.momentum_BMN[1], momentum[1] * 0.95)
    assert (weight[0] - before[0]).norm() > 0.01


def test_momentum_is_nesterov() -> None:
    """The second step orthogonalises g2 + mu (mu g1 + g2)."""
    first, second = random_matrix(12, 8, seed=1), random_matrix(12, 8, seed=2)
    weight = torch.zeros(12, 8)
    member = Member.of("w", weight, 1, 0.0)
    muon_step([(member, first)], 0.1)
    after_first = weight.clone()
    muon_step([(member, second)], 0.1)
    expected = muon_update(second + 0.95 * (0.95 * first + second))
    torch.testing.assert_close((weight - after_first) / -0.1, expected, rtol=1e-4, atol=1e-5)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on temporaries splits the batch of blocks and nothing else."""
    gradient = random_matrix(6, 8, 8)
    whole = muon_update(gradient)
    monkeypatch.setattr("openk3.optim.muon.CHUNK_VALUES", 130)
    torch.testing.assert_close(muon_update(gradient), whole)
