"""The output gate of attention by kernels, as a differentiable function."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import on_device
from openk3.ops.launch import cdiv, start
from openk3.ops.rows_fused import apart, gate_rows
from openk3.ops.sigmoid_gate_kernel import BLOCK, WARPS, gate_backward_kernel, gate_kernel
from openk3.ops.unrecorded import apply


class _SigmoidGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(o, gate)
        out = torch.empty_like(o, dtype=dtype)
        if out.numel():
            with on_device(o):
                start(gate_kernel, cdiv(o.numel(), BLOCK))(o, gate, out, o.numel(), BLOCK, num_warps=WARPS)
        return out

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        o, gate = ctx.saved_tensors
        d_o, d_gate = torch.empty_like(o), torch.empty_like(gate)
        if o.numel():
            with on_device(o):
                start(gate_backward_kernel, cdiv(o.numel(), BLOCK))(
                    *(grads[0].contiguous(), o, gate, d_o, d_gate, o.numel(), BLOCK), num_warps=WARPS
                )
        return d_o, d_gate, None


def fused_sigmoid_gate(o: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    """As `ops.sigmoid_gate.sigmoid_gate`, for shapes and formats that it has checked."""
    if apart(gate) and o.ndim == 2:
        return gate_rows(o, gate, dtype)
    return apply(_SigmoidGate, o.contiguous(), gate.contiguous(), dtype)
