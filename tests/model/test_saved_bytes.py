"""The books of saved activations are what autograd holds: by group and in all, by definition and by kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_models import random_batch, small_model

from openk3 import recipes
from openk3.config.activations import PRESETS, ActivationPolicy
from openk3.config.model import LinearAttnConfig, ModelConfig, schedule
from openk3.inputs.packed import Packed
from openk3.model.accounting import account
from openk3.model.k3 import K3
from openk3.model.roofline import H200
from openk3.model.saved_bytes import REST, Form, saved, state_bytes
from openk3.model.trace import Trace
from openk3.ops.saved import saving


def shallow(vocab: int = 512) -> ModelConfig:
    """Recipe small's shapes in four layers, with few experts and words."""
    config = recipes.model("small")
    kda, full = schedule(4)
    linear = LinearAttnConfig(head_dim=128, num_heads=6, kda_layers=kda, full_attn_layers=full)
    sizes = {"vocab_size": vocab, "num_hidden_layers": 4, "num_experts": 6, "num_experts_per_token": 2}
    text = dataclasses.replace(config.text, **sizes, linear_attn_config=linear)  # pyrefly: ignore
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id"), vocab - 1)
    return dataclasses.replace(config, text=text, vision=None, **ids)


MODELS = {
    "tiny": lambda: (K3.build(recipes.model("tiny"), seed=0), 2),
    "tiny bfloat16": lambda: (K3.build(recipes.model("tiny"), seed=0, dtype=torch.bfloat16), 2),
    "small's widths": lambda: (K3.build(shallow(), seed=0), 1),
}
LENGTH = 128
PADDED = {"moe_hidden", "moe_latents", "situ"}


def measured(model: K3, packed: Packed, policy: ActivationPolicy) -> dict[str, float]:
    """Bytes of a token by group, without the head's and its norm's gradients of weights."""
    own = [*model.parameters(), *model.buffers()]
    with saving(policy.groups(), beside=own) as books:
        loss = model.loss(packed, Trace())
        found = books.bytes()
    assert bool(loss.total.isfinite())
    found[REST] -= int(saved(model.config, policy, Form(value=model.embed.weight.element_size())).fixed)
    return {name: count / packed.num_tokens for name, count in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_by_definition(name: str) -> None:
    """Every policy: groups within 3 %, as MTP lacks a token, together within 1 %; but for padded experts.

    Rows that make experts equally many are at most a quarter more and depend on the routes.
    """
    model, sequences = MODELS[name]()
    generator = torch.Generator().manual_seed(0)
    packed = Packed.join([torch.randint(200, (LENGTH,), generator=generator) for _ in range(sequences)])
    form = Form(kernels=False, value=model.embed.weight.element_size(), length=LENGTH)
    texts = [*PRESETS, "mixer=recompute", "ffn=recompute", "selective,mla_qkv=fp8", "moe_hidden=recompute"]
    texts.append("kda_projections=recompute,kda_gates=recompute,mla_latents=recompute,ffn_hidden=recompute")
    for text in texts:
        policy = ActivationPolicy.parse(text)
        books, found = saved(model.config, policy, form), measured(model, packed, policy)
        assert books.groups.keys() == found.keys()
        for group, expected in books.groups.items():
            most = 1.25 if group in PADDED else 1.03
            assert 0.97 * expected <= found[group] <= most * expected, (text, group)
        total, all_found = (sum(each[group] for group in each.keys() - PADDED) for each in (books.groups, found))
        assert total == pytest.approx(all_found, rel=0.01), text


@pytest.mark.parametrize("text", ["none", pytest.param("memory", marks=pytest.mark.slow)])
def test_by_kernels(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, bfloat16."""
    monkeypatch.setenv("OPENK3_BACKEND", "triton")
    model = K3.build(small_model(), seed=1, dtype=torch.bfloat16)
    packed, policy = random_batch(0, (64,)), ActivationPolicy.parse(text)
    books, found = saved(model.config, policy, Form(length=64)), measured(model, packed, policy)
    assert books.total == pytest.approx(sum(found.values()), rel=0.03)
    for group in books.groups.keys() - {REST}:
        assert books.groups[group] == pytest.approx(found.get(group, 0.0), rel=0.03), group


@pytest.mark.parametrize(
    ("recipe", "tokens", "gigabytes"),
    [("small", 65536, 73.2), ("small", 32768, 46.1), ("medium", 32768, 124.7), ("medium", 16384, 95.5)],
)
def test_peaks_that_one_h200_had(recipe: str, tokens: int, gigabytes: float) -> None:
    """State and activations together, everything kept: measured peaks are within 6 % above."""
    config = recipes.model(recipe)
    found = state_bytes(account(config)) + saved(config, ActivationPolicy()).peak(tokens)
    assert 0.94 * gigabytes < found / 1e9 < gigabytes


@pytest.mark.parametrize("recipe", recipes.NAMES)
def test_what_policies_cost(recipe: str) -> None:
    """The presets hold less one after the other; "full" adds less than the forward pass, the cheap ones no product."""
    config = recipes.model(recipe)
    found = [saved(config, ActivationPolicy.parse(preset)) for preset in PRESETS]
    assert [books.total for books in found] == sorted((books.total for books in found), reverse=True)
    forward = account(config).training_flops(8192).total / 3
    assert [books.flops for books in found[:3]] == [0, 0, 0] and 0.4 * forward < found[3].flops < forward
    assert found[0].seconds(H200) == 0 < found[1].seconds(H200) < found[3].seconds(H200)
    halved = saved(config, ActivationPolicy(moe_hidden="fp8"))
    rest = found[0].total - found[0].groups["moe_hidden"]
    assert halved.total - rest == pytest.approx(found[0].groups["moe_hidden"] * (1 + 1 / 32) / 2)
