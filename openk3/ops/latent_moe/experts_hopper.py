"""Launches of the routed experts' Gluon kernels, and what they take."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openk3.ops.backend import prefers_gluon
from openk3.ops.kda.gluon_launch import Matrix, launch
from openk3.ops.kda.workspace import copyable
from openk3.ops.latent_moe.route_fused import Plan

ROWS = 128  # of a tile


def fits(plan: Plan, *tensors: Tensor) -> bool:
    """Whether the kernels run: on Hopper, in bfloat16, with tiles of 128 rows, and tensors that can be copied."""
    kind = all(x.dtype == torch.bfloat16 and copyable(x) for x in tensors)
    return prefers_gluon(tensors[0].device) and kind and plan.tile == ROWS and len(plan.slot_M) > 0


class Hopper(NamedTuple):
    """Products of one plan. Each does nothing and says so if its widths fit no block."""

    plan: Plan
    experts: int
    choices: int
    betas: tuple[float, float | None]

    def gate_up(self, z: Tensor, weights: tuple[Tensor, Tensor], results: tuple[Tensor | None, ...]) -> bool:
        """SiTU-GLU(z w1^T, z w3^T) of each row's token; results: gate and up or None, and act."""
        depth, (gate, up, act) = z.shape[1], results
        if depth % 64 or act is None or act.shape[1] % 128:
            return False
        matrices = [_matrix(w, (128, 64)) for w in weights]
        self._rows((z, z), self.plan.slot_M, matrices, (act, gate, up), kind=1)
        return True

    def down(self, act: Tensor, w2: Tensor, y: Tensor) -> bool:
        """y = act w2^T."""
        if act.shape[1] % 64 or y.shape[1] % 128:
            return False
        self._rows((act, act), None, [_matrix(w2, (128, 64))] * 2, (y, None, None), kind=0)
        return True

    def behind(self, d_u: Tensor, w2: Tensor, d: Tensor) -> bool:
        """d = d_u w2 of each row's token."""
        if d_u.shape[1] % 64 or d.shape[1] % 128:
            return False
        self._rows((d_u, d_u), self.plan.slot_M, [_matrix(w2, (64, 128))] * 2, (d, None, None), kind=2)
        return True

    def row_gradient(self, d: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], d_rows: Tensor) -> bool:
        """d_rows = d_gate w1 + d_up w3."""
        if d[0].shape[1] % 64 or d_rows.shape[1] % 128:
            return False
        self._rows(d, None, [_matrix(w, (64, 128)) for w in weights], (d_rows, None, None), kind=3)
        return True

    def down_weight(self, d_u: Tensor, scaled: Tensor, d_w2: Tensor, *, adds: bool) -> bool:
        """d_u^T scaled of each expert's rows."""
        if d_u.shape[1] % 128 or scaled.shape[1] % 256:
            return False
        self._weights(d_u, (scaled, scaled), (d_w2, None), adds=adds)
        return True

    def gate_up_weight(
        self, d: tuple[Tensor, Tensor], z: Tensor, results: tuple[Tensor, Tensor], *, adds: bool
    ) -> bool:
        """d_gate^T z and d_up^T z of each expert's rows."""
        if z.shape[1] % 128 or d[0].shape[1] % 128:
            return False
        self._weights(z, d, results, adds=adds)
        return True

    def _rows(
        self,
        sources: tuple[Tensor, Tensor],
        slot: Tensor | None,
        matrices: list[Matrix],
        results: tuple[Any, ...],
        *,
        kind: int,
    ) -> None:
        from openk3.ops.latent_moe import rows_gluon as kernels

        plan, width = self.plan, results[0].shape[1]
        halves = kernels.halves(kind, width)
        constants, options = kernels.settings(halves)
        form = sources[0].shape[1], width, self.experts, self.choices, kind, kernels.GROUP, *self.betas, halves
        tiles = len(plan.slot_M) // ROWS + min(self.experts, len(plan.slot_M))  # no plan has more
        programs = multiprocessors(results[0].device)
        tables = slot, plan.tile_expert, plan.tile_row, plan.tile_end
        arguments = [*sources, *tables, *matrices, *results, tiles, programs]
        launch(kernels.row_product_gluon, programs, arguments, {"FORM": form, **constants}, options)

    def _weights(self, x: Tensor, rows: tuple[Tensor, Tensor], results: tuple[Any, ...], *, adds: bool) -> None:
        from openk3.ops.latent_moe import weights_gluon as kernels

        constants, options = kernels.settings()
        _, height, width = results[0].shape
        form = height, width, self.experts, self.choices, 256 if results[1] is None else 128
        programs = multiprocessors(x.device)
        matrices = [_matrix(each, (kernels.DEPTH, kernels.SIDE)) for each in rows]
        arguments = [x, self.plan.slot_M, self.plan.start_X, *matrices, *results, programs]
        constants = {"FORM": form, "ADD": adds, **constants}
        launch(kernels.weight_gradient_gluon, programs, arguments, constants, options)


def _matrix(x: Tensor, block: tuple[int, int]) -> Matrix:
    """Rows of the last axis."""
    width = x.shape[-1]
    return Matrix(x, (x.numel() // width, width), (width, 1), block)


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; elsewhere kernels are interpreted as on a small one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
