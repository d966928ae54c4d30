"""Gluon twins of the decoding kernels, for 128 channels: a warp owns 32 value channels and sums over keys by itself.

q, k, v and the decay logits of a token are the rows of one tile, a warp each: convolution, norms and gate need no word
between warps. Products enter sums only where it is written (fma), and every kernel sums in the same order: a state does
not depend on which kernel took it over a token. Between projections and outputs all is float32.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from openk3.ops.kda.decode_kernel import EPS

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def sizes(name: str, K: int, V: int, W: int) -> tuple[dict[str, int], int]:
    """Constants of the kernel of that name, and how many programs a head has."""
    width = {} if name == "step_kernel" else {"W": W}
    block = {"BLOCK": 8} if name == "draft_kernel" else {}
    return {"K": K, "V": V, "R": 16} | width | block, 1


@gluon.constexpr_function
def _state_layout(R, V):
    """[R, V] of a state: a warp has 32 columns, a thread four of them in R / 4 rows."""
    return gl.BlockedLayout([R // 4, 4], [4, 8], [1, V // 32], [1, 0])


@gluon.constexpr_function
def _rows_layout(K):
    """[4, K]: a warp has a row."""
    return gl.BlockedLayout([1, K // 32], [1, 32], [4, 1], [1, 0])


@gluon.constexpr_function
def _taps_layout(K):
    """[4, K, 4]: the same with the taps of a channel in one thread."""
    return gl.BlockedLayout([1, K // 32, 4], [1, 32, 1], [4, 1, 1], [2, 1, 0])


@gluon.jit
def _of_row(row, first, second, third, fourth):
    """The pointer of a row."""
    return gl.where(row == 0, first, gl.where(row == 1, second, gl.where(row == 2, third, fourth)))


@gluon.jit
def _token_ptr(tokens, strides, at, row, channel):
    """[4, K] q, k, v and decay logits of a token."""
    q_ptr, k_ptr = tokens[0] + at * strides[0], tokens[1] + at * strides[1]
    return channel + _of_row(row, q_ptr, k_ptr, tokens[2] + at * strides[2], tokens[3] + at * strides[3])


@gluon.jit
def _row_index(K: gl.constexpr):
    """(row [4, 1], channel [1, K]) of a [4, K] tile."""
    ROWS: gl.constexpr = _rows_layout(K)
    row = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, ROWS)), 1)
    return row, gl.expand_dims(gl.arange(0, K, gl.SliceLayout(0, ROWS)), 0)


@gluon.jit
def _tap_index(K: gl.constexpr):
    """(row [4, 1, 1], offset [1, K, 4] in a window of K channels) of a [4, K, 4] tile."""
    TAPS: gl.constexpr = _taps_layout(K)
    row = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, TAPS)))
    channel = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(2, TAPS)))
    tap = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, TAPS)))
    offset = gl.expand_dims(gl.expand_dims(channel, 0), 2) * 4 + gl.expand_dims(gl.expand_dims(tap, 0), 0)
    return gl.expand_dims(gl.expand_dims(row, 1), 2), offset


@gluon.jit
def _split_taps(x, K: gl.constexpr):
    """The four taps of [4, K, 4], each [4, K]."""
    ROWS: gl.constexpr = _rows_layout(K)
    even, odd = gl.split(gl.reshape(x, [4, K, 2, 2]))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    x0, x1 = gl.convert_layout(x0, ROWS), gl.convert_layout(x1, ROWS)
    return x0, x1, gl.convert_layout(x2, ROWS), gl.convert_layout(x3, ROWS)


@gluon.jit
def _join_taps(x0, x1, x2, x3, K: gl.constexpr):
    """[4, K, 4] of four taps."""
    x = gl.join(gl.join(x0, x2), gl.join(x1, x3))
    return gl.convert_layout(gl.reshape(x, [4, K, 4]), _taps_layout(K))


@gluon.jit
def _filters(filters, head, K: gl.constexpr):
    """The convolution weights of a head, tap by tap in float32."""
    row, at = _tap_index(K)
    weight_ptr = _of_row(row, filters[0], filters[1], filters[2], filters[2]) + head * (K * 4) + at
    return _split_taps(gl.load(weight_ptr, mask=row < 3, other=0.0).to(gl.float32), K)


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def _convolve(taps, filters):
    """SiLU of the convolution, float32."""
    y = taps[3].to(gl.float32) * filters[3]
    y = gl.fma(taps[0].to(gl.float32), filters[0], y)
    y = gl.fma(taps[1].to(gl.float32), filters[1], y)
    y = gl.fma(taps[2].to(gl.float32), filters[2], y)
    return y * _sigmoid(y)


@gluon.jit
def _vectors(x, logit, slope, bias, row, BOUND: gl.constexpr):
    """[4, K] float32: q and k normalised, v, and in the fourth row the factors exp(kda_gate(logit))."""
    K: gl.constexpr = x.shape[1]
    inverse = gl.rsqrt(gl.expand_dims(gl.sum(x * x, 1), 1) + EPS)
    scale = gl.where(row == 0, inverse * K**-0.5, gl.where(row == 1, inverse, 1.0))
    z = logit.to(gl.float32) + bias
    if BOUND is None:
        alpha = gl.exp(-slope * (gl.maximum(z, 0.0) + gl.log(1.0 + gl.exp(-gl.abs(z)))))
    else:
        alpha = gl.exp2((BOUND * 1.4426950408889634) * _sigmoid(slope * z))
    return gl.where(row == 3, alpha, x * scale)


@gluon.jit
def _column(vectors, row: gl.constexpr, first: gl.constexpr, R: gl.constexpr, layout: gl.constexpr):
    """[R, 1] of a row."""
    return vectors.slice(row, 1, 0).slice(first, R, 1).permute([1, 0]).load(layout)


@gluon.jit
def _sum_keys(x):
    """[1, V] of [R, V]."""
    return gl.expand_dims(gl.sum(x, 0), 0)


@gluon.jit
def _observe(part, q, k, alpha, seen, read, both, READ: gl.constexpr):
    """Add some keys' share of S^T (alpha k), S^T (alpha q) and q k; o needs the latter two."""
    seen = gl.fma(part, k * alpha, seen)
    if READ:
        read = gl.fma(part, q * alpha, read)
        both = gl.fma(q, k, both)
    return seen, read, both


