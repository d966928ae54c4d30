"""Causal depthwise convolution of a few taps with SiLU, over packed sequences with a carried window."""

import torch
import torch.nn.functional as F
from torch import Tensor

from openk3.ops.norm import at_least_float32


def short_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    *,
    window_NCW: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: bool = True,
) -> tuple[Tensor, Tensor]:
    """y_t = SiLU(sum_i w[:, i] * x[t - W + 1 + i]) inside each sequence, zeros (or the window) before its start."""
    num_taps = weight_CW.shape[1]
    bounds = [0, x_TC.shape[0]] if cu_seqlens is None else cu_seqlens.tolist()
    if window_NCW is None:
        window_NCW = x_TC.new_zeros(len(bounds) - 1, x_TC.shape[1], num_taps)
    outputs, windows = [], []
    for n, (start, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        full_CT = torch.cat([window_NCW[n].to(x_TC.dtype), x_TC[start:end].T], dim=1)
        windows.append(full_CT[:, -num_taps:])
        wide = at_least_float32(full_CT[:, 1:])[None]
        weight = weight_CW.to(wide.dtype)[:, None]
        outputs.append(F.conv1d(wide, weight, groups=x_TC.shape[1])[0].T)
    y_TC = torch.cat(outputs)
    return (F.silu(y_TC) if activation else y_TC).to(x_TC.dtype), torch.stack(windows)
