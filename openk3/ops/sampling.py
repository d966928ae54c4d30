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
    uniform_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token id per row: logits [N, V] -> ids [N] int64.

    `temperature` 0 takes the largest logit, the lowest id among equals. `top_k` keeps the k largest logits (0, or
    at least V: all; equal logits in favour of the lower id); then `top_p` keeps the smallest set of the most likely
    ones whose renormalised probability reaches p (1: all; 0: only the first). Each of the three is one number, or
    one per row [N]. One uniform number per row is drawn from `generator`, none if every row is greedy; or `uniform_N`
    gives them, float64 in [0, 1). A row's id follows from its own logits, parameters and number alone, whatever the
    other rows are. A logit of -inf is never drawn. Computed in at least float32.

    Raises ValueError for a NaN or +inf logit, a row of -inf only, or a parameter or number out of range.
    """
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    temperature_N1 = _per_row("temperature", temperature, wide_NV, most=float("inf"))
    top_k_N1 = _per_row("top_k", top_k, wide_NV, most=float("inf"))
    top_p_N1 = _per_row("top_p", top_p, wide_NV, most=1)
    if wide_NV.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=wide_NV.device)
    unusable = (~wide_NV.amax(-1).isfinite()).nonzero()
    if unusable.numel():
        row = int(unusable[0, 0])
        raise ValueError(f"logits of row {row}: the largest is {wide_NV[row].max().item()}, need a finite number")
    if (temperature_N1 == 0).all():
        return wide_NV.max(-1).indices
    uniform_N1 = _uniform(uniform_N, generator, wide_NV)
    cuts_N = ((top_k_N1 > 0) | (top_p_N1 < 1)).squeeze(1)
    return sample_rows(wide_NV, temperature_N1, top_k_N1, top_p_N1, uniform_N1, cuts=cuts_N.nonzero().squeeze(1))


def sample_rows(
    wide_NV: torch.Tensor,
    temperature_N1: torch.Tensor,
    top_k_N1: torch.Tensor,
    top_p_N1: torch.Tensor,
    uniform_N1: torch.Tensor,
    *,
    cuts: torch.Tensor,
) -> torch.Tensor:
    """`sample` [N] of logits and parameters that are known to be right, [N, 1] each: a GPU is not waited for.

    `cuts` are the rows that top-k or top-p cut. Logits without a finite largest one give some id.
    """
    greedy_N1 = temperature_N1 == 0
    peak_N1, best_N1 = wide_NV.max(-1, keepdim=True)
    # The difference first: a low temperature must not turn large logits into infinities.
    scaled_NV = (wide_NV - peak_N1) / torch.where(greedy_N1, 1, temperature_N1)
    drawn_N1 = _draw(scaled_NV, uniform_N1, top_k_N1, top_p_N1, cuts)
    return torch.where(greedy_N1, best_N1, drawn_N1.clamp(max=wide_NV.shape[1] - 1)).squeeze(1)


def _per_row(name: str, value: float | torch.Tensor, like_NV: torch.Tensor, most: float) -> torch.Tensor:
    rows = torch.as_tensor(value, dtype=like_NV.dtype, device=like_NV.device)
    if rows.shape not in ((), like_NV.shape[:1]):
        raise ValueError(f"{name}: expected one number or one per row, got shape {tuple(rows.shape)}")
    if not ((rows >= 0) & (rows <= most)).all():
        raise ValueError(f"{name}: must lie between 0 and {most}, got {value}")
    return rows.expand(like_NV.shape[0]).unsqueeze(1)


def _uniform(uniform_N: torch.Tensor | None, generator: torch.Generator | None, like_NV: torch.Tensor) -> torch.Tensor:
    shape = like_NV.shape[:1]
    if uniform_N is None:
        return torch.rand(*shape, 1, dtype=torch.float64, device=like_NV.device, generator=generator)
    if uniform_N.shape != shape or not ((uniform_N >= 0) & (uniform_N < 1)).all():
        raise ValueError(f"uniform_N: expected {shape[0]} numbers from 0 to below 1, got {tuple(uniform_N.shape)}")
    return uniform_N.to(torch.float64).unsqueeze(1)


def _draw(
    scaled_NV: torch.Tensor,
    uniform_N1: torch.Tensor,
    top_k_N1: torch.Tensor,
    top_p_N1: torch.Tensor,
    cuts: torch.Tensor,
) -> torch.Tensor:
    """Ids in the order of the vocabulary where nothing is cut, by falling logit where something is, row by row."""
    if len(cuts) == len(scaled_NV):
        return _draw_cut(scaled_NV, uniform_N1, top_k_N1, top_p_N1)
    drawn_N1 = _place(scaled_NV.softmax(-1).double(), uniform_N1)
    if len(cuts):
        drawn_N1[cuts] = _draw_cut(*(x[cuts] for x in (scaled_NV, uniform_N1, top_k_N1, top_p_N1))).to(drawn_N1.dtype)
    return drawn_N1


def _draw_cut(
    scaled_NV: torch.Tensor, uniform_N1: torch.Tensor, top_k_N1: torch.Tensor, top_p_N1: torch.Tensor
) -> torch.Tensor:
    scaled_NV, ids_NV = scaled_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(scaled_NV.shape[1], device=scaled_NV.device)
    scaled_NV = scaled_NV.masked_fill((top_k_N1 > 0) & (rank_V >= top_k_N1), float("-inf"))
    probs_NV = scaled_NV.softmax(-1).double()
    reached_NV = probs_NV.cumsum(-1) - probs_NV >= top_p_N1
    reached_NV &= top_p_N1 < 1
    reached_NV[:, 0] = False
    place_N1 = _place(probs_NV.masked_fill(reached_NV, 0), uniform_N1).clamp(max=ids_NV.shape[1] - 1)
    return ids_NV.gather(1, place_N1)


def _place(probs_NV: torch.Tensor, uniform_N1: torch.Tensor) -> torch.Tensor:
    """Where the running sum of each row first exceeds its number's share of the total [N, 1]."""
    total_NV = probs_NV.cumsum(-1)
    # The number is at most 1 - 2^-53, so its product with the total stays below the total even after rounding, and the
    # first running sum above it belongs to an id that has a probability.
    return torch.searchsorted(total_NV, uniform_N1 * total_NV[:, -1:], right=True)
