"""Gluon kernel of the gradients inside KDA tiles for Hopper: the arithmetic of the Triton one, with layouts chosen.

Everything that has K channels is held transposed, [K, C], as accumulators of asynchronous products lie: there running
sums over tokens stay within four neighbouring lanes, and a converted accumulator is the left operand of the next
product without leaving its registers. The inputs of a tile arrive in shared memory by the copy engine, all at once
but for what takes the place of others when they are done: second halves of the gradients of states, which come in two
parts, and what rounding left of the writes. Two blocks share a multiprocessor: 128 registers a thread hold six of the
seven matrices that a tile needs at its busiest, so what waits is parked in the shared memory that the states have left,
and exponentials are taken anew.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openk3.ops.kda.gluon_launch import block_type, launch, matrix
from openk3.ops.kda.gradient_kernel import Scanned, TokenGradients
from openk3.ops.kda.gradient_pieces_gluon import (
    column_sums,
    decay,
    exponent,
    later_sums,
    norm_gradient,
    norms,
    rest,
    row,
)
from openk3.ops.kda.reference import KdaGate
from openk3.ops.kda.tiles import Span


def tile_gradients(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    gate: KdaGate,
    scanned: Scanned,
    out: TokenGradients,
    *,
    span: Span,
) -> Tensor:
    """As `gradient_kernel.tile_gradients`, for bfloat16, K = V = 128 and at least one tile."""
    q, k, _, logit, beta = tokens
    (_, H, K), V, C = q.shape, scanned.writes.shape[2], span.chunk
    d_gate = scanned.along.new_empty(span.num_tiles, H, 2, K)
    rows = [matrix(x, H * K, (C, K)) for x in (q, k, logit, out.d_q, out.d_k, out.d_logit)]
    assert scanned.writes_rest is not None and scanned.d_states_rest is not None
    values = [matrix(x, H * V, (C, V)) for x in (scanned.writes, scanned.writes_rest, scanned.d_o, scanned.d_v)]
    halves = [matrix(x, K, (V // 2, K)) for x in (scanned.d_states, scanned.d_states_rest)]
    arguments = [
        *rows,
        *values,
        matrix(scanned.states, K, (V, K)),
        *halves,
        None if scanned.states_rest is None else matrix(scanned.states_rest, K, (V, K)),
        scanned.along,
        out.d_q,
        out.d_k,
        out.d_logit,
        out.d_beta,
        d_gate,
    ]
    arguments += [beta, gate.A_log_H, gate.dt_bias_HK, span.start_X, span.length_X]
    arguments += [span.token_low, gate.lower_bound, H]
    options = settings(fine=scanned.states_rest is not None)
    launch(gradient_kernel, span.num_tiles * H, arguments, {"K": K, "V": V, "C": C}, options)
    return d_gate


def settings(*, fine: bool = False) -> dict[str, int]:
    """Launch options: two blocks on a multiprocessor; one where states come in two parts."""
    return {"num_warps": 8, "maxnreg": 240 if fine else 128}


@gluon.jit
def _barrier():
    """A barrier for one arrival and any number of bytes."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    return bar


@gluon.jit
def _fetch(descriptors, places, bar, ELEMENTS: gl.constexpr):
    """Blocks of so many elements in all at these places, on their way to shared memory until the barrier is done."""
    mbarrier.expect(bar, 2 * ELEMENTS)
    buffers = ()
    for n in gl.static_range(len(descriptors)):
        buffer = gl.allocate_shared_memory(gl.bfloat16, descriptors[n].block_shape, descriptors[n].layout)
        tma.async_copy_global_to_shared(descriptors[n], [places[n][0], places[n][1]], bar, buffer)
        buffers = buffers + (buffer,)
    return buffers


