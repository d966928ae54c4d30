"""Causal attention over packed sequences by kernels, as a differentiable function."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import on_device
from openk3.ops.launch import power_of_2, start
from openk3.ops.mla import attention_gradient_kernel, attention_hopper, attention_kernel
from openk3.ops.mla.attention_gradient_kernel import (
    delta_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
    score_gradient_kernel,
)
from openk3.ops.mla.attention_kernel import Settings
from openk3.ops.mla.attention_kernel import attention_kernel as forward_kernel
from openk3.ops.mla.attention_views import LOG2E, Job, Views
from openk3.ops.mla.tiles import Portion, gradient_tiles, query_tiles
from openk3.ops.saved import name
from openk3.ops.unrecorded import apply

ROOM = 2**31  # bytes of score gradients that exist at once, unless fewer programs than multiprocessors fit in


def attend(job: Job, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """(o [Tq, H, V] in float32, largest scaled score of each head [H]) for what `attention_views.obstacle` admits."""
    return apply(_Attention, job, *(x if x.stride(-1) == 1 else x.contiguous() for x in tensors))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: Job, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        views = Views.of(job, tensors)
        with on_device(views.q):
            o_THV, log_HT, peak_H = forward(views, job)
        name("mla_outputs", o_THV)
        ctx.save_for_backward(*tensors, o_THV, log_HT)
        ctx.job = job
        ctx.mark_non_differentiable(peak_H)
        return o_THV, peak_H

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, o_THV, log_HT = ctx.saved_tensors
        job = ctx.job
        d_tensors = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
        if job.joint is not None:  # of the shared part, for each head; summed in the end
            shared = tensors[2]
            d_tensors[2] = shared.new_empty(shared.shape[0], o_THV.shape[1], shared.shape[1])
        views, out = (Views.of(job, tuple(group)) for group in (tensors, d_tensors))
        with on_device(o_THV):
            narrow_THV, delta_HT = _deltas(o_THV, grads[0], job, views.q.dtype)
            _Backward(views, out, (narrow_THV, log_HT, delta_HT), job).run()
        if job.joint is not None:
            d_tensors[2] = d_tensors[2].sum(1, dtype=torch.float32).to(tensors[2].dtype)
        return None, *d_tensors


def forward(views: Views, job: Job) -> tuple[Tensor, Tensor, Tensor]:
    """(o [Tq, H, V], log2 of the sums of 2^scores [H, T] in `Bands.lines`, largest scaled scores [H])."""
    (T, H, _), device = views.q.shape, views.q.device
    o_THV = torch.empty(T, H, views.widths.value, dtype=torch.float32, device=device)
    log_HT = torch.empty(H, job.bands.lines()[-1], dtype=torch.float32, device=device)
    if T * H == 0:
        return o_THV, log_HT, torch.full((H,), float("-inf"), device=device)
    if attention_hopper.fits(views):
        peaks = attention_hopper.forward(views, job, o_THV, log_HT)
    else:
        found = attention_kernel.settings(views.q.element_size(), _arch(device))
        tiles = query_tiles(job.bands, found.rows, device)
        peaks = torch.empty(H, len(tiles), dtype=torch.float32, device=device)
        start(forward_kernel, len(tiles) * H)(
            *(views.q, views.k_a, views.k_b, views.v, o_THV, log_HT, peaks, tiles),
            *(job.scale * LOG2E, log_HT.stride(0), len(tiles)),
            **_constants(views),
            ROWS=found.rows,
            BLOCK=found.keys,
            **found.options(),
        )
    return o_THV, log_HT, peaks.amax(1) * job.scale


def _deltas(o_THV: Tensor, d_o_THV: Tensor, job: Job, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradient of the output in the products' format, and its product with the output [H, T] in `Bands.lines`."""
    (T, H, V), device = o_THV.shape, o_THV.device
    if d_o_THV.stride(-1) != 1:
        d_o_THV = d_o_THV.contiguous()
    narrow_THV = torch.empty(T, H, V, dtype=dtype, device=device)
    delta_HT = torch.empty(H, job.bands.lines()[-1], dtype=torch.float32, device=device)
    tiles = query_tiles(job.bands, 32, device)
    if T * H:
        start(delta_kernel, len(tiles) * H)(
            *(o_THV, d_o_THV, narrow_THV, delta_HT, tiles, delta_HT.stride(0), H),
            STRIDES=d_o_THV.stride()[:2],
            V=V,
            PV=max(16, power_of_2(V)),
            ROWS=32,
            num_warps=4,
        )
    return narrow_THV, delta_HT


