"""Triton kernels of the short convolution: one to three inputs of one shape (q, k and v) in one launch, and backward.

A program owns some channels of a run of tokens and walks along it with the last W - 1 inputs in registers, so each
input is read from memory once. Where a sequence ends inside the run the walk starts anew from the next one's window.
Further programs, one for each sequence, write the new windows (forward) and the windows' gradients (backward).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import on_device
from openk3.ops.sequences import bounds_on


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
    """Input of sequence n at a position >= -W from its start, from x or from the window before it; zeros if unwanted."""
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


FORWARD = Settings(1024, 4, 4, 8)
BACKWARD = Settings(512, 4, 4, 8)


@dataclass(frozen=True)
class _Launch:
    """One launch over S streams [T, C] of N sequences with windows of W inputs."""

    streams: int
    tokens: int
    channels: int
    sequences: int
    width: int
    device: torch.device
    settings: Settings

    @property
    def blocks(self) -> int:
        """Blocks of channels, of all streams."""
        return self.streams * triton.cdiv(max(1, self.channels), self.settings.block)

    @property
    def run(self) -> int:
        """Tokens of a run: enough runs to fill the GPU a few times over, but none shorter than 16."""
        wanted = triton.cdiv(self.settings.waves * _multiprocessors(self.device), self.blocks)
        unroll = self.settings.unroll
        return max(16, triton.cdiv(triton.cdiv(self.tokens, wanted), unroll) * unroll)

    @property
    def runs(self) -> int:
        """Runs of all tokens."""
        return triton.cdiv(self.tokens, self.run)

    def start(self, kernel: Any, arguments: Sequence[Any], per_sequence: bool, activation: bool) -> None:
        """Launch one program for each run and, if asked for, each sequence, times each block of channels."""
        programs = (self.runs + per_sequence * self.sequences) * self.blocks
        settings = self.settings
        flags = {"W": self.width, "C": self.channels, "BLOCK": settings.block, "UNROLL": settings.unroll}
        flags |= {"STREAMS": self.streams, "ACTIVATION": activation, "num_warps": settings.warps}
        if programs and self.channels:
            kernel[(programs,)](*arguments, self.tokens, self.sequences, self.run, **flags)


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    """Of a GPU; the interpreter acts as a large one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _three(tensors: Sequence[Tensor] | None) -> list[Tensor | None]:
    """The three arguments of a kernel for up to three streams; unused ones repeat the first."""
    return [None] * 3 if tensors is None else [*tensors, *(tensors[0] for _ in range(3 - len(tensors)))]


class Layout(NamedTuple):
    """What the streams of one call share besides their shapes."""

    streams: int
    bounds: tuple[int, ...]  # of the sequences
    activation: bool

    def cu_seqlens(self, device: torch.device) -> Tensor | None:
        """Bounds for the kernels; None for a single sequence."""
        return None if len(self.bounds) == 2 else bounds_on(self.bounds, device)


class _ShortConvs(torch.autograd.Function):
    """Inputs, then weights, then windows if there are any; outputs, then new windows."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
        S, bounds, activation = layout
        x, weight, window = tensors[:S], tensors[S : 2 * S], tensors[2 * S :] or None
        (T, C), W, N, device = x[0].shape, weight[0].shape[1], len(bounds) - 1, x[0].device
        y = [torch.empty_like(part) for part in x]
        recent = [part.new_empty(N, C, W) for part in x]
        arguments = [argument for part in (x, weight, window, y, recent) for argument in _three(part)]
        with on_device(x[0]):
            launch = _Launch(S, T, C, N, W, device, FORWARD)
            launch.start(conv_forward_kernel, [*arguments, layout.cu_seqlens(device)], True, activation)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.layout = layout
        return *y, *recent

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        S, bounds, activation = ctx.layout
        tensors = ctx.saved_tensors
        x, weight, window = tensors[:S], tensors[S : 2 * S], tensors[2 * S :] or None
        (T, C), W, N, device = x[0].shape, weight[0].shape[1], len(bounds) - 1, x[0].device
        dy = [torch.zeros_like(part) if d is None else d.contiguous() for part, d in zip(x, grads[:S])]
        d_recent = None
        if any(d is not None for d in grads[S:]):
            d_recent = [part.new_zeros(N, C, W) if d is None else d.contiguous() for part, d in zip(x, grads[S:])]
        dx = [torch.empty_like(part) for part in x]
        d_window = x[0].new_empty(S, N, C, W) if any(ctx.needs_input_grad[1 + 2 * S :]) else None
        d_weight = torch.empty(S, C, W, dtype=torch.float32, device=device)
        with on_device(x[0]):
            launch = _Launch(S, T, C, N, W, device, BACKWARD)
            shares = d_weight.new_empty(S, launch.runs, W, C)
            arguments = [argument for part in (x, dy, weight, window, d_recent, dx) for argument in _three(part)]
            arguments += [d_window, shares, ctx.layout.cu_seqlens(device)]
            launch.start(conv_backward_kernel, arguments, d_window is not None, activation)
            if C:
                conv_weight_kernel[(triton.cdiv(C, 128), S * W)](shares, d_weight, launch.runs, C, W, 128, 16)
        d_weights = [d.to(part.dtype) for d, part in zip(d_weight, weight)]
        d_windows = [None] * len(window or ()) if d_window is None else d_window.unbind()
        return None, *dx, *d_weights, *d_windows


def convolve(
    layout: Layout, x_TC: Sequence[Tensor], weight_CW: Sequence[Tensor], window_NCW: Sequence[Tensor] | None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The convolutions of up to three streams of one shape and dtype; (outputs, new windows) as in `short_conv`."""
    tensors = [*x_TC, *weight_CW, *(window_NCW or ())]
    results = _ShortConvs.apply(layout, *(tensor.contiguous() for tensor in tensors))
    return results[: layout.streams], results[layout.streams :]


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """What the launchers compile for q, k and v of width 4 in bfloat16; the same for every compute capability."""
    cases = []
    tensors = "x weight window y recent dy d_recent dx".split()
    for kernel, settings in ((conv_backward_kernel, BACKWARD), (conv_forward_kernel, FORWARD)):
        for packed, window, streams, C in ((True, True, 3, 12_288), (False, False, 3, 12_288), (True, False, 1, 1000)):
            arguments: dict[str, Any] = {f"{name}{n}": "*bf16" for name in tensors for n in range(3)}
            arguments |= {f"weight{n}": "*fp32" for n in range(3)} | {"d_weight": "*fp32", "d_window": "*bf16"}
            if not window:
                arguments |= {f"{name}{n}": None for name in ("window", "d_recent") for n in range(3)}
                arguments["d_window"] = None
            arguments |= {"cu_seqlens": "*i32" if packed else None, "T": "i32", "N": "i32", "run": "i32"}
            arguments |= {"W": 4, "C": C, "BLOCK": settings.block, "UNROLL": settings.unroll}
            arguments |= {"STREAMS": streams, "ACTIVATION": True}
            mine = {name: arguments[name] for name in kernel.arg_names}
            cases.append((kernel, mine, {"num_warps": settings.warps, "num_stages": 3}))
    sums = {"shares": "*fp32", "d_weight": "*fp32", "runs": "i32", "C": "i32:16", "W": 4, "BLOCK": 128, "RUNS": 16}
    return [*cases, (conv_weight_kernel, sums, {"num_warps": 4, "num_stages": 3})]
