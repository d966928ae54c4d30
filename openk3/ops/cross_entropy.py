"""Language-model head and loss in token chunks, so that logits for all tokens never exist at once."""

from __future__ import annotations

import torch

IGNORED = -100


def linear_cross_entropy(
    h_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor, *, chunk: int = 1024
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of next-token losses, number of labels that count)."""
    wide = torch.promote_types(h_TD.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=h_TD.device)
    for h, labels in zip(h_TD.split(chunk), labels_T.split(chunk)):
        logits = (h @ weight_VD.T).to(wide)
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total, (labels_T != IGNORED).sum()


def token_logprobs(
    h_TD: torch.Tensor, weight_VD: torch.Tensor, ids_T: torch.Tensor, *, chunk: int = 1024
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability of each id [T], entropy of each distribution [T])."""
    wide = torch.promote_types(h_TD.dtype, torch.float32)
    logprobs, entropies = [], []
    for h, ids in zip(h_TD.split(chunk), ids_T.split(chunk)):
        logp = torch.log_softmax((h @ weight_VD.T).to(wide), -1)
        logprobs.append(logp.gather(1, ids.unsqueeze(1)).squeeze(1))
        entropies.append(-(logp.exp() * logp).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)
