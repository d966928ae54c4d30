"""The two ends of a decoding step of few tokens: where its sequences lie, and logits with the most likely token."""

from __future__ import annotations

import torch
from torch import Tensor

from openk3.ops.backend import pick
from openk3.ops.few.linear import blocks_of, run, takes
from openk3.ops.norm import rms_norm

_BLOCK = 4096  # of the candidates that a program looks at at once
MOST_PLACES = 1024


def head(h_ND: Tensor, norm: tuple[Tensor, float], weight_VD: Tensor, logits_NV: Tensor, id_N: Tensor) -> None:
    """logits = rms_norm(h) W^T, and the most likely token of each row; into memory that is given.

    Of equally likely tokens kernels take the first, `argmax` any.
    """
    tensors = (weight_VD, norm[0], logits_NV)
    alike = all(x.dtype == h_ND.dtype and x.is_contiguous() for x in tensors) and id_N.is_contiguous()
    if not alike or not takes(h_ND, h_ND.shape[1]):
        torch.mm(rms_norm(h_ND, *norm), weight_VD.T, out=logits_NV)
        id_N.copy_(logits_NV.argmax(-1))
        return
    from openk3.ops.few.head_kernel import head_kernel, head_settings, likeliest_kernel

    (N, D), V = h_ND.shape, len(weight_VD)
    known, warps = head_settings(V, D, N)
    programs = blocks_of(V, known["R"])
    best = torch.empty(N, programs, dtype=torch.float32, device=h_ND.device)
    which = torch.empty(N, programs, dtype=torch.int32, device=h_ND.device)
    given = h_ND, norm[0], weight_VD, logits_NV, best, which, N, norm[1]
    run(head_kernel, programs, given, (known | {"STRIDE": h_ND.stride(0)}, warps), like=h_ND)
    run(likeliest_kernel, N, (best, which, id_N, programs), ({"BLOCK": _BLOCK}, 8), like=h_ND)


def places_of(slot_N: Tensor, length_R: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of sequences in slots (int32, -1: none, which have the last row): row and tokens so far [N] in int64, row [N, 1]
    and tokens with the one of this step [N] in int32."""
    N, last = len(slot_N), len(length_R) - 1
    if not 0 < N <= MOST_PLACES or not slot_N.is_cuda or pick("few_tokens", _like(slot_N)) != "triton":
        row_N = torch.where(slot_N < 0, last, slot_N)
        before_N = length_R[row_N.long()]
        return row_N.long(), before_N.long(), row_N.to(torch.int32).unsqueeze(1), before_N + 1
    return _places_by_kernel(slot_N, length_R)


def _places_by_kernel(slot_N: Tensor, length_R: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    import triton

    from openk3.ops.backend import on_device
    from openk3.ops.few.head_kernel import begin_kernel
    from openk3.ops.launch import start

    N = len(slot_N)
    row_N, before_N = slot_N.new_empty(2, N, dtype=torch.int64).unbind()
    page_N1, length_N = slot_N.new_empty(N, 1), slot_N.new_empty(N)
    with on_device(slot_N):
        given = slot_N, length_R, row_N, before_N, page_N1, length_N, N, len(length_R) - 1
        start(begin_kernel, 1)(*given, max(16, triton.next_power_of_2(N)), num_warps=1)
    return row_N, before_N, page_N1, length_N


def _like(x: Tensor) -> Tensor:
    """A tensor that `pick` takes for one of floats on x's device."""
    return x.new_empty(0, dtype=torch.float32)
