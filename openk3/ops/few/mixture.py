"""LatentMoE for few tokens by four launches, which may read depth themselves, and reads of depth by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from openk3.ops.backend import on_device, starts_early
from openk3.ops.few.linear import MOST_DEPTH, add_linear, blocks_of, run, takes
from openk3.ops.latent_moe.layer import RoutedForm, RoutedWeights, by_kernels
from openk3.ops.latent_moe.packed import ExpertTiles

MOST_READERS = 1  # tokens for which programs read depth themselves: with two, one after the other, launches are faster


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

    (T, D), E, latent = x_TD.shape, len(weights.router_ED), len(weights.down_CD)
    gate, up, _ = rest.shared or (None, None, None)
    S = 0 if gate is None else len(gate)
    found = _Projected.empty(x_TD, E, latent, S)
    known, warps = kernels.project_settings(D, T)
    blocks = sum(blocks_of(rows, known["R"]) for rows in (E, latent, S))
    tensors = x_TD, weights.router_ED, weights.down_CD, gate, up, *found, T
    settings = known | _situ(form.beta, form.linear_beta) | {"E": E, "C": latent, "S": S}, warps
    run(kernels.project_kernel, blocks, tensors, settings, like=x_TD)
    out = torch.empty_like(x_TD)
    _experts(found, weights, form, rest, out, add=False)
    return out


class _Projected(NamedTuple):
    """What an input is mapped to first: logits [T, E] in float32, latents [T, C], shared experts' activations."""

    logits_TE: Tensor
    latents_TC: Tensor
    act_TS: Tensor | None

    @classmethod
    def empty(cls, like: Tensor, E: int, C: int, S: int) -> _Projected:
        T = like.shape[-2]
        logits = torch.empty(T, E, dtype=torch.float32, device=like.device)
        return cls(logits, like.new_empty(T, C), like.new_empty(T, S) if S else None)


def _situ(beta: float, linear_beta: float | None) -> dict[str, float | None]:
    return {"BETA": float(beta), "LINEAR": linear_beta and float(linear_beta)}


def _experts(
    found: _Projected, weights: RoutedWeights, form: RoutedForm, rest: Rest, out_TD: Tensor, *, add: bool
) -> None:
    """The other three launches; if `add`, to what is in `out_TD` already."""
    from openk3.ops.few import mixture_kernel as kernels

    assert not isinstance(weights.experts, ExpertTiles)
    w1, w3, w2 = weights.experts
    (T, D), (E, inner, latent), k = out_TD.shape, w1.shape, form.k
    logits, latents, shared = found
    S = 0 if shared is None else shared.shape[1]
    act, sums = out_TD.new_empty(T * k, inner), torch.empty_like(latents)

    known, warps = kernels.choose_settings(E, k, latent, inner, T)
    settings = known | _situ(form.beta, form.linear_beta) | {"I": inner}, warps
    tensors = latents, logits, weights.bias_E, w1, w3, act
    run(kernels.choose_kernel, T * k * blocks_of(inner, known["R"] * known["TIMES"]), tensors, settings, like=out_TD)

    known, warps = kernels.gather_settings(E, k, inner, latent)
    settings = known | {"C": latent, "RENORMALIZE": form.renormalize}, warps
    tensors = act, w2, logits, weights.bias_E, sums, form.scale
    run(kernels.gather_kernel, T * blocks_of(latent, known["R"]), tensors, settings, like=out_TD)

    known, warps = kernels.finish_settings(D, latent, S, T)
    down = None if rest.shared is None else rest.shared[2]
    tensors = sums, weights.norm_C, rest.up_DC, shared, down, out_TD if add else None, out_TD, T, form.eps
    run(kernels.finish_kernel, blocks_of(D, known["R"]), tensors, (known, warps), like=out_TD)


