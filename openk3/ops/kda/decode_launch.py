"""Launches of the decoding kernels: arguments by name, checks of what kernels take for granted, one launch each.

Two modules have the same three kernels: `decode_kernel` (Triton, any size, Ampere and newer) and `decode_gluon` (Gluon,
Hopper, 128 channels). Nothing is read back from the device, so a launch can be captured in a CUDA graph.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from openk3.ops.backend import on_device, prefers_gluon
from openk3.ops.kda import decode_kernel
from openk3.ops.kda.decode import DecodePool, DecodeWeights, Projected
from openk3.ops.kda.reference import KdaGate

Tokens = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def step(tokens: Tokens, gate: KdaGate, state_SHKV: Tensor, slot_N: Tensor, into_SHKV: Tensor) -> Tensor:
    """o [N, H, V] of one token (q, k, v, decay logits, beta logits) per slot; the next states go to `into_SHKV`."""
    o_NHV = torch.empty_like(tokens[2], memory_format=torch.contiguous_format)
    tokens_ND = tuple(x.flatten(1) for x in tokens)
    _check_contiguous("state_SHKV", state_SHKV, into_SHKV)
    arguments = _of_gate(gate) | {
        "tokens": tokens_ND,
        "strides": _strides("tokens", *tokens_ND),
        "o_ptr": o_NHV,
        "state_ptr": state_SHKV,
        "next_ptr": into_SHKV,
        "slot_ptr": _index(slot_N),
    }
    _launch("step_kernel", arguments, slot_N.shape[0], state_SHKV, tokens_ND)
    return o_NHV


def decode(
    projected: Projected,
    output_gate_NC: Tensor,
    weights: DecodeWeights,
    pool: DecodePool,
    slot_N: Tensor,
    *,
    into: DecodePool,
) -> Tensor:
    """y [N, H * V] of `decode.decode_kda`."""
    arguments = _of_layer(weights, pool) | _of_outputs(projected, output_gate_NC, weights)
    _check_contiguous("into", *into.tensors())
    arguments |= {"into": into.tensors(), "slot_ptr": _index(slot_N)}
    _launch("decode_kernel", arguments, slot_N.shape[0], pool.state_SHKV, projected.tensors())
    return arguments["y_ptr"]


def verify(
    projected: Projected,
    output_gate_TC: Tensor,
    weights: DecodeWeights,
    pool: DecodePool,
    slot_N: Tensor,
    *,
    cu_seqlens: Tensor,
    kept: Projected | None,
    accepted_N: Tensor | None,
) -> Tensor:
    """y [T, H * V] of `decode.verify_kda`."""
    arguments = _of_layer(weights, pool) | _of_outputs(projected, output_gate_TC, weights)
    arguments |= _of_old(projected if kept is None else kept)
    arguments |= {"slot_ptr": _index(slot_N), "bounds_ptr": _index(cu_seqlens), "accepted_ptr": _index(accepted_N)}
    arguments |= {"REPLAY": accepted_N is not None, "VERIFY": True}
    _launch("draft_kernel", arguments, slot_N.shape[0], pool.state_SHKV, projected.tensors())
    return arguments["y_ptr"]


def replay(
    projected: Projected,
    weights: DecodeWeights,
    pool: DecodePool,
    slot_N: Tensor,
    accepted_N: Tensor,
    *,
    cu_seqlens: Tensor | None,
) -> None:
    """`decode.replay_kda`."""
    arguments = _of_layer(weights, pool) | _of_old(projected)
    arguments |= {"rows": arguments["old"], "strides": arguments["old_strides"]}
    arguments |= {"gate_ptr": None, "gate_stride": 0, "y_ptr": None}
    arguments |= {"slot_ptr": _index(slot_N), "bounds_ptr": _index(cu_seqlens), "accepted_ptr": _index(accepted_N)}
    arguments |= {"REPLAY": True, "VERIFY": False}
    _launch("draft_kernel", arguments, slot_N.shape[0], pool.state_SHKV, projected.tensors())


def _launch(
    name: str, arguments: dict[str, Any], num_requests: int, state_SHKV: Tensor, inputs: tuple[Tensor, ...]
) -> None:
    """Run the kernel of that name of the module that fits."""
    windows = arguments.get("pool", ())[1:]
    _, H, K, V = state_SHKV.shape
    kernels = _kernels_for(inputs, windows, K, V)
    constants, parts = kernels.sizes(name, K, V, windows[0].shape[2] if windows else 0)
    if kernels is decode_kernel and "y_ptr" in arguments:
        y = arguments["y_ptr"]
        arguments["spare_ptr"] = None if y is None else torch.empty_like(y, dtype=torch.float32)
    if num_requests:
        with on_device(state_SHKV):
            getattr(kernels, name)[(num_requests * H * parts,)](**arguments, **constants, **kernels.OPTIONS)


def _kernels_for(inputs: tuple[Tensor, ...], windows: tuple[Tensor, ...], K: int, V: int) -> ModuleType:
    """Gluon's kernels take q, k, v and decay logits of one format, and windows of four taps of one format."""
    q, k, v, logit = [x.dtype for x in inputs[:4]]
    alike = q == k == v == logit and all(x.dtype == windows[0].dtype for x in windows)
    if alike and K == V == 128 and all(x.shape[2] == 4 for x in windows) and prefers_gluon(inputs[0].device):
        from openk3.ops.kda import decode_gluon

        return decode_gluon
    return decode_kernel


