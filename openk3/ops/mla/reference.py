"""Causal attention of Gated MLA over packed sequences: expanded heads for training, absorbed latents for decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
from torch.autograd.function import once_differentiable

from openk3.ops.backend import pick
from openk3.ops.mla import attention_library
from openk3.ops.mla.attention_views import MOST_LATENT_CHANNELS, MOST_SHARED_CHANNELS, Job, obstacle
from openk3.ops.mla.paged_rows import PagedRows
from openk3.ops.mla.tiles import Bands
from openk3.ops.saved import name, remake
from openk3.ops.sequences import bounds_in, bounds_on, shown

# Query rows per tile: enough for full-speed matrix products, few enough to waste little beyond the diagonal; twice as
# many where the diagonal is a small part of the sequence.
_TILE_ROWS = 128
_LONG = 1024
# Scores that exist at once (float32: 16 MiB), whatever the length of a sequence or the number of heads.
_TILE_VALUES = 1 << 22
# Probabilities kept for the backward pass (float32: 32 MiB); beyond that it computes them again.
_KEPT_VALUES = 1 << 23


@overload
def mla_attention(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    scale: float,
    return_max: Literal[False] = False,
) -> torch.Tensor:
    """The output alone."""


@overload
def mla_attention(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    scale: float,
    return_max: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and each head's largest score."""


