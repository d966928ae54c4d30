"""LatentMoE for few tokens by four launches, and reads of depth by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from openk3.ops.backend import on_device, starts_early
from openk3.ops.few.linear import MOST_DEPTH, blocks_of, run, takes
from openk3.ops.latent_moe.layer import RoutedForm, RoutedWeights, by_kernels
from openk3.ops.latent_moe.packed import ExpertTiles


class Rest(NamedTuple):
    """What else a layer has: the map up [D, C], and gate and up [S, D] and down [D, S] of shared experts, or None."""

    up_DC: Tensor
    shared: tuple[Tensor, Tensor, Tensor] | None


def mixes_few(x_TD: Tensor, weights: RoutedWeights, form: RoutedForm, rest: Rest) -> bool:
    """Whether `mix_few` runs for this input: for inference, few tokens, experts that are not packed."""
    if isinstance(weights.experts, ExpertTiles):
        return False
    (_, inner, latent), shared = weights.experts[0].shape, rest.shared or ()
    width = len(shared[0]) if shared else 0
    if max(x_TD.shape[-1], inner, latent, width) > MOST_DEPTH or not takes(x_TD, x_TD.shape[-1]):
        return False
    tensors = (weights.down_CD, weights.router_ED, *weights.experts, weights.norm_C, rest.up_DC, *shared)
    if any(x.dtype != x_TD.dtype or not x.is_contiguous() for x in (x_TD, *tensors)):
        return False
    return by_kernels(x_TD, weights, form)


def mix_few(x_TD: Tensor, weights: RoutedWeights, form: RoutedForm, rest: Rest) -> Tensor:
    """y = W_up RMSNorm(sum_j p_j E_j(W_down x)) + Shared(x) [T, D], as `model.moe.LatentMoE` defines it.

    Rounded where the definition rounds; logits are sums of float32 products, and the choice is the definition's for
    the same logits, ties included. Every sum has one order.
    """
    from openk3.ops.few import mixture_kernel as kernels

    assert not isinstance(weights.experts, ExpertTiles)
    w1, w3, w2 = weights.experts
    (T, D), (E, inner, latent), k = x_TD.shape, w1.shape, form.k
    gate, up, down = rest.shared or (None, None, None)
    S = 0 if gate is None else len(gate)
    logits = torch.empty(T, E, dtype=torch.float32, device=x_TD.device)
    latents, sums = x_TD.new_empty(2, T, latent).unbind()
    shared, act = x_TD.new_empty(T, S) if S else None, x_TD.new_empty(T * k, inner)
    ids, share = logits.new_empty(T * k, dtype=torch.int32), logits.new_empty(T * k)
    situ = {"BETA": float(form.beta), "LINEAR": form.linear_beta and float(form.linear_beta)}

    known, warps = kernels.project_settings(D, T)
    blocks = sum(blocks_of(rows, known["R"]) for rows in (E, latent, S))
    tensors = x_TD, weights.router_ED, weights.down_CD, gate, up, logits, latents, shared, T
    settings = known | situ | {"E": E, "C": latent, "S": S}, warps
    run(kernels.project_kernel, blocks, tensors, settings, like=x_TD)

    known, warps = kernels.choose_settings(E, latent, inner)
    tensors = latents, logits, weights.bias_E, w1, w3, ids, share, act, form.scale
    settings = known | situ | {"CHOICES": k, "RENORMALIZE": form.renormalize, "I": inner}, warps
    run(kernels.choose_kernel, T * k * blocks_of(inner, known["R"]), tensors, settings, like=x_TD)

    known, warps = kernels.gather_settings(k, inner, latent)
    settings = known | {"C": latent}, warps
    blocks = T * blocks_of(latent, known["R"])
    run(kernels.gather_kernel, blocks, (act, w2, ids, share, sums), settings, like=x_TD)

    known, warps = kernels.finish_settings(D, latent, S, T)
    out = torch.empty_like(x_TD)
    tensors = sums, weights.norm_C, rest.up_DC, shared, down, out, T, form.eps
    run(kernels.finish_kernel, blocks_of(D, known["R"]), tensors, (known, warps), like=x_TD)
    return out


def reads_few(sources: Sequence[Tensor], weights: Sequence[Tensor], addend_TD: Tensor | None) -> bool:
    """Whether `read_few` runs: for inference, few tokens, sources and weights of one format."""
    x = sources[0]
    if not takes(x, x.shape[-1]):
        return False
    from openk3.ops.few.depth_kernel import MOST_SOURCES, MOST_WIDTH

    if len(sources) > MOST_SOURCES or x.shape[1] > MOST_WIDTH:
        return False
    tensors = (*sources, *weights, *(() if addend_TD is None else (addend_TD,)))
    return all(y.dtype == x.dtype and y.is_contiguous() for y in tensors)


def read_few(
    sources: Sequence[Tensor], weights: Sequence[Tensor], eps: float, addend_TD: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(the mixture's norm, the last source with the addend, weights [T, L]) of `ops.attn_res.mix_depth_normed`.

    `weights` are query, norm weight and out weight, [D] each.
    """
    import triton

    from openk3.ops.few.depth_kernel import depth_kernel, settings
    from openk3.ops.kda.gluon_launch import launch

    x = sources[0]
    (T, D), early = x.shape, starts_early(x.device)
    normed, newest = torch.empty_like(x), None if addend_TD is None else torch.empty_like(x)
    probs = torch.empty(T, len(sources), dtype=torch.float32, device=x.device)
    constants, warps = settings(D)
    options = {"num_warps": warps, "num_stages": 1} | ({"launch_pdl": True} if early else {})
    arguments = tuple(sources), addend_TD, *weights, newest, normed, probs, eps
    with on_device(x):
        if isinstance(depth_kernel, triton.JITFunction):
            launch(depth_kernel, T, arguments, constants | {"EARLY": early}, options)
        else:
            depth_kernel[(T,)](*arguments, **constants, EARLY=early, **options)
    return normed, sources[-1] if newest is None else newest, probs