def _of_layer(weights: DecodeWeights, pool: DecodePool) -> dict[str, Any]:
    """A layer's parameters, and its states and windows."""
    _check_contiguous("pool", *pool.tensors())
    return _of_gate(weights.gate) | {
        "filters": tuple(x.contiguous() for x in weights.convolutions()),
        "norm_ptr": weights.norm_weight_V.contiguous(),
        "eps": weights.norm_eps,
        "pool": pool.tensors(),
    }


def _of_gate(gate: KdaGate) -> dict[str, Any]:
    parameters = {"A_log_ptr": gate.A_log_H.contiguous(), "dt_bias_ptr": gate.dt_bias_HK.contiguous()}
    return parameters | {"H": gate.A_log_H.shape[0], "BOUND": gate.lower_bound}


def _of_outputs(projected: Projected, output_gate_TC: Tensor, weights: DecodeWeights) -> dict[str, Any]:
    """Projections of tokens, their output gates, and room for y."""
    if output_gate_TC.dtype != projected.v_TC.dtype:
        raise ValueError(f"output gate: {output_gate_TC.dtype}, but v is {projected.v_TC.dtype}")
    return {
        "rows": projected.tensors(),
        "strides": _strides("projected", *projected.tensors()),
        "gate_ptr": output_gate_TC,
        "gate_stride": _strides("output gate", output_gate_TC)[0],
        "y_ptr": torch.empty_like(output_gate_TC, memory_format=torch.contiguous_format),
    }


def _of_old(drafts: Projected) -> dict[str, Any]:
    """Drafts to replay: packed rows, or pools by slot, which are contiguous."""
    tensors = drafts.tensors()
    if tensors[0].ndim == 2:
        return {"old": tensors, "old_strides": _strides("projected", *tensors), "depth": 0, "KEPT": False}
    _check_contiguous("kept", *tensors)
    strides = tuple(x.shape[2] for x in tensors)
    return {"old": tensors, "old_strides": strides, "depth": tensors[0].shape[1], "KEPT": True}


def _index(x: Tensor | None) -> Tensor | None:
    """Slots, bounds or counts in the one format that kernels are compiled for."""
    return None if x is None else x.int().contiguous()


def _strides(name: str, *tensors: Tensor) -> tuple[int, ...]:
    """Of rows; their elements lie side by side."""
    strides = [x.stride() for x in tensors]
    for x, (_, inner) in zip(tensors, strides):
        if inner != 1 and x.shape[1] != 1:
            raise ValueError(f"{name}: the elements of a row must lie side by side")
    return tuple([outer for outer, _ in strides])


def _check_contiguous(name: str, *tensors: Tensor) -> None:
    if not all(x.is_contiguous() for x in tensors):
        raise ValueError(f"{name}: the kernels need contiguous tensors")
