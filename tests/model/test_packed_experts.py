"""Routed experts that stay packed: loaded, run by definition and by kernels, saved again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_model import tiny_config, tiny_model

from openk3.config.model import ConfigError
from openk3.inputs.packed import Packed
from openk3.model import packed_experts
from openk3.model.generate import generate
from openk3.model.hf import load_weights
from openk3.model.hf_files import CheckpointError
from openk3.model.k3 import K3
from openk3.model.packed_experts import LEAVES, PackedExperts

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
IDS = [7, 3, 9, 21, 4, 33, 8]


def holders(model: K3) -> list[PackedExperts]:
    """The modules that hold packed experts."""
    return [module for module in model.modules() if isinstance(module, PackedExperts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_logits_and_tokens_as_unpacked(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored MXFP4 model on a CPU, experts one at a time or all at once: logits and tokens are those of values."""
    plain = K3.from_pretrained(GOLDEN / "mxfp4_a", dtype=dtype)
    model = K3.from_pretrained(GOLDEN / "mxfp4_a", dtype=dtype, experts="mxfp4")
    assert holders(model) and not any(leaf in name for name in model.state_dict() for leaf in LEAVES)
    batch = Packed.join([IDS, IDS[2:4]])
    want = plain(batch)
    for at_once in (packed_experts.MOST_VALUES, 1):
        monkeypatch.setattr(packed_experts, "MOST_VALUES", at_once)
        torch.testing.assert_close(model(batch), want, rtol=1e-5, atol=1e-6)
    tokens = [list(generate(m, IDS, max_tokens=12, temperature=0.0)) for m in (plain, model)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 12


def test_bytes_come_back(tmp_path: Path) -> None:
    """Saving a packed model changes no byte of the experts; saving its values gives what they unpack to."""
    model = K3.from_pretrained(GOLDEN / "mxfp4_a", experts="mxfp4")
    model.save_pretrained(tmp_path / "a", experts="mxfp4", dtype="float32")
    model.save_pretrained(tmp_path / "b", experts="float32")
    again = K3.from_pretrained(tmp_path / "a", experts="mxfp4").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    values, plain = (K3.from_pretrained(folder).state_dict() for folder in (tmp_path / "b", GOLDEN / "mxfp4_a"))
    assert all(torch.equal(value, values[name]) for name, value in plain.items())


def test_values_are_quantised_while_they_are_loaded(tmp_path: Path) -> None:
    """From bfloat16 experts: the same as packing them on the way out."""
    config = tiny_config(moe_intermediate_size=32, routed_expert_hidden_size=64)
    model = tiny_model(config, dtype=torch.float32)
    for experts in ("float32", "mxfp4"):
        model.save_pretrained(tmp_path / experts, experts=experts, dtype="float32")
    one, two = (K3.from_pretrained(tmp_path / x, experts="mxfp4").state_dict() for x in ("float32", "mxfp4"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_dtypes_and_scales_survive(tmp_path: Path) -> None:
    """Codes stay integers when a model changes its dtype; wide scales are noticed however they come in."""
    model = K3.from_pretrained(GOLDEN / "mxfp4_a", experts="mxfp4")
    codes = [module.down_codes.clone() for module in holders(model)]
    model.to(torch.bfloat16)
    assert all(torch.equal(module.down_codes, old) for module, old in zip(holders(model), codes))
    assert not any(module.wide for module in holders(model))
    first = holders(model)[0]
    matrix, scale = first.stored("w3_EIC", 1)
    first.load("w3_EIC", 1, matrix, torch.full_like(scale, 200))
    assert first.wide and not holders(model)[1].wide
    assert (first.stored("w3_EIC", 1)[1] == 200).all() and torch.equal(first.stored("w3_EIC", 1)[0], matrix)
    other = K3.from_pretrained(GOLDEN / "mxfp4_a", experts="mxfp4", dtype=torch.bfloat16)
    other.load_state_dict(model.state_dict())
    assert [module.wide for module in holders(other)] == [module.wide for module in holders(model)]
    load_weights(other, GOLDEN / "mxfp4_a")
    fresh = holders(K3.from_pretrained(GOLDEN / "mxfp4_a", experts="mxfp4"))
    assert torch.equal(holders(other)[0].gate_up_scales, fresh[0].gate_up_scales)


def test_latents_have_gradients() -> None:
    """Through packed experts as through values."""
    grads = []
    for experts in (None, "mxfp4"):
        model = K3.from_pretrained(GOLDEN / "mxfp4_a", dtype=torch.float64, experts=experts)
        model(Packed.join([IDS])).square().sum().backward()
        grads.append(model.embed.weight.grad)
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_by_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, without gradients; with them the kernels are refused."""
    layer = K3.from_pretrained(GOLDEN / "mxfp4_a", dtype=dtype, experts="mxfp4").layers[1].ffn
    x_TD = torch.randn(5, layer.down_proj.in_features, generator=torch.Generator().manual_seed(2)).to(dtype)
    monkeypatch.setenv("OPENK3_BACKEND", "reference")
    with torch.no_grad():
        want = layer(x_TD)
        monkeypatch.setenv("OPENK3_BACKEND", "triton")
        got = layer(x_TD)
    assert float((got - want).double().norm()) <= (3e-6 if dtype == torch.float32 else 1.2e-2) * float(
        want.double().norm()
    )
    with pytest.raises(ConfigError, match="have no gradients"):
        layer(x_TD)


def test_refusals(tmp_path: Path) -> None:
    """Unknown ways to hold experts, and widths that MXFP4 does not have."""
    with pytest.raises(CheckpointError, match="'int4' is not one of"):
        K3.from_pretrained(GOLDEN / "mxfp4_a", experts="int4")
    with pytest.raises(ConfigError, match="multiple of 32"):
        K3.from_pretrained(GOLDEN / "text_a", experts="mxfp4")