@dataclass(frozen=True)
class Reading:
    """A read of depth: the first `sources` of rows [L, T, D]; query, norm weight and out weight [D]; eps of both."""

    stream_LTD: Tensor
    sources: int
    weights: tuple[Tensor, Tensor, Tensor]
    eps: float

    def settings(self, rows: int, matrices: int = 1) -> tuple[dict[str, int], int]:
        """(constants, warps) of kernels of `read_kernel`."""
        from openk3.ops.few.read_kernel import read_settings

        most, T, D = self.stream_LTD.shape
        constants, warps = read_settings(rows, D, most, matrices)
        return constants | {"TOKENS": T}, warps


def reads_itself(x_TD: Tensor, sources: int) -> bool:
    """Whether kernels read depth themselves for tokens like x: for inference, very few tokens, widths that fit."""
    from openk3.ops.few.depth_kernel import MOST_SOURCES, MOST_WIDTH

    fits = x_TD.shape[1] <= MOST_WIDTH and sources <= MOST_SOURCES and x_TD.is_contiguous()
    return fits and len(x_TD) <= MOST_READERS and takes(x_TD, x_TD.shape[1])


def read_linear(reading: Reading, weight_OD: Tensor) -> Tensor:
    """The norm of what is read, times W^T [T, O]: `ops.attn_res.mix_depth_normed` and a product in one launch."""
    from openk3.ops.few.read_kernel import read_linear_kernel

    stream, O = reading.stream_LTD, len(weight_OD)
    known, warps = reading.settings(O)
    out = stream.new_empty(stream.shape[1], O)
    tensors = stream, *reading.weights, weight_OD, out, reading.sources, reading.eps
    run(read_linear_kernel, blocks_of(O, known["R"]), tensors, (known | {"ROWS": O}, warps), like=stream)
    return out


def read_mixture(
    reading: Reading, weights: RoutedWeights, form: RoutedForm, rest: Rest, into_TD: Tensor, *, add: bool
) -> None:
    """`mix_few` of the norm of what is read; into_TD takes it, and if `add` keeps what it was beside."""
    found = _project(reading, (weights.router_ED, weights.down_CD), rest.shared, (form.beta, form.linear_beta))
    _experts(found, weights, form, rest, into_TD, add=add)


def read_dense(
    reading: Reading, weights: tuple[Tensor, Tensor, Tensor], betas: tuple[float, float | None], into_TD: Tensor,
    *, add: bool,
) -> None:  # fmt: skip
    """As `read_mixture` for a dense part: gate and up [S, D] and down [D, S]."""
    act_TS = _project(reading, None, weights, betas).act_TS
    assert act_TS is not None
    if act_TS.shape[1] <= MOST_DEPTH:
        add_linear(act_TS, weights[2], into_TD, add=add)
    elif add:
        into_TD += F.linear(act_TS, weights[2])
    else:
        torch.mm(act_TS, weights[2].T, out=into_TD)


def _project(
    reading: Reading,
    maps: tuple[Tensor, Tensor] | None,
    shared: tuple[Tensor, Tensor, Tensor] | None,
    betas: tuple[float, float | None],
) -> _Projected:
    """Router and map to latents, if there are such, and the first half of shared experts or a dense part."""
    from openk3.ops.few.read_kernel import read_project_kernel

    stream = reading.stream_LTD
    router, down = maps or (None, None)
    gate, up, _ = shared or (None, None, None)
    sizes = [0 if weight is None else len(weight) for weight in (router, down, gate)]
    found = _Projected.empty(stream, *sizes)
    known, warps = reading.settings(sum(sizes), 2)
    constants = known | dict(zip("ECS", sizes)) | _situ(*betas)
    outputs = found if maps is not None else (None, None, found.act_TS)
    tensors = stream, *reading.weights, router, down, gate, up, *outputs, reading.sources, reading.eps
    blocks = sum(blocks_of(size, known["R"]) for size in sizes)
    run(read_project_kernel, blocks, tensors, (constants, warps), like=stream)
    return found


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
