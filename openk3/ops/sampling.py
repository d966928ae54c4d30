"""Draw the next token: temperature, top-k, top-p, per row and reproducible."""

from __future__ import annotations

import torch


def sample(
    logits_NV: torch.Tensor,
    generator: torch.Generator | None,
    *,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
) -> torch.Tensor:
    """One token id per row: logits [N, V] -> ids [N] int64.

    `temperature` 0 takes the largest logit, the lowest id among equals. `top_k` keeps the k largest logits (0, or
    at least V: all; equal logits in favour of the lower id); then `top_p` keeps the smallest set of the most likely
    ones whose renormalised probability reaches p (1: all; 0: only the first). Each of the three is one number, or
    one per row [N]. One uniform number per row is drawn from `generator`, none if every row is greedy. A logit of
    -inf is never drawn. Computed in at least float32.

    Raises ValueError for a NaN or +inf logit, a row of -inf only, or a parameter out of range.
    """
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    temperature_N1 = _per_row("temperature", temperature, wide_NV, most=float("inf"))
    top_k_N1 = _per_row("top_k", top_k, wide_NV, most=float("inf"))
    top_p_N1 = _per_row("top_p", top_p, wide_NV, most=1)
    if wide_NV.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=wide_NV.device)
    peak_N1, best_N1 = wide_NV.max(-1, keepdim=True)
    unusable = (~peak_N1.isfinite()).nonzero()
    if unusable.numel():
        row = int(unusable[0, 0])
        raise ValueError(f"logits of row {row}: the largest is {peak_N1[row].item()}, need a finite number")
    greedy_N1 = temperature_N1 == 0
    if not greedy_N1.all():
        # The difference first: a low temperature must not turn large logits into infinities.
        scaled_NV = (wide_NV - peak_N1) / torch.where(greedy_N1, 1, temperature_N1)
        best_N1 = torch.where(greedy_N1, best_N1, _draw(scaled_NV, generator, top_k_N1, top_p_N1))
    return best_N1.squeeze(1)


def _per_row(name: str, value: float | torch.Tensor, like_NV: torch.Tensor, most: float) -> torch.Tensor:
    rows = torch.as_tensor(value, dtype=like_NV.dtype, device=like_NV.device)
    if rows.shape not in ((), like_NV.shape[:1]):
        raise ValueError(f"{name}: expected one number or one per row, got shape {tuple(rows.shape)}")
    if not ((rows >= 0) & (rows <= most)).all():
        raise ValueError(f"{name}: must lie between 0 and {most}, got {value}")
    return rows.expand(like_NV.shape[0]).unsqueeze(1)


def _draw(
    scaled_NV: torch.Tensor, generator: torch.Generator | None, top_k_N1: torch.Tensor, top_p_N1: torch.Tensor
) -> torch.Tensor:
    ids_NV = None
    if (top_k_N1 > 0).any() or (top_p_N1 < 1).any():
        scaled_NV, ids_NV = scaled_NV.sort(dim=-1, descending=True, stable=True)
        rank_V = torch.arange(scaled_NV.shape[1], device=scaled_NV.device)
        scaled_NV = scaled_NV.masked_fill((top_k_N1 > 0) & (rank_V >= top_k_N1), float("-inf"))
    probs_NV = scaled_NV.softmax(-1).double()
    if ids_NV is not None:
        reached_NV = probs_NV.cumsum(-1) - probs_NV >= top_p_N1
        reached_NV &= top_p_N1 < 1
        reached_NV[:, 0] = False
        probs_NV = probs_NV.masked_fill(reached_NV, 0)
    total_NV = probs_NV.cumsum(-1)
    uniform_N1 = torch.rand(total_NV.shape[0], 1, dtype=torch.float64, device=total_NV.device, generator=generator)
    # The number is at most 1 - 2^-53, so its product with the total stays below the total even after rounding, and the
    # first running sum above it belongs to an id that has a probability.
    position_N1 = torch.searchsorted(total_NV, uniform_N1 * total_NV[:, -1:], right=True)
    return position_N1 if ids_NV is None else ids_NV.gather(1, position_N1)