@gluon.jit
def _write(part, k, alpha, u):
    """Some keys of the next state diag(alpha) S + k u^T: what is rounded twice is the smaller term."""
    return gl.fma(part, alpha, k * u)


@gluon.jit
def _norm_and_gate(o, gate, weight, eps):
    """sigmoid(gate) * RMSNorm(o), row by row."""
    mean = gl.expand_dims(gl.sum(o * o, 1), 1) / o.shape[1]
    return o * gl.rsqrt(mean + eps) * weight * _sigmoid(gate.to(gl.float32))


@gluon.jit
def _start_copy(state, source_ptr, V: gl.constexpr, R: gl.constexpr):
    """Begin to copy a state to shared memory; what a thread copies, it also reads."""
    STATE: gl.constexpr = _state_layout(R, V)
    row = gl.expand_dims(gl.arange(0, R, gl.SliceLayout(1, STATE)), 1)
    tile = row * V + gl.expand_dims(gl.arange(0, V, gl.SliceLayout(0, STATE)), 0)
    for i in gl.static_range(state.shape[0] // R):
        async_copy.async_copy_global_to_shared(state.slice(i * R, R), source_ptr + i * (R * V) + tile)
    async_copy.commit_group()
    return tile


@gluon.jit
def _recur(state, vectors, beta, target_ptr, tile, R: gl.constexpr):
    """o [1, V] of a state and a token's vectors in shared memory; the next state goes to memory."""
    K: gl.constexpr = state.shape[0]
    V: gl.constexpr = state.shape[1]
    STATE: gl.constexpr = _state_layout(R, V)
    seen = gl.zeros([R, V], gl.float32, STATE)
    read = gl.zeros([R, V], gl.float32, STATE)
    both = gl.zeros([R, 1], gl.float32, STATE)
    for i in gl.static_range(K // R):
        part = state.slice(i * R, R).load(STATE).to(gl.float32)
        q = _column(vectors, 0, i * R, R, STATE)
        k = _column(vectors, 1, i * R, R, STATE)
        alpha = _column(vectors, 3, i * R, R, STATE)
        seen, read, both = _observe(part, q, k, alpha, seen, read, both, True)
    u = beta * (vectors.slice(2, 1, 0).load(STATE) - _sum_keys(seen))
    o = gl.fma(gl.sum(gl.sum(both, 1), 0), u, _sum_keys(read))
    gl.thread_barrier()  # or the compiler would keep all parts of the state in registers until here
    for i in gl.static_range(K // R):
        part = state.slice(i * R, R).load(STATE).to(gl.float32)
        k = _column(vectors, 1, i * R, R, STATE)
        part = _write(part, k, _column(vectors, 3, i * R, R, STATE), u)
        gl.store(target_ptr + i * (R * V) + tile, part.to(target_ptr.dtype.element_ty))
    return o


@gluon.jit
def step_kernel(
    tokens,  # q, k, v after the convolution, decay logits, beta logits
    strides,  # of their tokens
    o_ptr,
    state_ptr,
    next_ptr,
    A_log_ptr,
    dt_bias_ptr,
    slot_ptr,
    H,
    BOUND: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    R: gl.constexpr,
):
    """Recurrence only: one program for each request and head."""
    STATE: gl.constexpr = _state_layout(R, V)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    n = (gl.program_id(0) // H).to(gl.int64)
    head = gl.program_id(0) % H
    o_ptr += (n * H + head) * V + gl.expand_dims(gl.arange(0, V, gl.SliceLayout(0, STATE)), 0)
    slot = gl.load(slot_ptr + n).to(gl.int64)
    if slot < 0:
        gl.store(o_ptr, gl.zeros([1, V], o_ptr.dtype.element_ty, STATE))
    else:
        cell = (slot * H + head) * (K * V)
        state = gl.allocate_shared_memory(state_ptr.dtype.element_ty, [K, V], PLAIN)
        vectors = gl.allocate_shared_memory(gl.float32, [4, K], PLAIN)
        tile = _start_copy(state, state_ptr + cell, V, R)
        row, channel = _row_index(K)
        x = gl.load(_token_ptr(tokens, strides, n, row, head * K + channel))
        bias = gl.load(dt_bias_ptr + head * K + channel + row * 0, mask=row == 3, other=0.0).to(gl.float32)
        slope = gl.exp(gl.load(A_log_ptr + head).to(gl.float32))
        beta = _sigmoid(gl.load(tokens[4] + n * strides[4] + head).to(gl.float32))
        vectors.store(_vectors(x.to(gl.float32), x, slope, bias, row, BOUND))
        async_copy.wait_group(0)
        gl.thread_barrier()
        o = _recur(state, vectors, beta, next_ptr + cell, tile, R)
        gl.store(o_ptr, o.to(o_ptr.dtype.element_ty))


@gluon.jit
def decode_kernel(
    rows,  # projected q, k, v, decay logits, beta logits
    strides,  # of their rows
    gate_ptr,
    gate_stride,
    y_ptr,
    pool,  # states, windows of q, k, v
    into,  # the same four, where the next ones go
    filters,  # convolution weights of q, k, v
    A_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    slot_ptr,
    eps,
    H,
    BOUND: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    W: gl.constexpr,
    R: gl.constexpr,
):
    """The layer between its projections, one token: one program for each request and head."""
    gl.static_assert(W == 4 and K == V)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    n = (gl.program_id(0) // H).to(gl.int64)
    head = gl.program_id(0) % H
    row, channel = _row_index(K)
    slot = gl.load(slot_ptr + n).to(gl.int64)
    y_ptr += (n * H + head) * V + channel
    if slot < 0:
        gl.store(y_ptr, gl.zeros([1, V], y_ptr.dtype.element_ty, _rows_layout(V)))
    else:
        cell = slot * H + head
        state = gl.allocate_shared_memory(pool[0].dtype.element_ty, [K, V], PLAIN)
        vectors = gl.allocate_shared_memory(gl.float32, [4, K], PLAIN)
        outputs = gl.allocate_shared_memory(gl.float32, [1, V], PLAIN)
        tile = _start_copy(state, pool[0] + cell * (K * V), V, R)
        x = gl.load(_token_ptr(rows, strides, n, row, head * K + channel))
        tap_row, at = _tap_index(K)
        window_ptr = _of_row(tap_row, pool[1], pool[2], pool[3], pool[3]) + cell * (K * W) + at
        window = gl.load(window_ptr, mask=tap_row < 3, other=0.0).to(x.dtype)
        weights = _filters(filters, head, K)
        bias = gl.load(dt_bias_ptr + head * K + channel + row * 0, mask=row == 3, other=0.0).to(gl.float32)
        slope = gl.exp(gl.load(A_log_ptr + head).to(gl.float32))
        beta = _sigmoid(gl.load(rows[4] + n * strides[4] + head).to(gl.float32))
        gate = gl.load(gate_ptr + n * gate_stride + head * V + channel)
        norm = gl.load(norm_ptr + channel).to(gl.float32)
        _, t0, t1, t2 = _split_taps(window, K)
        taps = (t0, t1, t2, x)
        next_ptr = _of_row(tap_row, into[1], into[2], into[3], into[3]) + cell * (K * W) + at
        gl.store(next_ptr, _join_taps(t0, t1, t2, x, K).to(into[1].dtype.element_ty), mask=tap_row < 3)
        vectors.store(_vectors(_convolve(taps, weights), x, slope, bias, row, BOUND))
        async_copy.wait_group(0)
        gl.thread_barrier()
        o = _recur(state, vectors, beta, into[0] + cell * (K * V), tile, R)
        outputs.store(o)
        y = _norm_and_gate(outputs.load(_rows_layout(V)), gate, norm, eps)
        gl.store(y_ptr, y.to(y_ptr.dtype.element_ty))


@gluon.jit
def _tokens(
    state,
    taps,
    filters,
    rows,
    strides,
    first,
    count,
    slope,
    bias,
    shared,  # vectors of BLOCK tokens, their outputs
    outputs,  # output gates, stride of their rows, y, norm weight, eps
    kept,
    first_kept,
    room,
    head,
    H,
    BOUND: gl.constexpr,
    K: gl.constexpr,
    R: gl.constexpr,
    BLOCK: gl.constexpr,
    DTYPE: gl.constexpr,
    READ: gl.constexpr,
    KEEP: gl.constexpr,
):
    """(state, taps) after `count` rows from `first` on; READ: y is written; KEEP: copies of the first `room` rows.

    BLOCK tokens at a time: their vectors, which do not depend on the state; the state's way through them, with nothing
    to wait for but shared memory; their norms, a warp for each.
    """
    STATE: gl.constexpr = _state_layout(R, K)
    vectors, outs = shared
    gate_ptr, gate_stride, y_ptr, norm, eps = outputs
    row, channel = _row_index(K)
    x = gl.load(_token_ptr(rows, strides, first, row, head * K + channel), mask=(row * 0 + count) > 0, other=0.0)
    start = count * 0
    while start < count:
        stop = gl.minimum(start + BLOCK, count)
        weights = _filters(filters, head, K)  # here: they would take registers for as long as they are held
        j = start
        while j < stop:
            ahead_ptr = _token_ptr(rows, strides, first + j + 1, row, head * K + channel)
            ahead = gl.load(ahead_ptr, mask=(row * 0 + j + 1) < count, other=0.0)
            if KEEP:
                kept_at = ((first_kept + j) * H + head) * K  # what has no room must not lie in another slot
                gl.store(_token_ptr(kept, (1, 1, 1, 1), kept_at, row, channel), x, mask=(row * 0 + j) < room)
                logit = gl.load(rows[4] + (first + j) * strides[4] + head)
                gl.store(kept[4] + (first_kept + j) * H + head, logit, mask=j < room)
            taps = (taps[1], taps[2], taps[3], x)
            vector = vectors.index((j - start).to(gl.int32))
            vector.store(_vectors(_convolve(taps, weights), x, slope, bias, row, BOUND))
            x = ahead
            j += 1
        gl.thread_barrier()
        j = start
        logit = gl.load(rows[4] + (first + j) * strides[4] + head)
        while j < stop:
            vector = vectors.index((j - start).to(gl.int32))
            beta = _sigmoid(logit.to(gl.float32))
            logit = gl.load(rows[4] + (first + gl.minimum(j + 1, count - 1)) * strides[4] + head)
            seen = gl.zeros([R, K], gl.float32, STATE)
            read = gl.zeros([R, K], gl.float32, STATE)
            both = gl.zeros([R, 1], gl.float32, STATE)
            for i in gl.static_range(K // R):
                q = _column(vector, 0, i * R, R, STATE)
                k = _column(vector, 1, i * R, R, STATE)
                alpha = _column(vector, 3, i * R, R, STATE)
                seen, read, both = _observe(state[i], q, k, alpha, seen, read, both, READ)
            u = beta * (vector.slice(2, 1, 0).load(STATE) - _sum_keys(seen))
            if READ:
                o = gl.fma(gl.sum(gl.sum(both, 1), 0), u, _sum_keys(read))
                outs.index((j - start).to(gl.int32)).store(o)
            moved = ()
            for i in gl.static_range(K // R):
                k = _column(vector, 1, i * R, R, STATE)
                part = _write(state[i], k, _column(vector, 3, i * R, R, STATE), u)
                moved = moved + (part.to(DTYPE).to(gl.float32),)
            state = moved
            j += 1
        gl.thread_barrier()
        if READ:
            j = start
            while j < stop:
                at = first + j + row
                some = j + row < stop
                gate = gl.load(gate_ptr + at * gate_stride + head * K + channel, mask=some, other=0.0)
                four = outs._reinterpret(gl.float32, [BLOCK // 4, 4, K], outs.layout)
                o = four.index(((j - start) // 4).to(gl.int32)).load(_rows_layout(K))
                y = _norm_and_gate(o, gate, norm, eps)
                gl.store(y_ptr + (at * H + head) * K + channel, y.to(y_ptr.dtype.element_ty), mask=some)
                j += 4
            gl.thread_barrier()
        start += BLOCK
    return state, taps


@gluon.jit
def draft_kernel(
    rows,  # drafts: projected q, k, v, decay logits, beta logits
    strides,  # of their rows
    gate_ptr,
    gate_stride,
    y_ptr,
    old,  # drafts to replay, as `rows`; KEPT: the pools that take the new ones
    old_strides,
    pool,  # states, windows of q, k, v
    filters,  # convolution weights of q, k, v
    A_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    slot_ptr,
    bounds_ptr,
    accepted_ptr,
    eps,
    H,
    depth,
    KEPT: gl.constexpr,
    BOUND: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    W: gl.constexpr,
    R: gl.constexpr,
    BLOCK: gl.constexpr,
    REPLAY: gl.constexpr,
    VERIFY: gl.constexpr,
):
    """Replay accepted drafts, then verify new ones: one program for each request and head.

    Old drafts lie in row slot * depth and the following, or unless KEPT in the rows that the bounds give.
    """
    gl.static_assert(W == 4 and K == V)
    STATE: gl.constexpr = _state_layout(R, V)
    DTYPE: gl.constexpr = pool[0].dtype.element_ty
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    n = (gl.program_id(0) // H).to(gl.int64)
    head = gl.program_id(0) % H
    slot = gl.load(slot_ptr + n).to(gl.int64)
    row, channel = _row_index(K)
    begin, length = n * 0, n * 0
    if VERIFY or not KEPT:
        begin = gl.load(bounds_ptr + n).to(gl.int64)
        length = gl.load(bounds_ptr + n + 1).to(gl.int64) - begin
    if slot >= 0:
        cell = slot * H + head
        key = gl.expand_dims(gl.arange(0, R, gl.SliceLayout(1, STATE)), 1)
        tile = cell * (K * V) + (key * V + gl.expand_dims(gl.arange(0, V, gl.SliceLayout(0, STATE)), 0))
        state = ()
        for i in gl.static_range(K // R):
            state = state + (gl.load(pool[0] + i * (R * V) + tile).to(gl.float32),)
        tap_row, at = _tap_index(K)
        window_ptr = _of_row(tap_row, pool[1], pool[2], pool[3], pool[3]) + cell * (K * W) + at
        taps = _split_taps(gl.load(window_ptr, mask=tap_row < 3, other=0.0).to(old[0].dtype.element_ty), K)
        bias = gl.load(dt_bias_ptr + head * K + channel + row * 0, mask=row == 3, other=0.0).to(gl.float32)
        slope = gl.exp(gl.load(A_log_ptr + head).to(gl.float32))
        vectors = gl.allocate_shared_memory(gl.float32, [BLOCK, 4, K], PLAIN)
        shared = (vectors, gl.allocate_shared_memory(gl.float32, [BLOCK, 1, V], PLAIN))
        if REPLAY:
            count = gl.minimum(gl.load(accepted_ptr + n).to(gl.int64), depth if KEPT else length)
            first = slot * depth if KEPT else begin
            state, taps = _tokens(
                *(state, taps, filters, old, old_strides, first, count, slope, bias, shared),
                *((0, 0, 0, 0, 0), old, first, 0, head, H, BOUND, K, R, BLOCK, DTYPE, False, False),
            )
            if count > 0:
                for i in gl.static_range(K // R):
                    gl.store(pool[0] + i * (R * V) + tile, state[i].to(DTYPE))
                window = _join_taps(taps[0], taps[1], taps[2], taps[3], K).to(pool[1].dtype.element_ty)
                gl.store(window_ptr, window, mask=tap_row < 3)
        if VERIFY:
            outputs = (gate_ptr, gate_stride, y_ptr, gl.load(norm_ptr + channel).to(gl.float32), eps)
            _tokens(
                *(state, taps, filters, rows, strides, begin, length, slope, bias, shared),
                *(outputs, old, slot * depth, depth, head, H, BOUND, K, R, BLOCK, DTYPE, True, KEPT),
            )
    elif VERIFY:
        i = begin
        while i < begin + length:
            zeros = gl.zeros([4, V], y_ptr.dtype.element_ty, _rows_layout(V))
            gl.store(y_ptr + ((i + row) * H + head) * V + channel, zeros, mask=i + row < begin + length)
            i += 4


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """What the launcher compiles in bfloat16, for compute capability `arch`: the same launches as of the twins."""
    from openk3.ops.kda import decode_kernel as twins

    kernels = {"step_kernel": step_kernel, "decode_kernel": decode_kernel, "draft_kernel": draft_kernel}
    cases = []
    for twin, arguments, _ in twins.compile_cases(arch):
        others = {*twins.sizes(twin.__name__, 128, 128, 4)[0], "spare_ptr"}
        kept = {key: value for key, value in arguments.items() if key not in others}
        cases.append((kernels[twin.__name__], kept | sizes(twin.__name__, 128, 128, 4)[0], OPTIONS))
    return cases
