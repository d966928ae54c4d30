"""A K3 of a few thousand parameters with every part on and no parameter left at a special value."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openk3 import K3, ModelConfig, Packed
from openk3.config.model import LinearAttnConfig, TextConfig, VisionConfig, schedule
from openk3.inputs.packed import MediaItem

VOCAB, MEDIA = 61, 5


def tiny_config(layers: int = 6, vision: bool = True, **text: Any) -> ModelConfig:
    """KDA and MLA layers with K, V, heads and widths that differ, MoE from layer 1, MTP; fields may be replaced."""
    kda, full = schedule(layers)
    config = TextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=layers,
        num_attention_heads=3,
        q_lora_rank=16,
        kv_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=4,
        v_head_dim=8,
        linear_attn_config=LinearAttnConfig(head_dim=16, num_heads=2, kda_layers=kda, full_attn_layers=full),
        attn_res_block_size=2,
        num_experts=6,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=16,
        routed_expert_hidden_size=24,
        num_nextn_predict_layers=1,
    )
    tower = VisionConfig(
        vt_num_hidden_layers=2,
        vt_hidden_size=16,
        vt_intermediate_size=24,
        vt_num_attention_heads=2,
        qkv_hidden_size=32,
        init_pos_emb_height=6,
        init_pos_emb_width=6,
        text_hidden_size=text.get("hidden_size", 32),
    )
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "media_placeholder_token_id": MEDIA}
    return ModelConfig(text=dataclasses.replace(config, **text), vision=tower if vision else None, **ids)


def tiny_model(config: ModelConfig | None = None, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> K3:
    """Random weights large enough that every path shows in the logits."""
    model = K3.build(config or tiny_config(), seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            if value.ndim >= 2 and not name.startswith(("vision.", "projector.")) and "conv1d" not in name:
                value.copy_(noise * value.shape[-1] ** -0.5)
            elif name.endswith(("proj", "dt_bias", "A_log", "router.bias")):
                value.add_(0.3 * noise)
            elif value.ndim == 1:
                value.add_(0.1 * noise)
    return model


def random_ids(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Token ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(6, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def random_image(grid: tuple[int, int, int], seed: int = 0, dtype: torch.dtype = torch.float64) -> MediaItem:
    """Pixels in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    count = grid[0] * grid[1] * grid[2]
    return MediaItem(torch.rand(count, 3, 14, 14, generator=generator, dtype=torch.float64).to(dtype) * 2 - 1, grid)


def close(got: Tensor, want: Tensor, tolerance: float = 1e-11) -> None:
    """Equal in float64 up to rounding, relative to the largest value."""
    size = max(1.0, float(want.detach().abs().max())) if want.numel() else 1.0
    torch.testing.assert_close(got, want, atol=tolerance * size, rtol=0)


def gradients(model: K3, packed: Packed, weights_TV: Tensor | None = None) -> dict[str, Tensor]:
    """Gradient of a sum of squares (or of weights * logits) of the logits for every parameter that gets one."""
    model.zero_grad()
    logits_TV = model(packed)
    (logits_TV.square() if weights_TV is None else weights_TV * logits_TV).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
