"""A K3 of a few thousand parameters for the engine's tests: two groups of KDA layers, vision, MTP, varied answers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from small_models import MEDIA, small_model

from openk3.config.model import LinearAttnConfig, ModelConfig
from openk3.config.serve import CacheConfig, PageShape
from openk3.inputs.packed import MediaItem
from openk3.model.k3 import K3

VOCAB = 320


def engine_config(**text: Any) -> ModelConfig:
    """Layers K K M K: two rows a page (MLA and MTP), so the states of three KDA layers take one page and a half."""
    linear = LinearAttnConfig(head_dim=16, num_heads=2, kda_layers=(1, 2, 4), full_attn_layers=(3,))
    return small_model(**{"num_hidden_layers": 4, "linear_attn_config": linear, "attn_res_block_size": 2, **text})


@cache
def engine_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> K3:
    """Random weights, large enough that every path shows in the logits."""
    model = K3.build(engine_config(), seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            if value.ndim >= 2 and not name.startswith(("vision.", "projector.")) and "conv1d" not in name:
                value.copy_(noise * value.shape[-1] ** -0.5)
            elif name.endswith(("proj", "dt_bias", "A_log", "router.bias")):
                value.add_(0.3 * noise)
    return model.requires_grad_(False)


def cache_config(num_pages: int = 64, *, page_tokens: int = 8, hash_tokens: int = 2, **limits: int) -> CacheConfig:
    """Small pages for the model in float64."""
    shape = PageShape.of(engine_config(), page_tokens=page_tokens, hash_tokens=hash_tokens, value_bytes=8)
    return CacheConfig(shape, num_pages, **limits)


def picture(seed: int, grid: tuple[int, int, int] = (1, 4, 6), dtype: torch.dtype = torch.float64) -> MediaItem:
    """An image of h * w / 4 tokens."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(grid[0] * grid[1] * grid[2], 3, 14, 14, generator=generator, dtype=torch.float64)
    return MediaItem((pixels * 2 - 1).to(dtype), grid)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Ordinary token ids."""
    return torch.randint(0, 280, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


__all__ = ["MEDIA", "VOCAB", "cache_config", "engine_config", "engine_model", "picture", "prompt"]
