"""Triton kernels of the short convolution: one to three inputs of one shape (q, k and v) in one launch, and backward.

A program owns some channels of a run of tokens and walks along it with the last W - 1 inputs in registers, so each
input is read from memory once. Where a sequence ends inside the run the walk starts anew from the next one's window.
Further programs, one for each sequence, write the new windows (forward) and the windows' gradients (backward).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _choose(stream, first, second, third, STREAMS: tl.constexpr):
    """The pointer of a stream."""
    chosen = first
    if STREAMS > 1:
        chosen = tl.where(stream == 1, second, chosen)
    if STREAMS > 2:
        chosen = tl.where(stream == 2, third, chosen)
    return chosen


@triton.jit
def _sequence_of(cu_seqlens, N, token):
    """The sequence that holds a token: the last n with cu_seqlens[n] <= token."""
    low = 0
    high = N
    while low + 1 < high:
        middle = (low + high) // 2
        after = tl.load(cu_seqlens + middle) > token
        low = tl.where(after, low, middle)
        high = tl.where(after, middle, high)
    return low


@triton.jit
def _span(cu_seqlens, n, T):
    """First token of sequence n, and the one behind its last."""
    start = 0
    end = T
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + n)
        end = tl.load(cu_seqlens + n + 1)
    return start, end


@triton.jit
def _live(channel, wanted, C: tl.constexpr, BLOCK: tl.constexpr):
    """Channels there are, if wanted."""
    live = wanted
    if C % BLOCK != 0:
        live = wanted & (channel < C)
    return live


@triton.jit
def _input(x, window, n, start, position, channel, wanted, W: tl.constexpr, C: tl.constexpr):
    """Input of sequence n at a position >= -W from its start, from x or the window before it; zeros if unwanted."""
    wanted = wanted & (channel < C)
    row = tl.load(x + (start + position).to(tl.int64) * C + channel, mask=wanted & (position >= 0), other=0.0)
    if window is not None:
        at = window + n.to(tl.int64) * (C * W) + channel * W + (W + position)
        row = tl.where(position >= 0, row, tl.load(at, mask=wanted & (position < 0), other=0.0))
    return row


@triton.jit
def _history(x, window, n, start, position, channel, W: tl.constexpr, C: tl.constexpr):
    """The W - 1 inputs before a position of sequence n, oldest first, in float32."""
    rows = ()
    for i in tl.static_range(W - 1):
        row = _input(x, window, n, start, position - (W - 1) + i, channel, True, W, C)
        rows = rows + (row.to(tl.float32),)
    return rows


@triton.jit
def _taps(weight, channel, W: tl.constexpr, C: tl.constexpr):
    """The W weights of each channel, in float32."""
    taps = ()
    for i in tl.static_range(W):
        taps = taps + (tl.load(weight + channel * W + i, mask=channel < C, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _zeros(COUNT: tl.constexpr, BLOCK: tl.constexpr):
    rows = ()
    for _ in tl.static_range(COUNT):
        rows = rows + (tl.zeros([BLOCK], tl.float32),)
    return rows


@triton.jit
def _rows(x, token, stop, channel, SHAPE: tl.constexpr, WHOLE: tl.constexpr):
    """UNROLL rows from a token on, zeros from stop on; all are asked for before any is used."""
    C: tl.constexpr = SHAPE[1]
    at = x + token.to(tl.int64) * C + channel
    rows = ()
    for u in tl.static_range(SHAPE[3]):
        live = True if WHOLE else token + u < stop
        if WHOLE and C % SHAPE[2] == 0:
            row = tl.load(at + u * C)
        else:
            row = tl.load(at + u * C, mask=_live(channel, live, C, SHAPE[2]), other=0.0)
        rows = rows + (row,)
    return rows


@triton.jit
def _convolve(inputs, u: tl.constexpr, taps, W: tl.constexpr):
    """sum_i taps[i] * inputs[u + i]."""
    total = inputs[u] * taps[0]
    for i in tl.static_range(1, W):
        total += inputs[u + i] * taps[i]
    return total


@triton.jit
def _sigmoid(x):
    """1 / (1 + 2^(-x log2 e)) in four instructions; exact handling of results below 2^-126 would be ten more."""
    scaled = x * -1.4426950408889634
    if INTERPRETED:
        return 1 / (1 + tl.exp2(scaled))
    else:
        code: tl.constexpr = "ex2.approx.ftz.f32 $0, $1; add.f32 $0, $0, 0f3f800000; rcp.approx.ftz.f32 $0, $0;"
        return tl.inline_asm_elementwise(code, "=f,f", [scaled], tl.float32, True, 1)


@triton.jit
def _silu_slope(x):
    """Derivative of x * sigmoid(x)."""
    opened = _sigmoid(x)
    return opened + opened * (x - x * opened)


@triton.jit
def _forward_rows(
    x, y, inputs, taps, token, stop, channel, SHAPE: tl.constexpr, ACTIVATION: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Outputs of UNROLL tokens; returns the inputs that the next ones look back to."""
    W: tl.constexpr = SHAPE[0]
    C: tl.constexpr = SHAPE[1]
    UNROLL: tl.constexpr = SHAPE[3]
    rows = _rows(x, token, stop, channel, SHAPE, WHOLE)
    at = y + token.to(tl.int64) * C + channel
    for u in tl.static_range(UNROLL):
        inputs = inputs + (rows[u].to(tl.float32),)
        total = _convolve(inputs, u, taps, W)
        if ACTIVATION:
            total *= _sigmoid(total)
        value = total.to(y.dtype.element_ty)
        if WHOLE and C % SHAPE[2] == 0:
            tl.store(at + u * C, value)
        else:
            live = True if WHOLE else token + u < stop
            tl.store(at + u * C, value, mask=_live(channel, live, C, SHAPE[2]))
    return inputs[UNROLL:]


