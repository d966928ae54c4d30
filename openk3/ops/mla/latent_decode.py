"""Attention over cached latents in pages, by kernels: where latents lie, how work is shared out, and the launches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from openk3.ops.backend import check_kernels, on_device, prefers_gluon
from openk3.ops.launch import cdiv, power_of_2
from openk3.ops.mla import latent_kernel
from openk3.ops.mla.attention_views import LOG2E, MOST_LATENT_CHANNELS, MOST_SHARED_CHANNELS
from openk3.ops.sequences import integers

_HOPPER_WIDTHS = (512, 64)
_HOPPER_BLOCK = 64
_UNIT = 16  # numbers: latents of separate tensors are found by the distance of their memory, in this unit if it divides


@dataclass(frozen=True)
class LatentPages:
    """Latents of N requests: of request n, token t lies in page `page_NP[n, t // page_tokens]`, row t % page_tokens.

    A page begins `page_stride` numbers behind the one before it, a row `token_stride` behind the one before it; its
    numbers are neighbours: a latent of C channels, then the key part that all heads share.
    """

    memory: Tensor  # where page 0 begins; its format
    page_NP: Tensor  # int32 or int64
    length_N: Tensor  # int32: tokens of each request, those of this pass included
    num_pages: int
    page_tokens: int
    page_stride: int
    token_stride: int
    width: int
    apart: tuple[Tensor, ...] = ()  # latents in memory of their own: rows behind theirs must not be read

    @classmethod
    def of_pages(cls, latent_PTC: Tensor, page_NP: Tensor, length_N: Tensor) -> "LatentPages":
        """Latents [pages, tokens of a page, C+R] with any strides of pages and tokens, and each request's pages.

        Raises ValueError if shapes, formats or strides do not fit.
        """
        shapes = (latent_PTC.ndim, page_NP.ndim, length_N.ndim) == (3, 2, 1) and len(page_NP) == len(length_N)
        if not shapes or latent_PTC.stride(2) != 1:
            raise ValueError(
                "latents: pages [P, T, C] with neighbouring channels, tables [N, .] and lengths [N] needed"
            )
        if page_NP.stride(1) != 1 or length_N.dtype != torch.int32 or page_NP.dtype not in (torch.int32, torch.int64):
            raise ValueError("latents: page_NP must be int32 or int64 with neighbouring rows, length_N int32")
        pages, tokens, width = latent_PTC.shape
        across, along, _ = latent_PTC.stride()
        return cls(latent_PTC, page_NP, length_N, pages, tokens, across, along, width)

    @classmethod
    def contiguous(cls, latent_NTC: Tensor, length_N: Tensor) -> "LatentPages":
        """One piece of memory for each request [N, capacity, C+R]."""
        pages = torch.arange(len(latent_NTC), dtype=torch.int32, device=latent_NTC.device)
        return cls.of_pages(latent_NTC, pages.unsqueeze(1), length_N)

    @classmethod
    def of_sequences(cls, latents: Sequence[Tensor]) -> "LatentPages":
        """One tensor [length, C+R] for each request, wherever it lies."""
        first = latents[0]
        rows = tuple(latents)
        if first.stride(1) != 1 or any(x.stride() != first.stride() for x in rows):
            rows = tuple(x.contiguous() for x in rows)
            first = rows[0]
        away = [(x.data_ptr() - first.data_ptr()) // first.element_size() if len(x) else 0 for x in rows]
        unit = _UNIT if all(distance % _UNIT == 0 for distance in away) else 1
        pages = torch.tensor([[distance // unit] for distance in away], dtype=torch.int64)
        lengths = torch.tensor([len(x) for x in rows], dtype=torch.int32)
        most = max(1, *(len(x) for x in rows))
        table = pages.to(first.device), lengths.to(first.device)
        return cls(first, *table, 1, most, unit, first.stride(0), first.shape[1], rows)


@dataclass(frozen=True)
class LatentPlan:
    """How the blocks of all requests' keys are shared out: the same for all layers of a pass.

    `before` [parts, N + 1] int32 holds how many blocks lie before each request, for every block of rows.
    """

    before: Tensor
    runs: int  # programs that walk through the blocks, for each block of rows
    rows: int  # of a block: heads times new tokens
    block: int  # keys
    hopper: bool

    @property
    def parts(self) -> int:
        """Blocks of rows."""
        return len(self.before)


def plan_latents(pages: LatentPages, cu_seqlens_q: Tensor, heads: int, new_tokens: int) -> LatentPlan:
    """The plan of a pass over `pages`; new_tokens: the most that one request has. Waits for nothing."""
    device = pages.memory.device
    hopper = _suits_hopper(pages)
    if hopper:
        from openk3.ops.mla import latent_gluon

        found = latent_gluon.settings(heads * new_tokens)
        rows, block, programs = found["FIRST"] + found["SECOND"], _HOPPER_BLOCK, 1
    else:
        latent = pages.width - MOST_SHARED_CHANNELS  # at least: the shared part has no more
        settings = latent_kernel.settings(heads * new_tokens, pages.memory.element_size(), _arch(device), latent)
        rows, block, programs = settings.rows, settings.keys, settings.programs
    parts, N = cdiv(heads * new_tokens, rows), len(pages.length_N)
    before = torch.empty(parts, N + 1, dtype=torch.int32, device=device)
    with on_device(before):
        latent_kernel.plan_kernel[(parts,)](
            *(pages.length_N, cu_seqlens_q, before, N, heads, rows, block),
            PADDED=power_of_2(max(256, N)),
            num_warps=4,
        )
    return LatentPlan(before, max(1, _multiprocessors(device) * programs // parts), rows, block, hopper)


def latent_attention(
    q_latent_THC: Tensor,
    q_shared_THR: Tensor,
    pages: LatentPages,
    cu_seqlens_q: Tensor,
    *,
    scale: float,
    new_tokens: int | None = None,
    plan: LatentPlan | None = None,
) -> Tensor:
    """`absorbed_attention` by kernels, over latents in pages: context in latent space [Tq, H, C] in float32.

    The new tokens of request n are rows cu_seqlens_q[n] to [n + 1] and its last positions. `new_tokens` is the most
    that one request has; without it the bounds are read from the device. A `plan` of the pass saves making one in
    every layer. With both nothing is waited for, so that a graph can be captured. Not differentiable. Raises ValueError
    if shapes or formats do not fit, and for what the kernels cannot run on.
    """
    (T, H, C), N = q_latent_THC.shape, len(pages.length_N)
    check_latents(q_latent_THC, q_shared_THR, pages, cu_seqlens_q, scale)
    if new_tokens is None:
        bounds = integers(cu_seqlens_q)
        new_tokens = max(1, *(b - a for a, b in zip(bounds, bounds[1:])), 1)
    out_THC = torch.empty(T, H, C, dtype=torch.float32, device=q_latent_THC.device)
    if T * H == 0:
        return out_THC
    plan = plan or plan_latents(pages, cu_seqlens_q, H, new_tokens)
    q_latent_THC, q_shared_THR = (x if x.stride(2) == 1 else x.contiguous() for x in (q_latent_THC, q_shared_THR))
    slots = plan.parts * (plan.runs + N) * plan.rows
    parts = torch.empty(slots, C, dtype=torch.float32, device=out_THC.device)
    logs = torch.empty(slots, dtype=torch.float32, device=out_THC.device)
    run = _by_gluon if plan.hopper else _by_triton
    with on_device(out_THC):
        run((q_latent_THC, q_shared_THR), pages, cu_seqlens_q, (out_THC, parts, logs), scale=scale, plan=plan)
        latent_kernel.combine_kernel[(T * H,)](
            *(parts, logs, cu_seqlens_q, plan.before, out_THC, N, H, plan.runs, plan.rows),
            C=C,
            PC=max(16, power_of_2(C)),
            num_warps=4,
        )
    return out_THC


def check_latents(
    q_latent_THC: Tensor, q_shared_THR: Tensor, pages: LatentPages, cu_seqlens_q: Tensor, scale: float
) -> None:
    """Raise ValueError if `latent_attention` cannot take these."""
    check_kernels("latent_attention", q_latent_THC)
    C, R = q_latent_THC.shape[2], q_shared_THR.shape[2]
    fits = C <= MOST_LATENT_CHANNELS and R <= MOST_SHARED_CHANNELS
    if pages.width != C + R or q_shared_THR.shape[:2] != q_latent_THC.shape[:2] or not fits:
        most = f"{MOST_LATENT_CHANNELS} and {MOST_SHARED_CHANNELS}"
        raise ValueError(
            f"latent_attention: queries of {C} and {R} channels for latents of {pages.width}; at most {most}"
        )
    if pages.memory.dtype != q_latent_THC.dtype or q_shared_THR.dtype != q_latent_THC.dtype:
        raise ValueError("latent_attention: queries and latents must have one format")
    if cu_seqlens_q.dtype != torch.int32 or len(cu_seqlens_q) != len(pages.length_N) + 1:
        raise ValueError("latent_attention: cu_seqlens_q must be int32 with one more bound than there are requests")
    if not scale > 0:
        raise ValueError(f"latent_attention: the scale must be positive, got {scale}")


Outputs = tuple[Tensor, Tensor, Tensor]  # whole requests, parts of requests, log-sums of the parts


def _by_triton(
    queries: tuple[Tensor, Tensor],
    pages: LatentPages,
    cu_seqlens_q: Tensor,
    outputs: Outputs,
    *,
    scale: float,
    plan: LatentPlan,
) -> None:
    q_latent_THC, q_shared_THR = queries
    (_, H, C), R = q_latent_THC.shape, q_shared_THR.shape[2]
    arch = _arch(q_latent_THC.device)
    settings = latent_kernel.settings(plan.rows * plan.parts, q_latent_THC.element_size(), arch, C)
    padded = {name: max(16, power_of_2(width)) for name, width in (("PC", C), ("PS", R))}
    latent_kernel.latent_kernel[(plan.runs * plan.parts,)](
        *(*queries, pages.memory, pages.page_NP, pages.length_N, cu_seqlens_q, plan.before, *outputs),
        *(scale * LOG2E, len(pages.length_N), H, pages.page_NP.stride(0), plan.parts),
        *(pages.page_stride, pages.token_stride, *_strides(queries)),
        C=C,
        S=R,
        **padded,
        ROWS=plan.rows,
        BLOCK=plan.block,
        PAGE=_page_constant(pages, plan.block),
        PRECISION="tf32x3",
        **settings.options(),
    )


def _by_gluon(
    queries: tuple[Tensor, Tensor],
    pages: LatentPages,
    cu_seqlens_q: Tensor,
    outputs: Outputs,
    *,
    scale: float,
    plan: LatentPlan,
) -> None:
    from openk3.ops.kda.gluon_launch import Matrix, launch
    from openk3.ops.mla import latent_gluon

    queries = (_settled(queries[0]), _settled(queries[1]))
    options = latent_gluon.settings(plan.rows * plan.parts)
    shape = {name: options.pop(name) for name in ("FIRST", "SECOND", "SLOTS")}
    sizes = (pages.num_pages, pages.page_tokens, pages.width)
    memory = Matrix(pages.memory, sizes, (pages.page_stride, pages.token_stride, 1), (1, plan.block, 64))
    constants: dict[str, Any] = {"Q_STRIDES": _strides(queries), "FIRST": shape["FIRST"], "SECOND": shape["SECOND"]}
    constants |= {"PAGE": _page_constant(pages, plan.block), "SLOTS": shape["SLOTS"], "SPLIT": plan.parts > 1}
    arguments = [memory, *queries, pages.page_NP, pages.length_N, cu_seqlens_q, plan.before, *outputs]
    arguments += [scale * LOG2E, len(pages.length_N), queries[0].shape[1], pages.page_NP.stride(0)]
    arguments += [plan.runs, plan.parts]
    launch(latent_gluon.latent_gluon, plan.runs * plan.parts, arguments, constants, options)


def _strides(queries: tuple[Tensor, Tensor]) -> tuple[int, ...]:
    return tuple(stride for x in queries for stride in x.stride()[:2])


def _settled(q_THC: Tensor) -> Tensor:
    """Queries whose strides, for which this kernel is compiled, do not follow from just any number of tokens.

    Where heads come first the distance between them does. Such queries are copied, but for the numbers of places that
    graphs of decoding are made for: a power of two or one and a half of one.
    """
    T = len(q_THC)
    whole = 1 << (T - 1).bit_length()
    follows = q_THC.stride(1) > q_THC.stride(0) and T not in (whole, whole // 4 * 3)
    return q_THC.contiguous() if follows else q_THC


def _page_constant(pages: LatentPages, block: int) -> int:
    """Tokens of a page as a compile-time number; where a request has one page only, one number does for all sizes."""
    return pages.page_tokens if pages.page_NP.shape[1] > 1 else 2**30


def _suits_hopper(pages: LatentPages) -> bool:
    """Whether the Gluon kernel takes these: bfloat16 latents of 512 + 64 values that the copy engine can fetch."""
    strides = (pages.page_stride, pages.token_stride)
    return (
        prefers_gluon(pages.memory.device)
        and not pages.apart
        and pages.memory.dtype == torch.bfloat16
        and pages.width == sum(_HOPPER_WIDTHS)
        and (pages.page_tokens % _HOPPER_BLOCK == 0 or pages.page_NP.shape[1] == 1)
        and pages.num_pages > 0
        and pages.memory.data_ptr() % 16 == 0
        and all(stride % 8 == 0 for stride in strides)
    )


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
