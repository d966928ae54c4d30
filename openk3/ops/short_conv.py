"""Causal depthwise convolution of a few taps with SiLU, over packed sequences with a carried window.

All tokens are convolved as one long sequence by shifted multiply-adds; then the first tokens of each sequence, whose
taps reach before its start, are computed again with the window in place of the foreign tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import pick
from openk3.ops.norm import at_least_float32
from openk3.ops.sequences import check_tensors, sequence_bounds
from openk3.ops.unrecorded import apply

_FORMATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def short_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    *,
    window_NCW: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: bool = True,
) -> tuple[Tensor, Tensor]:
    """y_t = SiLU(sum_i w[:, i] * x[t - W + 1 + i]) inside each sequence (report §2.1, W = 4).

    Before a sequence's start come the last W - 1 inputs of its window, or zeros. Accumulates in at least float32 and
    returns y [T, C] in x.dtype with the new window [N, C, W]: the last W raw inputs, oldest first. An empty sequence
    keeps its window. cu_seqlens None means one sequence. Differentiable in x, weight and window. Raises ValueError if
    shapes, formats or devices do not fit.
    """
    windows = None if window_NCW is None else (window_NCW,)
    (y_TC,), (recent_NCW,) = short_convs(
        (x_TC,), (weight_CW,), windows_NCW=windows, cu_seqlens=cu_seqlens, activation=activation
    )
    return y_TC, recent_NCW


def short_convs(
    xs_TC: Sequence[Tensor],
    weights_CW: Sequence[Tensor],
    *,
    windows_NCW: Sequence[Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    activation: bool = True,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """`short_conv` of several inputs over the same sequences (q, k and v): (outputs, new windows).

    On a GPU up to three inputs of one shape and dtype are one kernel launch.
    """
    if not xs_TC:
        raise ValueError("short_convs: no inputs")
    check_tensors((_name("x_TC", 0, len(xs_TC)), xs_TC[0]))
    if xs_TC[0].ndim != 2:
        raise ValueError(f"{_name('x_TC', 0, len(xs_TC))}: expected [tokens, channels], got {list(xs_TC[0].shape)}")
    bounds = sequence_bounds(cu_seqlens, len(xs_TC[0]))
    _check(xs_TC, weights_CW, windows_NCW, len(bounds) - 1)
    windows = None if windows_NCW is None else [window.to(x.dtype) for window, x in zip(windows_NCW, xs_TC)]
    kinds = {(x.shape, x.dtype, weight.shape, weight.dtype) for x, weight in zip(xs_TC, weights_CW)}
    together = len(xs_TC) if len(kinds) == 1 and len(xs_TC) <= 3 else 1
    outputs, recents = [], []
    for first in range(0, len(xs_TC), together):
        part = slice(first, first + together)
        run = (
            _convolve_by_kernel
            if pick("short_conv", xs_TC[first], name=_name("x_TC", first, len(xs_TC))) == "triton"
            else _convolve
        )
        y, recent = run(xs_TC[part], weights_CW[part], windows and windows[part], bounds, activation)
        outputs += y
        recents += recent
    return tuple(outputs), tuple(recents)


Results = tuple[Sequence[Tensor], Sequence[Tensor]]


def _check(
    xs_TC: Sequence[Tensor], weights_CW: Sequence[Tensor], windows_NCW: Sequence[Tensor] | None, num_sequences: int
) -> None:
    """Raise ValueError unless every input has its weight, and its windows if there are any, of its kind."""
    windows = [None] * len(xs_TC) if windows_NCW is None else windows_NCW
    if not len(xs_TC) == len(weights_CW) == len(windows):
        raise ValueError(f"short_conv: {len(xs_TC)} inputs, {len(weights_CW)} weights, windows of {len(windows)}")
    for n, (x, weight, window) in enumerate(zip(xs_TC, weights_CW, windows)):
        x_name, weight_name, window_name = (_name(name, n, len(xs_TC)) for name in ("x_TC", "weight_CW", "window_NCW"))
        parts = [(x_name, x), (weight_name, weight)]
        check_tensors(*parts, *([] if windows_NCW is None else [(window_name, window)]))
        parts += [] if window is None else [(window_name, window)]
        if len(x) != len(xs_TC[0]):
            raise ValueError(f"{x_name}: {len(x)} tokens, but {_name('x_TC', 0, len(xs_TC))} has {len(xs_TC[0])}")
        if x.ndim != 2 or weight.ndim != 2 or len(weight) != x.shape[1]:
            raise ValueError(f"short_conv: {weight_name} {list(weight.shape)} does not fit {x_name} {list(x.shape)}")
        if window is not None and window.shape != (num_sequences, *weight.shape):
            raise ValueError(
                f"{window_name}: expected {[num_sequences, *weight.shape]} for {num_sequences} sequences,"
                f" got {list(window.shape)}"
            )
        if 0 in weight.shape:
            raise ValueError(f"short_conv: {weight_name} {list(weight.shape)} needs a channel and a tap at least")
        for name, part in parts:
            if part.dtype not in _FORMATS or part.device != xs_TC[0].device:
                raise ValueError(
                    f"short_conv: {name} must be floating point of 16 bits or more on {xs_TC[0].device},"
                    f" got {part.dtype} on {part.device}"
                )


def _name(argument: str, index: int, count: int) -> str:
    """How the caller knows one of several: by the number that it has among them."""
    plural = {"x_TC": "xs_TC", "weight_CW": "weights_CW", "window_NCW": "windows_NCW"}
    return argument if count == 1 else f"{plural[argument]}[{index}]"


def _convolve_by_kernel(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    windows: Sequence[Tensor] | None,
    bounds: tuple[int, ...],
    activation: bool,
) -> Results:
    from openk3.ops.short_conv_fused import Layout, convolve

    return convolve(Layout(len(xs), bounds, activation), xs, weights, windows)


def _convolve(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    windows: Sequence[Tensor] | None,
    bounds: tuple[int, ...],
    activation: bool,
) -> Results:
    taps = weights[0].shape[1]
    edges = _edges(bounds, taps, xs[0].device)
    if windows is None:
        windows = [x.new_zeros(len(bounds) - 1, x.shape[1], taps) for x in xs]
    pairs = [
        apply(_ShortConv, edges, activation, x, weight, window.transpose(1, 2))
        for x, weight, window in zip(xs, weights, windows)
    ]
    return [y for y, _ in pairs], [recent_NWC.transpose(1, 2) for _, recent_NWC in pairs]


@dataclass(frozen=True)
class _Edges:
    """Which tokens lie near a sequence's start or end, and where their inputs are.

    Inputs are looked up in a pool: the windows' N * W rows, then the rows of `token_P`.
    """

    head_B: Tensor  # tokens at positions 0 .. W - 2 of their sequence
    token_P: Tensor  # tokens that the pool needs
    reach_X: Tensor  # pool row of each tap of each head token, [B * W]
    recent_X: Tensor  # pool row of each slot of the new windows, [N * W]


@lru_cache(maxsize=8)
def _edges(bounds: tuple[int, ...], taps: int, device: torch.device) -> _Edges:
    """Edges of sequences [bounds[n], bounds[n + 1]); remembered, because every layer of a step asks again."""
    start_N = torch.tensor(bounds)[:-1]
    length_N = torch.tensor(bounds).diff()
    position_NB = torch.arange(taps - 1).expand(len(length_N), -1)
    near_NB = position_NB < length_N[:, None]
    sequence_B = near_NB.nonzero()[:, 0]
    head_B = (start_N[:, None] + position_NB)[near_NB]
    back_W = torch.arange(taps)
    reach_X = (position_NB[near_NB][:, None] - taps + 1 + back_W).flatten()
    recent_X = (length_N[:, None] - taps + back_W).flatten()
    position_X = torch.cat([reach_X, recent_X])
    sequence_X = torch.cat([sequence_B, torch.arange(len(length_N))]).repeat_interleave(taps)
    inside_X = position_X >= 0
    row_X = sequence_X * taps + taps + position_X
    row_X[inside_X] = len(length_N) * taps + torch.arange(int(inside_X.sum()))
    token_P = (start_N[sequence_X] + position_X)[inside_X]
    reach, recent = row_X.split([len(reach_X), len(recent_X)])
    return _Edges(head_B.to(device), token_P.to(device), reach.to(device), recent.to(device))


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edges: _Edges, activation: bool, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, window = inputs
        N, W, C = window.shape
        wide = at_least_float32(x)
        weight_WC = weight.to(wide.dtype).T.contiguous()
        y = wide * weight_WC[-1]
        for shift in range(1, min(W, len(x))):
            y[shift:].addcmul_(wide[:-shift], weight_WC[W - 1 - shift])
        pool = torch.cat([window.reshape(-1, C), x.index_select(0, edges.token_P)])
        reach = at_least_float32(pool.index_select(0, edges.reach_X)).view(-1, W, C)
        y.index_copy_(0, edges.head_B, (reach * weight_WC).sum(1))
        ctx.save_for_backward(x, weight, reach, y if activation else None)
        ctx.set_materialize_grads(False)
        ctx.edges, ctx.pool_rows, ctx.activation = edges, len(pool), activation
        recent = pool.index_select(0, edges.recent_X).view(N, W, C)
        return (F.silu(y) if activation else y).to(x.dtype), recent

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_out, d_recent = grads
        x, weight, reach, y = ctx.saved_tensors
        edges, (_, W, C) = ctx.edges, reach.shape
        wide = at_least_float32(x)
        weight_WC = weight.to(wide.dtype).T.contiguous()
        d_y = torch.zeros_like(wide) if d_out is None else at_least_float32(d_out)
        d_y = torch.ops.aten.silu_backward(d_y, y) if ctx.activation else d_y.clone()
        d_head = d_y.index_select(0, edges.head_B)
        d_y.index_fill_(0, edges.head_B, 0)
        d_x = d_y * weight_WC[-1]
        product = d_y * wide
        d_weight = [product.sum(0)]
        for shift in range(1, min(W, len(x))):
            d_x[:-shift].addcmul_(d_y[shift:], weight_WC[W - 1 - shift])
            d_weight.append(torch.mul(d_y[shift:], wide[:-shift], out=product[shift:]).sum(0))
        d_weight += [torch.zeros_like(d_weight[0])] * (W - len(d_weight))
        d_weight_WC = torch.stack(d_weight[::-1]).add_((d_head[:, None] * reach).sum(0))
        d_pool = wide.new_zeros(ctx.pool_rows, C)
        d_pool.index_add_(0, edges.reach_X, (d_head[:, None] * weight_WC).view(-1, C))
        if d_recent is not None:
            d_pool.index_add_(0, edges.recent_X, at_least_float32(d_recent).reshape(-1, C))
        num_window_rows = ctx.pool_rows - len(edges.token_P)
        d_x.index_add_(0, edges.token_P, d_pool[num_window_rows:])
        d_window = d_pool[:num_window_rows].view(-1, W, C)
        return None, None, d_x.to(x.dtype), d_weight_WC.T.to(weight.dtype), d_window.to(x.dtype)
