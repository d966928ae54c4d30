"""Which optimizer each parameter gets, spelled out for a model with every part."""

from __future__ import annotations

import pytest
import torch
from small_models import random_batch, small_model, small_run

from openk3 import recipes
from openk3.model.k3 import K3
from openk3.optim.groups import build_optimizer, rule_for
from openk3.train.state import TrainState
from openk3.train.step import train_step

HEADS, EXPERTS = 2, 4
ADAMW, WHOLE, PER_HEAD, PER_EXPERT = 0, 1, HEADS, EXPERTS
KDA = {
    **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight"), PER_HEAD),
    **dict.fromkeys(("f_a_proj.weight", "f_b_proj.weight", "g_proj.weight", "o_proj.weight"), WHOLE),
    **dict.fromkeys(("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "b_proj.weight"), ADAMW),
    **dict.fromkeys(("A_log", "dt_bias", "o_norm.weight"), ADAMW),
}
MLA = {
    **dict.fromkeys(("q_b_proj.weight", "kv_b_proj.weight"), PER_HEAD),
    **dict.fromkeys(("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "g_proj.weight", "o_proj.weight"), WHOLE),
    **dict.fromkeys(("q_a_layernorm.weight", "kv_a_layernorm.weight"), ADAMW),
}
DENSE = dict.fromkeys(("gate_proj.weight", "up_proj.weight", "down_proj.weight"), WHOLE)
MOE = {
    **dict.fromkeys(("experts.w1_EIC", "experts.w3_EIC", "experts.w2_ECI"), PER_EXPERT),
    **{f"shared.{name}": rule for name, rule in DENSE.items()},
    **dict.fromkeys(("down_proj.weight", "up_proj.weight"), WHOLE),
    **dict.fromkeys(("router.weight", "latent_norm.weight"), ADAMW),
}
LAYER = dict.fromkeys(
    ("mix_norm.weight", "ffn_norm.weight", "mix_query.norm", "mix_query.proj", "ffn_query.norm", "ffn_query.proj"),
    ADAMW,
)
BLOCK = {
    "wqkv.weight": 3 * HEADS,
    **dict.fromkeys(("wo.weight", "mlp.fc0.weight", "mlp.fc1.weight"), WHOLE),
    **dict.fromkeys(("norm0.weight", "norm1.weight"), ADAMW),
}


def below(prefix: str, *tables: dict[str, int]) -> dict[str, int]:
    """Tables with a prefix before each name."""
    return {f"{prefix}.{name}": rule for table in tables for name, rule in table.items()}


EXPECTED = {
    **below("layers.0", LAYER),
    **below("layers.0.mixer", KDA),
    **below("layers.0.ffn", DENSE),
    **below("layers.1", LAYER),
    **below("layers.1.mixer", MLA),
    **below("layers.1.ffn", MOE),
    **below("mtp", dict.fromkeys(("enorm.weight", "hnorm.weight", "norm.weight"), ADAMW), {"eh_proj.weight": WHOLE}),
    **below("mtp.layer", LAYER),
    **below("mtp.layer.mixer", MLA),
    **below("mtp.layer.ffn", MOE),
    **below("vision.encoder.blocks.0", BLOCK),
    **dict.fromkeys(("vision.patch_embed.proj.weight", "vision.patch_embed.pos_emb.weight"), ADAMW),
    "vision.encoder.final_layernorm.weight": ADAMW,
    **dict.fromkeys(("projector.proj.0.weight", "projector.proj.2.weight"), WHOLE),
    "projector.post_norm.weight": ADAMW,
    **dict.fromkeys(("embed.weight", "lm_head.weight", "norm.weight", "output_query.norm", "output_query.proj"), ADAMW),
}


def test_every_parameter_has_its_rule() -> None:
    """q, k, v, q_b, kv_b and wqkv per head; other matrices inside layers whole; experts each; the rest AdamW."""
    model = K3.build(small_model(), seed=0)
    found = {name: rule_for(name, p, model.config).blocks for name, p in model.named_parameters()}
    assert found == EXPECTED


def test_weight_decay_spares_vectors() -> None:
    """0.1 on matrices (convolution taps, router, embedding and position table among them), none on vectors."""
    model = K3.build(small_model(), seed=0)
    optimizer = build_optimizer(model, small_run().optim)
    for name, parameter in model.named_parameters():
        member = optimizer.muon.get(name) or optimizer.adamw[name]
        assert member.decay == (0.1 if parameter.ndim > 1 else 0.0), name


def test_blocks_are_heads() -> None:
    """kv_b's key and value rows of one head are one block; a q head is head_dim rows."""
    model = K3.build(small_model(), seed=0)
    optimizer = build_optimizer(model, small_run().optim)
    assert optimizer.muon["layers.1.mixer.kv_b_proj.weight"].momentum_BMN.shape == (HEADS, 16, 16 + 16)
    assert optimizer.muon["layers.0.mixer.q_proj.weight"].momentum_BMN.shape == (HEADS, 16, 32)
    assert optimizer.muon["layers.1.ffn.experts.w2_ECI"].momentum_BMN.shape == (EXPERTS, 32, 32)


def test_frozen_parameters_are_left_out() -> None:
    """Only what requires a gradient is updated."""
    model = K3.build(small_model(), seed=0)
    assert model.vision is not None
    model.vision.requires_grad_(False)
    assert not any(name.startswith("vision.") for name in build_optimizer(model, small_run().optim).parameters)


@pytest.mark.parametrize("name", recipes.NAMES)
def test_no_recipe_falls_back_to_the_plain_gradient(name: str) -> None:
    """U02: in each documented configuration, one step moves no matrix along its gradient, and moves them all."""
    config = small_run(optim=recipes.pretrain(name).optim)
    state = TrainState.build(config)
    before = {n: p.detach().clone() for n, p in state.model.named_parameters()}
    model_loss = state.model.loss(random_batch(0, images=8))
    model_loss.total.backward()
    gradients = {n: p.grad for n, p in state.model.named_parameters() if p.grad is not None}
    train_step(state, [random_batch(0, images=8)])
    decay = 1 - config.optim.lr * config.optim.weight_decay
    for n, p in state.model.named_parameters():
        if n in state.optimizer.muon:
            update = p.detach() - before[n] * decay
            similarity = torch.cosine_similarity(update.flatten(), -gradients[n].flatten(), dim=0)
            assert 0 < similarity < 0.995, n
