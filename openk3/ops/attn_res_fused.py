"""Attention Residuals by kernels: mixing depth with the sum before and the norm after it, as a differentiable function.

On Hopper 16-bit rows of common widths take the Gluon kernels, everything else the Triton ones; both read each source
from memory once in each direction. Kept for the backward pass are the sources and three numbers per token and source.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops import (
    attn_res_gluon,
    attn_res_gradient_gluon,
    attn_res_kernel,
    attn_res_narrow_kernel,
    attn_res_phase_kernel,
)
from openk3.ops.attn_res_kernel import (
    BACKWARD_WARPS,
    FORWARD_WARPS,
    MOST_SOURCES,
    MOST_WIDTH,
    VECTORS,
    VECTORS_OPTIONS,
)
from openk3.ops.backend import on_device, prefers_gluon
from openk3.ops.kda.gluon_launch import launch
from openk3.ops.launch import cdiv
from openk3.ops.saved import name
from openk3.ops.unrecorded import apply


class Wanted(NamedTuple):
    """What a call is to return beside the weights, and the norms' eps.

    `passed`: the sources again, for later reads to take, which then hand their gradients to this one to be added.
    """

    mixed: bool
    normed: bool
    eps: float
    passed: bool = False


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    """Of a GPU; the interpreter acts as one with few, so that a program takes several tokens."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def obstacle(sources: Sequence[Tensor]) -> str | None:
    """Why the kernels cannot take these sources, or None."""
    if len(sources) > MOST_SOURCES:
        return f"there are {len(sources)} depth sources, more than {MOST_SOURCES}"
    T, D = sources[0].shape
    if not 0 < D <= MOST_WIDTH:
        return f"depth sources are {D} wide, not 1 to {MOST_WIDTH}"
    return None