@dataclass(frozen=True)
class _Backward:
    """The launches of a backward pass, slab by slab; what a shared key part gets is left apart for each head."""

    views: Views
    out: Views
    rows: tuple[Tensor, Tensor, Tensor]  # gradient of the output, sums of the forward pass, delta
    job: Job

    def run(self) -> None:
        """Scores, keys and queries of every slab."""
        q, device = self.views.q, self.views.q.device
        found = attention_gradient_kernel.settings(q.element_size(), _arch(device))
        tiles = gradient_tiles(self.job.bands, found["scores"].keys, device)
        area, heads = tiles.size**2, q.shape[1]
        if tiles.num_key_tiles * heads == 0:
            return
        slabs = tiles.slabs(heads, max(1, ROOM // (area * q.element_size())), _multiprocessors(device))
        d_scores = q.new_empty(max(1, tiles.most(slabs)) * area)
        portions = [Portion(tiles, slab, d_scores) for slab in slabs]
        whole = all(portion.whole for portion in portions)
        sums = None if whole else torch.empty(q.shape[0], q.shape[2], dtype=torch.float32, device=device)
        hopper = attention_hopper.fits(self.views)
        for portion in portions:
            if hopper:
                attention_hopper.scores(self.views, self.out, self.rows, self.job.scale, portion)
                attention_hopper.keys(self.views, self.out, self.job.scale, portion)
            else:
                self._scores_and_keys(portion, found)
            if len(tiles.queries) == 0:
                continue
            if hopper and sums is None:
                attention_hopper.queries(self.views, self.out, self.job.scale, portion)
            else:
                self._queries(portion, sums, found["queries"])

    def _scores_and_keys(self, portion: Portion, found: dict[str, Settings]) -> None:
        views, out, tiles, scale = self.views, self.out, portion.tiles, self.job.scale
        d_o_THV, log_HT, delta_HT = self.rows
        order, place = portion.order, portion.place
        grid = (len(portion.slab.tiles) * len(portion.slab.heads),)
        constants = _constants(views) | {"D_STRIDES": out.strides()[2:], "SIZE": tiles.size}
        inputs = (views.q, views.k_a, views.k_b, views.v, d_o_THV, log_HT, delta_HT)
        start(score_gradient_kernel, *grid)(
            *(*inputs, out.v, portion.d_scores, tiles.keys, order),
            *(scale * LOG2E, log_HT.stride(0), views.q.shape[1], *place),
            **constants,
            STEP=found["scores"].rows,
            **found["scores"].options(),
        )
        del constants["V"], constants["PV"]
        start(key_gradient_kernel, *grid)(
            *(views.q, portion.d_scores, out.k_a, out.k_b, tiles.keys, order, scale, *place),
            **constants,
            **found["keys"].options(),
        )

    def _queries(self, portion: Portion, sums: Tensor | None, found: Settings) -> None:
        views, tiles, slab = self.views, portion.tiles, portion.slab
        count = len(tiles.queries)
        _, each, low, head = portion.place
        constants = _constants(views)
        del constants["V"], constants["PV"]
        start(query_gradient_kernel, count * len(slab.heads))(
            *(views.k_a, views.k_b, portion.d_scores, self.out.q, sums, tiles.queries, self.job.scale),
            *(views.q.shape[1], count, each, low, slab.tiles.start, slab.tiles.stop, head),
            **constants,
            SIZE=tiles.size,
            FIRST=slab.tiles.start == 0,
            LAST=slab.tiles.stop == tiles.num_key_tiles,
            **found.options(),
        )


def _constants(views: Views) -> dict[str, Any]:
    return {"STRIDES": views.strides(), "PRECISION": "tf32x3", **views.widths.constants()}


@lru_cache(maxsize=8)
def _arch(device: torch.device) -> int:
    """Compute capability times ten; that of Hopper for the interpreter."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
