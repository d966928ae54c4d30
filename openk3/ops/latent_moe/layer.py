"""A layer's routed experts by kernels, from its input to what the up-projection takes, without asking the GPU anything.

No size depends on what the router chooses, so a step of fixed length can be captured as a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.backend import pick
from openk3.ops.latent_moe.packed import ExpertTiles
from openk3.ops.routing import Routes
from openk3.ops.saved import again, name

MOST_EXPERTS, MOST_CHOICES = 1024, 32  # of a layer, of a token: what the routing kernels hold in registers


@dataclass(frozen=True)
class RoutedWeights:
    """Weights of a layer's routed part; all of one format but the bias, which is float32, and packed experts."""

    down_CD: Tensor
    router_ED: Tensor
    bias_E: Tensor
    experts: (
        tuple[Tensor, Tensor, Tensor] | ExpertTiles
    )  # w1 and w3 [E, I, C] and w2 [E, C, I], or all of them in MXFP4
    norm_C: Tensor


@dataclass(frozen=True)
class RoutedForm:
    """How a layer routes, activates and normalises."""

    k: int
    renormalize: bool
    scale: float
    beta: float
    linear_beta: float | None
    eps: float
    grouped: bool = False  # only some groups of experts are eligible


def by_kernels(x_TD: Tensor, weights: RoutedWeights, form: RoutedForm) -> bool:
    """Whether `latent_experts` runs for this input: `ops.backend.pick`'s rules and those of `_obstacle`."""
    return pick("latent_moe", x_TD, obstacle=_obstacle(x_TD, weights, form)) == "triton"


def _obstacle(x_TD: Tensor, weights: RoutedWeights, form: RoutedForm) -> str | None:
    """Why the kernels cannot take a layer, or None."""
    w = weights
    dense = () if isinstance(w.experts, ExpertTiles) else w.experts
    kinds = {tensor.dtype for tensor in (w.down_CD, w.router_ED, *dense, w.norm_C)}
    if kinds != {x_TD.dtype} or w.bias_E.dtype != torch.float32:
        return f"weights are {', '.join(sorted(map(str, kinds)))} with a bias of {w.bias_E.dtype}, x is {x_TD.dtype}"
    if not dense and x_TD.dtype == torch.float16:
        return "packed experts do not fit into float16"
    if not dense and torch.is_grad_enabled() and any(x.requires_grad for x in (x_TD, w.down_CD, w.router_ED, w.norm_C)):
        return "those of packed experts have no gradients"
    if form.grouped:
        return "they choose among all experts, not among groups of them"
    if len(w.router_ED) > MOST_EXPERTS or form.k > MOST_CHOICES:
        return f"{len(w.router_ED)} experts, {form.k} a token: more than {MOST_EXPERTS}, {MOST_CHOICES}"
    return None


def latent_experts(
    x_TD: Tensor, weights: RoutedWeights, form: RoutedForm, *, with_scores: bool = False
) -> tuple[Tensor, Tensor | None, Routes]:
    """(RMSNorm(sum_j p_j E_j(W_down x)) [T, C], scores_TE if they are wanted, routes); report eqs. 11-13.

    Equal to the reference in `model.moe.LatentMoE` up to rounding: experts' outputs are rounded to x's format before
    their sum, as there. The choice is the reference's for the same logits, ties included. Latents, weights and scores
    carry gradients; those of experts without tokens are exactly zero; every sum has one order.
    """
    from openk3.ops.latent_moe.experts_fused import Form, mix_experts, tile_rows
    from openk3.ops.latent_moe.packed_fused import mix_packed, packed_tile_rows
    from openk3.ops.latent_moe.project_fused import project_and_route
    from openk3.ops.latent_moe.route_fused import Choice, sort

    w = weights
    choice = Choice(form.k, form.renormalize, form.scale)
    z_TC, routed = project_and_route(x_TD, (w.down_CD, w.router_ED), w.bias_E, choice, with_scores=with_scores)
    norm = w.norm_C, Form(form.beta, form.linear_beta, form.eps)
    if isinstance(w.experts, ExpertTiles):
        plan = sort(routed, packed_tile_rows(z_TC, form.k, w.experts))
        u_TC = mix_packed(z_TC, routed.weights_Tk, plan, w.experts, norm)
    else:
        plan = sort(routed, tile_rows(z_TC, form.k, len(w.router_ED)))
        experts = w.experts
        name("moe_latents", z_TC)
        u_TC = again("moe_hidden", lambda z_TC: mix_experts(z_TC, routed.weights_Tk, plan, experts, norm), z_TC)
        name("moe_latents", u_TC)
    load_E = plan.start_X.diff().long() if with_scores else None
    return u_TC, routed.scores_TE, Routes(routed.ids_Tk, routed.weights_Tk, routed.threshold_T, load_E)
