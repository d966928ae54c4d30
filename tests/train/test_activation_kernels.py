"""Activation policies through the kernels, in Triton's interpreter: the bits of keeping everything, FP8 near them."""

from __future__ import annotations

import pytest
import torch
from small_models import random_batch, small_model
from torch import Tensor

from openk3.config.activations import ActivationPolicy
from openk3.inputs.packed import Packed
from openk3.model.k3 import K3
from openk3.ops.saved import saving


def gradients(model: K3, packed: Packed, policy: str) -> dict[str, Tensor]:
    """By parameter, the forward pass under a policy."""
    model.zero_grad()
    with saving(ActivationPolicy.parse(policy).groups()):
        loss = model.loss(packed).total
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_under_policies(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences, MTP: what is made again are the same bits, whole parts of a layer too."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    model, packed = K3.build(small_model(), seed=1, dtype=dtype), random_batch(0, (37, 3))
    want = gradients(model, packed, "none")
    products = "kda_projections=recompute,kda_gates=recompute,mla_latents=recompute,mla_qkv=recompute"
    products += ",mla_gates=recompute,moe_hidden=recompute,ffn_hidden=recompute"
    for policy in ("selective", f"selective,{products}", "full"):
        got = gradients(model, packed, policy)
        assert got.keys() == want.keys()
        for name in want:
            assert torch.equal(got[name], want[name]), (policy, name)
    rounded = gradients(model, packed, "memory,depth_sources=fp8")
    whole = sum(float(x.float().norm()) ** 2 for x in want.values()) ** 0.5
    off = sum(float((rounded[name].float() - x.float()).norm()) ** 2 for name, x in want.items()) ** 0.5
    assert 0 < off < 0.05 * whole
