"""Draw the next token: temperature, top-k, top-p."""

from __future__ import annotations

import torch


def sample(
    logits_NV: torch.Tensor,
    generator: torch.Generator | None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> torch.Tensor:
    """One id per row [N]; temperature 0 takes the largest logit (the lowest id among equals)."""
    wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    if temperature == 0:
        return wide.argmax(-1)
    values, ids = torch.sort(wide / temperature, dim=-1, descending=True, stable=True)
    if top_k > 0:
        values[:, top_k:] = float("-inf")
    probs = values.softmax(-1)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill(before >= top_p, 0) if top_p < 1 else probs
    probs[:, 0] = probs[:, 0].clamp_min(torch.finfo(probs.dtype).tiny)
    pick = torch.multinomial(probs, 1, generator=generator)
    return ids.gather(1, pick).squeeze(1)
