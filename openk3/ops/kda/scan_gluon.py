"""Gluon kernel of the KDA scan for Hopper: the arithmetic of the Triton scan, with the schedule written out.

One warp brings the tiles of the workspace into a ring of shared memory with the copy engine; each of the consumer
warpgroups holds 64 rows of the transposed state as the accumulator of asynchronous products. Only error, write and
state depend on one another from tile to tile: outputs and stores of a tile run in the shadow of that chain.
"""

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
from openk3.ops.kda.scan_kernel import ScanOutputs
from openk3.ops.kda.tiles import Span
from openk3.ops.kda.workspace import Workspace

ROWS = 64  # of the transposed state in a warpgroup: one tensor-core tile
RESTS = ("kr_rest", "nkd_rest", "inv_rest")  # in the order of the kernel's arguments


def scan(workspace: Workspace, v_THV: Tensor, span: Span, initial_PHKV: Tensor | None, outputs: ScanOutputs) -> None:
    """As `scan_kernel.scan`, for bfloat16 and K = V = 128."""
    _launch(workspace, v_THV, span, initial_PHKV, outputs, maps=False)


def scan_maps(workspace: Workspace, v_THV: Tensor, span: Span) -> Tensor:
    """As `scan_kernel.scan_maps`, for bfloat16 and K = V = 128."""
    (_, H, V), K = v_THV.shape, workspace.sizes[3]
    maps = torch.empty(span.num_runs, H, V + K, K, dtype=torch.float32, device=v_THV.device)
    _launch(workspace, v_THV, span, None, ScanOutputs(final=maps), maps=True)
    return maps


