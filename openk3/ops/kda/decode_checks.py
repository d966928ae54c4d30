"""What decoding takes for granted of its arguments, checked before a kernel reads memory that is not theirs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from openk3.ops.kda.reference import KdaGate, check_kind
from openk3.ops.sequences import check_tensors, shown

if TYPE_CHECKING:
    from openk3.ops.kda.decode import DecodePool, DecodeWeights, Projected

Named = tuple[str, Tensor, tuple[int, ...]]  # name, tensor and the shape that it must have

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def check_step(
    tokens: Iterable[Tensor], gate: KdaGate, state_SHKV: Tensor, slot_N: Tensor | None = None, *, pooled: bool = False
) -> None:
    """Raise ValueError unless five tensors of N tokens fit a pool of states, or unless `pooled` the N states."""
    (S, H, K, V), tokens = _sizes("state_SHKV" if pooled else "state_NHKV", state_SHKV), tuple(tokens)
    check_tensors(*zip(_TOKENS, tokens))
    N = len(tokens[0])
    shapes = ((N, H, K), (N, H, K), (N, H, V), (N, H, K), (N, H))
    if not pooled and S != N:
        raise ValueError(f"state_NHKV: {S} states for {N} tokens")
    named: list[Named] = list(zip(_TOKENS, tokens, shapes))
    _check_shapes(state_SHKV, [*named, *_of_gate(gate, H, K)])
    _check_formats(state_SHKV, named)
    if pooled:
        _check_integers(state_SHKV, ("slot_N", slot_N, N))
        _check_own("state_SHKV", state_SHKV)


def check_layer(weights: DecodeWeights, pool: DecodePool, into: DecodePool) -> None:
    """Raise ValueError unless a layer's parameters and two sets of pools are of the same sizes and on one device."""
    S, H, K, V = _sizes("pool.state_SHKV", pool.state_SHKV)
    channels = (H * K, H * K, H * V)
    convolutions = weights.convolutions()
    check_tensors(("conv_q_CW", convolutions[0]))
    if not isinstance(weights.norm_eps, int | float):
        raise ValueError(f"norm_eps: expected a number, got {weights.norm_eps!r}")
    W = convolutions[0].shape[-1]
    named: list[Named] = [("norm_weight_V", weights.norm_weight_V, (V,)), *_of_gate(weights.gate, H, K)]
    named += [(f"conv_{x}_CW", weight, (C, W)) for x, weight, C in zip("qkv", convolutions, channels)]
    written: list[Named] = []
    for name, pools in (("pool", pool),) if into is pool else (("pool", pool), ("into", into)):
        state, *windows = pools.tensors()
        written.append((f"{name}.state_SHKV", state, (S, H, K, V)))
        written += [(f"{name}.window_{x}_SCW", window, (S, C, W)) for x, window, C in zip("qkv", windows, channels)]
    _check_shapes(pool.state_SHKV, [*named, *written])
    for name, x, _ in written:
        _check_own(name, x)


def check_rows(
    state_SHKV: Tensor,
    rows: Projected,
    slot_N: Tensor,
    *,
    output_gate: Tensor | None = None,
    packed: bool = True,
    name: str = "projected",
) -> int:
    """Raise ValueError unless rows [T, C] fit the states, and N slots; returns N.

    Unless `packed` the rows are pools [S, D, C], of as many slots as there are states. Messages call them `name`.
    """
    S, H, K, V = _sizes("pool.state_SHKV", state_SHKV)
    first = rows.q_TC
    check_tensors((f"{name}.q_TC", first))
    if first.ndim != (2 if packed else 3):
        raise ValueError(f"{name}.q_TC: expected {'[T, C]' if packed else '[S, D, C]'}, got {list(first.shape)}")
    if not packed and len(first) != S:
        raise ValueError(f"{name}.q_TC: {len(first)} slots beside {S} states")
    before = tuple(first.shape[:-1])
    channels = (H * K, H * K, H * V, H * K, H)
    named: list[Named] = [(x, y, (*before, C)) for x, y, C in zip(_fields(name), rows.tensors(), channels)]
    if output_gate is not None:
        named.append(("output gate", output_gate, (*before, H * V)))
    _check_shapes(state_SHKV, named)
    _check_formats(state_SHKV, named)
    N = len(slot_N) if isinstance(slot_N, Tensor) and slot_N.ndim == 1 else len(first)
    _check_integers(state_SHKV, ("slot_N", slot_N, N))
    return N


def check_kept(rows: Projected, kept: Projected) -> None:
    """Raise ValueError unless the pools that take copies of rows have the rows' formats, and memory of their own."""
    for name, x, store in zip(_fields("kept"), rows.tensors(), kept.tensors()):
        if x.dtype != store.dtype:
            raise ValueError(f"{name}: {store.dtype}, but the rows are {x.dtype}")
        _check_own(name, store)


