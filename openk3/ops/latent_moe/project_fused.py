"""A layer's input to latents, logits and routes: both projections and the expert choice, as one differentiable step."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from openk3.ops.backend import on_device
from openk3.ops.latent_moe.project_kernel import GROUP, block_for, project_kernel
from openk3.ops.latent_moe.route_fused import Choice, Routed, logits_gradient, route
from openk3.ops.norm import at_least_float32

# Inputs up to this width take one launch for both products; for wider ones the library's two are faster.
ONE_LAUNCH = 2048


def project(x_TD: Tensor, down_CD: Tensor, router_ED: Tensor) -> tuple[Tensor, Tensor]:
    """(x down^T in x's format, x router^T in float32).

    The released router casts both operands to float32 before it multiplies. For one 16-bit format throughout, products
    are exact in float32 and are added there by tensor cores: the same sums in another order.
    """
    kinds = {x_TD.dtype, down_CD.dtype, router_ED.dtype}
    if len(kinds) > 1 or x_TD.dtype.itemsize != 2:
        return F.linear(x_TD, down_CD), F.linear(at_least_float32(x_TD), at_least_float32(router_ED))
    if x_TD.shape[1] > ONE_LAUNCH and x_TD.device.type == "cuda":
        return F.linear(x_TD, down_CD), torch.mm(x_TD, router_ED.T, out_dtype=torch.float32)
    return project_once(x_TD, down_CD, router_ED)


def project_once(x_TD: Tensor, down_CD: Tensor, router_ED: Tensor) -> tuple[Tensor, Tensor]:
    """`project` in one launch, for one 16-bit format."""
    (T, D), C, E = x_TD.shape, len(down_CD), len(router_ED)
    x_TD, down_CD, router_ED = x_TD.contiguous(), down_CD.contiguous(), router_ED.contiguous()
    z, logits = x_TD.new_empty(T, C), torch.empty(T, E, dtype=torch.float32, device=x_TD.device)
    major, minor = torch.cuda.get_device_capability(x_TD.device) if x_TD.device.type == "cuda" else (9, 0)
    rows, columns, depth, warps, stages = block_for(10 * major + minor)
    programs = triton.cdiv(T, rows) * (triton.cdiv(C, columns) + triton.cdiv(E, columns))
    if programs:
        with on_device(x_TD):
            project_kernel[(programs,)](
                *(x_TD, down_CD, router_ED, z, logits, T, D, D, C, E, rows, columns, depth, GROUP),
                num_warps=warps,
                num_stages=stages,
            )
    return z, logits


class Projected(NamedTuple):
    """Latents and routes; of these, latents, weights and scores carry gradients."""

    z_TC: Tensor
    routed: Routed


class _Project(torch.autograd.Function):
    """Outputs: latents, weights, scores (None if they are not wanted), then the rest of `Routed`."""

    @staticmethod
    def forward(ctx: Any, choice: Choice, with_scores: bool, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        x, down, router, bias = tensors
        z, logits = project(x, down, router)
        routed = route(logits, bias, choice, with_scores=with_scores)
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