@gluon.jit
def _shared_sums(a_s, a_rest_s, b_s, rest_s, FIRST: gl.constexpr):
    """Sums over rows of (a + its rest, if any) * (b + rest), in shared memory, b and rest from row FIRST of a on."""
    K: gl.constexpr = a_s.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [1, K // 16], [1, 0])
    both = gl.zeros([16, K], gl.float32, layout=layout)
    for n in gl.static_range(b_s.shape[0] // 16):
        b = b_s.slice(16 * n, 16).load(layout).to(gl.float32) + rest_s.slice(16 * n, 16).load(layout).to(gl.float32)
        a = a_s.slice(FIRST + 16 * n, 16).load(layout).to(gl.float32)
        for rest_n in gl.static_range(len(a_rest_s)):
            a += a_rest_s[rest_n].slice(FIRST + 16 * n, 16).load(layout).to(gl.float32)
        both += a * b
    return gl.sum(both, 0)


@gluon.jit
def _add_products(acc, d_states_s, d_rest_s, u_s, u_rest_s, FIRST: gl.constexpr):
    """acc plus products of d_states + rest, rows from FIRST on, and of what is written there; anew from the first."""
    ROWS: gl.constexpr = d_states_s.shape[0]
    u_t = u_s.slice(FIRST, ROWS, 1).permute((1, 0))
    u_rest_t = u_rest_s.slice(FIRST, ROWS, 1).permute((1, 0))
    acc = warpgroup_mma(d_states_s.permute((1, 0)), u_t, acc, use_acc=FIRST > 0, is_async=True)
    acc = warpgroup_mma(d_rest_s.permute((1, 0)), u_t, acc, is_async=True)
    return warpgroup_mma(d_states_s.permute((1, 0)), u_rest_t, acc, is_async=True)


@gluon.jit
def _times(row, parts, acc, TURNED: gl.constexpr):
    """acc plus a row in bfloat16 by a square, or its transpose; where that has two parts, so has the row. Under way."""
    left: gl.constexpr = gl.DotOperandLayout(0, row.type.layout, 2)
    rounded = row.to(gl.bfloat16)
    first = parts[0].permute((1, 0)) if TURNED else parts[0]
    acc = warpgroup_mma(gl.convert_layout(rounded, left), first, acc, is_async=True)
    if len(parts) > 1:
        second = parts[1].permute((1, 0)) if TURNED else parts[1]
        acc = warpgroup_mma(gl.convert_layout(rest(row, rounded), left), first, acc, is_async=True)
        acc = warpgroup_mma(gl.convert_layout(rounded, left), second, acc, is_async=True)
    return acc


@gluon.jit
def _seen(row, FINE: gl.constexpr):
    """A row as products took it."""
    return row if FINE else row.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def _refill(descriptors, place, bar, buffers, ELEMENTS: gl.constexpr):
    """As `_fetch`, of blocks at one place, to memory that all threads have read."""
    mbarrier.expect(bar, 2 * ELEMENTS)
    fence_async_shared()
    gl.thread_barrier()
    for n in gl.static_range(len(descriptors)):
        tma.async_copy_global_to_shared(descriptors[n], [place[0], place[1]], bar, buffers[n])


@gluon.jit
def _keep(buffers):
    """Nobody else is given this memory before here."""
    for n in gl.static_range(len(buffers)):
        buffers[n]._keep_alive()


@gluon.jit
def _gate_gradient(d_log, x, slope, live, factor, d_gate_ptr):
    """Gradient of the logits from that of the log decay over `factor`; what this tile gives to A_log's and dt_bias'."""
    K: gl.constexpr = x.shape[0]
    tail = gl.exp2(gl.abs(x) * -1.4426950408889634)
    share = 1.0 / (1.0 + tail)
    d_x = gl.where(live[None, :], d_log * (tail * share * share) * factor, gl.zeros_like(x))
    channel = gl.arange(0, K, layout=gl.SliceLayout(1, x.type.layout))
    x = gl.minimum(gl.maximum(x, -1e4), 1e4)  # d_x is zero far out, where x may be inf
    gl.store(d_gate_ptr + channel, gl.sum(d_x * x, 1))
    gl.store(d_gate_ptr + K + channel, gl.sum(d_x, 1) * slope)
    return d_x * slope


@gluon.jit
def _value_products(d_o_s, d_r_s, u_s, u_rest_s, square: gl.constexpr):
    """Gradients of mqk and of the keys' products, less their sign, [C, C]: those of outputs and errors by writes."""
    C: gl.constexpr = u_s.shape[0]
    first: gl.constexpr = gl.DotOperandLayout(0, square, 2)
    second: gl.constexpr = gl.DotOperandLayout(1, square, 2)
    none = gl.zeros([C, C], gl.float32, layout=square)
    u_t = u_s.permute((1, 0)).load(second)
    u_rest_t = u_rest_s.permute((1, 0)).load(second)
    d_mqk = mma_v2(d_o_s.load(first), u_rest_t, mma_v2(d_o_s.load(first), u_t, none))
    d_keys = mma_v2(d_r_s.load(first), u_rest_t, mma_v2(d_r_s.load(first), u_t, none))
    return d_mqk, d_keys


@gluon.jit
def _apart(d_mqk, d_keys):
    """Both below the diagonal, the second one's sign turned, and what they are to be taken relative to."""
    C: gl.constexpr = d_mqk.shape[0]
    square: gl.constexpr = d_mqk.type.layout
    none = gl.zeros_like(d_mqk)
    # A token's query reads its own key without any decay between: the diagonal is left out of the products, where its
    # two shares in the gradient of the decay would cancel only up to rounding. Decay may span 2^-231 in a tile and
    # gradients may be tiny: products are taken relative to the largest. But what comes from the states may be large
    # where nothing was written: the scale counts the diagonal and leaves room for that.
    row = gl.arange(0, C, layout=gl.SliceLayout(1, square))
    column = gl.arange(0, C, layout=gl.SliceLayout(0, square))
    below = row[:, None] > column[None, :]
    most = gl.abs(gl.where(row[:, None] >= column[None, :], d_mqk, none))
    d_mqk = gl.where(below, d_mqk, none)
    d_keys = gl.where(below, -d_keys, none)
    peak = gl.max(gl.max(gl.maximum(most, gl.abs(d_keys)), 1), 0)
    size = gl.exp2(gl.ceil(gl.log2(gl.maximum(peak, 1e-27))))
    return d_mqk, d_keys, size


@gluon.jit
def _triangle(C: gl.constexpr, square: gl.constexpr):
    """Ones on and below the diagonal."""
    row = gl.arange(0, C, layout=gl.SliceLayout(1, square))
    column = gl.arange(0, C, layout=gl.SliceLayout(0, square))
    none = gl.zeros([C, C], gl.float32, layout=square)
    return gl.where(row[:, None] >= column[None, :], 1.0, none).to(gl.bfloat16)


@gluon.jit
def _clear(buffers, length, layout: gl.constexpr):
    """Zero the rows of a tile that belong to other tokens, whatever they hold."""
    C: gl.constexpr = buffers[0].shape[0]
    if length < C:
        live = gl.arange(0, C, layout=gl.SliceLayout(1, layout)) < length
        for n in gl.static_range(len(buffers)):
            x = buffers[n].load(layout)
            buffers[n].store(gl.where(live[:, None], x, gl.zeros_like(x)))
        fence_async_shared()


@gluon.jit
def _put(x, buffer, out_d, out_ptr, start, length, head, H):
    """Write x^T, [K, C], to the tokens of a tile: by the copy engine, or one by one where the tile is cut."""
    K: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    if length == C:
        buffer.permute((1, 0)).store(x)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out_d, [start, head * K], buffer)
    else:
        layout: gl.constexpr = x.type.layout
        c = gl.arange(0, C, layout=gl.SliceLayout(0, layout))
        channel = gl.arange(0, K, layout=gl.SliceLayout(1, layout))
        rows = ((start.to(gl.int64) + c) * H + head) * K
        gl.store(out_ptr + rows[None, :] + channel[:, None], x, mask=(c < length)[None, :])


@gluon.jit
def _along(along_ptr, program, V: gl.constexpr, C: gl.constexpr):
    """Parts [V / 16, C] of the sums over values of their gradients times them, as the reverse scan left them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, C // 4], [0, 1])
    part = gl.arange(0, V // 16, layout=gl.SliceLayout(1, layout))
    token = gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    return gl.load(along_ptr + program * (V // 16 * C) + (part * C)[:, None] + token[None, :])


@gluon.jit(
    do_not_specialize=["H", "token_low"],
    do_not_specialize_on_alignment=["start_ptr", "length_ptr"],
)
def gradient_kernel(
    q_d,
    k_d,
    logit_d,
    d_q_d,
    d_k_d,
    d_logit_d,
    writes_d,
    writes_rest_d,
    d_o_d,
    d_v_d,
    states_d,
    d_states_d,
    d_states_rest_d,
    states_rest_d,
    along_ptr,
    d_q_ptr,
    d_k_ptr,
    d_logit_ptr,
    d_beta_ptr,
    d_gate_ptr,
    beta_ptr,
    a_log_ptr,
    bias_ptr,
    start_ptr,
    length_ptr,
    token_low,
    bound,
    H,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
):
    """One tile of one head; rows of the writes are counted from token_low. FINE where states come in two parts."""
    FINE: gl.constexpr = states_rest_d is not None
    io: gl.constexpr = gl.bfloat16
    scale: gl.constexpr = K**-0.5
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, C, 16])  # [K, C]
    square: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 4], [16, 8])  # [C, C]
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    over_c: gl.constexpr = gl.SliceLayout(0, wide)
    over_k: gl.constexpr = gl.SliceLayout(1, wide)
    over_columns: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([K // 8, 1], [8, 4], [1, C // 4], [0, 1]))
    program = gl.program_id(0)
    tile, head = program // H, program % H
    start, length = gl.load(start_ptr + tile), gl.load(length_ptr + tile)

    tokens_bar, values_bar, rest_bar, states_bar = _barrier(), _barrier(), _barrier(), _barrier()
    fence_async_shared()
    gl.thread_barrier()
    key, value, written = (start, head * K), (start, head * V), (start - token_low, head * V)
    logit_s, q_s, k_s = _fetch((logit_d, q_d, k_d), (key, key, key), tokens_bar, 3 * C * K)
    u_s, d_o_s, d_r_s = _fetch((writes_d, d_o_d, d_v_d), (written, value, value), values_bar, 3 * C * V)
    # Both parts of the gradients of the states share the memory of one, and come in halves.
    state = (program * V, 0)
    wanted = (states_d, d_states_d, d_states_rest_d)
    LEFT: gl.constexpr = V * K if FINE else 0
    if FINE:
        wanted = wanted + (states_rest_d,)
    brought = _fetch(wanted, (state, state, state, state), states_bar, 2 * V * K + LEFT)
    states_s, d_states_s, d_rest_s = brought[0], brought[1], brought[2]
    states_rest_s = (brought[3],) if FINE else ()

    # What rounding left of the writes lies where the logits were, which come again when its products are done.
    live = gl.arange(0, C, layout=over_c) < length
    zero = gl.zeros([K, C], gl.float32, layout=wide)
    mbarrier.wait(tokens_bar, 0)
    logit = logit_s.permute((1, 0)).load(wide)
    u_rest_s = logit_s
    _refill((writes_rest_d,), written, rest_bar, (u_rest_s,), C * V)
    _clear((q_s, k_s), length, rows)

    # Products among values.
    mbarrier.wait(values_bar, 0)
    mbarrier.wait(rest_bar, 0)
    _clear((u_s, d_o_s, d_r_s, u_rest_s), length, rows)
    own = gl.sum(d_o_s.load(rows).to(gl.float32) * u_s.load(rows).to(gl.float32), 1)
    d_mqk, d_keys = _value_products(d_o_s, d_r_s, u_s, u_rest_s, square)

    # Products with the states. The second halves are on their way while the gate is computed.
    gl.thread_barrier()
    mbarrier.wait(states_bar, 0)
    d_kr = _add_products(zero, d_states_s, d_rest_s, u_s, u_rest_s, 0)
    carried = gl.convert_layout(_shared_sums(states_s, states_rest_s, d_states_s, d_rest_s, 0), over_k)
    d_kr = warpgroup_mma_wait(0, (d_kr,))
    _refill((d_states_d, d_states_rest_d), (program * V + V // 2, 0), states_bar, (d_states_s, d_rest_s), V * K)

    total, middle = decay(logit, live, bound, a_log_ptr, bias_ptr, head)

    mbarrier.wait(states_bar, 1)
    d_kr = _add_products(d_kr, d_states_s, d_rest_s, u_s, u_rest_s, V // 2)
    carried += gl.convert_layout(_shared_sums(states_s, states_rest_s, d_states_s, d_rest_s, V // 2), over_k)
    states_t = states_s.permute((1, 0))
    d_kd = warpgroup_mma(states_t, d_r_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    d_qd = warpgroup_mma(states_t, d_o_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    for n in gl.static_range(len(states_rest_s)):
        rest_t = states_rest_s[n].permute((1, 0))
        d_kd = warpgroup_mma(rest_t, d_r_s.permute((1, 0)), d_kd, is_async=True)
        d_qd = warpgroup_mma(rest_t, d_o_s.permute((1, 0)), d_qd, is_async=True)

    d_mqk, d_keys, size = _apart(d_mqk, d_keys)
    shrink = 1.0 / size
    half = gl.exp2(middle)
    d_kd, d_qd, d_kr = warpgroup_mma_wait(0, (d_kd, d_qd, d_kr))
    mbarrier.expect(rest_bar, 2 * C * K)
    fence_async_shared()
    gl.thread_barrier()  # a warpgroup waits for its own products only, and what follows overwrites what both read
    _keep((u_s, d_o_s, d_r_s, states_s, d_states_s, d_rest_s))
    _keep(states_rest_s)
    tma.async_copy_global_to_shared(logit_d, [start, head * K], rest_bar, logit_s)
    small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], io)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # The triangle first: where another operand of products lay, ptxas (CUDA 12.8) loses the address of one that is
    # read again at once, and takes its second half from anywhere.
    ones_s = gl.allocate_shared_memory(io, [C, C], small, _triangle(C, square))
    d_mqk_s = gl.allocate_shared_memory(io, [C, C], small, (d_mqk * shrink).to(io))
    d_keys_s = gl.allocate_shared_memory(io, [C, C], small, (d_keys * shrink).to(io))
    mqk_parts = (d_mqk_s,)
    keys_parts = (d_keys_s,)
    if FINE:
        part = rest(d_mqk * shrink, (d_mqk * shrink).to(io))
        mqk_parts = (d_mqk_s, gl.allocate_shared_memory(io, [C, C], small, part))
        part = rest(d_keys * shrink, (d_keys * shrink).to(io))
        keys_parts = (d_keys_s, gl.allocate_shared_memory(io, [C, C], small, part))
    fence_async_shared()
    k_norm = norms(k_s, rows)
    q_norm = norms(q_s, rows)
    own_s = gl.allocate_shared_memory(gl.float32, [C], line, own * (shrink * scale))
    dots_s = gl.allocate_shared_memory(gl.float32, [C], line)
    parked: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, C], gl.float32)
    total_s = gl.allocate_shared_memory(gl.float32, [K, C], parked, total)
    d_qd_s = gl.allocate_shared_memory(gl.float32, [K, C], parked, d_qd * shrink * half[:, None])
    scratch_s = gl.allocate_shared_memory(gl.float32, [K, C], parked)

    # What the gradients of the beta logits need.
    token = gl.arange(0, C, layout=over_columns)
    beta_at = (start.to(gl.int64) + token) * H + head
    beta_x = gl.load(beta_ptr + beta_at, mask=token < length, other=0.0)
    along = _along(along_ptr, program, V, C)

    # Products inside the tile. Gradients of the decay take the rows that the products take: then what a pair of tokens
    # gives to the decay up to the one and takes from that up to the other cancels exactly where it should.
    d_kr = d_kr * shrink * half[:, None]
    row_ki = row(k_s, k_norm, wide) * gl.exp2(-total_s.load(wide))
    ki = row_ki.to(io)
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, C], io)
    if FINE:
        ends = gl.sum(d_kr * row_ki, 1)
    else:
        alone = (d_kr * (row_ki - ki.to(gl.float32))).to(io)
        ends = gl.sum(d_kr * ki.to(gl.float32) + alone.to(gl.float32), 1)  # rounded as what is taken from it below
    carried_s = gl.allocate_shared_memory(gl.float32, [K], line, carried * shrink * half * half + ends)
    if not FINE:
        alone_s = gl.allocate_shared_memory(io, [K, C], flat, alone)
    d_kd = _times(row_ki, keys_parts, d_kd * -shrink * half[:, None], True)
    row_kd = row(k_s, k_norm, wide) * gl.exp2(total_s.load(wide))
    d_ki = _times(row_kd, keys_parts, d_kr, False)
    row_qd = row(q_s, q_norm, wide) * (gl.exp2(total_s.load(wide)) * scale)
    d_ki = _times(row_qd, mqk_parts, d_ki, False)
    d_kd, d_ki = warpgroup_mma_wait(0, (d_kd, d_ki))
    if FINE:
        row_kd = row(k_s, k_norm, wide) * gl.exp2(total_s.load(wide))
    d_log = d_kd * _seen(row_kd, FINE)
    # Of all that a token reads, its value counts for it and what its key finds against it; 1 - beta is exact.
    d_read = gl.convert_layout(gl.sum(along, 0), over_columns) + column_sums(d_log, scratch_s) * size
    d_beta = d_read / (1.0 + gl.exp2(beta_x.to(gl.float32) * 1.4426950408889634))
    gl.store(d_beta_ptr + beta_at, d_beta.to(d_beta_ptr.dtype.element_ty), mask=token < length)
    if FINE:
        d_log -= d_ki * (row(k_s, k_norm, wide) * gl.exp2(-total_s.load(wide)))
    else:
        d_log -= d_ki * ki.to(gl.float32) + alone_s.load(wide).to(gl.float32)
    total = total_s.load(wide)
    d_k = d_kd * gl.exp2(total) + d_ki * gl.exp2(-total)
    d_qd = _times(row_ki, mqk_parts, d_qd_s.load(wide), True)
    d_k_s = gl.allocate_shared_memory(gl.float32, [K, C], parked, d_k)
    d_qd = warpgroup_mma_wait(0, (d_qd,))
    _keep(mqk_parts)
    _keep(keys_parts)
    up = gl.exp2(total_s.load(wide)) * scale
    row_qd = row(q_s, q_norm, wide) * up
    d_log += d_qd * _seen(row_qd, FINE)
    d_q = d_qd * up

    d_q_s = gl.allocate_shared_memory(gl.float32, [K, C], parked, d_q)
    d_log = later_sums(d_log, ones_s, zero + carried_s.load(over_k)[:, None])
    ones_s._keep_alive()
    mbarrier.wait(rest_bar, 1)
    x, slope = exponent(logit_s.permute((1, 0)).load(wide), a_log_ptr, bias_ptr, head)
    d_logit = _gate_gradient(d_log, x, slope, live, bound * size, d_gate_ptr + program * (2 * K))
    _put(d_logit.to(io), logit_s, d_logit_d, d_logit_ptr, start, length, head, H)
    q = row(q_s, q_norm, wide)
    k = row(k_s, k_norm, wide)
    own = own_s.load(over_c)[None, :]
    d_k = norm_gradient(d_k_s.load(wide) + q * own, k, k_norm, dots_s, scratch_s, size)
    d_q = norm_gradient(d_q_s.load(wide) + k * own, q, q_norm, dots_s, scratch_s, size)
    _put(d_k.to(io), k_s, d_k_d, d_k_ptr, start, length, head, H)
    _put(d_q.to(io), q_s, d_q_d, d_q_ptr, start, length, head, H)
    tma.store_wait(0)
    # The memory of a barrier is nobody else's: the machine may write it back when another process takes its turn.
    _keep((tokens_bar, values_bar, rest_bar, states_bar))


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launcher compiles at K = V = 128 in bfloat16, for Hopper."""
    assert arch == 90
    tile, state, half = (block_type((rows, 128)) for rows in (32, 128, 64))
    given: dict[str, Any] = dict.fromkeys(("q_d", "k_d", "logit_d", "d_q_d", "d_k_d", "d_logit_d"), tile)
    given |= dict.fromkeys(("writes_d", "writes_rest_d", "d_o_d", "d_v_d"), tile) | {"states_d": state}
    given |= dict.fromkeys(("d_states_d", "d_states_rest_d"), half)
    given |= dict.fromkeys(("d_q_ptr", "d_k_ptr", "d_logit_ptr", "d_beta_ptr", "beta_ptr"), "*bf16")
    given |= dict.fromkeys(("along_ptr", "d_gate_ptr"), "*fp32")
    given |= {"a_log_ptr": "*fp32", "bias_ptr": "*fp32", "start_ptr": "*i32:1", "length_ptr": "*i32:1"}
    given |= {"token_low": "i32", "bound": "fp32", "H": "i32", "K": 128, "V": 128, "C": 32}
    plain, fine = given | {"states_rest_d": None}, given | {"states_rest_d": state}
    return [(gradient_kernel, plain, settings()), (gradient_kernel, fine, settings(fine=True))]
