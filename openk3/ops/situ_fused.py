"""SiTU-GLU by kernels, as a differentiable function: one pass over gate and up, one over them and the gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import on_device
from openk3.ops.launch import cdiv, start
from openk3.ops.rows_fused import apart, situ_rows
from openk3.ops.situ_kernel import BLOCK, WARPS, situ_backward_kernel, situ_kernel
from openk3.ops.unrecorded import apply


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = beta, linear_beta
        out = torch.empty_like(gate)
        if out.numel():
            with on_device(gate):
                grid = (cdiv(out.numel(), BLOCK),)
                start(situ_kernel, *grid)(gate, up, out, out.numel(), beta, linear_beta, BLOCK, num_warps=WARPS)
        return out

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        d_out, d_gate, d_up = grads[0].contiguous(), torch.empty_like(gate), torch.empty_like(up)
        if gate.numel():
            with on_device(gate):
                start(situ_backward_kernel, cdiv(gate.numel(), BLOCK))(
                    *(gate, up, d_out, d_gate, d_up, gate.numel(), *ctx.betas, BLOCK), num_warps=WARPS
                )
        return d_gate, d_up, None, None


def fused_situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """As `ops.situ.situ_glu`, for shapes and dtypes that it has checked."""
    if apart(gate, up):
        return situ_rows(gate, up, beta, linear_beta)
    return apply(_SituGlu, gate.contiguous(), up.contiguous(), float(beta), linear_beta and float(linear_beta))
