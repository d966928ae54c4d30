"""SiTU-GLU, the bounded gated activation of every K3 feed-forward layer, and its gradient."""

from __future__ import annotations

import torch


def situ_glu(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float | None) -> torch.Tensor:
    """`beta*tanh(gate/beta)*sigmoid(gate) * linear_beta*tanh(up/linear_beta)`, in at least float32.

    `gate` and `up` share any shape and dtype; the result has both. The sigmoid sees the uncapped gate;
    `linear_beta` None leaves `up` as it is. Bounded by `beta * linear_beta`. Report §2.3.2, eqs. 12, 18, 19.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(wide), up.to(wide)
    if linear_beta is not None:
        u = linear_beta * torch.tanh(u / linear_beta)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * u).to(gate.dtype)
