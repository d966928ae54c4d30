"""Linear maps of few tokens, with the norm before them: by a kernel that reads a weight once, for all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openk3.ops.backend import on_device, pick, starts_early
from openk3.ops.norm import rms_norm

MOST_TOKENS, MOST_DEPTH = 8, 2048  # that the kernels take; more tokens keep a library's kernels busy


def takes(x: Tensor, depth: int) -> bool:
    """Whether kernels multiply x [T, D], or parts of it, by matrices of `depth` columns: few tokens, for inference."""
    few = x.ndim == 2 and 0 < len(x) <= MOST_TOKENS and 0 < depth <= MOST_DEPTH and x.stride(-1) == 1
    if not few or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return False
    return pick("few_tokens", x) == "triton"


def linear(x_TD: Tensor, weight_OD: Tensor, norm: tuple[Tensor, float] | None = None) -> Tensor:
    """x W^T [T, O], or rms_norm(x) W^T if there are a norm weight [D] and its eps; in x's format.

    Raises what `F.linear` raises for shapes and dtypes that do not fit.
    """
    tensors = (x_TD, weight_OD) if norm is None else (x_TD, weight_OD, norm[0])
    alike = len({x.dtype for x in tensors}) == 1 and all(x.is_contiguous() for x in tensors[1:])
    if alike and weight_OD.shape[1:] == x_TD.shape[1:] and takes(x_TD, x_TD.shape[-1]):
        return _by_kernel(x_TD, weight_OD, norm)
    return F.linear(x_TD if norm is None else rms_norm(x_TD, *norm), weight_OD)


def add_linear(x_TD: Tensor, weight_OD: Tensor, into_TO: Tensor, *, add: bool) -> None:
    """into = x W^T [T, O], rounded, or unless `add` is False plus what it was; `takes` must hold for x."""
    _launch(x_TD, weight_OD, None, into_TO, into_TO if add else None)


def through(layer: nn.Module, x_TD: Tensor) -> Tensor:
    """layer(x); `linear` where the layer is nothing but its weight."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    if type(layer) is not nn.Linear or layer.bias is not None or hooked:
        return layer(x_TD)
    return linear(x_TD, layer.weight)


def _by_kernel(x_TD: Tensor, weight_OD: Tensor, norm: tuple[Tensor, float] | None) -> Tensor:
    out = x_TD.new_empty(len(x_TD), len(weight_OD))
    _launch(x_TD, weight_OD, norm, out, None)
    return out


def _launch(
    x_TD: Tensor, weight_OD: Tensor, norm: tuple[Tensor, float] | None, out: Tensor, before: Tensor | None
) -> None:
    from openk3.ops.few.product_kernel import linear_kernel, shape_for, tokens_for

    (T, D), O = x_TD.shape, len(weight_OD)
    how = shape_for(O, D)
    weight, eps = (None, 0.0) if norm is None else norm
    tensors = x_TD, weight, weight_OD, before, out, T, eps
    constants = {"STRIDE": x_TD.stride(0), "ROWS": O, "K": D} | how.constants | tokens_for(T, how)
    run(linear_kernel, blocks_of(O, how.rows), tensors, (constants, how.warps), like=x_TD)


def blocks_of(size: int, block: int) -> int:
    """How many blocks a size takes."""
    return -(-size // block)


def run(
    kernel: Any, programs: int, arguments: tuple[Any, ...], settings: tuple[dict[str, Any], int], *, like: Tensor
) -> None:
    """Launch a kernel of these modules: `settings` are its constants, EARLY excepted, and its warps."""
    from openk3.ops.launch import start

    constants, warps = settings
    early = starts_early(like.device)
    known = constants | {"EARLY": early}
    names = kernel.arg_names[len(arguments) :]
    options: dict[str, Any] = {"num_warps": warps, "num_stages": 1} | ({"launch_pdl": True} if early else {})
    if programs:
        with on_device(like):
            start(kernel, programs)(*arguments, *(known[name] for name in names), **options)