def mla_attention(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    scale: float,
    return_max: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`softmax(scale * q k^T + causal) v` inside each packed sequence: o [Tq, H, V].

    q [Tq, H, K], k [Tk, H, K], v [Tk, H, V]; K and V may differ. `cu_seqlens_q` and `cu_seqlens_k` [N+1] hold the
    sequence boundaries (the same if `cu_seqlens_k` is None). The queries of a sequence are its last positions:
    query i of n_q sees keys 0 .. n_k - n_q + i. Empty sequences are allowed. Arithmetic and output are in at least
    float32 (report §2.1.2: the attention output stays in FP32); gradients have the inputs' dtypes. Scores exist for
    one tile of query rows at a time, so that memory grows with T, not T^2.

    With `return_max`, also the largest scaled causal score of each head [H], detached, for QK-Clip; -inf where
    there is no query. Raises ValueError if boundaries and tensors disagree or a sequence has more queries than keys.
    """
    bands = _bands(cu_seqlens_q, cu_seqlens_k, q_THK.shape[0], k_THK.shape[0])
    job, tensors = Job(bands, scale), (q_THK, k_THK, v_THV)
    if attention_library.applies(job, q_THK, return_max=return_max):
        return attention_library.library_attention(q_THK, k_THK, v_THV, scale)
    if pick("mla", q_THK, name="q_THK", obstacle=obstacle(job, tensors)) == "triton":
        from openk3.ops.mla.attention_fused import attend

        o_THV, max_logit_H = attend(job, *tensors)
        return (o_THV, max_logit_H) if return_max else o_THV
    tiles = _plan(bands.queries, bands.keys)
    values = q_THK.shape[1] * sum((tile.q1 - tile.q0) * (tile.k1 - tile.k0) for tile in tiles)
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (q_THK, k_THK, v_THV))
    options = _Options(tiles, scale, return_max, keep=differentiable and values <= _KEPT_VALUES)
    o_THV, max_logit_H = _Attention.apply(q_THK, k_THK, v_THV, options)
    return (o_THV, max_logit_H) if return_max else o_THV


def joint_attention(
    q_THK: torch.Tensor,
    kv_THC: torch.Tensor,
    shared_TR: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    scale: float,
    return_max: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`mla_attention` of what kv_b gives, without copies of it: (o [Tq, H, V], largest scores [H] or None).

    kv_THC holds a head's own key channels, then its values; the key channels that all heads share come after its own.
    The width of a query says where values begin. Raises ValueError as `mla_attention`, and if widths do not fit.
    """
    own = q_THK.shape[-1] - shared_TR.shape[-1]
    if not 0 < own < kv_THC.shape[-1] or len(shared_TR) != len(kv_THC):
        shapes = [list(x.shape) for x in (q_THK, kv_THC, shared_TR)]
        raise ValueError(f"joint_attention: queries, keys and values, shared keys of shapes {shapes} do not fit")
    job = Job(_bands(cu_seqlens_q, cu_seqlens_k, len(q_THK), len(kv_THC)), scale, own)
    tensors = (q_THK, kv_THC, shared_TR)
    by_library = attention_library.applies(job, q_THK, return_max=return_max)
    if not by_library and pick("mla", q_THK, name="q_THK", obstacle=obstacle(job, tensors)) == "triton":
        from openk3.ops.mla.attention_fused import attend

        o_THV, max_logit_H = attend(job, *tensors)
        return o_THV, max_logit_H if return_max else None
    k_THK = _keys(kv_THC, shared_TR, own)
    remake("mla_qkv", [k_THK], partial(_keys, own=own), kv_THC, shared_TR)
    bounds = cu_seqlens_q, cu_seqlens_k
    if return_max:
        return mla_attention(q_THK, k_THK, kv_THC[..., own:], *bounds, scale=scale, return_max=True)
    return mla_attention(q_THK, k_THK, kv_THC[..., own:], *bounds, scale=scale), None


def _keys(kv_THC: torch.Tensor, shared_TR: torch.Tensor, own: int) -> torch.Tensor:
    """Every head's own key channels, then the shared ones."""
    return torch.cat((kv_THC[..., :own], shared_TR.unsqueeze(1).expand(-1, kv_THC.shape[1], -1)), -1)


def absorbed_attention(
    q_latent_THC: torch.Tensor,
    q_shared_THR: torch.Tensor,
    latents: Sequence[torch.Tensor],
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """The same attention read from cached latents: context in latent space [Tq, H, C], in at least float32.

    `q_latent_THC` is the content query times the key half of kv_b, `q_shared_THR` the part for the shared key.
    `latents` holds one [Tk, C+R] per sequence, normed latent then shared key, the current positions included (or is
    PagedRows, which kernels read in place); the queries are its last positions. Multiply the result by the value half
    of kv_b to get the heads' outputs.

    Raises ValueError if the boundaries do not fit or a sequence has more queries than cached positions.
    """
    ends = bounds_in("cu_seqlens_q", cu_seqlens_q)
    if len(latents) != len(ends) - 1:
        raise ValueError(f"latents: {len(latents)} sequences, but cu_seqlens_q has {len(ends) - 1}")
    paged = isinstance(latents, PagedRows)
    for start, end, length in zip(ends, ends[1:], latents.lengths if paged else map(len, latents)):
        _check([0, end - start], [0, length], end - start, length)
    against = _no_decoding(q_latent_THC, q_shared_THR, latents, scale)
    if latents and pick("mla", q_latent_THC, name="q_latent_THC", obstacle=against) == "triton":
        from openk3.ops.mla.latent_decode import LatentPages, latent_attention

        if paged:
            pages = LatentPages.of_pages(latents.latent_PTC, latents.where.page_NP, latents.where.length_N)
        else:
            pages = LatentPages.of_sequences(latents)
        most = max(b - a for a, b in zip(ends, ends[1:]))
        bounds = bounds_on(ends, q_latent_THC.device)
        return latent_attention(q_latent_THC, q_shared_THR, pages, bounds, scale=scale, new_tokens=max(1, most))
    wide = torch.promote_types(q_latent_THC.dtype, torch.float32)
    q_THK = torch.cat((q_latent_THC, q_shared_THR), -1).to(wide)
    heads, latent_dim = q_latent_THC.shape[1:]
    outputs = [q_THK.new_zeros(0, heads, latent_dim)]
    for start, end, latent_KD in zip(ends, ends[1:], latents):
        length, latent_KD = len(latent_KD), latent_KD.to(wide)
        rows = max(1, min(_TILE_ROWS, _TILE_VALUES // max(1, heads * length)))
        for q0 in range(start, end, rows):
            q1 = min(q0 + rows, end)
            seen = length - (end - q1)
            scores = (q_THK[q0:q1].flatten(0, 1) @ latent_KD[:seen].T).mul_(scale).view(q1 - q0, heads, seen)
            if q1 - q0 > 1:
                scores[..., seen - (q1 - q0) :] += _hide(q1 - q0, scores).unsqueeze(1)
            probs = scores.softmax(-1).view(-1, seen)
            outputs.append((probs @ latent_KD[:seen, :latent_dim]).view(q1 - q0, heads, latent_dim))
    return torch.cat(outputs)


def _no_decoding(
    q_latent_THC: torch.Tensor, q_shared_THR: torch.Tensor, latents: Sequence[torch.Tensor], scale: float
) -> str | None:
    """Why the kernels cannot take cached latents, or None."""
    rows = (latents.latent_PTC,) if isinstance(latents, PagedRows) else latents
    tensors = (q_latent_THC, q_shared_THR, *rows)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "they have no gradients through cached latents"
    if any(x.dtype != q_latent_THC.dtype or x.device != q_latent_THC.device for x in tensors):
        return "queries and latents differ in format or device"
    widths = q_latent_THC.shape[2], q_shared_THR.shape[2]
    if not (0 < widths[0] <= MOST_LATENT_CHANNELS and 0 < widths[1] <= MOST_SHARED_CHANNELS):
        most = f"{MOST_LATENT_CHANNELS} and {MOST_SHARED_CHANNELS}"
        return f"latents have {widths[0]} and {widths[1]} channels; they take up to {most}"
    return None if scale > 0 else f"the scale is {scale}, not positive"


class _Tile(NamedTuple):
    """Query rows q0:q1 against keys k0:k1; one sequence's rows, or several whole short sequences (`ends`)."""

    q0: int
    q1: int
    k0: int
    k1: int
    ends: tuple[tuple[int, int], ...] = ()  # (last query row, last key) of each sequence, plus one

    def hide_(self, scores_HQK: torch.Tensor) -> None:
        """Set the scores of later positions and of other sequences to -inf."""
        rows = self.q1 - self.q0
        if rows > 1 and not self.ends:
            # Keys before the tile's own rows are visible to all of them.
            scores_HQK[:, :, -rows:] += _hide(rows, scores_HQK)
        elif self.ends:
            bias_QK = scores_HQK.new_full(scores_HQK.shape[1:], float("-inf"))
            row = column = 0
            for q1, k1 in self.ends:
                q1, k1 = q1 - self.q0, k1 - self.k0
                block = bias_QK[row:q1, column:k1]
                block.triu_(k1 - column - (q1 - row) + 1)
                row, column = q1, k1
            scores_HQK += bias_QK


def _hide(rows: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_full((rows, rows), float("-inf")).triu_(1)


def kept_scores(length: int, heads: int) -> float:
    """Values of one token's probabilities that wait for the backward pass, among as few sequences as fill a tile."""
    ends = [length * n for n in range(1 + max(1, _TILE_ROWS // length))]
    values = heads * sum((tile.q1 - tile.q0) * (tile.k1 - tile.k0) for tile in _plan(ends, ends))
    return values / ends[-1] if values <= _KEPT_VALUES else 0.0


class _Options(NamedTuple):
    tiles: list[_Tile]
    scale: float
    return_max: bool
    keep: bool


def _bands(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor | None, num_q: int, num_k: int) -> Bands:
    ends_q = bounds_in("cu_seqlens_q", cu_seqlens_q)
    ends_k = ends_q if cu_seqlens_k is None else bounds_in("cu_seqlens_k", cu_seqlens_k)
    _check(ends_q, ends_k, num_q, num_k)
    return Bands(ends_q, ends_k)


def _check(ends_q: Sequence[int], ends_k: Sequence[int], num_q: int, num_k: int) -> None:
    if len(ends_q) != len(ends_k) or (ends_q[0], ends_q[-1], ends_k[0], ends_k[-1]) != (0, num_q, 0, num_k):
        bounds = f"{shown(ends_q)} and {shown(ends_k)}"
        raise ValueError(f"sequence boundaries {bounds} do not fit {num_q} queries and {num_k} keys")
    for i, (q0, q1, k0, k1) in enumerate(zip(ends_q, ends_q[1:], ends_k, ends_k[1:])):
        if not 0 <= q1 - q0 <= max(k1 - k0, 0):
            raise ValueError(f"sequence {i} has {q1 - q0} queries for {k1 - k0} keys; queries are the last positions")


def _plan(ends_q: Sequence[int], ends_k: Sequence[int]) -> list[_Tile]:
    """Cut long sequences into tiles of rows, and join short neighbours into one tile."""
    tiles: list[_Tile] = []
    group: list[tuple[int, int]] = []
    for q0, q1, k0, k1 in zip(ends_q, ends_q[1:], ends_k, ends_k[1:]):
        if group and max(q1 - tiles[-1].q0, k1 - tiles[-1].k0) <= _TILE_ROWS:
            group.append((q1, k1))
            tiles[-1] = _Tile(tiles[-1].q0, q1, tiles[-1].k0, k1, tuple(group))
            continue
        group = [(q1, k1)] if 0 < max(q1 - q0, k1 - k0) <= _TILE_ROWS // 2 else []
        rows = _TILE_ROWS if k1 - k0 <= _LONG else 2 * _TILE_ROWS
        rows = max(1, min(rows, _TILE_VALUES // max(1, k1 - k0)))
        for start in range(q0, q1, rows):
            end = min(start + rows, q1)
            tiles.append(_Tile(start, end, k0, k1 - (q1 - end)))
        if q0 == q1:
            group = []
    return tiles


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, options: _Options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(q_THK.dtype, torch.float32)
        q, k, v = (x.to(wide).transpose(0, 1) for x in (q_THK, k_THK, v_THV))
        o_THV = v.new_empty(q_THK.shape[0], *v_THV.shape[1:])
        max_logit_H = q.new_full(q.shape[:1], float("-inf"))
        kept = []
        for tile, heads, rows, keys in _pieces(options.tiles, q.shape[0]):
            scores = _scores(tile, q[heads, rows], k[heads, keys], options.scale)
            if options.return_max:
                max_logit_H[heads] = torch.maximum(max_logit_H[heads], scores.amax((1, 2)))
            probs = scores.softmax(-1)
            o_THV.transpose(0, 1)[heads, rows].baddbmm_(probs, v[heads, keys], beta=0)
            if options.keep:
                kept.append(probs)
        name("mla_outputs", o_THV)
        ctx.save_for_backward(q_THK, k_THK, v_THV, o_THV, *kept)
        ctx.options = options
        ctx.mark_non_differentiable(max_logit_H)
        return o_THV, max_logit_H

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, options = ctx.saved_tensors, ctx.options  # read once: recomputed activations allow no second time
        *inputs, o_THV = saved[:4]
        kept = saved[4:]
        q, k, v = (x.to(o_THV.dtype).transpose(0, 1) for x in inputs)
        grad_o_THV = grads[0]
        grad_o = grad_o_THV.transpose(0, 1)
        delta_HT1 = torch.linalg.vecdot(grad_o_THV, o_THV).T.unsqueeze(-1)
        grads_THX = [torch.empty_like(inputs[0], dtype=o_THV.dtype, memory_format=torch.contiguous_format)]
        grads_THX += [torch.zeros_like(x, dtype=o_THV.dtype, memory_format=torch.contiguous_format) for x in inputs[1:]]
        grad_q, grad_k, grad_v = (x.transpose(0, 1) for x in grads_THX)
        for i, (tile, heads, rows, keys) in enumerate(_pieces(options.tiles, q.shape[0])):
            probs = kept[i] if kept else _scores(tile, q[heads, rows], k[heads, keys], options.scale).softmax(-1)
            grad_v[heads, keys].baddbmm_(probs.mT, grad_o[heads, rows])
            grad_scores = torch.bmm(grad_o[heads, rows], v[heads, keys].mT).sub_(delta_HT1[heads, rows]).mul_(probs)
            grad_q[heads, rows].baddbmm_(grad_scores, k[heads, keys], beta=0, alpha=options.scale)
            grad_k[heads, keys].baddbmm_(grad_scores.mT, q[heads, rows], alpha=options.scale)
        return *(grad.to(x.dtype) for grad, x in zip(grads_THX, inputs)), None


def _pieces(tiles: list[_Tile], num_heads: int) -> Iterator[tuple[_Tile, slice, slice, slice]]:
    """(tile, heads, query rows, keys): tiles split over heads where they would exceed _TILE_VALUES."""
    for tile in tiles:
        step = max(1, _TILE_VALUES // ((tile.q1 - tile.q0) * (tile.k1 - tile.k0)))
        for head in range(0, num_heads, step):
            yield tile, slice(head, head + step), slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)


def _scores(tile: _Tile, q_HQK: torch.Tensor, k_HKK: torch.Tensor, scale: float) -> torch.Tensor:
    shape = (q_HQK.shape[0], q_HQK.shape[1], k_HKK.shape[1])
    scores_HQK = q_HQK.new_empty(shape).baddbmm_(q_HQK, k_HKK.mT, beta=0, alpha=scale)
    tile.hide_(scores_HQK)
    return scores_HQK
