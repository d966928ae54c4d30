"""The routed experts of a layer by kernels, as one differentiable function from latents to the normed weighted sum."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import on_device
from openk3.ops.gradient_sums import GradientSum, sum_of
from openk3.ops.latent_moe import combine_kernel as rows_kernel
from openk3.ops.latent_moe import experts_hopper
from openk3.ops.latent_moe.experts_kernel import (
    GROUP,
    KERNELS,
    WEIGHT_BLOCKS,
    kind_of,
    rows_of_tile,
    tile_for,
)
from openk3.ops.latent_moe.experts_library import Library, act_rows, is_faster
from openk3.ops.latent_moe.route_fused import Plan
from openk3.ops.launch import start
from openk3.ops.saved import name

NORM_PROGRAMS = 4  # of each multiprocessor, all at work at once, for the gradient of the norm behind the sum


class Form(NamedTuple):
    """Constants of a layer's experts."""

    beta: float
    linear_beta: float | None
    eps: float  # of the norm behind the weighted sum


class Sizes(NamedTuple):
    """Shapes of a layer's experts, and how often a token is copied."""

    C: int  # latent
    I: int  # inner
    E: int
    k: int


@lru_cache(maxsize=64)
def kind(device: torch.device, dtype: torch.dtype) -> str:
    """Which table of tiles a device takes; the interpreter acts as Hopper."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return kind_of(10 * major + minor, dtype.itemsize)


def tile_rows(z_TC: Tensor, k: int, experts: int) -> int:
    """Rows of a tile that `mix_experts` wants the plan to have."""
    return rows_of_tile(len(z_TC) * k, experts, kind(z_TC.device, z_TC.dtype))


class _Launch:
    """Products over the rows of one plan: by kernels, on Hopper by Gluon's, or by the library where that is faster."""

    def __init__(self, plan: Plan, sizes: Sizes, form: Form, like: Tensor, *weights: Tensor) -> None:
        self.plan, self.sizes, self.form = plan, sizes, form
        self.kind = kind(like.device, like.dtype)
        M, (C, I, E, k) = len(plan.slot_M), sizes
        self.constants = {"C": C, "I": I, "E": E, "K": k, "BETA": form.beta, "LINEAR": form.linear_beta, "GROUP": GROUP}
        self.tiles = M // plan.tile + min(E, M)  # no plan has more
        by_library = is_faster(self.kind, like.dtype, plan, (C, I))
        betas = form.beta, form.linear_beta
        self.library = Library(plan, k, betas) if by_library else None
        moves = not by_library and experts_hopper.fits(plan, like, *weights)
        self.hopper = experts_hopper.Hopper(plan, E, k, betas) if moves else None

    def of_tokens(self, x_TC: Tensor) -> Tensor:
        """What products of tokens' rows take: the library the rows, the kernels the tokens."""
        return x_TC if self.library is None else self.library.rows(x_TC)

    def gate_up(self, z: Tensor, w1: Tensor, w3: Tensor, *, keep: bool) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """gate and up (by the kernels only if they are to be kept) and act; z `of_tokens`."""
        if self.library is not None:
            return self.library.gate_up(z, w1, w3)
        M, I = len(self.plan.slot_M), self.sizes.I
        act = z.new_empty(M, I)
        gate, up = z.new_empty(2, M, I).unbind() if keep else (None, None)
        if self.hopper is None or not self.hopper.gate_up(z, (w1, w3), (gate, up, act)):
            self.rows("gate_up", (z, w1, w3, gate, up, act), I, self.sizes.C)
        return gate, up, act

    def down(self, act: Tensor, w2: Tensor) -> Tensor:
        """y = act w2^T."""
        if self.library is not None:
            return self.library.product(act, w2.mT)
        y = act.new_empty(len(act), self.sizes.C)
        if self.hopper is None or not self.hopper.down(act, w2, y):
            self.rows("down", (act, w2, y), self.sizes.C, self.sizes.I)
        return y

    def act_gradient(
        self, d_u: Tensor, w2: Tensor, gate: Tensor, up: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """d_gate, d_up, p act, and shares of the weights' gradient; d_u `of_tokens`."""
        if self.library is not None:
            return self.library.act_gradient(d_u, w2, gate, up, weights)
        (M, I), C = gate.shape, self.sizes.C
        d_gate = torch.empty_like(gate)
        if self.hopper is not None and self.hopper.behind(d_u, w2, d_gate):
            return act_rows(d_gate, (gate, up), weights, self.plan, (self.form.beta, self.form.linear_beta))
        d_up, scaled = torch.empty_like(gate), torch.empty_like(gate)
        shares = weights.new_empty(self.blocks("act_gradient", I, C), M)
        self.rows("act_gradient", (d_u, w2, gate, up, weights, d_gate, d_up, scaled, shares), I, C)
        return d_gate, d_up, scaled, shares

    def row_gradient(self, d_gate: Tensor, d_up: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
        """d_gate w1 + d_up w3."""
        (M, I), C = d_gate.shape, self.sizes.C
        d_rows = d_gate.new_empty(M, C)
        if self.hopper is None or not self.hopper.row_gradient((d_gate, d_up), weights, d_rows):
            self.rows("row_gradient", (d_gate, d_up, *weights, d_rows), C, I)
        return d_rows

    def down_weight(self, d_u: Tensor, scaled: Tensor, w2: Tensor, total: GradientSum | None) -> Tensor | None:
        """d_w2, or None if it was added to its sum; d_u `of_tokens`."""
        if self.library is not None:
            return self.library.weight(d_u, scaled)
        (d_w2,), kind = _targets((w2,), (total,))
        adds = kind == "adds"
        if self.hopper is None or not self.hopper.down_weight(d_u, scaled, d_w2, adds=adds):
            self.weights("down_weight", (d_u, scaled, d_w2), (self.sizes.C, self.sizes.I), adds=adds)
        return d_w2 if kind == "alone" else None

    def gate_up_weight(
        self, d_gate: Tensor, d_up: Tensor, z: Tensor, weights: Sequence[Tensor], totals: Sequence[GradientSum | None]
    ) -> tuple[Tensor | None, Tensor | None]:
        """d_w1 and d_w3, or None if they were added to their sums; z `of_tokens`."""
        if self.library is not None:
            return self.library.weight(d_gate, z), self.library.weight(d_up, z)
        (d_w1, d_w3), kind = _targets(weights, totals)
        shape, adds = (self.sizes.I, self.sizes.C), kind == "adds"
        if self.hopper is None or not self.hopper.gate_up_weight((d_gate, d_up), z, (d_w1, d_w3), adds=adds):
            self.weights("gate_up_weight", (d_gate, d_up, z, d_w1, d_w3), shape, adds=adds)
        return (d_w1, d_w3) if kind == "alone" else (None, None)

    def blocks(self, name: str, width: int, depth: int) -> int:
        """Blocks of columns of a row product."""
        return triton.cdiv(width, tile_for(self.kind, self.plan.tile, name, width, depth).columns)

    def rows(self, name: str, tensors: Sequence[Tensor | None], width: int, depth: int) -> None:
        """A row product of `width` columns, a sum over `depth`."""
        tile = tile_for(self.kind, self.plan.tile, name, width, depth)
        plan, kernel = self.plan, KERNELS[name]
        known = self.constants | {"BM": plan.tile // tile.split, "BN": tile.columns, "BK": tile.depth}
        known["SPLIT"] = tile.split
        flags = {x: known[x] for x in kernel.arg_names if x in known}
        named = {"slot": plan.slot_M, "tile_expert": plan.tile_expert, "tile_row": plan.tile_row}
        named |= {"tile_end": plan.tile_end, "tiles": self.tiles * tile.split, "depth": depth, "M": len(plan.slot_M)}
        tables = {x: named[x] for x in kernel.arg_names if x in named}
        options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
        if self.tiles:
            grid = (self.tiles * tile.split * triton.cdiv(width, tile.columns),)
            start(kernel, *grid)(*tensors, **tables, **flags, **options)

    def weights(self, name: str, tensors: Sequence[Tensor], shape: tuple[int, int], *, adds: bool) -> None:
        """Gradients of every expert's matrices of one shape, written or, if it `adds`, added to what is there."""
        rows, columns, deep, warps, stages = WEIGHT_BLOCKS[self.kind][name]
        kernel = KERNELS[name]
        known = self.constants | {"BM": rows, "BN": columns, "BK": deep, "ADD": adds}
        flags = {x: known[x] for x in kernel.arg_names if x in known}
        grid = (self.sizes.E * triton.cdiv(shape[0], rows) * triton.cdiv(shape[1], columns),)
        start(kernel, *grid)(*tensors, self.plan.slot_M, self.plan.start_X, **flags, num_warps=warps, num_stages=stages)


def _targets(weights: Sequence[Tensor], totals: Sequence[GradientSum | None]) -> tuple[list[Tensor], str]:
    """Where a kernel puts gradients: "alone" in new tensors, or where sums are open "writes" them there or "adds"."""
    found = [total for total in totals if total is not None and total.is_open]
    begun = {total.is_begun for total in found}
    if len(found) < len(weights) or len(begun) > 1:
        return [torch.empty_like(weight) for weight in weights], "alone"
    return [total.take(weight) for total, weight in zip(found, weights)], "adds" if begun.pop() else "writes"


def _combine(y_MC: Tensor, plan: Plan, weights_Tk: Tensor, norm_C: Tensor, eps: float) -> tuple[Tensor, ...]:
    """(u, RMSNorm(u), reciprocal roots) of each token's weighted sum u."""
    (T, k), C = weights_Tk.shape, y_MC.shape[1]
    u, out = y_MC.new_empty(2, T, C).unbind()
    inverse = weights_Tk.new_empty(T)
    settings = rows_kernel.row_settings(C)
    if T:
        start(rows_kernel.combine_kernel, triton.cdiv(T, settings["BT"]))(
            *(y_MC, plan.row_Tk, weights_Tk, norm_C, u, out, inverse, T, eps),
            **settings,
            K=k,
            num_warps=rows_kernel.row_warps(C),
        )
    return u, out, inverse


def _combine_backward(d_out: Tensor, u: Tensor, inverse: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of u and of the norm's weight."""
    (T, C), settings = u.shape, rows_kernel.row_settings(u.shape[1])
    programs = max(1, min(triton.cdiv(T, settings["BT"]), NORM_PROGRAMS * _multiprocessors(u.device)))
    d_u, shares = torch.empty_like(u), inverse.new_empty(programs, C)
    start(rows_kernel.combine_backward_kernel, programs)(
        *(d_out, u, inverse, norm, d_u, shares, T, programs), **settings, num_warps=rows_kernel.row_warps(C)
    )
    return d_u, shares.sum(0).to(norm.dtype)


def _slot_gradient(d_rows: Tensor, shares: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Gradients of the latents and of the weights."""
    (T, k), (M, C) = plan.row_Tk.shape, d_rows.shape
    d_z, d_weights = d_rows.new_empty(T, C), shares.new_empty(T, k)
    settings = rows_kernel.row_settings(C)
    if T:
        start(rows_kernel.slot_gradient_kernel, triton.cdiv(T, settings["BT"]))(
            *(d_rows, shares, plan.row_Tk, d_z, d_weights, T, M, len(shares)),
            **settings,
            K=k,
            CHOICES=triton.next_power_of_2(k),
            num_warps=rows_kernel.row_warps(C),
        )
    return d_z, d_weights


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    """Of a GPU; the interpreter acts as a small one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _plan(tables: list[Tensor], tile: int) -> Plan:
    row, slot, start, tile_expert, tile_row, tile_end = tables
    return Plan(row, slot, start, tile_expert, tile_row, tile_end, tile)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Form, tile: int, *tensors: Tensor) -> Tensor:
        z, weights, w1, w3, w2, norm, *tables = tensors
        plan = _plan(tables, tile)
        (E, I, C), k = w1.shape, weights.shape[1]
        keep = any(ctx.needs_input_grad)
        with on_device(z):
            launch = _Launch(plan, Sizes(C, I, E, k), form, z, w1, w3, w2)
            gate, up, act = launch.gate_up(launch.of_tokens(z), w1, w3, keep=keep)
            u, out, inverse = _combine(launch.down(act, w2), plan, weights, norm, form.eps)
        if keep:
            name("moe_hidden", gate, up)
            name("moe_latents", u)
            ctx.save_for_backward(*tensors, gate, up, u, inverse)
            ctx.form, ctx.tile, ctx.sums = form, tile, [sum_of(weight) for weight in (w1, w3, w2)]
        return out

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, weights, w1, w3, w2, norm, *tables, gate, up, u, inverse = ctx.saved_tensors
        plan, wanted = _plan(tables, ctx.tile), ctx.needs_input_grad[2:]
        (E, I, C), k = w1.shape, weights.shape[1]
        d_w1 = d_w3 = d_w2 = d_z = d_weights = None
        with on_device(z):
            launch = _Launch(plan, Sizes(C, I, E, k), ctx.form, z, w1, w3, w2)
            d_u, d_norm = _combine_backward(grads[0].contiguous(), u, inverse, norm)
            rows = launch.of_tokens(d_u)
            d_gate, d_up, scaled, shares = launch.act_gradient(rows, w2, gate, up, weights)
            if wanted[4]:
                d_w2 = launch.down_weight(rows, scaled, w2, ctx.sums[2])
            if wanted[2] or wanted[3]:
                d_w1, d_w3 = launch.gate_up_weight(d_gate, d_up, launch.of_tokens(z), (w1, w3), ctx.sums[:2])
            if wanted[0] or wanted[1]:
                d_z, d_weights = _slot_gradient(launch.row_gradient(d_gate, d_up, (w1, w3)), shares, plan)
        return None, None, d_z, d_weights, d_w1, d_w3, d_w2, d_norm, *[None] * len(tables)


def mix_experts(
    z_TC: Tensor, weights_Tk: Tensor, plan: Plan, experts: tuple[Tensor, Tensor, Tensor], norm: tuple[Tensor, Form]
) -> Tensor:
    """RMSNorm(sum_i p_i w2 SiTU-GLU(w1 z, w3 z)) over each token's k experts, [T, C] in z's format.

    `experts` are w1 and w3 [E, I, C] and w2 [E, C, I], of z's format like the norm's weight; weights are float32.
    """
    weight_C, form = norm
    tables = plan[:-1]
    contiguous = (x.contiguous() for x in (z_TC, weights_Tk, *experts, weight_C))
    return _Experts.apply(form, plan.tile, *contiguous, *tables)
