"""A KDA layer and a whole K3 on a GPU in bfloat16: the kernels from end to end, and no wait for the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from small_models import random_batch, small_model
from torch import Tensor

from openk3.model.cache import DenseCache, KdaCache, Sequences
from openk3.model.init import initialize
from openk3.model.k3 import K3
from openk3.model.kda import KimiDeltaAttention
from openk3.ops.kda import fused_backward

pytestmark = pytest.mark.gpu

CONFIG = small_model(
    linear_attn_config=dataclasses.replace(small_model().text.linear_attn_config, head_dim=128, num_heads=2)
)


def layer() -> KimiDeltaAttention:
    """In bfloat16 with float32 convolutions and gate, width 32, two heads of 128."""
    kda = KimiDeltaAttention(CONFIG.text, 0).cuda()
    initialize(kda, 0, 0.3)
    for name, parameter in kda.named_parameters():
        parameter.data = parameter.data.bfloat16() if "proj" in name else parameter.data
    return kda


def layout(*lengths: int) -> Sequences:
    """Sequences of these lengths, bounds on the GPU."""
    return Sequences(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda())


def error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((got.detach().double() - want.detach()).norm() / want.detach().norm())


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def terms_of_gate_gradients(kda: KimiDeltaAttention, x: Tensor, sequences: Sequences, d_y: Tensor) -> dict[str, float]:
    """Norms of what the gradients of the gate's parameters are sums of: one term for each token and channel."""
    kept: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    with kda.f_b_proj.register_forward_hook(keep):
        kda(x, sequences).backward(d_y)
    logit, d_logit = kept[0].detach(), kept[0].grad
    assert d_logit is not None
    return {
        "A_log": float((d_logit * (logit + kda.dt_bias.detach().flatten())).norm()),
        "dt_bias": float(d_logit.norm()),
    }


def test_layer_against_float64() -> None:
    """Outputs and gradients of packed sequences are as close to float64 as the PyTorch form's.

    Gradients of the gate's parameters are sums in which most cancels: their errors count beside the terms.
    """
    kda, sequences = layer(), layout(130, 0, 70, 1)
    x = torch.randn(201, 32, generator=torch.Generator("cuda").manual_seed(0), device="cuda").bfloat16()
    d_y = torch.randn_like(x)

    def everything(module: KimiDeltaAttention, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        y = module(x, sequences)
        return [y, *torch.autograd.grad(y, [x, *module.parameters()], d_y.to(y.dtype))]

    got = everything(kda, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENK3_BACKEND", "reference")
        plain = everything(kda, x)
    want = everything(layer().double(), x.double())
    terms = terms_of_gate_gradients(layer().double(), x.double(), sequences, d_y.double())
    names = ["y", "x", *(name for name, _ in kda.named_parameters())]
    for name, ours, other, right in zip(names, got, plain, want, strict=True):
        size = float(right.detach().norm())
        share = size / (size + terms.get(name, 0.0))
        assert error(ours, right) * share < max(1.5 * error(other, right) * share, 1e-2), name


def test_prefill_and_decode_are_the_whole() -> None:
    """Prefill in two passes, then single tokens, continue each sequence as one pass over everything does."""
    kda, x = layer(), torch.randn(2, 90, 32, device="cuda").bfloat16()
    cache = DenseCache(CONFIG, 2, torch.bfloat16, "cuda").layers[0]
    assert isinstance(cache, KdaCache)
    with torch.no_grad():
        whole = kda(x.flatten(0, 1), layout(90, 90)).view_as(x)
        start, parts = 0, []
        for length in (50, 37, 1, 1, 1):
            piece = x[:, start : start + length].flatten(0, 1)
            before = cache.state_NHKV.clone()
            y = kda(piece, layout(length, length), cache)
            assert torch.equal(cache.state_NHKV, before)
            cache.commit()
            parts.append(y.view(2, length, -1))
            start += length
    assert error(torch.cat(parts, 1), whole.double()) < 1e-2


def test_a_pass_waits_for_nothing() -> None:
    """Once the bounds of a batch are known, forward and backward only queue work."""
    kda, sequences = layer(), layout(40, 24)
    x = torch.randn(64, 32, device="cuda").bfloat16().requires_grad_()
    kda(x, sequences).sum().backward()
    with no_waiting():
        kda(x, sequences).sum().backward()
    with pytest.raises(RuntimeError, match="synchronizing"), no_waiting():
        float(x.sum())


def test_a_model_trains_and_decodes_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """K3 in bfloat16: the forward and the backward pass reach the kernels, and so does each decoded token."""
    reached: list[str] = []
    for target, name in ((fused_backward, "fused_kda"), (KimiDeltaAttention, "_decode")):
        run = getattr(target, name)
        monkeypatch.setattr(target, name, lambda *a, run=run, name=name, **k: reached.append(name) or run(*a, **k))
    model = K3.build(CONFIG, seed=0, dtype=torch.bfloat16, device="cuda")
    packed = random_batch(0, (70, 33)).to("cuda")
    loss = model.loss(packed).total
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert reached == ["fused_kda"]
    cache = model.new_cache(2)
    with torch.no_grad():
        model(packed, cache)
        logits = model(random_batch(1, (1, 1)).to("cuda"), cache)
    assert logits.isfinite().all() and reached == ["fused_kda", "fused_kda", "_decode"]
