"""One weight matrix per expert over rows sorted by expert; an expert without rows costs nothing.

Report section 2.3, eq. 11: the E_j of the sum over chosen experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from openk3.ops.unrecorded import apply


def grouped_linear(x_MC: torch.Tensor, weight_EOC: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """`x_rows @ weight[e].T` for each expert's rows -> y [M, O] in x's dtype.

    `x_MC` holds the rows of expert 0, then of expert 1, and so on; `counts_E` (int64) says how many each has.
    Experts without rows are not computed and their weight gradient is exactly zero. M = 0 gives an empty result
    that still carries (zero) gradients. Equal counts take one batched product.

    Raises ValueError if shapes, dtypes or the counts' sum do not fit.
    """
    if x_MC.dtype != weight_EOC.dtype:
        raise ValueError(f"x is {x_MC.dtype} and weight is {weight_EOC.dtype}; need one dtype")
    num_experts, _, channels = weight_EOC.shape
    if x_MC.shape[1] != channels or counts_E.shape != (num_experts,) or int(counts_E.sum()) != x_MC.shape[0]:
        raise ValueError(
            f"x {tuple(x_MC.shape)}, weight {tuple(weight_EOC.shape)}, counts {tuple(counts_E.shape)} "
            f"summing to {int(counts_E.sum())} do not fit"
        )
    return apply(_GroupedLinear, x_MC, weight_EOC, counts_E)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MC: torch.Tensor, weight_EOC: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_MC, weight_EOC, counts_E)
        return _rows_times(x_MC, weight_EOC.mT, counts_E)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (grad_MO,) = grads
        x_MC, weight_EOC, counts_E = ctx.saved_tensors
        grad_x = _rows_times(grad_MO, weight_EOC, counts_E) if ctx.needs_input_grad[0] else None
        grad_weight = _outer(grad_MO, x_MC, counts_E) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def _rows_times(rows_MX: torch.Tensor, matrix_EXY: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """Each expert's rows times its matrix -> [M, Y]."""
    if _is_even(counts_E):
        return torch.bmm(rows_MX.view(counts_E.shape[0], -1, rows_MX.shape[1]), matrix_EXY).flatten(0, 1)
    if _has_kernel(rows_MX, *matrix_EXY.shape[1:]):
        return torch.nn.functional.grouped_mm(rows_MX.contiguous(), _dense(matrix_EXY), offs=_ends(counts_E))
    out_MY = rows_MX.new_empty(rows_MX.shape[0], matrix_EXY.shape[2])
    for expert, start, end in _segments(counts_E):
        torch.mm(rows_MX[start:end], matrix_EXY[expert], out=out_MY[start:end])
    return out_MY


def _outer(left_MX: torch.Tensor, right_MY: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """left^T right over each expert's rows -> [E, X, Y], exactly zero for an expert without rows."""
    if _is_even(counts_E):
        left_EMX, right_EMY = (x.view(counts_E.shape[0], -1, x.shape[1]) for x in (left_MX, right_MY))
        return torch.bmm(left_EMX.mT, right_EMY)
    if _has_kernel(left_MX, left_MX.shape[1], right_MY.shape[1]):
        left_XM = left_MX.contiguous().T
        out_EXY = torch.nn.functional.grouped_mm(left_XM, right_MY.contiguous(), offs=_ends(counts_E))
        # What the kernel leaves for an expert without rows is not specified.
        return out_EXY.index_fill_(0, (counts_E == 0).nonzero().squeeze(1), 0)
    out_EXY = left_MX.new_zeros(counts_E.shape[0], left_MX.shape[1], right_MY.shape[1])
    for expert, start, end in _segments(counts_E):
        torch.mm(left_MX[start:end].T, right_MY[start:end], out=out_EXY[expert])
    return out_EXY


def _is_even(counts_E: torch.Tensor) -> bool:
    """Whether every expert has the same number of rows, at least one."""
    least, most = counts_E.aminmax()
    return bool((least == most) & (least > 0))


def _has_kernel(rows: torch.Tensor, *widths: int) -> bool:
    """Whether torch's grouped product takes these operands: rows a multiple of 16 bytes, not empty, right dtype."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if rows.device.type == "cpu" else (torch.bfloat16,)
    aligned = all(width * rows.element_size() % 16 == 0 for width in widths)
    return aligned and rows.shape[0] > 0 and rows.dtype in dtypes


def _dense(matrix_EXY: torch.Tensor) -> torch.Tensor:
    return matrix_EXY if matrix_EXY.is_contiguous() or matrix_EXY.mT.is_contiguous() else matrix_EXY.contiguous()


def _ends(counts_E: torch.Tensor) -> torch.Tensor:
    return counts_E.cumsum(0, dtype=torch.int32)


def _segments(counts_E: torch.Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, last row + 1) of the experts that have rows."""
    segments, start = [], 0
    for expert, count in enumerate(counts_E.tolist()):
        if count > 0:
            segments.append((expert, start, start + count))
        start += count
    return segments
