"""One decoding step of a KDA layer for requests whose states and convolution inputs lie in pages, where they lie."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openk3.ops.backend import on_device, pick, prefers_gluon
from openk3.ops.kda.decode import DecodePool, DecodeWeights, Projected, decode_kda
from openk3.ops.kda.decode_checks import check_layer, check_rows, check_values


@dataclass(frozen=True)
class DecodePages:
    """States [P, H, K, V], and the last W - 1 raw inputs of q, k and v, one behind the other [P, 2 H K + H V, W - 1].

    Both are views of any stride from page to page; within a page their numbers are neighbours.
    """

    state_PHKV: Tensor
    inputs_PXW: Tensor

    def gathered(self, page_N: Tensor) -> DecodePool:
        """Copies of what these pages hold; a window's oldest input, which nobody needs, is zero."""
        _, H, K, V = self.state_PHKV.shape
        inputs_NXW = torch.nn.functional.pad(self.inputs_PXW[page_N], (1, 0))
        return DecodePool(self.state_PHKV[page_N], *inputs_NXW.split([H * K, H * K, H * V], 1))

    def scatter(self, page_N: Tensor, pool: DecodePool) -> None:
        """Overwrite what `gathered` has read."""
        state_NHKV, *windows = pool.tensors()
        self.state_PHKV[page_N] = state_NHKV
        self.inputs_PXW[page_N] = torch.cat(windows, 1)[..., 1:]


@torch.no_grad()
def decode_pages(
    projected: Projected, output_gate_NC: Tensor, weights: DecodeWeights, pages: DecodePages, page_N: Tensor
) -> Tensor:
    """`decode_kda` for N requests whose (distinct) pages move on in place; page -1 means no request, outputs zero.

    Returns sigmoid(output gate) * RMSNorm(o) [N, H * V] in the gate's dtype (report §2.1, eq. 1). On a GPU one kernel,
    which reads nothing back, so that a graph can be captured; the definition gathers, steps and scatters. Raises
    ValueError for shapes, formats and devices that do not fit, and for pages whose numbers are no neighbours; values of
    page_N are checked where they lie on the CPU.
    """
    state_PHKV, inputs_PXW = pages.state_PHKV, pages.inputs_PXW
    _check(projected, output_gate_NC, weights, pages, page_N)
    if pick("kda", projected.q_TC, name="q", channels=state_PHKV.shape[2:]) != "reference":
        return _launch(projected, output_gate_NC, weights, pages, page_N)
    live_N = page_N >= 0
    used = page_N[live_N].long()
    pool = pages.gathered(used)
    slots = torch.arange(len(used), dtype=torch.int32, device=page_N.device)
    y_NC = torch.zeros_like(output_gate_NC)
    y_NC[live_N] = decode_kda(projected.rows(live_N), output_gate_NC[live_N], weights, pool, slots)
    DecodePages(state_PHKV, inputs_PXW).scatter(used, pool)
    return y_NC


def _check(
    projected: Projected, output_gate_NC: Tensor, weights: DecodeWeights, pages: DecodePages, page_N: Tensor
) -> None:
    state_PHKV, inputs_PXW = pages.state_PHKV, pages.inputs_PXW
    if state_PHKV.ndim != 4 or inputs_PXW.ndim != 3 or len(state_PHKV) != len(inputs_PXW):
        raise ValueError(f"pages: {list(state_PHKV.shape)} and {list(inputs_PXW.shape)}, not [P, H, K, V], [P, X, W-1]")
    _, H, K, V = state_PHKV.shape
    taps = weights.conv_q_CW.shape[-1] - 1
    if inputs_PXW.shape[1:] != (2 * H * K + H * V, taps):
        raise ValueError(f"inputs_PXW: expected [P, {2 * H * K + H * V}, {taps}], got {list(inputs_PXW.shape)}")
    if state_PHKV.stride()[1:] != (K * V, V, 1) or inputs_PXW.stride()[1:] != (taps, 1):
        raise ValueError("pages: the numbers of a page must lie side by side")
    if check_rows(state_PHKV, projected, page_N, output_gate=output_gate_NC) != len(output_gate_NC):
        raise ValueError(f"page_N: {len(page_N)} pages for {len(output_gate_NC)} tokens")
    check_values(len(state_PHKV), page_N)
    windows = (inputs_PXW.new_empty(0, channels, taps + 1) for channels in (H * K, H * K, H * V))
    pool = DecodePool(state_PHKV[:0], *windows)
    check_layer(weights, pool, pool)


def _launch(
    projected: Projected, output_gate_NC: Tensor, weights: DecodeWeights, pages: DecodePages, page_N: Tensor
) -> Tensor:
    from openk3.ops.kda import decode_launch, paged_kernel

    state_PHKV, inputs_PXW = pages.state_PHKV, pages.inputs_PXW
    _, H, K, V = state_PHKV.shape
    W = inputs_PXW.shape[2] + 1
    arguments: dict[str, Any] = decode_launch._of_outputs(projected, output_gate_NC, weights)
    arguments |= decode_launch._of_gate(weights.gate)
    arguments |= {
        "filters": tuple(x.contiguous() for x in weights.convolutions()),
        "norm_ptr": weights.norm_weight_V.contiguous(),
        "eps": weights.norm_eps,
        "page_ptr": page_N.int().contiguous(),
        "state_ptr": state_PHKV,
        "state_stride": state_PHKV.stride(0),
        "input_ptr": inputs_PXW,
        "input_stride": inputs_PXW.stride(0),
    }
    alike = len({x.dtype for x in projected.tensors()[:4]}) == 1
    y_NC = arguments["y_ptr"]
    if alike and K == V == 128 and W == 4 and prefers_gluon(y_NC.device):
        from openk3.ops.kda import paged_gluon

        kernel, constants = paged_gluon.paged_kernel, paged_gluon.sizes(K, V, W) | paged_gluon.OPTIONS
    else:
        kernel, constants = paged_kernel.paged_kernel, paged_kernel.sizes(K, V, W) | paged_kernel.OPTIONS
        arguments["spare_ptr"] = torch.empty_like(y_NC, dtype=torch.float32)
    if len(page_N):
        with on_device(y_NC):
            kernel[(len(page_N) * H,)](**arguments, **constants)
    return y_NC
