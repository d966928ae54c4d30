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
def _row(x, token, C, channel, wanted, EVEN: tl.constexpr):
    """One row of x [T, C]; zeros unless wanted."""
    at = x + token.to(tl.int64) * C + channel
    if EVEN:
        return tl.load(at, mask=wanted, other=0.0)
    return tl.load(at, mask=wanted & (channel < C), other=0.0)


@triton.jit
def _slot(window, n, slot, C, channel, wanted, W: tl.constexpr):
    """One slot of window n of [N, C, W]; zeros unless wanted."""
    at = window + n.to(tl.int64) * C * W + channel * W + slot
    return tl.load(at, mask=wanted & (channel < C), other=0.0)


@triton.jit
def _input(x, window, n, start, position, C, channel, wanted, W: tl.constexpr, EVEN: tl.constexpr):
    """Input of sequence n at a position >= -W from its start, from x or from the window before it."""
    row = _row(x, start + position, C, channel, wanted & (position >= 0), EVEN)
    if window is not None:
        row = tl.where(position >= 0, row, _slot(window, n, W + position, C, channel, wanted & (position < 0), W))
    return row


@triton.jit
def _history(x, window, n, start, position, C, channel, W: tl.constexpr, EVEN: tl.constexpr):
    """The W - 1 inputs before a position of sequence n, oldest first, in float32."""
    rows = ()
    for i in tl.static_range(W - 1):
        row = _input(x, window, n, start, position - (W - 1) + i, C, channel, True, W, EVEN)
        rows = rows + (row.to(tl.float32),)
    return rows


@triton.jit
def _taps(weight, C, channel, W: tl.constexpr):
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
def _rows(x, token, stop, C, channel, UNROLL: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr):
    """UNROLL rows from a token on, zeros from stop on; all are asked for before any is used."""
    rows = ()
    for u in tl.static_range(UNROLL):
        if WHOLE and EVEN:
            row = tl.load(x + (token + u).to(tl.int64) * C + channel)
        else:
            row = _row(x, token + u, C, channel, token + u < stop, EVEN)
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
def _silu_slope(x):
    """Derivative of x * sigmoid(x)."""
    opened = 1 / (1 + tl.exp(-x))
    return opened * (1 + x * (1 - opened))


@triton.jit
def _forward_rows(x, y, inputs, taps, token, stop, C, channel, FLAGS: tl.constexpr, WHOLE: tl.constexpr):
    """Outputs of UNROLL tokens; returns the inputs that the next ones look back to."""
    W: tl.constexpr = FLAGS[0]
    UNROLL: tl.constexpr = FLAGS[1]
    EVEN: tl.constexpr = FLAGS[3]
    rows = _rows(x, token, stop, C, channel, UNROLL, EVEN, WHOLE)
    for u in tl.static_range(UNROLL):
        inputs = inputs + (rows[u].to(tl.float32),)
        total = _convolve(inputs, u, taps, W)
        if FLAGS[2]:
            total = total / (1 + tl.exp(-total))
        at = y + (token + u).to(tl.int64) * C + channel
        value = total.to(y.dtype.element_ty)
        if WHOLE and EVEN:
            tl.store(at, value)
        else:
            tl.store(at, value, mask=(token + u < stop) & (channel < C))
    return inputs[UNROLL:]


