"""Large products of the routed experts by torch's grouped matmul, where that is faster than our kernels."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from openk3.ops.latent_moe.combine_kernel import act_rows_kernel, act_rows_settings
from openk3.ops.latent_moe.route_fused import Plan
from openk3.ops.launch import start
from openk3.ops.situ_fused import fused_situ_glu

# Of latents and inner layers. Up to 768 our kernels win. At 3584 x 3072 and 146 rows an expert the products of both
# passes take 12.2 ms by them and 10.2 by the library, rows gathered and SiTU in passes of its own included.
LEAST_WIDTH = 2048
ROWS = 128  # of the plan's tiles: experts with few rows were not measured


def is_faster(kind: str, dtype: torch.dtype, plan: Plan, widths: tuple[int, int]) -> bool:
    """Whether the library takes an operation's products; `kind` as in `experts_kernel.kind_of`. The same every time.

    Hopper alone: elsewhere the library does not write gradients of experts without rows.
    """
    fits = kind == "hopper" and dtype == torch.bfloat16 and all(width % 8 == 0 for width in widths)  # rows of 16 bytes
    return fits and min(widths) >= LEAST_WIDTH and plan.tile >= ROWS and len(plan.slot_M) > 0


def act_rows(
    d: Tensor, saved: tuple[Tensor, Tensor], weights: Tensor, plan: Plan, betas: tuple[float, float | None]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What follows d = d_u w2: d_gate in its place, d_up, p act, and the weights' gradient as one share a row."""
    (M, I), d_up, scaled = d.shape, torch.empty_like(d), torch.empty_like(d)
    shares = weights.new_empty(1, M)
    constants, options = act_rows_settings(I)
    start(act_rows_kernel, M)(
        *(d, *saved, weights, plan.slot_M, d_up, scaled, shares),
        **constants,
        BETA=betas[0],
        LINEAR=betas[1],
        **options,
    )
    return d, d_up, scaled, shares


class Library(NamedTuple):
    """Products over the rows of one plan."""

    plan: Plan
    k: int
    betas: tuple[float, float | None]

    def rows(self, x_TC: Tensor) -> Tensor:
        """The token of each row."""
        return x_TC.index_select(0, self.plan.slot_M // self.k)

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Each expert's rows by its matrix [E, depth, width]."""
        return grouped_mm(rows, weight, offs=self.plan.start_X[1:])

    def gate_up(self, rows: Tensor, w1: Tensor, w3: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """gate, up and act."""
        gate, up = self.product(rows, w1.mT), self.product(rows, w3.mT)
        return gate, up, fused_situ_glu(gate, up, *self.betas)

    def act_gradient(
        self, d_rows: Tensor, w2: Tensor, gate: Tensor, up: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """d_gate, d_up, p act, and the weights' gradient as one share for each row."""
        return act_rows(self.product(d_rows, w2), (gate, up), weights, self.plan, self.betas)

    def weight(self, d_rows: Tensor, rows: Tensor) -> Tensor:
        """d_rows^T rows of each expert; zero for one without rows."""
        return grouped_mm(d_rows.mT, rows, offs=self.plan.start_X[1:])
