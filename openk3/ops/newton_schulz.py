"""Newton-Schulz orthogonalisation of a batch of matrices, the core of Muon."""

from __future__ import annotations

import torch

from openk3.ops.backend import pick

# x -> a x + b (x x^T) x + c (x x^T)^2 x, tuned for speed near zero rather than for exact convergence to 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(x_BMN: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Push the singular values of each matrix [M, N] towards 1, keeping its singular vectors.

    Each of the B matrices is divided by its Frobenius norm, then goes through `steps` quintic iterations on its
    smaller side; with 5 steps singular values end up in about 0.7 .. 1.2. The norm is taken after division by the
    largest magnitude, so the result does not depend on the matrix's scale, however small. A zero matrix gives
    zeros. A NaN or infinity makes its own matrix NaN and touches no other. Computed in at least float32, returned
    in x's dtype; on a GPU by kernels that multiply bfloat16 values and add in float32, as Muon usually does, with an
    error no larger than that of the plain iteration in bfloat16. Report §2.5; Muon's equations in Liu et al. 2025
    (Moonlight), eqs. 1-4.

    Raises ValueError if `x_BMN` is not a batch of matrices.
    """
    if x_BMN.dim() != 3:
        raise ValueError(f"expected a batch of matrices [B, M, N], got shape {tuple(x_BMN.shape)}")
    if x_BMN.numel() == 0:
        return x_BMN.clone()
    if steps and pick("newton_schulz", x_BMN) == "triton":
        from openk3.ops.newton_schulz_fused import newton_schulz_kernels

        return newton_schulz_kernels(x_BMN, steps, COEFFICIENTS)
    a, b, c = COEFFICIENTS
    wide = x_BMN.to(torch.promote_types(x_BMN.dtype, torch.float32))
    tall = wide.shape[1] > wide.shape[2]
    x = _unit_norm(wide.mT if tall else wide)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(x_BMN.dtype)


def _unit_norm(x_BMN: torch.Tensor) -> torch.Tensor:
    """Each matrix over its Frobenius norm; squares of tiny numbers would underflow without the first division."""
    peak = x_BMN.abs().amax((1, 2), keepdim=True)
    x = x_BMN / torch.where(peak == 0, 1, peak)
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    return x / torch.where(norm == 0, 1, norm)
