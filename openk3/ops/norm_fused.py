"""RMSNorm and gated RMSNorm by kernels, as one differentiable function."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import multiprocessors, on_device
from openk3.ops.launch import cdiv, start
from openk3.ops.norm_kernel import PROGRAMS, norm_backward_kernel, norm_forward_kernel, settings
from openk3.ops.unrecorded import apply

_settings = lru_cache(maxsize=64)(settings)


class _Norm(torch.autograd.Function):
    """Rows [R, D] that may lie apart, gate [R, D] or None, weight [D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        rows, D = x.shape
        kind = torch.promote_types(x.dtype, weight.dtype) if gate is None else gate.dtype
        out, inverse = x.new_empty(rows, D, dtype=kind), x.new_empty(rows, dtype=torch.float32)
        if rows:
            how = _settings(D, x.stride(0), backward=False)
            with on_device(x):
                programs = cdiv(rows, how.constants["ROWS"])
                arguments = x, gate, weight, out, inverse, rows, eps
                start(norm_forward_kernel, programs)(*arguments, **how.constants, **how.options)
        ctx.save_for_backward(x, gate, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, inverse = ctx.saved_tensors
        (rows, D), d_out = x.shape, grads[0].contiguous()
        d_x = x.new_empty(rows, D)
        d_gate = None if gate is None else torch.empty_like(gate)
        how = _settings(D, x.stride(0), backward=True)
        most = PROGRAMS * (multiprocessors(x.device) if x.device.type == "cuda" else 1)  # few in the interpreter
        programs = min(cdiv(rows, how.constants["ROWS"]), most)
        shares = inverse.new_empty(programs, D)
        if rows:
            with on_device(x):
                arguments = d_out, x, gate, weight, inverse, d_x, d_gate, shares, rows
                start(norm_backward_kernel, programs)(*arguments, **how.constants, **how.options)
        return d_x, d_gate, shares.sum(0).to(weight.dtype), None


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `ops.norm.rms_norm`."""
    rows = x if x.ndim == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
    return apply(_Norm, rows, None, weight.contiguous(), float(eps)).view(x.shape)


def fused_gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `ops.norm.gated_rms_norm`."""
    rows, gates = (x.reshape(-1, o.shape[-1]).contiguous() for x in (o, gate))
    return apply(_Norm, rows, gates, weight.contiguous(), float(eps)).view(o.shape)
