"""Newton-Schulz orthogonalisation of a batch of matrices, the core of Muon."""

from __future__ import annotations

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(x_BMN: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Push every matrix of the batch towards its nearest orthogonal one, whatever its scale."""
    wide = torch.promote_types(x_BMN.dtype, torch.float32)
    x = x_BMN.to(wide)
    transpose = x.shape[-2] > x.shape[-1]
    if transpose:
        x = x.mT
    peak = x.abs().amax((-2, -1), keepdim=True)
    x = x / torch.where(peak == 0, 1, peak)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / torch.where(norm == 0, 1, norm)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if transpose else x).to(x_BMN.dtype)
