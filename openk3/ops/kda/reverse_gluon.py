"""Gluon kernel of the reverse scan of KDA for Hopper: the arithmetic of the Triton one, scheduled as `scan_gluon`."""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openk3.ops.kda.gluon_launch import block_type, launch, matrix, tiles_of
from openk3.ops.kda.reverse_kernel import ReverseOutputs
from openk3.ops.kda.scan_gluon import ROWS, put_states, put_tokens
from openk3.ops.kda.tiles import Span
from openk3.ops.kda.workspace import Workspace

RESTS = ("kr_rest", "nkd_rest", "inv_rest", "qd_rest")  # in the order of the kernel's arguments


def reverse_scan(
    workspace: Workspace,
    d_o_THV: Tensor,
    span: Span,
    d_leaving_PHKV: Tensor | None,
    outputs: ReverseOutputs,
    *,
    v_THV: Tensor | None,
) -> None:
    """As `reverse_kernel.reverse_scan`, for bfloat16 and K = V = 128."""
    _, H, V = d_o_THV.shape
    out, (_, _, C, K) = outputs, workspace.sizes
    if span.num_tiles * H == 0:
        return
    options = settings()
    constants = {"K": K, "V": V, "C": C, "STAGES": options.pop("STAGES")}
    assert workspace.kr_rest is not None
    arguments = [
        *(*tiles_of(workspace, RESTS, rest=True), matrix(d_o_THV, H * V, (C, V))),
        None if out.along is None or v_THV is None else matrix(v_THV, H * V, (C, V)),
        *(None if x is None else matrix(x, K, (ROWS, K)) for x in (out.d_states, out.d_states_rest)),
        *(out.d_v, out.along, d_leaving_PHKV, out.d_entering),
        *(span.start_X, span.length_X, span.first_P, span.tile_low, H),
    ]
    launch(reverse_kernel, span.num_runs * H, arguments, constants, options)


def settings() -> dict[str, int]:
    """Stages of the ring (three are slower: what is loaded early competes with the stores), and launch options."""
    return {"STAGES": 2, "num_warps": 4, "maxnreg": 168}


@gluon.jit
def _produce(descriptors, ring, full, empty, start_ptr, low, steps, H, head, V: gl.constexpr, BYTES: gl.constexpr):
    """The copy warp: tile after tile, from the last, into the next free stage of the ring."""
    nkd_d, qd_d, kr_d, kr_rest_d, rests, inv_d, mqk_d, decay_d, beta_d, d_o_d, v_d = descriptors
    nkd_s, qd_s, kr_s, kr_rest_s, rests_s, inv_s, mqk_s, decay_s, beta_s, d_o_s, v_s = ring
    STAGES: gl.constexpr = nkd_s.shape[0]
    C: gl.constexpr = nkd_s.shape[1]
    for step in range(steps):
        stage = step % STAGES
        bar = full.index(stage)
        tile = low + steps - 1 - step
        at = tile * H + head
        start = gl.load(start_ptr + tile)
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, BYTES)
        tma.async_copy_global_to_shared(d_o_d, [start, head * V], bar, d_o_s.index(stage))
        tma.async_copy_global_to_shared(kr_d, [at * C, 0], bar, kr_s.index(stage))
        tma.async_copy_global_to_shared(kr_rest_d, [at * C, 0], bar, kr_rest_s.index(stage))
        tma.async_copy_global_to_shared(mqk_d, [at * C, 0], bar, mqk_s.index(stage))
        tma.async_copy_global_to_shared(inv_d, [at * C, 0], bar, inv_s.index(stage))
        tma.async_copy_global_to_shared(beta_d, [at, 0], bar, beta_s.index(stage))
        tma.async_copy_global_to_shared(decay_d, [at, 0], bar, decay_s.index(stage))
        tma.async_copy_global_to_shared(qd_d, [at * C, 0], bar, qd_s.index(stage))
        tma.async_copy_global_to_shared(nkd_d, [at * C, 0], bar, nkd_s.index(stage))
        for n in gl.static_range(len(rests)):
            tma.async_copy_global_to_shared(rests[n], [at * C, 0], bar, rests_s[n].index(stage))
        if v_d is not None:
            tma.async_copy_global_to_shared(v_d, [start, head * V], bar, v_s.index(stage))