@triton.jit(do_not_specialize=["T", "N", "run"])
def conv_forward_kernel(
    x0, x1, x2, weight0, weight1, weight2, window0, window1, window2, y0, y1, y2, recent0, recent1, recent2,
    cu_seqlens, T, C, N, run,
    W: tl.constexpr, UNROLL: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr, STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y = SiLU(conv(x)) and the new windows; program = (run of tokens, then sequence) x stream x block of channels."""
    FLAGS: tl.constexpr = (W, UNROLL, ACTIVATION, EVEN)
    blocks = tl.cdiv(C, BLOCK)
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
        taps = _taps(_choose(stream, weight0, weight1, weight2, STREAMS), C, channel, W)
        token = part * run
        last = tl.minimum(token + run, T)
        n = token * 0
        if cu_seqlens is not None:
            n = _sequence_of(cu_seqlens, N, token)
        while token < last:
            start, end = _span(cu_seqlens, n, T)
            stop = tl.minimum(end, last)
            inputs = _history(x, window, n, start, token - start, C, channel, W, EVEN)
            while token + UNROLL <= stop:
                inputs = _forward_rows(x, y, inputs, taps, token, stop, C, channel, FLAGS, True)
                token += UNROLL
            if token < stop:
                _forward_rows(x, y, inputs, taps, token, stop, C, channel, FLAGS, False)
            token = stop
            n += 1
    else:
        n = part - runs
        start, end = _span(cu_seqlens, n, T)
        recent = _choose(stream, recent0, recent1, recent2, STREAMS)
        for i in tl.static_range(W):
            row = _input(x, window, n, start, end - start - W + i, C, channel, True, W, EVEN)
            at = recent + n.to(tl.int64) * C * W + channel * W + i
            tl.store(at, row.to(recent.dtype.element_ty), mask=channel < C)


@triton.jit
def _backward_rows(
    x, dy, dx, inputs, grads, d_taps, taps, d_recent,
    token, first, stop, reach, recent_at, C, channel, FLAGS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Pre-activation gradients of UNROLL tokens; writes dx of those W - 1 before them, all of whose outputs are done."""
    W: tl.constexpr = FLAGS[0]
    UNROLL: tl.constexpr = FLAGS[1]
    EVEN: tl.constexpr = FLAGS[3]
    rows = _rows(x, token, reach, C, channel, UNROLL, EVEN, WHOLE)
    d_rows = _rows(dy, token, reach, C, channel, UNROLL, EVEN, WHOLE)
    for u in tl.static_range(UNROLL):
        inputs = inputs + (rows[u].to(tl.float32),)
        grad = d_rows[u].to(tl.float32)
        if FLAGS[2]:
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
        row = token + u - (W - 1)
        if d_recent is not None:
            slot = row - recent_at
            at = d_recent + channel * W + slot
            total += tl.load(at, mask=(slot >= 0) & (slot < W) & (channel < C), other=0.0).to(tl.float32)
        mask = row >= first
        if not WHOLE:
            mask = mask & (row < stop)
        if not EVEN:
            mask = mask & (channel < C)
        tl.store(dx + row.to(tl.int64) * C + channel, total.to(dx.dtype.element_ty), mask=mask)
    return inputs[UNROLL:], grads[UNROLL:], d_taps


@triton.jit
def _window_gradient(
    x, dy, window, d_recent, d_window, cu_seqlens, n, taps, T, C, channel, FLAGS: tl.constexpr
):  # fmt: skip
    """Gradient of the window of sequence n: through its first W - 1 outputs, and through the new window of a short one."""
    W: tl.constexpr = FLAGS[0]
    start, end = _span(cu_seqlens, n, T)
    inputs = _history(x, window, n, start, 0, C, channel, W, FLAGS[3])
    grads = ()
    for p in tl.static_range(W - 1):
        inputs = inputs + (_row(x, start + p, C, channel, start + p < end, FLAGS[3]).to(tl.float32),)
        grad = _row(dy, start + p, C, channel, start + p < end, FLAGS[3]).to(tl.float32)
        if FLAGS[2]:
            grad *= _silu_slope(_convolve(inputs, p, taps, W))
        grads = grads + (tl.where(start + p < end, grad, 0.0),)
    for slot in tl.static_range(W):
        total = channel * 0.0
        for p in tl.static_range(slot):
            total += grads[p] * taps[slot - 1 - p]
        if d_recent is not None:
            kept = slot - (end - start)
            total += _slot(d_recent, n, kept, C, channel, kept >= 0, W).to(tl.float32)
        at = d_window + n.to(tl.int64) * C * W + channel * W + slot
        tl.store(at, total.to(d_window.dtype.element_ty), mask=channel < C)


@triton.jit(do_not_specialize=["T", "N", "run"])
def conv_backward_kernel(
    x0, x1, x2, dy0, dy1, dy2, weight0, weight1, weight2, window0, window1, window2,
    d_recent0, d_recent1, d_recent2, dx0, dx1, dx2, d_window, d_weight, cu_seqlens, T, C, N, run,
    W: tl.constexpr, UNROLL: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr, STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of `conv_forward_kernel`: dx; each run's share of d_weight [STREAMS, runs, W, C]; d_window.

    The outputs before SiLU are computed again. A run walks W - 1 tokens past its end, whose outputs reach back into it.
    """
    FLAGS: tl.constexpr = (W, UNROLL, ACTIVATION, EVEN)
    blocks = tl.cdiv(C, BLOCK)
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    stream = tl.program_id(0) // blocks % STREAMS
    part = tl.program_id(0) // blocks // STREAMS
    x = _choose(stream, x0, x1, x2, STREAMS)
    dy = _choose(stream, dy0, dy1, dy2, STREAMS)
    taps = _taps(_choose(stream, weight0, weight1, weight2, STREAMS), C, channel, W)
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
            inputs = _history(x, window, n, start, token - start, C, channel, W, EVEN)
            grads = _zeros(W - 1, BLOCK)
            d_recent = d_recents
            if d_recents is not None:
                d_recent = d_recents + n.to(tl.int64) * C * W
            while token + UNROLL <= stop:
                inputs, grads, d_taps = _backward_rows(
                    x, dy, dx, inputs, grads, d_taps, taps, d_recent,
                    token, first, stop, reach, end - W, C, channel, FLAGS, True,
                )  # fmt: skip
                token += UNROLL
            while token < stop + W - 1:
                inputs, grads, d_taps = _backward_rows(
                    x, dy, dx, inputs, grads, d_taps, taps, d_recent,
                    token, first, stop, reach, end - W, C, channel, FLAGS, False,
                )  # fmt: skip
                token += UNROLL
            token = stop
            n += 1
        for i in tl.static_range(W):
            share = d_weight + ((stream * runs + part).to(tl.int64) * W + i) * C
            tl.store(share + channel, d_taps[i], mask=channel < C)
    else:
        if d_window is not None:
            at = d_window + stream.to(tl.int64) * N * C * W
            _window_gradient(x, dy, window, d_recents, at, cu_seqlens, part - runs, taps, T, C, channel, FLAGS)


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
        flags = {"W": self.width, "UNROLL": settings.unroll, "ACTIVATION": activation, "STREAMS": self.streams}
        flags |= {"EVEN": self.channels % settings.block == 0, "BLOCK": settings.block, "num_warps": settings.warps}
        if programs and self.channels:
            kernel[(programs,)](*arguments, self.tokens, self.channels, self.sequences, self.run, **flags)


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
        for packed, window, streams, even in ((True, True, 3, True), (False, False, 3, True), (True, False, 1, False)):
            arguments: dict[str, Any] = {f"{name}{n}": "*bf16" for name in tensors for n in range(3)}
            arguments |= {f"weight{n}": "*fp32" for n in range(3)} | {"d_weight": "*fp32", "d_window": "*bf16"}
            if not window:
                arguments |= {f"{name}{n}": None for name in ("window", "d_recent") for n in range(3)}
                arguments["d_window"] = None
            arguments |= {"cu_seqlens": "*i32" if packed else None, "T": "i32", "C": "i32:16", "N": "i32", "run": "i32"}
            arguments |= {"W": 4, "UNROLL": settings.unroll, "ACTIVATION": True, "EVEN": even, "STREAMS": streams}
            arguments["BLOCK"] = settings.block
            mine = {name: arguments[name] for name in kernel.arg_names}
            cases.append((kernel, mine, {"num_warps": settings.warps, "num_stages": 3}))
    sums = {"shares": "*fp32", "d_weight": "*fp32", "runs": "i32", "C": "i32:16", "W": 4, "BLOCK": 128, "RUNS": 16}
    return [*cases, (conv_weight_kernel, sums, {"num_warps": 4, "num_stages": 3})]
