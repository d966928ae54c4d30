"""Causal attention of Gated MLA over packed sequences: expanded heads for training, absorbed latents for decoding."""

from __future__ import annotations

import torch


def mla_attention(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    scale: float,
    return_max: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention where the queries are the last positions of their sequence's keys -> o_THV."""
    wide = torch.promote_types(q_THK.dtype, torch.float32)
    q, k, v = q_THK.to(wide), k_THK.to(wide), v_THV.to(wide)
    ends_q = cu_seqlens_q.tolist()
    ends_k = ends_q if cu_seqlens_k is None else cu_seqlens_k.tolist()
    outputs = [q.new_zeros(0, *v.shape[1:])]
    max_logit_H = q.new_full((q.shape[1],), float("-inf"))
    for q0, q1, k0, k1 in zip(ends_q, ends_q[1:], ends_k, ends_k[1:]):
        if q1 == q0:
            continue
        hidden = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=q.device).triu(k1 - k0 - (q1 - q0) + 1)
        logits = torch.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1]) * scale
        logits = logits.masked_fill(hidden, float("-inf"))
        max_logit_H = torch.maximum(max_logit_H, logits.detach().amax((1, 2)))
        outputs.append(torch.einsum("hqk,khv->qhv", logits.softmax(-1), v[k0:k1]))
    o_THV = torch.cat(outputs)
    return (o_THV, max_logit_H) if return_max else o_THV


def absorbed_attention(
    q_latent_THC: torch.Tensor,
    q_shared_THR: torch.Tensor,
    latents: list[torch.Tensor],
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Attention over cached latents [Tk, C+R], one per sequence -> context in latent space [T, H, C]."""
    wide = torch.promote_types(q_latent_THC.dtype, torch.float32)
    width = q_latent_THC.shape[-1]
    q_THK = torch.cat((q_latent_THC, q_shared_THR), -1).to(wide)
    ends = cu_seqlens_q.tolist()
    outputs = [q_THK.new_zeros(0, q_THK.shape[1], width)]
    for start, end, latent in zip(ends, ends[1:], latents):
        latent = latent.to(wide)
        hidden = torch.ones(end - start, latent.shape[0], dtype=torch.bool, device=q_THK.device)
        hidden = hidden.triu(latent.shape[0] - (end - start) + 1)
        logits = torch.einsum("qhc,kc->hqk", q_THK[start:end], latent) * scale
        probs = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,kc->qhc", probs, latent[:, :width]))
    return torch.cat(outputs)