@triton.jit(do_not_specialize=["T", "N", "run"])
def conv_forward_kernel(
    x0, x1, x2, weight0, weight1, weight2, window0, window1, window2, y0, y1, y2, recent0, recent1, recent2,
    cu_seqlens, T, N, run,
    W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, STREAMS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """y = SiLU(conv(x)) and the new windows; program = (run of tokens, then sequence) x stream x block of channels."""
    SHAPE: tl.constexpr = (W, C, BLOCK, UNROLL)
    blocks: tl.constexpr = (C + BLOCK - 1) // BLOCK
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    stream = tl.program_id(0) // blocks % STREAMS
    part = tl.program_id(0) // blocks // STREAMS
    x = _choose(stream, x0, x1, x2, STREAMS)
    window = window0
    if window0 is not None:
        window = _choose(stream, window0, window1, window2, STREAMS)
    runs = tl.cdiv(T, run)
    if part < runs:
        y = _choose(stream, y0, y1, y2, STREAMS)
        taps = _taps(_choose(stream, weight0, weight1, weight2, STREAMS), channel, W, C)
        token = part * run
        last = tl.minimum(token + run, T)
        n = token * 0
        if cu_seqlens is not None:
            n = _sequence_of(cu_seqlens, N, token)
        while token < last:
            start, end = _span(cu_seqlens, n, T)
            stop = tl.minimum(end, last)
            inputs = _history(x, window, n, start, token - start, channel, W, C)
            while token + UNROLL <= stop:
                inputs = _forward_rows(x, y, inputs, taps, token, stop, channel, SHAPE, ACTIVATION, True)
                token += UNROLL
            if token < stop:
                _forward_rows(x, y, inputs, taps, token, stop, channel, SHAPE, ACTIVATION, False)
            token = stop
            n += 1
    else:
        n = part - runs
        start, end = _span(cu_seqlens, n, T)
        recent = _choose(stream, recent0, recent1, recent2, STREAMS)
        for i in tl.static_range(W):
            row = _input(x, window, n, start, end - start - W + i, channel, True, W, C)
            at = recent + n.to(tl.int64) * (C * W) + channel * W + i
            tl.store(at, row.to(recent.dtype.element_ty), mask=channel < C)


@triton.jit
def _backward_rows(
    x, dy, dx, inputs, grads, d_taps, taps, d_recent, token, first, stop, reach, end, channel,
    SHAPE: tl.constexpr, ACTIVATION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Pre-activation gradients of UNROLL tokens; writes dx of those W - 1 before them, all of whose outputs are done.

    WHOLE: all of the tokens lie before stop, and no written one is among the last W of its sequence.
    """
    W: tl.constexpr = SHAPE[0]
    C: tl.constexpr = SHAPE[1]
    UNROLL: tl.constexpr = SHAPE[3]
    rows = _rows(x, token, reach, channel, SHAPE, WHOLE)
    d_rows = _rows(dy, token, reach, channel, SHAPE, WHOLE)
    row = token - (W - 1)
    at = dx + row.to(tl.int64) * C + channel
    for u in tl.static_range(UNROLL):
        inputs = inputs + (rows[u].to(tl.float32),)
        grad = d_rows[u].to(tl.float32)
        if ACTIVATION:
            grad *= _silu_slope(_convolve(inputs, u, taps, W))
        mine = grad
        if not WHOLE:
            grad = tl.where(token + u < reach, grad, 0.0)
            mine = tl.where(token + u < stop, grad, 0.0)
        grads = grads + (grad,)
        sums = ()
        for i in tl.static_range(W):
            sums = sums + (d_taps[i] + mine * inputs[u + i],)
        d_taps = sums
        total = grads[u] * taps[W - 1]
        for i in tl.static_range(1, W):
            total += grads[u + i] * taps[W - 1 - i]
        wanted = row + u >= first
        if not WHOLE:
            wanted = wanted & (row + u < stop)
            if d_recent is not None:
                slot = row + u - (end - W)
                total += tl.load(
                    d_recent + channel * W + slot, mask=wanted & (slot >= 0) & (channel < C), other=0.0
                ).to(tl.float32)
        tl.store(at + u * C, total.to(dx.dtype.element_ty), mask=_live(channel, wanted, C, SHAPE[2]))
    return inputs[UNROLL:], grads[UNROLL:], d_taps


@triton.jit
def _window_gradient(
    x, dy, window, d_recent, d_window, cu_seqlens, n, taps, T, channel, W: tl.constexpr, C: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Gradient of the window of sequence n: through its first W - 1 outputs, and the new window of a short one."""
    start, end = _span(cu_seqlens, n, T)
    inputs = _history(x, window, n, start, 0, channel, W, C)
    grads = ()
    for p in tl.static_range(W - 1):
        live = (channel < C) & (start + p < end)
        at = (start + p).to(tl.int64) * C + channel
        inputs = inputs + (tl.load(x + at, mask=live, other=0.0).to(tl.float32),)
        grad = tl.load(dy + at, mask=live, other=0.0).to(tl.float32)
        if ACTIVATION:
            grad *= _silu_slope(_convolve(inputs, p, taps, W))
        grads = grads + (tl.where(start + p < end, grad, 0.0),)
    sequence = n.to(tl.int64) * (C * W) + channel * W
    for slot in tl.static_range(W):
        total = channel * 0.0
        for p in tl.static_range(slot):
            total += grads[p] * taps[slot - 1 - p]
        if d_recent is not None:
            kept = slot - (end - start)
            total += tl.load(d_recent + sequence + kept, mask=(channel < C) & (kept >= 0), other=0.0).to(tl.float32)
        tl.store(d_window + sequence + slot, total.to(d_window.dtype.element_ty), mask=channel < C)


@triton.jit(do_not_specialize=["T", "N", "run"])
def conv_backward_kernel(
    x0, x1, x2, dy0, dy1, dy2, weight0, weight1, weight2, window0, window1, window2,
    d_recent0, d_recent1, d_recent2, dx0, dx1, dx2, d_window, d_weight, cu_seqlens, T, N, run,
    W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, STREAMS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Gradients of `conv_forward_kernel`: dx; each run's share of d_weight [STREAMS, runs, W, C]; d_window.

    The outputs before SiLU are computed again. A run walks W - 1 tokens past its end, whose outputs reach back into it.
    """
    SHAPE: tl.constexpr = (W, C, BLOCK, UNROLL)
    blocks: tl.constexpr = (C + BLOCK - 1) // BLOCK
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    stream = tl.program_id(0) // blocks % STREAMS
    part = tl.program_id(0) // blocks // STREAMS
    x = _choose(stream, x0, x1, x2, STREAMS)
    dy = _choose(stream, dy0, dy1, dy2, STREAMS)
    taps = _taps(_choose(stream, weight0, weight1, weight2, STREAMS), channel, W, C)
    window = window0
    if window0 is not None:
        window = _choose(stream, window0, window1, window2, STREAMS)
    d_recents = d_recent0
    if d_recent0 is not None:
        d_recents = _choose(stream, d_recent0, d_recent1, d_recent2, STREAMS)
    runs = tl.cdiv(T, run)
    if part < runs:
        dx = _choose(stream, dx0, dx1, dx2, STREAMS)
        d_taps = _zeros(W, BLOCK)
        token = part * run
        last = tl.minimum(token + run, T)
        n = token * 0
        if cu_seqlens is not None:
            n = _sequence_of(cu_seqlens, N, token)
        while token < last:
            first = token
            start, end = _span(cu_seqlens, n, T)
            stop = tl.minimum(end, last)
            reach = tl.minimum(end, stop + W - 1)
            inputs = _history(x, window, n, start, token - start, channel, W, C)
            grads = _zeros(W - 1, BLOCK)
            d_recent = d_recents
            if d_recents is not None:
                d_recent = d_recents + n.to(tl.int64) * (C * W)
            while token + UNROLL < stop:
                inputs, grads, d_taps = _backward_rows(
                    x, dy, dx, inputs, grads, d_taps, taps, d_recent, token, first, stop, reach, end, channel,
                    SHAPE, ACTIVATION, True,
                )  # fmt: skip
                token += UNROLL
            while token < stop + W - 1:
                inputs, grads, d_taps = _backward_rows(
                    x, dy, dx, inputs, grads, d_taps, taps, d_recent, token, first, stop, reach, end, channel,
                    SHAPE, ACTIVATION, False,
                )  # fmt: skip
                token += UNROLL
            token = stop
            n += 1
        for i in tl.static_range(W):
            share = d_weight + ((stream * runs + part).to(tl.int64) * W + i) * C
            tl.store(share + channel, d_taps[i], mask=channel < C)
    else:
        if d_window is not None:
            at = d_window + stream.to(tl.int64) * N * (C * W)
            _window_gradient(
                x, dy, window, d_recents, at, cu_seqlens, part - runs, taps, T, channel, W, C, ACTIVATION
            )  # fmt: skip


@triton.jit(do_not_specialize=["runs"])
def conv_weight_kernel(shares, d_weight, runs, C, W: tl.constexpr, BLOCK: tl.constexpr, RUNS: tl.constexpr):
    """Sum the shares [STREAMS, runs, W, C] of all runs, always in the same order, into d_weight [STREAMS, C, W]."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tap = tl.program_id(1) % W
    stream = (tl.program_id(1) // W).to(tl.int64)
    total = tl.zeros([RUNS, BLOCK], tl.float32)
    done = 0
    while done < runs:
        part = done + tl.arange(0, RUNS)
        at = shares + ((stream * runs + part[:, None]) * W + tap) * C + channel[None, :]
        total += tl.load(at, mask=(part[:, None] < runs) & (channel[None, :] < C), other=0.0)
        done += RUNS
    tl.store(d_weight + (stream * C + channel) * W + tap, tl.sum(total, 0), mask=channel < C)


class Settings(NamedTuple):
    """How a kernel is compiled and its work cut up."""

    block: int  # channels of a program
    warps: int
    unroll: int  # tokens asked for at once
    waves: int  # programs for each multiprocessor, so far as there are tokens for them


FORWARD = Settings(512, 4, 8, 32)
BACKWARD = Settings(256, 2, 4, 32)


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile for q, k and v of 96 heads of 128 in bfloat16, width 4; the same for every GPU.

    First everything at once; then one sequence or several, with or without windows; then one odd number of channels.
    """
    layer = {"C": 12_288, "STREAMS": 3}
    cases = [_case(conv_backward_kernel, BACKWARD, (), layer), _case(conv_forward_kernel, FORWARD, (), layer)]
    for given in ((), ("window",), ("cu_seqlens",), ("window", "cu_seqlens")):
        absent = tuple({"window", "cu_seqlens"} - set(given))
        cases.append(_case(conv_backward_kernel, BACKWARD, (*absent, "d_recent", "d_window"), layer))
        if absent:
            cases.append(_case(conv_forward_kernel, FORWARD, absent, layer))
    cases.append(_case(conv_backward_kernel, BACKWARD, (), {"C": 1000, "STREAMS": 1}))
    sums = {"shares": "*fp32", "d_weight": "*fp32", "runs": "i32", "C": "i32:16", "W": 4, "BLOCK": 128, "RUNS": 16}
    return [*cases, (conv_weight_kernel, sums, {"num_warps": 4, "num_stages": 3})]


def _case(
    kernel: Any, settings: Settings, absent: tuple[str, ...], sizes: dict[str, int]
) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """A case of `compile_cases`; inputs named in `absent` are not given."""
    constants = {"W": 4, "BLOCK": settings.block, "UNROLL": settings.unroll, "ACTIVATION": True} | sizes
    scalars = {"T": "i32", "N": "i32", "run": "i32", "cu_seqlens": "*i32", "d_weight": "*fp32"}
    arguments: dict[str, Any] = {}
    for name in kernel.arg_names:
        tensor = name.rstrip("012")
        other = "*fp32" if tensor == "weight" else "*bf16"
        arguments[name] = None if tensor in absent else constants.get(name, scalars.get(name, other))
    return kernel, arguments, {"num_warps": settings.warps, "num_stages": 3}
