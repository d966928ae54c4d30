"""Short convolution of up to three inputs by kernels, as a differentiable function."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops import short_conv_kernel
from openk3.ops.backend import on_device
from openk3.ops.launch import cdiv, start
from openk3.ops.sequences import bounds_on
from openk3.ops.short_conv_kernel import Settings, conv_backward_kernel, conv_forward_kernel, conv_weight_kernel
from openk3.ops.unrecorded import apply


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

    @cached_property
    def blocks(self) -> int:
        """Blocks of channels, of all streams."""
        return self.streams * cdiv(max(1, self.channels), self.settings.block)

    @cached_property
    def run(self) -> int:
        """Tokens of a run: enough runs to fill the GPU a few times over, but none shorter than 16."""
        wanted = cdiv(self.settings.waves * _multiprocessors(self.device), self.blocks)
        unroll = self.settings.unroll
        return max(16, cdiv(cdiv(self.tokens, wanted), unroll) * unroll)

    @property
    def runs(self) -> int:
        """Runs of all tokens."""
        return cdiv(self.tokens, self.run)

    def start(self, kernel: Any, arguments: Sequence[Any], per_sequence: bool, activation: bool) -> None:
        """Launch one program for each run and, if asked for, each sequence, times each block of channels."""
        programs = (self.runs + per_sequence * self.sequences) * self.blocks
        settings = self.settings
        flags = {"W": self.width, "C": self.channels, "BLOCK": settings.block, "UNROLL": settings.unroll}
        flags |= {"STREAMS": self.streams, "ACTIVATION": activation, "num_warps": settings.warps}
        if programs and self.channels:
            start(kernel, programs)(*arguments, self.tokens, self.sequences, self.run, **flags)


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
            launch = _Launch(S, T, C, N, W, device, short_conv_kernel.FORWARD)
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
            launch = _Launch(S, T, C, N, W, device, short_conv_kernel.BACKWARD)
            shares = d_weight.new_empty(S, launch.runs, W, C)
            arguments = [argument for part in (x, dy, weight, window, d_recent, dx) for argument in _three(part)]
            arguments += [d_window, shares, ctx.layout.cu_seqlens(device)]
            launch.start(conv_backward_kernel, arguments, d_window is not None, activation)
            if C:
                start(conv_weight_kernel, cdiv(C, 128), S * W)(shares, d_weight, launch.runs, C, W, 128, 16)
        d_weights = [d.to(part.dtype) for d, part in zip(d_weight, weight)]
        d_windows = [None] * len(window or ()) if d_window is None else d_window.unbind()
        return None, *dx, *d_weights, *d_windows


def convolve(
    layout: Layout, x_TC: Sequence[Tensor], weight_CW: Sequence[Tensor], window_NCW: Sequence[Tensor] | None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The convolutions of up to three streams of one shape and dtype; (outputs, new windows) as in `short_conv`."""
    tensors = [*x_TC, *weight_CW, *(window_NCW or ())]
    results = apply(_ShortConvs, layout, *(tensor.contiguous() for tensor in tensors))
    return results[: layout.streams], results[layout.streams :]