@gluon.jit
def _consume(ring, full, empty, stores, pointers, place, K: gl.constexpr, V: gl.constexpr, GROUP: gl.constexpr):
    """A warpgroup: rows 64 GROUP + 0..63 of the transposed gradient of the state of one head of one run."""
    nkd_s, qd_s, kr_s, kr_rest_s, rests_s, inv_s, mqk_s, decay_s, beta_s, d_o_s, v_s = ring
    d_states_d, d_states_rest_d, d_v_s, d_states_s = stores
    d_v_ptr, along_ptr, d_leaving_ptr, d_entering_ptr, start_ptr, length_ptr = pointers
    run_head, low, steps, H, head = place
    STAGES: gl.constexpr = nkd_s.shape[0]
    C: gl.constexpr = nkd_s.shape[1]
    ROWS: gl.constexpr = 64
    column: gl.constexpr = ROWS * GROUP
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    wide_left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    left: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    value = column + gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, wide))
    inner = run_head * (K * V) + channel[None, :] * V + value[:, None]
    token_left = gl.arange(0, C, layout=gl.SliceLayout(0, left))
    zero = gl.zeros([ROWS, C], gl.float32, layout=narrow)
    state = gl.zeros([ROWS, K], gl.float32, layout=wide)
    if d_leaving_ptr is not None:
        state = gl.load(d_leaving_ptr + inner)
    for step in range(steps):
        stage = step % STAGES
        tile = low + steps - 1 - step
        start = gl.load(start_ptr + tile)
        length = gl.load(length_ptr + tile)
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        d_o = d_o_s.index(stage).slice(column, ROWS, 1).permute((1, 0)).load(left)
        d_o = gl.where((token_left < length)[None, :], d_o, 0.0)
        state = warpgroup_mma_wait(0, (state,))
        rounded = state.to(gl.bfloat16)
        leaving = gl.convert_layout(rounded, left)
        kr_t = kr_s.index(stage).permute((1, 0))
        d_write = warpgroup_mma(leaving, kr_t, zero, use_acc=False, is_async=True)
        d_write = warpgroup_mma(leaving, kr_rest_s.index(stage).permute((1, 0)), d_write, is_async=True)
        rest = (state - rounded.to(gl.float32)).to(gl.bfloat16)
        d_write = warpgroup_mma(gl.convert_layout(rest, left), kr_t, d_write, is_async=True)
        d_write = warpgroup_mma(d_o, mqk_s.index(stage), d_write, is_async=True)
        decay = decay_s.index(stage).reshape([K]).load(gl.SliceLayout(0, wide))
        state = state * decay[None, :]
        if d_states_d is not None:
            put_states(rounded, d_states_s.index(2 * GROUP), d_states_d, (tile * H + head) * V + column)
            put_states(rest, d_states_s.index(2 * GROUP + 1), d_states_rest_d, (tile * H + head) * V + column)
        d_write = warpgroup_mma_wait(0, (d_write,))
        high = d_write.to(gl.bfloat16)  # in two parts: this product costs nothing beside the others, its rounding does
        low_part = (d_write - high.to(gl.float32)).to(gl.bfloat16)
        d_v = warpgroup_mma(gl.convert_layout(high, left), inv_s.index(stage), zero, use_acc=False, is_async=True)
        d_v = warpgroup_mma(gl.convert_layout(low_part, left), inv_s.index(stage), d_v, is_async=True)
        if len(rests_s) > 0:
            d_v = warpgroup_mma(gl.convert_layout(high, left), rests_s[1].index(stage), d_v, is_async=True)
        state = warpgroup_mma(gl.convert_layout(d_o, wide_left), qd_s.index(stage), state, is_async=True)
        beta = beta_s.index(stage).reshape([C]).load(gl.SliceLayout(0, narrow))
        d_v = warpgroup_mma_wait(1, (d_v,))
        d_v = d_v * beta[None, :]
        d_v_io = d_v.to(gl.bfloat16)
        state = warpgroup_mma(gl.convert_layout(d_v_io, wide_left), nkd_s.index(stage), state, is_async=True)
        low_part = (d_v - d_v_io.to(gl.float32)).to(gl.bfloat16)
        state = warpgroup_mma(gl.convert_layout(low_part, wide_left), nkd_s.index(stage), state, is_async=True)
        if len(rests_s) > 0:
            nkd_rest, qd_rest = rests_s[0].index(stage), rests_s[2].index(stage)
            state = warpgroup_mma(gl.convert_layout(d_v_io, wide_left), nkd_rest, state, is_async=True)
            state = warpgroup_mma(gl.convert_layout(d_o, wide_left), qd_rest, state, is_async=True)
        if along_ptr is not None:
            v = v_s.index(stage).slice(column, ROWS, 1).permute((1, 0)).load(narrow).to(gl.float32)
            along = gl.sum((d_v * v).reshape((4, 16, C)), 1)
            part = column // 16 + gl.arange(0, 4, layout=gl.SliceLayout(1, along.type.layout))
            token = gl.arange(0, C, layout=gl.SliceLayout(0, along.type.layout))
            gl.store(along_ptr + (tile * H + head) * (V // 16 * C) + (part * C)[:, None] + token[None, :], along)
        if d_v_ptr is not None:
            put_tokens(d_v_io, d_v_s, d_v_ptr, start, length, H, head, column, V)
        state = warpgroup_mma_wait(0, (state,))
        mbarrier.arrive(empty.index(stage), count=1)
    if d_entering_ptr is not None:
        gl.store(d_entering_ptr + inner, state)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["H", "tile_low"],
    do_not_specialize_on_alignment=["start_ptr", "length_ptr", "first_ptr"],
)
def reverse_kernel(
    nkd_d,
    qd_d,
    kr_d,
    kr_rest_d,
    nkd_rest_d,
    inv_rest_d,
    qd_rest_d,
    inv_d,
    mqk_d,
    decay_d,
    beta_d,
    d_o_d,
    v_d,
    d_states_d,
    d_states_rest_d,
    d_v_ptr,
    along_ptr,
    d_leaving_ptr,
    d_entering_ptr,
    start_ptr,
    length_ptr,
    first_ptr,
    tile_low,
    H,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One head of one run, its value channels over two warpgroups."""
    run_head = gl.program_id(0)
    head = run_head % H
    run = run_head // H
    low = gl.load(first_ptr + run) - tile_low
    steps = gl.load(first_ptr + run + 1) - tile_low - low
    io: gl.constexpr = gl.bfloat16
    nkd_s = gl.allocate_shared_memory(io, [STAGES, C, K], nkd_d.layout)
    qd_s = gl.allocate_shared_memory(io, [STAGES, C, K], qd_d.layout)
    kr_s = gl.allocate_shared_memory(io, [STAGES, C, K], kr_d.layout)
    kr_rest_s = gl.allocate_shared_memory(io, [STAGES, C, K], kr_d.layout)
    rests = ()
    rests_s = ()
    if nkd_rest_d is not None:
        nkd_rest_s = gl.allocate_shared_memory(io, [STAGES, C, K], nkd_d.layout)
        inv_rest_s = gl.allocate_shared_memory(io, [STAGES, C, C], inv_d.layout)
        qd_rest_s = gl.allocate_shared_memory(io, [STAGES, C, K], qd_d.layout)
        rests = (nkd_rest_d, inv_rest_d, qd_rest_d)
        rests_s = (nkd_rest_s, inv_rest_s, qd_rest_s)
    inv_s = gl.allocate_shared_memory(io, [STAGES, C, C], inv_d.layout)
    mqk_s = gl.allocate_shared_memory(io, [STAGES, C, C], mqk_d.layout)
    decay_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, K], decay_d.layout)
    beta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, C], beta_d.layout)
    d_o_s = gl.allocate_shared_memory(io, [STAGES, C, V], d_o_d.layout)
    v_s = d_o_s if v_d is None else gl.allocate_shared_memory(io, [STAGES, C, V], v_d.layout)
    d_v_s = gl.allocate_shared_memory(io, [2, C, 64], d_o_d.layout)
    d_states_s = d_v_s if d_states_d is None else gl.allocate_shared_memory(io, [4, 64, K], d_states_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    descriptors = (nkd_d, qd_d, kr_d, kr_rest_d, rests, inv_d, mqk_d, decay_d, beta_d, d_o_d, v_d)
    ring = (nkd_s, qd_s, kr_s, kr_rest_s, rests_s, inv_s, mqk_s, decay_s, beta_s, d_o_s, v_s)
    pointers = (d_v_ptr, along_ptr, d_leaving_ptr, d_entering_ptr, start_ptr, length_ptr)
    place = (run_head.to(gl.int64), low, steps, H, head)
    first = (d_states_d, d_states_rest_d, d_v_s.index(0), d_states_s)
    second = (d_states_d, d_states_rest_d, d_v_s.index(1), d_states_s)
    VALUES: gl.constexpr = C * V if v_d is None else 2 * C * V
    RESTS: gl.constexpr = 0 if nkd_rest_d is None else 2 * C * K + C * C
    BYTES: gl.constexpr = 2 * (4 * C * K + 2 * C * C + RESTS + VALUES) + 4 * K + 4 * C
    gl.warp_specialize(
        [
            (_consume, (ring, full, empty, first, pointers, place, K, V, 0)),
            (_consume, (ring, full, empty, second, pointers, place, K, V, 1)),
            (_produce, (descriptors, ring, full, empty, start_ptr, low, steps, H, head, V, BYTES)),
        ],
        [4, 1],
        [240, 24],
    )


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles, for compute capability `arch`: the backward pass, and its first pass over parts."""
    K, C = 128, 32
    options = settings()
    given: dict[str, Any] = dict.fromkeys(("nkd_d", "qd_d", "kr_d", "kr_rest_d", "d_o_d", "v_d"), block_type((C, K)))
    given |= {"along_ptr": "*fp32"}
    given |= dict.fromkeys(("inv_d", "mqk_d"), block_type((C, C)))
    given |= {"decay_d": block_type((1, K), torch.float32), "beta_d": block_type((1, C), torch.float32)}
    given |= dict.fromkeys(("start_ptr", "length_ptr", "first_ptr"), "*i32:1")
    given |= {"tile_low": "i32", "H": "i32", "K": K, "V": 128, "C": C, "STAGES": options.pop("STAGES")}
    written = dict.fromkeys(("d_states_d", "d_states_rest_d"), block_type((ROWS, K)))
    variants: list[dict[str, Any]] = [
        written | {"d_v_ptr": "*bf16", "d_leaving_ptr": "*fp32", "d_entering_ptr": "*fp32"},
        written | {"d_v_ptr": "*bf16", "d_leaving_ptr": "*fp32", "d_entering_ptr": None},
        dict.fromkeys((*written, "d_v_ptr", "along_ptr", "v_d", "d_leaving_ptr")) | {"d_entering_ptr": "*fp32"},
    ]
    shapes = {"nkd_rest_d": (C, K), "inv_rest_d": (C, C), "qd_rest_d": (C, K)}
    rests = [dict.fromkeys(shapes), {name: block_type(shape) for name, shape in shapes.items()}]
    return [(reverse_kernel, given | variant | some, options) for some in rests for variant in variants]
