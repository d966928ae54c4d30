"""A layer's input to latents and routes: both projections and the expert choice, as one differentiable step."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from openk3.ops.backend import on_device
from openk3.ops.latent_moe.logits_kernel import block_for, logits_kernel
from openk3.ops.latent_moe.route_fused import Choice, Routed, logits_gradient, route
from openk3.ops.launch import start
from openk3.ops.norm import at_least_float32


def router_logits(x_TD: Tensor, router_ED: Tensor) -> Tensor:
    """x router^T in float32, as exact as if both were cast to float32 first: by the kernel for one 16-bit format."""
    if x_TD.dtype != router_ED.dtype or x_TD.dtype.itemsize != 2:
        return F.linear(at_least_float32(x_TD), at_least_float32(router_ED))
    (T, D), E = x_TD.shape, len(router_ED)
    x_TD, router_ED = x_TD.contiguous(), router_ED.contiguous()
    logits = torch.empty(T, E, dtype=torch.float32, device=x_TD.device)
    major, minor = torch.cuda.get_device_capability(x_TD.device) if x_TD.device.type == "cuda" else (9, 0)
    rows, columns, depth, warps, stages = block_for(T, E, 10 * major + minor)
    if T:
        with on_device(x_TD):
            start(logits_kernel, triton.cdiv(T, rows) * triton.cdiv(E, columns))(
                *(x_TD, router_ED, logits, T, D, 1.0, D, E, rows, columns, depth), num_warps=warps, num_stages=stages
            )
    return logits


class Projected(NamedTuple):
    """Latents and routes; of these, latents, weights and scores carry gradients."""

    z_TC: Tensor
    routed: Routed


class _Project(torch.autograd.Function):
    """Outputs: latents, weights, scores (None if they are not wanted), then the rest of `Routed`."""

    @staticmethod
    def forward(ctx: Any, choice: Choice, with_scores: bool, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        x, down, router, bias = tensors
        z = F.linear(x, down)
        routed = route(router_logits(x, router), bias, choice, with_scores=with_scores)
        ids, weights, chosen, threshold, scores, masks, counts = routed
        ctx.save_for_backward(x, down, router, *routed)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ids, chosen, threshold, masks, counts)
        ctx.choice = choice
        return z, weights, scores, ids, chosen, threshold, masks, counts

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_z, d_weights, d_scores, *_ = grads
        x, down, router, *saved = ctx.saved_tensors
        routed, wanted = Routed(*saved), ctx.needs_input_grad[2:]
        d_logits = None
        if d_weights is not None:
            d_logits = logits_gradient(d_weights.contiguous(), routed, ctx.choice, x.dtype)
        if d_scores is not None and routed.scores_TE is not None:
            direct = d_scores * routed.scores_TE * (1 - routed.scores_TE)
            d_logits = (direct if d_logits is None else direct + d_logits).to(x.dtype)
        d_x = d_down = d_router = None
        if d_z is not None:
            d_x = d_z @ down if wanted[0] else None
            d_down = d_z.T @ x if wanted[1] else None
        if d_logits is not None:
            if wanted[0]:
                router = router.to(x.dtype)
                d_x = d_logits @ router if d_x is None else d_x.addmm_(d_logits, router)
            d_router = (d_logits.T @ x).to(router.dtype) if wanted[2] else None
        return None, None, d_x, d_down, d_router, None


def project_and_route(
    x_TD: Tensor, weights: tuple[Tensor, Tensor], bias_E: Tensor, choice: Choice, *, with_scores: bool
) -> Projected:
    """Latents by the first of `weights`, [C, D], and routes by the second, [E, D], and the balancing bias."""
    z, weights_Tk, scores, ids, chosen, threshold, masks, counts = _Project.apply(
        choice, with_scores, x_TD, *weights, bias_E
    )
    return Projected(z, Routed(ids, weights_Tk, chosen, threshold, scores, masks, counts))
