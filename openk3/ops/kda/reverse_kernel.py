"""Triton kernels of the reverse scan of KDA: gradients of values and states, from the last tile to the first.

As in the forward scan the gradient of the state is held transposed, [V, K], as a float32 accumulator. Per tile, from
that of the state leaving it: dU^T = dS^T kr^T + do^T mqk;  dv^T = dU^T inv diag(beta);
dS^T <- dS^T diag(decay) + do^T qd + dv^T nkd. Nothing here needs the states themselves.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openk3.ops.kda.gluon_launch import fits
from openk3.ops.kda.scan_kernel import compute_capability
from openk3.ops.kda.tiles import Span
from openk3.ops.kda.workspace import Workspace


@dataclass(frozen=True)
class ReverseOutputs:
    """Where a reverse scan writes; None is not wanted. All are written for every tile, token and run of the span."""

    d_v: Tensor | None = None  # [T, H, V] of all tokens
    d_states: Tensor | None = None  # [X, H, V, K]: the transposed gradient of the state leaving each tile
    d_states_rest: Tensor | None = None  # as d_states: what rounding left of it
    d_entering: Tensor | None = None  # [P, H, K, V] float32: of the state entering each run; may be d_leaving itself
    along: Tensor | None = None  # [X, H, V / 16, C] float32: sums of d_v times v over each 16 channels; needs v


def reverse_scan(
    workspace: Workspace,
    d_o_THV: Tensor,
    span: Span,
    d_leaving_PHKV: Tensor | None,
    outputs: ReverseOutputs,
    *,
    v_THV: Tensor | None = None,
) -> None:
    """Scan each run of the span backward, from the gradient of the state leaving it (float32; None: zero).

    The workspace must have `kr_rest` unless it is in float32.
    """
    out = outputs
    if fits(workspace, d_o_THV, v_THV, d_leaving_PHKV, workspace.kr_rest, *(vars(out).values())):
        from openk3.ops.kda import reverse_gluon

        reverse_gluon.reverse_scan(workspace, d_o_THV, span, d_leaving_PHKV, out, v_THV=v_THV)
        return
    _, H, V = d_o_THV.shape
    runs, K = span.num_runs, workspace.qd.shape[3]
    exact = workspace.qd.dtype == torch.float32
    options = settings(V, compute_capability(d_o_THV.device), exact=exact)
    if runs * H == 0:
        return
    w = workspace
    reverse_kernel[(runs * H * (V // options["BV"]),)](
        *(w.nkd, w.qd, w.kr, w.kr_rest, w.nkd_rest, w.inv_rest, w.qd_rest, w.inv, w.mqk, w.decay, w.beta),
        *(d_o_THV, v_THV, d_leaving_PHKV),
        *(out.d_v, out.d_states, out.d_states_rest, out.d_entering, out.along),
        *(span.start_X, span.length_X, span.first_P, span.tile_low, H),
        K=K,
        V=V,
        C=span.chunk,
        **options,
    )


def reverse_fold(maps: Tensor, d_state_NHKV: Tensor, written_PHKV: Tensor, parts_N: Tensor, low: int) -> None:
    """Gradients of the states leaving consecutive parts, from those of the sequences they belong to.

    maps [P, H, V + K, K] of all parts, as `scan_maps` gives them. parts_N [N + 1]: first part of each of the sequences
    that have parts here. written [parts, H, K, V], for parts low and later: on entry what the outputs of each part send
    to the state entering it, on return the gradient of the state leaving it. d_state [N, H, K, V], of the states
    leaving the last of those parts, becomes that of the states entering the first.
    """
    _, H, rows, K = maps.shape
    V, count = rows - K, written_PHKV.shape[0]
    if written_PHKV.numel():
        block = 16
        reverse_fold_kernel[(d_state_NHKV.shape[0] * H * (V // block),)](
            *(maps, d_state_NHKV, written_PHKV, parts_N, low, count, H), K=K, V=V, BV=block, num_warps=8, num_stages=2
        )


def settings(V: int, arch: int, *, exact: bool = False) -> dict[str, int]:
    """Block of value channels, and launch options, for a compute capability such as 90; `exact`: in float32."""
    if exact:
        return {"BV": 16, "num_warps": 8, "num_stages": 2}
    return {"BV": min(V, 64 if arch == 90 else 32), "num_warps": 4 if V < 64 else 8, "num_stages": 2}


@triton.jit(
    do_not_specialize=["H", "tile_low"],
    do_not_specialize_on_alignment=["start_ptr", "length_ptr", "first_ptr"],
)
def reverse_kernel(
    nkd_ptr,
    qd_ptr,
    kr_ptr,
    kr_rest_ptr,
    nkd_rest_ptr,
    inv_rest_ptr,
    qd_rest_ptr,
    inv_ptr,
    mqk_ptr,
    decay_ptr,
    beta_ptr,
    d_o_ptr,
    v_ptr,
    d_leaving_ptr,
    d_v_ptr,
    d_states_ptr,
    d_states_rest_ptr,
    d_entering_ptr,
    along_ptr,
    start_ptr,
    length_ptr,
    first_ptr,
    tile_low,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
):
    """BV value channels of one head of one run."""
    io = nkd_ptr.dtype.element_ty
    precision: tl.constexpr = "ieee" if nkd_ptr.dtype.element_ty == tl.float32 else "tf32"
    blocks: tl.constexpr = V // BV
    heads = tl.cast(H, tl.int64)
    program = tl.program_id(0).to(tl.int64)
    block = program % blocks
    head = (program // blocks) % H
    run = program // blocks // H
    low = tl.load(first_ptr + run) - tile_low
    high = tl.load(first_ptr + run + 1) - tile_low
    column = block * BV
    value = tl.arange(0, BV)
    channel = tl.arange(0, K)
    c = tl.arange(0, C)
    inner = channel[None, :] * V + value[:, None]  # of a state [K, V], transposed
    at_state = (run * H + head) * (K * V) + column
    state = tl.zeros((BV, K), tl.float32)
    if d_leaving_ptr is not None:
        state = tl.load(d_leaving_ptr + at_state + inner)
    wide = c[:, None] * K + channel[None, :]
    square = c[:, None] * C + c[None, :]
    tokens = c[:, None] * (H * V) + value[None, :]
    transposed = value[:, None] * K + channel[None, :]
    for step in range(high - low):
        tile = high - 1 - step
        at = tile * heads + head
        length = tl.load(length_ptr + tile)
        first = (tl.load(start_ptr + tile).to(tl.int64) * H + head) * V + column
        live = (c < length)[:, None]
        d_o = tl.load(d_o_ptr + first + tokens, mask=live, other=0.0).to(io)
        kr = tl.load(kr_ptr + at * (C * K) + wide)
        mqk = tl.load(mqk_ptr + at * (C * C) + square)
        inv = tl.load(inv_ptr + at * (C * C) + square)
        qd = tl.load(qd_ptr + at * (C * K) + wide)
        nkd = tl.load(nkd_ptr + at * (C * K) + wide)
        decay = tl.load(decay_ptr + at * K + channel)
        beta = tl.load(beta_ptr + at * C + c)
        leaving = state.to(io)
        if d_states_ptr is not None:
            tl.store(d_states_ptr + at * (V * K) + column * K + transposed, leaving)
        d_write = tl.dot(tl.trans(d_o), mqk, input_precision=precision)
        d_write = tl.dot(leaving, tl.trans(kr), d_write, input_precision=precision)
        if kr_rest_ptr is not None:  # what follows are small differences where keys are nearly one: all in two parts
            kr_rest = tl.load(kr_rest_ptr + at * (C * K) + wide)
            d_write = tl.dot(leaving, tl.trans(kr_rest), d_write, input_precision=precision)
            rest = (state - leaving.to(tl.float32)).to(io)
            if d_states_rest_ptr is not None:
                tl.store(d_states_rest_ptr + at * (V * K) + column * K + transposed, rest)
            d_write = tl.dot(rest, tl.trans(kr), d_write, input_precision=precision)
        d_v = tl.dot(d_write.to(io), inv, input_precision=precision)
        if precision != "ieee":
            rest = (d_write - d_write.to(io).to(tl.float32)).to(io)
            d_v = tl.dot(rest, inv, d_v, input_precision=precision)
        if inv_rest_ptr is not None:
            d_v = tl.dot(d_write.to(io), tl.load(inv_rest_ptr + at * (C * C) + square), d_v, input_precision=precision)
        d_v *= beta[None, :]
        if along_ptr is not None:
            v = tl.load(v_ptr + first + tokens, mask=live, other=0.0)
            along = tl.sum(tl.reshape(d_v * tl.trans(v).to(tl.float32), (BV // 16, 16, C)), 1)
            parts = tl.arange(0, BV // 16)[:, None] * C + c[None, :]
            tl.store(along_ptr + (at * V + column) // 16 * C + parts, along)
        rest = (d_v - d_v.to(io).to(tl.float32)).to(io)
        d_v = d_v.to(io)
        if d_v_ptr is not None:
            tl.store(d_v_ptr + first + tokens, tl.trans(d_v).to(d_v_ptr.dtype.element_ty), mask=live)
        state = tl.dot(tl.trans(d_o), qd, state * decay[None, :], input_precision=precision)
        state = tl.dot(d_v, nkd, state, input_precision=precision)
        if precision != "ieee":
            state = tl.dot(rest, nkd, state, input_precision=precision)
        if nkd_rest_ptr is not None:
            state = tl.dot(d_v, tl.load(nkd_rest_ptr + at * (C * K) + wide), state, input_precision=precision)
        if qd_rest_ptr is not None:
            state = tl.dot(tl.trans(d_o), tl.load(qd_rest_ptr + at * (C * K) + wide), state, input_precision=precision)
    if d_entering_ptr is not None:
        tl.store(d_entering_ptr + at_state + inner, state)


@triton.jit(do_not_specialize=["H", "part_low", "count"], do_not_specialize_on_alignment=["parts_ptr"])
def reverse_fold_kernel(
    maps_ptr,
    d_state_ptr,
    written_ptr,
    parts_ptr,
    part_low,
    count,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
):
    """BV value channels of one head of one sequence: the gradient of the state leaving each of its parts."""
    blocks: tl.constexpr = V // BV
    heads = tl.cast(H, tl.int64)
    program = tl.program_id(0).to(tl.int64)
    value = (program % blocks) * BV + tl.arange(0, BV)
    head = (program // blocks) % H
    sequence = program // blocks // H
    channel = tl.arange(0, K)
    low = tl.maximum(tl.load(parts_ptr + sequence) - part_low, 0)
    high = tl.minimum(tl.load(parts_ptr + sequence + 1) - part_low, count)
    inner = channel[None, :] * V + value[:, None]
    at_state = (sequence * H + head) * (K * V)
    state = tl.load(d_state_ptr + at_state + inner)
    for step in range(high - low):
        part = high - 1 - step
        at = (part * heads + head) * (K * V)
        rows = maps_ptr + ((part + part_low) * heads + head) * ((V + K) * K)
        transition = tl.load(rows + (V + channel[None, :]) * K + channel[:, None])
        written = tl.load(written_ptr + at + inner)
        tl.store(written_ptr + at + inner, state)
        state = tl.dot(state, transition, written, input_precision="tf32x3")
    tl.store(d_state_ptr + at_state + inner, state)


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile in bfloat16 at K = V = 128, and on Hopper at 64 key channels, for this capability."""
    options = settings(128, arch)
    shape = {"K": 128, "V": 128, "C": 32, "BV": options.pop("BV")}
    tiles = ("nkd_ptr", "qd_ptr", "kr_ptr", "kr_rest_ptr", "inv_ptr", "mqk_ptr", "d_o_ptr", "v_ptr")
    given: dict[str, Any] = dict.fromkeys(tiles, "*bf16") | {"along_ptr": "*fp32"}
    given |= {
        "decay_ptr": "*fp32",
        "beta_ptr": "*fp32",
        "start_ptr": "*i32:1",
        "length_ptr": "*i32:1",
        "first_ptr": "*i32:1",
    }
    given |= {"tile_low": "i32", "H": "i32"} | shape
    written = dict.fromkeys(("d_v_ptr", "d_states_ptr", "d_states_rest_ptr"), "*bf16")
    variants = (
        written | {"d_leaving_ptr": "*fp32", "d_entering_ptr": "*fp32"},
        written | {"d_leaving_ptr": "*fp32", "d_entering_ptr": None},
        {"d_leaving_ptr": None, "d_entering_ptr": "*fp32"} | dict.fromkeys((*written, "along_ptr", "v_ptr")),
    )
    folding = {"maps_ptr": "*fp32", "d_state_ptr": "*fp32", "written_ptr": "*fp32", "parts_ptr": "*i32:1"}
    folding |= {"part_low": "i32", "count": "i32", "H": "i32", "K": 128, "V": 128, "BV": 16}
    rests = [dict.fromkeys(("nkd_rest_ptr", "inv_rest_ptr", "qd_rest_ptr"), kind) for kind in (None, "*bf16")]
    cases = [(reverse_kernel, given | variant | some, options) for some in rests for variant in variants]
    cases += [(kernel, some | {"K": 64}, how) for kernel, some, how in cases[2::3]] if arch == 90 else []
    return [*cases, (reverse_fold_kernel, folding, {"num_warps": 8, "num_stages": 2})]
