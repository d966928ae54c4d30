"""The optimizer's kernels on a GPU: the path of the definition, the same bits in every run, chunks, odd addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from openk3.config.train import OptimConfig
from openk3.ops import newton_schulz_fused
from openk3.optim.optimizer import Optimizer

pytestmark = pytest.mark.gpu
CONFIG = OptimConfig(lr=0.1, min_lr=0.0, clip_norm=50.0)
WEIGHTS = {
    "heads": ((6 * 128, 768), 6, True),
    "tall heads": ((128, 6, 768), 128, True),
    "experts": ((16, 384, 512), 16, True),
    "tall experts": ((16, 512, 384), 16, True),
    "whole": ((768, 2048), 1, True),
    "odd": ((3 * 17, 211), 3, True),
    "odd whole": ((301, 203), 1, False),
    "embedding": ((5000, 129), 0, True),
    "vector": ((77,), 0, False),
    "scalar": ((1,), 0, False),
}


def train(
    steps: int, dtype: torch.dtype = torch.bfloat16, shift: int = 0, names: Sequence[str] = tuple(WEIGHTS)
) -> Optimizer:
    """Some steps of WEIGHTS; `shift` values lie before every parameter, so that its address is odd."""
    generator = torch.Generator("cuda").manual_seed(0)
    optimizer = Optimizer(CONFIG)
    for name in names:
        shape, blocks, decays = WEIGHTS[name]
        value = torch.randn(shape, generator=generator, device="cuda")
        memory = torch.empty(value.numel() + shift, dtype=dtype, device="cuda")
        parameter = nn.Parameter(memory[shift:].view(shape).copy_(value))
        optimizer.add(name, parameter, blocks=blocks, decays=decays)
    for step in range(steps):
        optimizer.zero_grad()
        drawn: list[Tensor] = []
        for name, parameter in optimizer.parameters.items():
            gradient = torch.randn(parameter.shape, generator=generator, device="cuda")
            if name == "experts":
                gradient[step % 16] = 0
                gradient[-1] *= 1e-25
            drawn.append(gradient.to(dtype))
        optimizer.add_gradients(drawn)
        optimizer.step(0.1)
    return optimizer


def apart(x: Tensor, y: Tensor) -> float:
    """Norm of the difference over the second one's norm."""
    return float((x - y).double().norm() / y.double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_path_of_the_definition(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps: moments to the last bits, AdamW's weights too, Muon's to bfloat16 products; copies round masters."""
    start, got = train(0, dtype), train(3, dtype)
    monkeypatch.setenv("OPENK3_BACKEND", "reference")
    want = train(3, dtype)
    for name, value in want.state_dict().items():
        assert name.startswith("master.") or apart(got.state_dict()[name], value) < 2e-6, name
    for name, (_, blocks, _) in WEIGHTS.items():
        moved, wanted = (x.weight(name) - start.weight(name) for x in (got, want))
        assert apart(moved, wanted) < (2e-2 if blocks else 2e-5), name
        assert torch.equal(got.parameters[name].detach(), got.weight(name).to(dtype)), name


def test_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run, whatever the chunks, and at addresses that are no multiple of 16 bytes."""
    want = train(2).state_dict()
    odd = train(2, shift=3).state_dict()
    monkeypatch.setattr(newton_schulz_fused, "CHUNK_VALUES", 3 * 384 * 512)
    for found in (train(2).state_dict(), odd):
        assert [name for name, value in want.items() if not torch.equal(found[name], value)] == []


def test_a_large_weight() -> None:
    """More than 2^31 bytes of one kind: the last blocks are updated as the first."""
    config = replace(CONFIG, clip_norm=1e9)
    optimizer = Optimizer(config)
    stack = nn.Parameter(torch.zeros(2400, 512, 512, dtype=torch.bfloat16, device="cuda"))
    optimizer.add("stack", stack, blocks=len(stack), decays=False)
    gradient = torch.zeros(stack.shape, device="cuda")
    gradient[0] = torch.randn(512, 512, device="cuda")
    gradient[-1] = gradient[0]
    optimizer._wide_gradients["stack"] = gradient
    optimizer.step(0.1)
    weight = optimizer.weight("stack")
    assert torch.equal(weight[0], weight[-1]) and weight[0].abs().mean() > 0.01 and not weight[1:-1].any()
