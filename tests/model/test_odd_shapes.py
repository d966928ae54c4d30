"""Shapes at the edge of what a configuration allows: each trains, and decodes from a cache what one pass computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_model import close, random_ids, tiny_config, tiny_model

from openk3 import ModelConfig, Packed
from openk3.config.model import LinearAttnConfig, schedule

LENGTHS = [5, 0, 33, 1]


def linear(layers: int = 6, **changes: Any) -> LinearAttnConfig:
    """The tiny model's KDA layers with fields replaced."""
    kda, full = schedule(layers)
    return LinearAttnConfig(**{"head_dim": 16, "num_heads": 2, "kda_layers": kda, "full_attn_layers": full, **changes})


EVERY_LAYER = (1, 2, 3, 4, 5, 6)
SHAPES: dict[str, ModelConfig] = {
    "one layer": tiny_config(layers=1),
    "one MLA head": tiny_config(num_attention_heads=1),
    "one KDA head": tiny_config(linear_attn_config=linear(num_heads=1)),
    "KDA heads of width 1": tiny_config(linear_attn_config=linear(head_dim=1)),
    "convolution of one tap": tiny_config(linear_attn_config=linear(short_conv_kernel_size=1)),
    "convolution of seven taps": tiny_config(linear_attn_config=linear(short_conv_kernel_size=7)),
    "narrow gate": tiny_config(linear_attn_config=linear(gate_lower_bound=-0.5)),
    "unbounded gate": tiny_config(linear_attn_config=linear(gate_lower_bound=None)),
    "KDA only": tiny_config(linear_attn_config=linear(kda_layers=EVERY_LAYER, full_attn_layers=())),
    "MLA only": tiny_config(linear_attn_config=linear(kda_layers=(), full_attn_layers=EVERY_LAYER)),
    "values of width 1": tiny_config(v_head_dim=1),
    "latents of width 1": tiny_config(kv_lora_rank=1, q_lora_rank=1),
    "no shared key": tiny_config(qk_rope_head_dim=0),
    "no output gate": tiny_config(mla_use_output_gate=False),
    "one expert": tiny_config(num_experts=1, num_experts_per_token=1),
    "every expert chosen": tiny_config(num_experts=4, num_experts_per_token=4),
    "one group kept": tiny_config(num_experts=6, num_experts_per_token=2, num_expert_group=3, topk_group=1),
    "groups of one expert": tiny_config(num_experts=6, num_experts_per_token=1, num_expert_group=6, topk_group=1),
    "experts of width 1": tiny_config(routed_expert_hidden_size=1, moe_intermediate_size=1),
    "no shared experts": tiny_config(num_shared_experts=0),
    "raw weights": tiny_config(moe_renormalize=False),
    "uncapped up": tiny_config(activation_situ_linear_beta=None),
    "dense only": tiny_config(first_k_dense_replace=6),
    "MoE from the first layer": tiny_config(first_k_dense_replace=0),
    "MoE in every second layer": tiny_config(moe_layer_freq=2),
    "blocks of one layer": tiny_config(attn_res_block_size=1),
    "one block for all layers": tiny_config(attn_res_block_size=60),
    "full depth attention": tiny_config(attn_res_mode="full"),
    "no vision": tiny_config(vision=False),
    "no MTP": tiny_config(num_nextn_predict_layers=0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_odd_shape(name: str) -> None:
    """Training pass, two-phase pass and cached passes of few and single tokens agree; every gradient is finite."""
    model, rows = tiny_model(SHAPES[name]), random_ids(LENGTHS)
    want = model(Packed.join(rows))
    model.loss(Packed.join(rows)).total.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(grad.isfinite().all() for grad in grads)
    assert model.embed.weight.grad is not None and model.embed.weight.grad.any()
    with torch.no_grad():
        close(model(Packed.join(rows)), want)
    cache, done = model.new_cache(len(rows)), [0] * len(rows)
    parts: list[list[torch.Tensor]] = [[] for _ in rows]
    while done != LENGTHS:
        taken = [min(9 if sum(done) < 20 else 1, n - k) for n, k in zip(LENGTHS, done)]
        logits = model(Packed.join([row[k : k + t] for row, k, t in zip(rows, done, taken)]), cache).split(taken)
        for part, piece in zip(parts, logits):
            part.append(piece)
        done = [k + t for k, t in zip(done, taken)]
    close(torch.cat([torch.cat(part) for part in parts]), want)


@pytest.mark.parametrize("name", ["unbounded gate", "every expert chosen", "full depth attention", "no MTP"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_odd_shape_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """Forward, backward and decoding run in 16 bits and stay finite."""
    model, rows = tiny_model(SHAPES[name], dtype=dtype), random_ids(LENGTHS)
    logits = model(Packed.join(rows))
    assert logits.dtype == dtype and logits.isfinite().all()
    model.loss(Packed.join(rows)).total.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    cache = model.new_cache(4)
    model(Packed.join(rows), cache)
    assert model(Packed.join([[7], [8], [], [9]]), cache).isfinite().all()
