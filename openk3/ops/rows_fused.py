"""SiTU-GLU and the output gate over rows that lie apart, without gradients: nothing is copied before."""

from __future__ import annotations

import torch
from torch import Tensor

from openk3.ops.backend import on_device
from openk3.ops.launch import cdiv, start
from openk3.ops.rows_kernel import BLOCK, WARPS, gate_rows_kernel, situ_rows_kernel


def apart(*tensors: Tensor) -> bool:
    """Whether these are rows of which some lie apart, their values side by side, and nothing is recorded."""
    rows = all(x.ndim == 2 and x.stride(1) == 1 for x in tensors)
    return rows and not torch.is_grad_enabled() and not all(x.is_contiguous() for x in tensors)


def situ_rows(gate_RI: Tensor, up_RI: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """`ops.situ.situ_glu` of rows."""
    R, width = gate_RI.shape
    out_RI = gate_RI.new_empty(R, width)
    if out_RI.numel():
        sizes = gate_RI.stride(0), up_RI.stride(0), width, float(beta), linear_beta and float(linear_beta)
        with on_device(gate_RI):
            start(situ_rows_kernel, R * cdiv(width, BLOCK))(
                *(gate_RI, up_RI, out_RI, *sizes, BLOCK), num_warps=WARPS, num_stages=1
            )
    return out_RI


def gate_rows(o_RC: Tensor, gate_RC: Tensor, dtype: torch.dtype) -> Tensor:
    """`ops.sigmoid_gate.sigmoid_gate` of rows."""
    (R, width), o_RC = o_RC.shape, o_RC.contiguous()
    out_RC = torch.empty(R, width, dtype=dtype, device=o_RC.device)
    if out_RC.numel():
        with on_device(o_RC):
            start(gate_rows_kernel, R * cdiv(width, BLOCK))(
                *(o_RC, gate_RC, out_RC, gate_RC.stride(0), width, BLOCK), num_warps=WARPS, num_stages=1
            )
    return out_RC
