"""A KDA layer's step of few tokens between its first maps and what it adds to depth: two launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.few.linear import blocks_of, run, takes
from openk3.ops.kda.reference import KdaGate

_CHANNELS = (16, 32, 64, 128)  # of a head, keys and values


@dataclass(frozen=True)
class StatePlaces:
    """Where sequences keep states [S, H, K, V] and windows of q, k and v [S, H * K or V, TAPS], and slots int32 [N].

    Slots are distinct, -1 where there is no sequence. Numbers of a slot are neighbours; of a window's inputs the last
    W - 1 are read, W being the length of the filters.
    """

    state_SHKV: Tensor
    windows: tuple[Tensor, Tensor, Tensor]
    slot_N: Tensor

    def fit(self) -> bool:
        """Whether strides are what kernels take."""
        _, H, K, V = self.state_SHKV.shape
        taps, apart = self.windows[0].shape[2], self.windows[0].stride(0)
        near = all(x.stride() == (apart, taps, 1) and x.shape[2] == taps for x in self.windows)
        slots = self.slot_N.dtype == torch.int32 and self.slot_N.is_contiguous()
        sized = K in _CHANNELS and V in _CHANNELS and self.state_SHKV.stride()[1:] == (K * V, V, 1)
        return near and slots and sized and [x.shape[1] for x in self.windows] == [H * K, H * K, H * V]


@dataclass(frozen=True)
class StateWeights:
    """Weights between a layer's first maps and what is added to depth, and the sizes of its heads."""

    widen_CN: Tensor  # from the narrow input of the decay to [H * K]
    filters: tuple[Tensor, Tensor, Tensor]  # [C, W]
    gate: KdaGate
    norm: tuple[Tensor, float]  # [V]
    out_DC: Tensor


def steps_states(x_ND: Tensor, weights: StateWeights, places: StatePlaces) -> bool:
    """Whether `step_states` runs: for inference, few tokens, one format but for what is float32 in every model."""
    own = (weights.widen_CN, weights.out_DC)
    alike = all(x.dtype == x_ND.dtype and x.is_contiguous() for x in own)
    other = (*weights.filters, weights.gate.A_log_H, weights.gate.dt_bias_HK, weights.norm[0])
    _, H, _, V = places.state_SHKV.shape
    sized = max(H * V, weights.widen_CN.shape[1]) <= 2048
    return alike and sized and all(x.is_contiguous() for x in other) and places.fit() and takes(x_ND, x_ND.shape[-1])


def step_states(
    projected: Sequence[Tensor], weights: StateWeights, places: StatePlaces, into_ND: Tensor, *, add: bool
) -> None:
    """What `model.kda.KimiDeltaAttention` makes of q, k, v, gate, narrow decay inputs and beta: parts of one tensor.

    into_ND takes it, rounded, and if `add` what it was beside. States and windows move on in place.
    """
    from openk3.ops.few.step_kernel import gated_kernel, gated_settings, step_kernel, step_settings

    q, k, v, gate, narrow, beta = projected
    state, windows, slots = places.state_SHKV, places.windows, places.slot_N
    _, H, K, V = state.shape
    taps, W = windows[0].shape[2], weights.filters[0].shape[1]
    N, D = into_ND.shape
    strides = state.stride(0), windows[0].stride(0)
    out = torch.empty(N, H, V, dtype=torch.float32, device=state.device)

    known, warps = step_settings(K, V, narrow.shape[1], taps, W)
    blocks = V // known["B"]
    more = {"STRIDE": q.stride(0), "H": H, "BOUND": weights.gate.lower_bound}
    decay = weights.gate.A_log_H, weights.gate.dt_bias_HK
    tensors = q, k, v, narrow, beta, weights.widen_CN, state, *windows, *weights.filters, *decay, slots, out, *strides
    run(step_kernel, N * H * blocks, tensors, (known | more, warps), like=state)

    known, warps = gated_settings(D, H, K, V, taps)
    norm, eps = weights.norm
    before = into_ND if add else None
    tensors = out, gate, norm, weights.out_DC, before, into_ND, q, k, v, *windows, slots, N, eps, strides[1]
    run(gated_kernel, blocks_of(D, known["R"]) + N * H, tensors, (known | {"STRIDE": q.stride(0)}, warps), like=state)