def _streams(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the Gluon kernels can take these rows: 16-bit values of one format in aligned rows."""
    rows = [x for x in tensors if x is not None]
    narrowest, widest = attn_res_gluon.WIDTHS
    return (
        prefers_gluon(rows[0].device)
        and rows[0].dtype in (torch.bfloat16, torch.float16)
        and len({x.dtype for x in rows}) == 1
        and not any(x.data_ptr() % 16 for x in rows)
        and narrowest <= rows[0].shape[1] <= widest
        and rows[0].shape[1] % 8 == 0
        and len(rows[0]) < 2**31
    )


def _narrow(sources: Sequence[Tensor], addend: Tensor | None) -> bool:
    """Whether the kernels for narrow rows can take these: 16-bit values of one format, few enough of them."""
    rows = sources if addend is None else (*sources, addend)
    tokens, width = rows[0].shape
    return (
        len(sources) <= attn_res_narrow_kernel.MOST_SOURCES
        and rows[0].dtype in (torch.bfloat16, torch.float16)
        and len({x.dtype for x in rows}) == 1
        and width <= attn_res_narrow_kernel.MOST_WIDTH
        and tokens <= attn_res_narrow_kernel.MOST_TOKENS
    )


def _padded(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """As many pointers as the Triton kernels have places for; unused ones repeat the first."""
    return (*tensors, *(tensors[0] for _ in range(MOST_SOURCES - len(tensors))))


def _launch(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, int], options: dict[str, int]
) -> None:
    """Run a kernel; on a GPU without looking at its arguments' types anew, which takes Triton longer than the work."""
    if isinstance(kernel, triton.JITFunction):
        launch(kernel, programs, arguments, constants, options)
    else:
        kernel[(programs,)](*arguments, **constants, **options)


def _run_forward(
    wanted: Wanted, weights: Sequence[Tensor | None], addend: Tensor | None, sources: Sequence[Tensor], narrow: bool
) -> tuple[Any, ...]:
    """(mixed, normed, newest, probs, scores, rrms); weights = query, norm weight, out weight or None.

    The last three are [T, L]; where rows are narrow one piece of memory, [T, 3, L].
    """
    (T, D), L = sources[0].shape, len(sources)
    x, out_weight = sources[0], weights[2]
    mixed = torch.empty_like(x) if wanted.mixed else None
    normed = x.new_empty(T, D, dtype=torch.promote_types(x.dtype, out_weight.dtype)) if out_weight is not None else None
    newest = None if addend is None else torch.empty_like(x)
    stats = x.new_empty(*((T, 3) if narrow else (3, T)), L, dtype=torch.float32).unbind(1 if narrow else 0)
    tensors = (addend, *weights, newest, mixed, normed, *stats[: 1 if narrow else 3])
    if T == 0:
        return mixed, normed, newest, *stats
    with on_device(x):
        if narrow:
            how = attn_res_narrow_kernel.settings(D, L, backward=False)
            arguments = tuple(sources), *tensors, T, wanted.eps, wanted.eps
            _launch(attn_res_narrow_kernel.narrow_forward_kernel, T, arguments, how.constants, how.options)
        elif _streams((*sources, addend)) and L <= attn_res_gluon.MOST_SOURCES:
            constants, how = attn_res_gluon.forward_constants(D, L, addend is not None)
            programs = min(T, how.programs * _multiprocessors(x.device))
            arguments = tuple(sources), *tensors, T, wanted.eps, wanted.eps
            _launch(attn_res_gluon.mix_forward_kernel, programs, arguments, constants, how.options())
        else:
            arguments = _padded(sources), *tensors, L, wanted.eps, wanted.eps
            _launch(attn_res_kernel.mix_forward_kernel, T, arguments, *attn_res_kernel.constants(D, FORWARD_WARPS))
    return mixed, normed, newest, *stats


class _Backward(NamedTuple):
    """What the backward kernels read: gradients of the results (or None), parameters, sources, what was kept.

    `later` are the gradients that sources have from later reads, the newest one's last.
    """

    d_mixed: Tensor | None
    d_normed: Tensor | None
    later: Sequence[Tensor | None]
    query: Tensor
    norm_weight: Tensor
    out_weight: Tensor | None
    sources: Sequence[Tensor]
    stats: Sequence[Tensor]

    def run_narrow(self, needed: Sequence[bool], eps: float) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """As `run`, by the kernels for narrow rows."""
        x, (T, D) = self.sources[0], self.sources[0].shape
        how = attn_res_narrow_kernel.settings(D, len(self.sources), backward=True)
        grads = [torch.empty_like(source) if need else None for source, need in zip(self.sources, needed)]
        places = tuple(source if grad is None else grad for source, grad in zip(self.sources, grads))
        later = tuple(source if d is None else d for source, d in zip(self.sources, self.later))
        given_later = [d is not None for d in self.later]
        wanted, added = (sum(bit << i for i, bit in enumerate(row)) for row in (needed, given_later))
        programs = min(T, how.programs * _multiprocessors(x.device))
        out_weight = None if self.d_normed is None else self.out_weight
        d_vectors = x.new_empty(programs, D, dtype=torch.float32)
        d_outs = None if out_weight is None else torch.empty_like(d_vectors)
        given = self.query, self.norm_weight, out_weight, self.d_mixed, self.d_normed, self.stats[0], d_vectors, d_outs
        constants = how.constants | {"WANTED": wanted, "LATER": added}
        with on_device(x):
            arguments = tuple(self.sources), later, places, *given, T, eps
            _launch(attn_res_narrow_kernel.narrow_backward_kernel, programs, arguments, constants, how.options)
            return grads, self._vectors(d_vectors, d_outs, out_weight)

    def run(self, needed: Sequence[bool], eps: float) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of the sources that need one, and of query, norm weight and out weight."""
        x, d_newest = self.sources[0], self.later[-1]
        (T, D), L = x.shape, len(self.sources)
        grads = [torch.empty_like(source) if need else None for source, need in zip(self.sources, needed)]
        places = [source if grad is None else grad for source, grad in zip(self.sources, grads)]
        wanted = sum(need << i for i, need in enumerate(needed))
        streams = _streams((*self.sources, self.d_mixed, self.d_normed)) and L <= attn_res_gluon.MOST_SOURCES
        kind = (self.d_normed is not None, d_newest is not None)
        constants, how = attn_res_gradient_gluon.backward_constants(D, L, wanted, *kind) if streams else ({}, None)
        programs = min(T, (how.programs if how else 1) * _multiprocessors(x.device))
        out_weight = None if self.d_normed is None else self.out_weight
        d_vectors = x.new_empty(programs, D, dtype=torch.float32)
        d_outs = None if out_weight is None else torch.empty_like(d_vectors)
        given = (self.query, self.norm_weight, out_weight, self.d_mixed, self.d_normed, d_newest)
        given = (*given, *self.stats, d_vectors, d_outs, T)
        with on_device(x):
            if how is not None:
                arguments = tuple(self.sources), tuple(places), *given, eps
                _launch(attn_res_gradient_gluon.mix_backward_kernel, programs, arguments, constants, how.options())
            else:
                arguments = _padded(self.sources), _padded(places), *given, L, wanted, eps
                flags = attn_res_kernel.constants(D, BACKWARD_WARPS)
                _launch(attn_res_kernel.mix_backward_kernel, programs, arguments, *flags)
            for grad, d in zip(grads[:-1], self.later[:-1]):
                if grad is not None and d is not None:
                    grad += d
            return grads, self._vectors(d_vectors, d_outs, out_weight)

    def _vectors(self, d_vectors: Tensor, d_outs: Tensor | None, out_weight: Tensor | None) -> list[Tensor | None]:
        """Gradients of query, norm weight and out weight from the programs' shares."""
        programs, D = d_vectors.shape
        into = [torch.empty_like(x) if x is not None else None for x in (self.query, self.norm_weight, out_weight)]
        blocks = cdiv(D, VECTORS["BLOCK"])
        arguments = d_vectors, d_outs, self.query, self.norm_weight, *into, programs
        _launch(attn_res_kernel.mix_vectors_kernel, blocks, arguments, {"D": D} | VECTORS, VECTORS_OPTIONS)
        return into


class _MixDepth(torch.autograd.Function):
    """Query, norm weight, out weight or None, addend or None, sources; mixed, normed, the newest source, weights.

    With `wanted.passed` also all sources but the newest, or all where nothing is added to the last one.
    """

    @staticmethod
    def forward(ctx: Any, wanted: Wanted, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        weights, addend, sources = tensors[:3], tensors[3], [x for x in tensors[4:] if x is not None]
        narrow = _narrow(sources, addend)
        mixed, normed, newest, *stats = _run_forward(wanted, weights, addend, sources, narrow)
        passed = sources if newest is None else sources[:-1]
        if newest is not None:
            name("depth_sources", newest)
        ctx.save_for_backward(*weights, *stats, *passed, *([] if newest is None else [newest]))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(stats[0])
        ctx.eps, ctx.narrow = wanted.eps, narrow
        return mixed, normed, newest, stats[0], *(passed if wanted.passed else ())

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        query, norm_weight, out_weight, *rest = ctx.saved_tensors
        stats, sources = rest[:3], rest[3:]
        d_mixed, d_normed, d_newest, _, *later = (None if d is None else d.contiguous() for d in grads)
        later += [None] * (len(sources) - len(later))
        later[-1] = d_newest if later[-1] is None else later[-1]
        needed = list(ctx.needs_input_grad[5:])
        for_addend = ctx.needs_input_grad[4]
        needed[-1] = needed[-1] or for_addend
        d_weights: Sequence[Tensor | None] = (None, None, None)
        if d_mixed is None and d_normed is None:
            d_sources = [d if need else None for d, need in zip(later, needed)]
        elif len(sources[0]) == 0:
            d_sources = [torch.empty_like(source) if need else None for source, need in zip(sources, needed)]
            d_weights = [torch.zeros_like(x) if x is not None else None for x in (query, norm_weight, out_weight)]
        else:
            job = _Backward(d_mixed, d_normed, later, query, norm_weight, out_weight, sources, stats)
            d_sources, d_weights = (job.run_narrow if ctx.narrow else job.run)(needed, ctx.eps)
        return None, *d_weights, d_sources[-1] if for_addend else None, *d_sources


class Mixed(NamedTuple):
    """What `mix` returns: mixture and its norm if wanted, weights, and the sources to be read from now on."""

    mixed_TD: Tensor | None
    normed_TD: Tensor | None
    probs_TL: Tensor
    sources: list[Tensor]  # the newest one last, with what was added to it


def mix(
    sources: Sequence[Tensor], weights: Sequence[Tensor | None], wanted: Wanted, addend: Tensor | None = None
) -> Mixed:
    """Mix sources of one dtype; weights: query, norm weight, out weight or None."""
    rows = [x.contiguous() for x in sources]
    parameters = [None if x is None else x.contiguous() for x in weights]
    wanted = wanted._replace(passed=wanted.passed and torch.is_grad_enabled() and any(x.requires_grad for x in rows))
    mixed, normed, newest, probs, *passed = apply(
        _MixDepth, wanted, *parameters, None if addend is None else addend.contiguous(), *rows
    )
    if not wanted.passed:
        passed = rows if newest is None else rows[:-1]
    return Mixed(mixed, normed, probs, [*passed, *([] if newest is None else [newest])])


def inter_block(
    sources: Sequence[Tensor], vectors_QD: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.attn_res.inter_block` by kernels; not differentiable."""
    (T, D), L, Q = sources[0].shape, len(sources), len(vectors_QD)
    x = sources[0]
    mixtures = x.new_empty(Q, T, D, dtype=dtype)
    tops, totals = x.new_empty(2, Q, T, dtype=torch.float32)
    if T and Q:
        rows = tuple(source.contiguous() for source in sources)
        weights = x.new_empty(T, L, Q, dtype=torch.float32)
        flags = attn_res_phase_kernel.score_constants(D, Q)
        grid = (cdiv(T, flags["ROWS"]), cdiv(Q, flags["QUERIES"]))
        with on_device(x):
            vectors = vectors_QD.float().contiguous()
            run = attn_res_phase_kernel.phase_score_kernel[grid]
            run(rows, vectors, weights, tops, totals, T, Q, eps, 1.0, **flags)
            flags = attn_res_phase_kernel.mix_constants(D)
            run = attn_res_phase_kernel.phase_mix_kernel[(T * cdiv(D, flags["BLOCK"]),)]
            run(rows, weights, mixtures, T, Q, **flags)
    return mixtures, tops, totals


def merge(
    phase_one: tuple[Tensor, Tensor, Tensor],
    partial: Tensor,
    vector: Tensor,
    *,
    eps: float,
    addend: Tensor | None = None,
    out_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(mixture, or its norm if there is an out weight; the newest block sum); not differentiable."""
    partial = partial.contiguous()
    T, D = partial.shape
    kind = partial.dtype if out_weight is None else torch.promote_types(partial.dtype, out_weight.dtype)
    result = partial.new_empty(T, D, dtype=kind)
    newest = None if addend is None else torch.empty_like(partial)
    mixed, normed = (result, None) if out_weight is None else (None, result)
    if T:
        mixture, tops, totals = (x.contiguous() for x in phase_one)
        tensors = (mixture, tops, totals, partial, None if addend is None else addend.contiguous(), vector, out_weight)
        with on_device(partial):
            arguments = *tensors, newest, mixed, normed, eps, eps
            flags = attn_res_phase_kernel.merge_constants(D)
            _launch(attn_res_phase_kernel.phase_merge_kernel, T, arguments, *flags)
    return result, partial if newest is None else newest