def _launch(
    workspace: Workspace, v_THV: Tensor, span: Span, initial: Tensor | None, outputs: ScanOutputs, *, maps: bool
) -> None:
    _, H, V = v_THV.shape
    out, (X, _, C, K) = outputs, workspace.sizes
    if X * H == 0:
        return
    options = settings(outputs=(out.o is not None) + (out.r is not None) + (out.states is not None))
    constants = {"K": K, "V": V, "C": C, "MAPS": maps, "GROUPS": options.pop("GROUPS"), "STAGES": options.pop("STAGES")}
    width = ROWS * constants["GROUPS"]
    careful = out.states is not None or (maps and workspace.kr_rest is not None)
    assert not careful or workspace.kr_rest is not None
    assert out.r_rest is None or (out.r is not None and out.states is not None)
    arguments = [
        *(*tiles_of(workspace, RESTS, rest=careful), matrix(v_THV, H * V, (C, width))),
        *(None if x is None else matrix(x, K, (ROWS, K)) for x in (out.states, out.states_rest)),
        *(out.o, out.r, out.r_rest, initial, out.final, out.saved),
        *(span.start_X, span.length_X, span.mark_X, span.first_P, span.tile_low, span.token_low, H),
    ]
    launch(scan_kernel, span.num_runs * H * (((V + K) if maps else V) // width), arguments, constants, options)


def settings(outputs: int) -> dict[str, int]:
    """Consumer warpgroups, stages of the ring and registers, by the number of output tensors of a tile."""
    return {"GROUPS": 2, "STAGES": 5 - outputs, "num_warps": 4, "maxnreg": 168}


@gluon.jit
def _produce(
    descriptors,
    ring,
    full,
    empty,
    start_ptr,
    low,
    steps,
    H,
    head,
    column,
    V: gl.constexpr,
    READ: gl.constexpr,
    MAPS: gl.constexpr,
    BYTES: gl.constexpr,
):
    """The copy warp: tile after tile into the next free stage of the ring; BYTES of a stage, without v."""
    nkd_d, qd_d, kr_d, kr_rest_d, nkd_rest_d, inv_rest_d, inv_d, mqk_d, decay_d, beta_d, v_d = descriptors
    nkd_s, qd_s, kr_s, kr_rest_s, nkd_rest_s, inv_rest_s, inv_s, mqk_s, decay_s, beta_s, v_s = ring
    STAGES: gl.constexpr = nkd_s.shape[0]
    C: gl.constexpr = nkd_s.shape[1]
    VALUES: gl.constexpr = 2 * C * v_s.shape[2]
    for step in range(steps):
        stage = step % STAGES
        bar = full.index(stage)
        at = (low + step) * H + head
        start = gl.load(start_ptr + low + step)
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        if not MAPS or column < V:
            mbarrier.expect(bar, BYTES + VALUES)
            tma.async_copy_global_to_shared(v_d, [start, head * V + column], bar, v_s.index(stage))
        else:
            mbarrier.expect(bar, BYTES)
        tma.async_copy_global_to_shared(nkd_d, [at * C, 0], bar, nkd_s.index(stage))
        tma.async_copy_global_to_shared(beta_d, [at, 0], bar, beta_s.index(stage))
        tma.async_copy_global_to_shared(inv_d, [at * C, 0], bar, inv_s.index(stage))
        if nkd_rest_d is not None:
            tma.async_copy_global_to_shared(nkd_rest_d, [at * C, 0], bar, nkd_rest_s.index(stage))
            tma.async_copy_global_to_shared(inv_rest_d, [at * C, 0], bar, inv_rest_s.index(stage))
        tma.async_copy_global_to_shared(decay_d, [at, 0], bar, decay_s.index(stage))
        tma.async_copy_global_to_shared(kr_d, [at * C, 0], bar, kr_s.index(stage))
        if kr_rest_d is not None:
            tma.async_copy_global_to_shared(kr_rest_d, [at * C, 0], bar, kr_rest_s.index(stage))
        if READ:
            tma.async_copy_global_to_shared(qd_d, [at * C, 0], bar, qd_s.index(stage))
            tma.async_copy_global_to_shared(mqk_d, [at * C, 0], bar, mqk_s.index(stage))


@gluon.jit
def put_tokens(values, buffer, out_ptr, row, length, H, head, column, V: gl.constexpr):
    """Write values^T, [64, C], to the first `length` tokens from `row` on; transposed by way of shared memory."""
    C: gl.constexpr = values.shape[1]
    ROWS: gl.constexpr = values.shape[0]
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    buffer.permute((1, 0)).store(values)
    token = gl.arange(0, C, layout=gl.SliceLayout(1, rows))
    value = column + gl.arange(0, ROWS, layout=gl.SliceLayout(0, rows))
    at = ((row + token).to(gl.int64) * H + head)[:, None] * V + value[None, :]
    gl.store(out_ptr + at, buffer.load(rows), mask=(token < length)[:, None])


@gluon.jit
def put_states(values, buffer, out_d, row):
    """Write values [64, K] to rows from `row` on, by the copy engine, from the one of two buffers not used last."""
    tma.store_wait(1)
    buffer.store(values)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_d, [row, 0], buffer)


@gluon.jit
def _consume(
    ring,
    full,
    empty,
    stores,
    pointers,
    place,
    column,
    K: gl.constexpr,
    V: gl.constexpr,
    MAPS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """A warpgroup: rows `column` + 0..63 of the transposed state of one head of one run."""
    nkd_s, qd_s, kr_s, kr_rest_s, nkd_rest_s, inv_rest_s, inv_s, mqk_s, decay_s, beta_s, v_s = ring
    states_d, states_rest_d, kr_rest_d, nkd_rest_d, o_s, r_s, states_s = stores
    outputs, initial_ptr, start_ptr, length_ptr, mark_ptr, token_low = pointers
    o_ptr, r_ptr, r_rest_ptr, final_ptr, saved_ptr = outputs
    run_head, low, steps, H, head = place
    STAGES: gl.constexpr = nkd_s.shape[0]
    C: gl.constexpr = nkd_s.shape[1]
    ROWS: gl.constexpr = 64
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    wide_left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    left: gl.constexpr = gl.DotOperandLayout(0, narrow, 2)
    value = column + gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, wide))
    inner = channel[None, :] * V + value[:, None]
    token = gl.arange(0, C, layout=gl.SliceLayout(0, narrow))
    zero = gl.zeros([ROWS, C], gl.float32, layout=narrow)
    state = gl.zeros([ROWS, K], gl.float32, layout=wide)
    if MAPS:
        state += gl.where(value[:, None] - V == channel[None, :], 1.0, 0.0)
    elif initial_ptr is not None:
        state = gl.load(initial_ptr + run_head * (K * V) + inner).to(gl.float32)
    ready = gl.zeros([ROWS, C], gl.bfloat16, layout=narrow)  # outputs of the tile before, still to be stored
    ready_start = gl.to_tensor(0)
    ready_length = gl.to_tensor(0)
    start = gl.load(start_ptr + low, mask=steps > 0, other=0)
    length = gl.load(length_ptr + low, mask=steps > 0, other=0)
    for step in range(steps):
        stage = step % STAGES
        more = step + 1 < steps
        next_start = gl.load(start_ptr + low + step + 1, mask=more, other=0)
        next_length = gl.load(length_ptr + low + step + 1, mask=more, other=0)
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        v = v_s.index(stage).slice(GROUP * ROWS, ROWS, 1).permute((1, 0)).load(narrow).to(gl.float32)
        shown = token < length
        if MAPS:
            shown = shown & (column < V)
        v = gl.where(shown[None, :], v, 0.0)
        state = warpgroup_mma_wait(0, (state,))
        rounded = state.to(gl.bfloat16)
        entering = gl.convert_layout(rounded, left)
        beta = beta_s.index(stage).reshape([C]).load(gl.SliceLayout(0, narrow))
        error = warpgroup_mma(entering, nkd_s.index(stage).permute((1, 0)), v, is_async=True)
        if kr_rest_d is not None:  # gradients of what reads these states want them better than outputs do
            state_rest = (state - rounded.to(gl.float32)).to(gl.bfloat16)
            rest = gl.convert_layout(state_rest, left)
            error = warpgroup_mma(rest, nkd_s.index(stage).permute((1, 0)), error, is_async=True)
        if nkd_rest_d is not None:
            error = warpgroup_mma(entering, nkd_rest_s.index(stage).permute((1, 0)), error, is_async=True)
        if states_rest_d is not None:
            put_states(rounded, states_s.index(2 * GROUP), states_d, ((low + step) * H + head) * V + column)
            put_states(state_rest, states_s.index(2 * GROUP + 1), states_rest_d, ((low + step) * H + head) * V + column)
        elif states_d is not None:
            buffer = states_s.index(2 * GROUP + (step & 1))
            put_states(rounded, buffer, states_d, ((low + step) * H + head) * V + column)
        error = warpgroup_mma_wait(0, (error,))
        strong_wide = error * beta[None, :]
        strong = strong_wide.to(gl.bfloat16)
        write = warpgroup_mma(
            gl.convert_layout(strong, left), inv_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        rest = (strong_wide - strong.to(gl.float32)).to(gl.bfloat16)  # the rounding of one part would be felt
        write = warpgroup_mma(gl.convert_layout(rest, left), inv_s.index(stage).permute((1, 0)), write, is_async=True)
        if nkd_rest_d is not None:
            inv_rest = inv_rest_s.index(stage).permute((1, 0))
            write = warpgroup_mma(gl.convert_layout(strong, left), inv_rest, write, is_async=True)
        if o_ptr is not None:
            out = warpgroup_mma(entering, qd_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        decay = decay_s.index(stage).reshape([K]).load(gl.SliceLayout(0, wide))
        state = state * decay[None, :]
        write = warpgroup_mma_wait(1 if o_ptr is not None else 0, (write,))
        write_io = write.to(gl.bfloat16)
        state = warpgroup_mma(gl.convert_layout(write_io, wide_left), kr_s.index(stage), state, is_async=True)
        if kr_rest_d is not None:
            kr_rest = kr_rest_s.index(stage)
            state = warpgroup_mma(gl.convert_layout(write_io, wide_left), kr_rest, state, is_async=True)
            rest = (write - write_io.to(gl.float32)).to(gl.bfloat16)
            state = warpgroup_mma(gl.convert_layout(rest, wide_left), kr_s.index(stage), state, is_async=True)
        if o_ptr is not None:
            out = warpgroup_mma(
                gl.convert_layout(write_io, left), mqk_s.index(stage).permute((1, 0)), out, is_async=True
            )
            put_tokens(ready, o_s, o_ptr, ready_start, ready_length, H, head, column, V)
        if r_ptr is not None:
            put_tokens(write_io, r_s, r_ptr, start - token_low, length, H, head, column, V)
        if r_rest_ptr is not None:
            put_tokens(rest, o_s, r_rest_ptr, start - token_low, length, H, head, column, V)
        if o_ptr is not None:
            state, out = warpgroup_mma_wait(0, (state, out))
            ready = out.to(gl.bfloat16)
            ready_start = start
            ready_length = length
        else:
            state = warpgroup_mma_wait(0, (state,))
        mbarrier.arrive(empty.index(stage), count=1)
        if saved_ptr is not None:
            mark = gl.load(mark_ptr + low + step).to(gl.int64)
            if mark >= 0:
                gl.store(saved_ptr + (mark * H + head) * (K * V) + inner, state)
        start = next_start
        length = next_length
    if o_ptr is not None:
        put_tokens(ready, o_s, o_ptr, ready_start, ready_length, H, head, column, V)
    if MAPS:
        gl.store(final_ptr + (run_head * (V + K) + value[:, None]) * K + channel[None, :], state)
    elif final_ptr is not None:
        gl.store(final_ptr + run_head * (K * V) + inner, state)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["H", "tile_low", "token_low"],
    do_not_specialize_on_alignment=["start_ptr", "length_ptr", "mark_ptr", "first_ptr"],
)
def scan_kernel(
    nkd_d,
    qd_d,
    kr_d,
    kr_rest_d,
    nkd_rest_d,
    inv_rest_d,
    inv_d,
    mqk_d,
    decay_d,
    beta_d,
    v_d,
    states_d,
    states_rest_d,
    o_ptr,
    r_ptr,
    r_rest_ptr,
    initial_ptr,
    final_ptr,
    saved_ptr,
    start_ptr,
    length_ptr,
    mark_ptr,
    first_ptr,
    tile_low,
    token_low,
    H,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    MAPS: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """64 GROUPS rows of the transposed state of one head of one run; with MAPS also the rows that begin as identity."""
    blocks: gl.constexpr = ((V + K) if MAPS else V) // (64 * GROUPS)
    program = gl.program_id(0)
    column = program % blocks * (64 * GROUPS)
    run_head = program // blocks
    head = run_head % H
    run = run_head // H
    low = gl.load(first_ptr + run) - tile_low
    steps = gl.load(first_ptr + run + 1) - tile_low - low
    io: gl.constexpr = gl.bfloat16
    READ: gl.constexpr = o_ptr is not None
    nkd_s = gl.allocate_shared_memory(io, [STAGES, C, K], nkd_d.layout)
    kr_s = gl.allocate_shared_memory(io, [STAGES, C, K], kr_d.layout)
    kr_rest_s = kr_s if kr_rest_d is None else gl.allocate_shared_memory(io, [STAGES, C, K], kr_d.layout)
    inv_s = gl.allocate_shared_memory(io, [STAGES, C, C], inv_d.layout)
    nkd_rest_s, inv_rest_s = nkd_s, inv_s
    if nkd_rest_d is not None:
        nkd_rest_s = gl.allocate_shared_memory(io, [STAGES, C, K], nkd_d.layout)
        inv_rest_s = gl.allocate_shared_memory(io, [STAGES, C, C], inv_d.layout)
    qd_s = gl.allocate_shared_memory(io, [STAGES if READ else 1, C, K], qd_d.layout)
    mqk_s = gl.allocate_shared_memory(io, [STAGES if READ else 1, C, C], mqk_d.layout)
    decay_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, K], decay_d.layout)
    beta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, C], beta_d.layout)
    v_s = gl.allocate_shared_memory(io, [STAGES, C, 64 * GROUPS], v_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    o_s = gl.allocate_shared_memory(io, [GROUPS, C, 64], v_d.layout)
    r_s = o_s if r_ptr is None else gl.allocate_shared_memory(io, [GROUPS, C, 64], v_d.layout)
    states_s = o_s if states_d is None else gl.allocate_shared_memory(io, [2 * GROUPS, 64, K], states_d.layout)
    descriptors = (nkd_d, qd_d, kr_d, kr_rest_d, nkd_rest_d, inv_rest_d, inv_d, mqk_d, decay_d, beta_d, v_d)
    ring = (nkd_s, qd_s, kr_s, kr_rest_s, nkd_rest_s, inv_rest_s, inv_s, mqk_s, decay_s, beta_s, v_s)
    outputs = (o_ptr, r_ptr, r_rest_ptr, final_ptr, saved_ptr)
    pointers = (outputs, initial_ptr, start_ptr, length_ptr, mark_ptr, token_low)
    place = (run_head.to(gl.int64), low, steps, H, head)
    first = (states_d, states_rest_d, kr_rest_d, nkd_rest_d, o_s.index(0), r_s.index(0), states_s)
    rows: gl.constexpr = 3 if READ else 2
    more: gl.constexpr = 0 if kr_rest_d is None else 1
    few: gl.constexpr = 0 if nkd_rest_d is None else 1
    BYTES: gl.constexpr = 2 * ((rows + more + few) * C * K + (rows - 1 + few) * C * C) + 4 * K + 4 * C
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (ring, full, empty, first, pointers, place, column, K, V, MAPS, 0)),
                (
                    _produce,
                    (descriptors, ring, full, empty, start_ptr, low, steps, H, head, column, V, READ, MAPS, BYTES),
                ),
            ],
            [1],
            [24],
        )
    else:
        second = (states_d, states_rest_d, kr_rest_d, nkd_rest_d, o_s.index(1), r_s.index(1), states_s)
        gl.warp_specialize(
            [
                (_consume, (ring, full, empty, first, pointers, place, column, K, V, MAPS, 0)),
                (_consume, (ring, full, empty, second, pointers, place, column + 64, K, V, MAPS, 1)),
                (
                    _produce,
                    (descriptors, ring, full, empty, start_ptr, low, steps, H, head, column, V, READ, MAPS, BYTES),
                ),
            ],
            [4, 1],
            [240, 24],
        )


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles, for compute capability `arch`: the backward pass, training, prefill, maps."""
    K, C = 128, 32
    backward = {"states_d": block_type((ROWS, K)), "kr_rest_d": block_type((C, K))}
    backward |= dict.fromkeys(("r_ptr", "r_rest_ptr"), "*bf16")
    writes: list[dict[str, Any]] = [
        backward | {"initial_ptr": "*fp32"},
        backward,
        {"o_ptr": "*bf16", "initial_ptr": "*fp32", "final_ptr": "*fp32", "saved_ptr": "*fp32"},
        {"o_ptr": "*bf16", "initial_ptr": "*fp32", "final_ptr": "*fp32"},
        {"o_ptr": "*bf16", "final_ptr": "*fp32", "saved_ptr": "*fp32"},
        {"o_ptr": "*bf16", "final_ptr": "*fp32"},
        {"final_ptr": "*fp32", "MAPS": True},
        {"final_ptr": "*fp32", "MAPS": True, "kr_rest_d": block_type((C, K))},
    ]
    few = {"nkd_rest_d": block_type((C, K)), "inv_rest_d": block_type((C, C))}
    rest = few | {"states_rest_d": block_type((ROWS, K))}
    writes += [writes[0] | rest, writes[1] | rest, writes[7] | few]
    given: dict[str, Any] = dict.fromkeys(("nkd_d", "qd_d", "kr_d"), block_type((C, K)))
    given |= dict.fromkeys(("inv_d", "mqk_d"), block_type((C, C)))
    given |= {"decay_d": block_type((1, K), torch.float32), "beta_d": block_type((1, C), torch.float32)}
    given |= dict.fromkeys(("kr_rest_d", "nkd_rest_d", "inv_rest_d", "states_d", "states_rest_d"))
    given |= dict.fromkeys(("o_ptr", "r_ptr", "r_rest_ptr"))
    given |= dict.fromkeys(("initial_ptr", "final_ptr", "saved_ptr"))
    given |= dict.fromkeys(("start_ptr", "length_ptr", "mark_ptr", "first_ptr"), "*i32:1")
    given |= {"tile_low": "i32", "token_low": "i32", "H": "i32", "K": K, "V": 128, "C": C, "MAPS": False}
    cases = []
    for variant in writes:
        options = settings(outputs=len({"o_ptr", "r_ptr", "states_d"} & variant.keys()))
        shape = {"GROUPS": options.pop("GROUPS"), "STAGES": options.pop("STAGES")}
        values = {"v_d": block_type((C, ROWS * shape["GROUPS"]))}
        cases.append((scan_kernel, given | values | shape | variant, options))
    return cases
