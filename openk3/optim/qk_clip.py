"""QK-Clip: shrink the query and key weights of attention heads whose logits grew beyond a bound."""

from __future__ import annotations

import torch
from torch import Tensor

from openk3.model.k3 import K3
from openk3.model.mla import GatedMLA
from openk3.optim.optimizer import Optimizer


def clip_factors(max_logit_H: Tensor, tau: float) -> Tensor:
    """gamma_h = min(1, tau / largest logit of head h), 1 where no logit was positive (report section 3.3)."""
    return torch.where(max_logit_H > tau, tau / max_logit_H.clamp_min(tau), torch.ones_like(max_logit_H))


@torch.no_grad()
def clip_heads(q_b: Tensor, kv_b: Tensor, gamma_H: Tensor, *, nope: int) -> None:
    """Scale one MLA layer's weights in place, so that head h's logits shrink by gamma_h.

    q_b [H * (nope + shared), q_rank]: content rows by sqrt(gamma), rows that meet the shared key by gamma.
    kv_b [H * (nope + value), kv_rank]: key rows by sqrt(gamma); value rows and the shared key stay.
    """
    heads = len(gamma_H)
    q_HRC, kv_HRC = q_b.view(heads, -1, q_b.shape[1]), kv_b.view(heads, -1, kv_b.shape[1])
    root_H11 = gamma_H.sqrt().view(-1, 1, 1).to(q_b.dtype)
    q_HRC[:, :nope] *= root_H11
    q_HRC[:, nope:] *= gamma_H.view(-1, 1, 1).to(q_b.dtype)
    kv_HRC[:, :nope] *= root_H11.to(kv_b.dtype)


def apply_qk_clip(model: K3, optimizer: Optimizer, max_logits: dict[int, Tensor], tau: float) -> int:
    """Clip every MLA layer whose largest logit of the step passed `tau`; returns how many heads were clipped."""
    found = [
        (prefix, module, clip_factors(max_logits[module.layer], tau))
        for prefix, module in model.named_modules()
        if isinstance(module, GatedMLA) and module.layer in max_logits
    ]
    # A GPU is asked once.
    counts = torch.stack([(gamma_H < 1).sum() for *_, gamma_H in found]).tolist() if found else []
    for (prefix, module, gamma_H), heads in zip(found, counts):
        if heads:
            q_b, kv_b = f"{prefix}.q_b_proj.weight", f"{prefix}.kv_b_proj.weight"
            clip_heads(optimizer.weight(q_b), optimizer.weight(kv_b), gamma_H, nope=module.nope)
            optimizer.publish((q_b, kv_b))
    return sum(counts)
