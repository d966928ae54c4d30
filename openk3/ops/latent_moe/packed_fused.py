"""A layer's routed experts from packed weights by kernels, from latents to the normed weighted sum; no gradients."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from openk3.ops.backend import on_device, prefers_gluon
from openk3.ops.latent_moe import packed_gluon, packed_kernel, packed_rows_gluon
from openk3.ops.latent_moe.experts_fused import Form, _combine
from openk3.ops.latent_moe.packed import COLUMNS, GROUP, ExpertTiles, Tiles
from openk3.ops.latent_moe.route_fused import Plan
from openk3.ops.launch import start

FEW = 32  # rows of the largest tile that warps multiply without shared memory


class Way(NamedTuple):
    """How the products of a plan run: by which kernels, and with how many rows at a time."""

    kind: str  # "few", "many" or "triton"
    rows: int


def way_for(tokens: int, k: int, experts: int, *, gluon: bool, moved: bool) -> Way:
    """Kernels and rows of a tile for so many tokens: few where experts have few rows, for what a tile lacks is lost.

    `moved` says whether both widths are multiples of 128, and larger, as the kernels for many rows need.
    """
    mean = tokens * k / experts
    if not gluon:
        return Way("triton", 16 if mean <= 16 else 64 if mean <= 96 else 128)
    if tokens <= FEW or mean <= 20 or not moved:
        return Way("few", 8 if tokens <= 8 else 16 if tokens <= 16 or mean <= 8 else FEW)
    return Way("many", 64 if mean <= 96 else 128)


def _way(z_TC: Tensor, k: int, packed: ExpertTiles) -> Way:
    gluon = z_TC.dtype == torch.bfloat16 and prefers_gluon(z_TC.device)
    # Triton 3.6 cannot compile their loop for a single round.
    moved = all(width % COLUMNS == 0 and width > COLUMNS for width in (packed.gate_up.columns, packed.inner))
    return way_for(len(z_TC), k, packed.experts, gluon=gluon, moved=moved)


def packed_tile_rows(z_TC: Tensor, k: int, packed: ExpertTiles) -> int:
    """Rows of a tile that `mix_packed` wants the plan to have."""
    return max(16, _way(z_TC, k, packed).rows)


@lru_cache(maxsize=64)
def _few(rows: int, steps: int) -> dict[str, Any]:
    return packed_gluon.settings(rows)


@lru_cache(maxsize=64)
def _many(rows: int, units: int) -> dict[str, Any]:
    return packed_rows_gluon.settings(rows, 8 if units % 8 == 0 else GROUP)


class _Launch:
    """Launches over the tiles of one plan."""

    def __init__(self, plan: Plan, packed: ExpertTiles, form: Form, way: Way, like: Tensor) -> None:
        self.plan, self.way, self.like = plan, way, like
        M, E = len(plan.slot_M), packed.experts
        self.tiles = M // plan.tile + min(E, M)  # no plan has more
        constants = {"C": packed.gate_up.columns, "I": packed.inner, "E": E, "K": plan.row_Tk.shape[1]}
        self.known: dict[str, Any] = constants | {"BETA": form.beta, "LINEAR": form.linear_beta, "WIDE": packed.wide}
        self.known |= {"slot": plan.slot_M, "tile_expert": plan.tile_expert, "tile_row": plan.tile_row}
        self.known |= {"tile_end": plan.tile_end, "tiles": self.tiles}

    def run(self, name: str, x: Tensor, tiles: Tiles, out: Tensor) -> None:
        """The products of x with the experts' matrices: "gate_up" or "down"."""
        kind, rows = self.way
        if kind == "few":
            settings = _few(rows, tiles.steps) | {"UNITS": tiles.units}
            programs = tiles.units // settings["WARPS"]
        elif kind == "many":
            settings = _many(rows, tiles.units) | {"UNITS": tiles.units}
            programs = tiles.units // settings["WARPS"]
        else:
            settings = packed_kernel.settings(rows, x.element_size())
            settings = settings | {"ALL": tiles.units, "GROUP": packed_kernel.GROUP, "depth": tiles.columns}
            programs = tiles.units // settings["UNITS"]
        kernel = KERNELS[kind][name]
        known = self.known | settings
        named = {argument: known[argument] for argument in kernel.arg_names if argument in known}
        options = {option: settings[option] for option in ("num_warps", "num_stages", "maxnreg") if option in settings}
        if kind == "few":
            x = x.view(torch.int32)
        if self.tiles:
            start(kernel, self.tiles * programs)(x, tiles.codes_EUSW, tiles.scales_EUSX, out, **named, **options)


KERNELS: dict[str, dict[str, Any]] = {
    "few": {"gate_up": packed_gluon.few_gate_up_kernel, "down": packed_gluon.few_down_kernel},
    "many": {"gate_up": packed_rows_gluon.many_gate_up_kernel, "down": packed_rows_gluon.many_down_kernel},
    "triton": {"gate_up": packed_kernel.packed_gate_up_kernel, "down": packed_kernel.packed_down_kernel},
}


def move_columns(x_TC: Tensor) -> Tensor:
    """Columns in the order that the kernels for many rows take; a width that is a multiple of 128."""
    out, rows = torch.empty_like(x_TC), x_TC.numel() // COLUMNS
    if rows:
        start(packed_kernel.move_columns_kernel, triton.cdiv(rows, packed_kernel.MOVED_ROWS))(
            x_TC, out, rows, packed_kernel.MOVED_ROWS, num_warps=packed_kernel.MOVED_WARPS
        )
    return out


def mix_packed(z_TC: Tensor, weights_Tk: Tensor, plan: Plan, packed: ExpertTiles, norm: tuple[Tensor, Form]) -> Tensor:
    """RMSNorm(sum_i p_i w2 SiTU-GLU(w1 z, w3 z)) over each token's k experts, [T, C] in z's format; no gradients.

    The plan's tiles have `packed_tile_rows` rows; weights are float32.
    """
    weight_C, form = norm
    z_TC = z_TC.contiguous()
    way = _way(z_TC, plan.row_Tk.shape[1], packed)
    M = len(plan.slot_M)
    with on_device(z_TC):
        launch = _Launch(plan, packed, form, way, z_TC)
        act, y = z_TC.new_empty(M, packed.inner), z_TC.new_empty(M, z_TC.shape[1])
        launch.run("gate_up", move_columns(z_TC) if way.kind == "many" else z_TC, packed.gate_up, act)
        launch.run("down", act, packed.down, y)
        _, out, _ = _combine(y, plan, weights_Tk.contiguous(), weight_C, form.eps)
    return out
