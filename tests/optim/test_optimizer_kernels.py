"""The optimizer's kernels in Triton's interpreter, against its definition: one path, two implementations."""

from __future__ import annotations

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from openk3.config.train import OptimConfig
from openk3.ops import newton_schulz_fused, optimizer_fused
from openk3.optim.optimizer import Optimizer

CONFIG = OptimConfig(lr=0.1, min_lr=0.0, clip_norm=1e9, newton_schulz_steps=2)
# name: (shape, blocks of Muon or 0 for AdamW, decays): wide and tall, one block and many, sizes that fit nothing
WEIGHTS = {
    "heads": ((3 * 8, 40), 3, True),
    "tall": ((2, 40, 8), 2, True),
    "odd": ((2 * 5, 9), 2, True),
    "large": ((66, 72), 1, True),
    "small": ((9, 5), 1, False),
    "embedding": ((700, 7), 0, True),
    "vector": ((3,), 0, False),
}


def build(dtype: torch.dtype, config: OptimConfig = CONFIG) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    """An optimizer of every kind of weight."""
    generator = torch.Generator().manual_seed(0)
    optimizer = Optimizer(config)
    parameters = {}
    for name, (shape, blocks, decays) in WEIGHTS.items():
        parameters[name] = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        optimizer.add(name, parameters[name], blocks=blocks, decays=decays)
    return optimizer, parameters


def gradients(seed: int) -> dict[str, Tensor]:
    """Standard normal ones; a head's are tiny and another block's are zero."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, (shape, _, _) in WEIGHTS.items()}
    drawn["heads"][8:16] *= 1e-25
    if seed:
        drawn["tall"][1] = 0
    return drawn


def train(backend: str, dtype: torch.dtype, clip: float = 1e9) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    """Two steps."""
    optimizer, parameters = build(dtype, replace(CONFIG, clip_norm=clip))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENK3_BACKEND", backend)
        patch.setattr(newton_schulz_fused, "LARGEST_GRAM", 64)
        for seed in range(2):
            optimizer.zero_grad()
            wanted = gradients(seed)
            optimizer.add_gradients([wanted[name].to(dtype) for name in parameters])
            optimizer.step(0.1)
    return optimizer, parameters


def apart(x: Tensor, y: Tensor) -> float:
    """Norm of the difference over the second one's norm."""
    return float((x - y).double().norm() / y.double().norm())


@pytest.mark.parametrize(("dtype", "clip"), [(torch.float32, 1e9), (torch.bfloat16, 0.5), (torch.float16, 0.5)])
def test_kernels_take_the_same_path(dtype: torch.dtype, clip: float) -> None:
    """Moments and AdamW's weights to the last bits, Muon's up to bfloat16 products; narrow copies round the masters."""
    start = {name: p.detach().float() for name, p in build(dtype)[1].items()}
    want, _ = train("reference", dtype, clip)
    got, parameters = train("triton", dtype, clip)
    for name, value in want.state_dict().items():
        assert name.startswith("master.") or apart(got.state_dict()[name], value) < 1e-6, name
    for name, (_, blocks, _) in WEIGHTS.items():
        moved, wanted = got.weight(name) - start[name], want.weight(name) - start[name]
        assert apart(moved, wanted) < (2e-2 if blocks else 1e-5), name
        assert torch.equal(parameters[name].detach(), got.weight(name).to(dtype)), name


def test_tiny_blocks_learn() -> None:
    """U01: a head whose gradient is 1e-25 of the others' gets an update like theirs, whatever its squares are."""
    optimizer, _ = train("triton", torch.float32)
    start = build(torch.float32)[1]["heads"].detach()
    moved = (optimizer.weight("heads") - start).unflatten(0, (3, 8)).flatten(1).norm(dim=1)
    assert moved.min() > 0.8 * moved.max()


def test_idle_blocks_only_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    """E01: in the second step one block of "tall" has no gradient: it decays, and its momentum shrinks."""
    optimizer, _ = train("triton", torch.float32)
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    before, momentum = optimizer.weight("tall").clone(), optimizer.muon["tall"].momentum.clone()
    optimizer.zero_grad()
    optimizer.add_gradients([gradients(1)[name] for name in WEIGHTS])
    optimizer.step(0.1)
    torch.testing.assert_close(optimizer.weight("tall")[1], before[1] * (1 - 0.1 * 0.1), rtol=1e-6, atol=0)
    torch.testing.assert_close(optimizer.muon["tall"].momentum[1], momentum[1] * 0.95, rtol=1e-6, atol=0)
    assert (optimizer.weight("tall")[0] - before[0]).norm() > 0.1


def test_chunks_missing_gradients_and_saved_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks in several chunks take the same step, bit for bit; so does a copy that loads the state; and what has no
    gradient is left alone."""
    one, _ = train("triton", torch.bfloat16)
    monkeypatch.setattr(newton_schulz_fused, "CHUNK_VALUES", 400)
    two, _ = train("triton", torch.bfloat16)
    three, parameters = build(torch.bfloat16)
    three.load_state_dict(copy.deepcopy(one.state_dict()))
    for name, value in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], value) and torch.equal(three.state_dict()[name], value), name
    before = {name: p.detach().clone() for name, p in parameters.items()}
    three.add_gradients([gradients(0)[name].bfloat16() if name == "vector" else None for name in parameters])
    three.step(0.1)
    assert {name for name, p in parameters.items() if not torch.equal(p, before[name])} == {"vector"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_micro_batches_are_summed_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four micro-batches, one of them infinite in a place: bit by bit torch's sums, sizes that fit no program."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(3, 2731, generator=generator).to(dtype) * 10**n for n in range(4)]
    given[2][1, 7] = torch.inf
    want = given[0].float()
    for x in given[1:]:
        want = want + x
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    monkeypatch.setattr("openk3.optim.optimizer.WIDENED_BY_KERNEL", 1)
    optimizer, weight = Optimizer(CONFIG), nn.Parameter(torch.zeros(3, 2731, dtype=dtype))
    optimizer.add("weight", weight, blocks=1, decays=False)
    with mock.patch.object(optimizer_fused, "widen_kernels", wraps=optimizer_fused.widen_kernels) as kernels:
        for x in given:
            (weight * x).sum().backward()
    assert kernels.call_count == 4 and weight.grad is None
    assert torch.equal(optimizer.gradients()["weight"], want)
