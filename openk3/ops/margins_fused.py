"""Launch of the kernel that counts margins."""

import torch
import triton
from torch import Tensor

from openk3.ops.backend import on_device
from openk3.ops.launch import start
from openk3.ops.margins_kernel import COLUMNS, ROWS, WARPS, margins_kernel


def count_margins_by_kernel(counts_EB: Tensor, scores_TE: Tensor, threshold_T: Tensor, range_2: Tensor) -> None:
    """As `ops.margins.count_margins`; scores and thresholds are read as float32."""
    (E, bins), T = counts_EB.shape, len(scores_TE)
    if not counts_EB.is_contiguous() or counts_EB.dtype != torch.int64:
        raise ValueError(f"count_margins: counts must be contiguous int64, got {counts_EB.dtype}")
    scores, threshold = (x.float().contiguous() for x in (scores_TE, threshold_T))
    if T:
        with on_device(scores):
            grid = (triton.cdiv(T, ROWS), triton.cdiv(E, COLUMNS))
            start(margins_kernel, *grid)(
                scores, threshold, range_2.contiguous(), counts_EB, T, E, bins, ROWS, COLUMNS, num_warps=WARPS
            )