def check_counts(state_SHKV: Tensor, *named: tuple[str, Tensor, int]) -> None:
    """Raise ValueError unless the tensors hold that many integers each."""
    _check_integers(state_SHKV, *named)


def check_values(num_slots: int, slot_N: Tensor) -> None:
    """Raise ValueError unless slots lie in the pool or are -1, and are distinct.

    A GPU would have to wait, and is not asked: there every negative slot means no request.
    """
    if slot_N.device.type != "cpu":
        return
    slots = slot_N.tolist()
    for slot in slots:
        if not -1 <= slot < num_slots:
            raise ValueError(f"slot_N: slot {slot} in a pool of {num_slots}; -1 means no request")
    live = [slot for slot in slots if slot >= 0]
    if len(set(live)) != len(live):
        raise ValueError(f"slot_N: slots must be distinct, got {shown(slots)}")


def check_accepted(accepted_N: Tensor, slot_N: Tensor, rows_N: Tensor | int) -> None:
    """Raise ValueError unless every request accepts between none and all of its rows; CPU only.

    On a GPU counts are cut to what there is.
    """
    if accepted_N.device.type != "cpu":
        return
    rows = [rows_N] * len(slot_N) if isinstance(rows_N, int) else rows_N.tolist()
    for n, (count, slot, most) in enumerate(zip(accepted_N.tolist(), slot_N.tolist(), rows)):
        if slot >= 0 and not 0 <= count <= most:
            raise ValueError(f"accepted_N: request {n} has {most} rows, of which {count} cannot be accepted")


def check_bounds(cu_seqlens: Tensor, num_rows: int, most: int | None) -> None:
    """Raise ValueError unless bounds rise from 0 or more to at most the rows, each by at most `most`; CPU only."""
    if cu_seqlens.device.type != "cpu":
        return
    bounds = cu_seqlens.tolist()
    rising = all(a <= b for a, b in zip(bounds, bounds[1:]))
    if not rising or bounds[0] < 0 or bounds[-1] > num_rows:
        raise ValueError(f"cu_seqlens: integers that must rise within the {num_rows} rows; got {shown(bounds)}")
    longest = max((b - a for a, b in zip(bounds, bounds[1:])), default=0)
    if most is not None and longest > most:
        raise ValueError(f"kept: room for {most} rows of a request, which has {longest}")


_TOKENS = ("q", "k", "v", "decay_logit", "beta_logit")


def _fields(holder: str) -> tuple[str, ...]:
    """How a caller calls the five of a `Projected`."""
    return tuple(f"{holder}.{name}" for name in ("q_TC", "k_TC", "v_TC", "decay_logit_TC", "beta_logit_TH"))


def _sizes(name: str, state_SHKV: Tensor) -> tuple[int, int, int, int]:
    check_tensors((name, state_SHKV))
    if state_SHKV.ndim != 4 or not state_SHKV.is_floating_point():
        raise ValueError(
            f"{name}: expected floating point [S, H, K, V], got {state_SHKV.dtype} {list(state_SHKV.shape)}"
        )
    S, H, K, V = state_SHKV.shape
    return S, H, K, V


def _of_gate(gate: KdaGate, H: int, K: int) -> list[Named]:
    check_kind(gate)
    return [("A_log_H", gate.A_log_H, (H,)), ("dt_bias_HK", gate.dt_bias_HK, (H, K))]


def _check_shapes(state_SHKV: Tensor, named: Iterable[Named]) -> None:
    for name, x, shape in named:
        check_tensors((name, x))
        if x.shape != shape:
            raise ValueError(f"{name}: expected {list(shape)} for states {list(state_SHKV.shape)}, got {list(x.shape)}")
        if x.device != state_SHKV.device:
            raise ValueError(f"{name}: on {x.device}, but the states are on {state_SHKV.device}")


def _check_formats(state_SHKV: Tensor, named: Iterable[Named]) -> None:
    """Floating point throughout; float64 is for the definition, and for all or none."""
    wide = state_SHKV.dtype == torch.float64
    for name, x, _ in named:
        if not x.is_floating_point() or (x.dtype == torch.float64) != wide:
            raise ValueError(
                f"{name}: {x.dtype} beside states in {state_SHKV.dtype}; must be floating point, all float64 or none"
            )


def _check_own(name: str, x: Tensor) -> None:
    """Raise ValueError if values of a tensor that is written to share memory, as those of an expanded one do."""
    if x.is_contiguous():
        return
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size > 1:
            if stride < reach:
                raise ValueError(f"{name}: its values share memory (expanded?), but are written one by one; clone it")
            reach += stride * (size - 1)


def _check_integers(state_SHKV: Tensor, *named: tuple[str, Tensor | None, int]) -> None:
    for name, x, size in named:
        if not isinstance(x, Tensor) or x.dtype not in _INTEGERS or x.shape != (size,):
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name}: expected {size} integers in a tensor [{size}], got {got}")
        if x.device != state_SHKV.device:
            raise ValueError(f"{name}: on {x.device}, but the states are on {state_SHKV.device}")
