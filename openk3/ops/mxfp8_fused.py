"""Launches of the MXFP8 kernels, for shapes and dtypes that `ops.mxfp8` has checked."""

import torch
import triton
from torch import Tensor

from openk3.ops.backend import on_device
from openk3.ops.launch import start
from openk3.ops.mxfp import BLOCK
from openk3.ops.mxfp8_kernel import (
    ROWS,
    WARPS,
    mxfp8_dequantize_kernel,
    mxfp8_quantize_kernel,
    mxfp8_round_trip_kernel,
)


def fused_quantize(x: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """(values float8_e4m3fn, scale bytes)."""
    x = x.contiguous()
    values = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = values.new_empty(*x.shape[:-1], x.shape[-1] // BLOCK)
    if scale.numel():
        with on_device(x):
            run = start(mxfp8_quantize_kernel, triton.cdiv(scale.numel(), ROWS))
            run(x, values, scale, scale.numel(), rule == "ceil", ROWS, num_warps=WARPS)
    return values.view(torch.float8_e4m3fn), scale


def fused_dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in `dtype`."""
    values, scale = values.contiguous().view(torch.uint8), scale.contiguous()
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    if scale.numel():
        with on_device(values):
            run = start(mxfp8_dequantize_kernel, triton.cdiv(scale.numel(), ROWS))
            run(values, scale, out, scale.numel(), ROWS, num_warps=WARPS)
    return out


def fused_round_trip(x: Tensor, rule: str) -> Tensor:
    """x rounded to MXFP8 and back."""
    x = x.contiguous()
    out, rows = torch.empty_like(x), x.numel() // BLOCK
    if rows:
        with on_device(x):
            run = start(mxfp8_round_trip_kernel, triton.cdiv(rows, ROWS))
            run(x, out, rows, rule == "ceil", ROWS, num_warps=WARPS)
    return out
