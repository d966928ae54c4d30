"""Launches of the Gluon kernels of causal attention, and what they take."""

from typing import Any

import torch
from torch import Tensor

from openk3.ops.backend import prefers_gluon
from openk3.ops.kda.gluon_launch import Matrix, launch
from openk3.ops.mla.attention_views import LOG2E, Job, Views
from openk3.ops.mla.tiles import Portion, query_tiles

_FIRST, _SECOND, _VALUES = (64, 128), (32, 64), (64, 128)


def fits(views: Views) -> bool:
    """Whether the kernels take these: on Hopper, bfloat16, 64 or 128, 32 or 64, and 64 or 128 channels, all aligned."""
    widths = views.widths
    return (
        prefers_gluon(views.q.device)
        and widths.first in _FIRST
        and widths.second in _SECOND
        and widths.value in _VALUES
        and all(_movable(x) for x in (views.q, views.k_a, views.k_b, views.v))
    )


def forward(views: Views, job: Job, o_THV: Tensor, log_HT: Tensor) -> Tensor:
    """Fill in outputs and sums of `attention_kernel`; returns the largest products of some rows each [H, X]."""
    from openk3.ops.mla import attention_gluon as kernels

    options = kernels.settings()
    constants: dict[str, Any] = {"COLUMNS": _columns(views.q, views.k_a, views.k_b, views.v)}
    constants |= {name: options.pop(name) for name in ("BLOCK", "STAGES", "TURNS")}
    tiles = query_tiles(job.bands, kernels.ROWS, views.q.device)
    H, count = views.q.shape[1], len(tiles)
    peaks = torch.empty(H, 2 * count, dtype=torch.float32, device=views.q.device)
    blocks = [_rows(x, constants["BLOCK"]) for x in (views.k_a, views.k_b, views.v)]
    arguments = [*_queries(views, kernels.ROWS), *blocks, o_THV, log_HT, peaks, tiles]
    arguments += [job.scale * LOG2E, log_HT.stride(0), H, count]
    launch(kernels.attention_gluon, H * count, arguments, constants, options)
    return peaks


def scores(views: Views, out: Views, rows: tuple[Tensor, Tensor, Tensor], scale: float, portion: Portion) -> None:
    """As `score_gradient_kernel`; rows: gradient of the output, sums of the forward pass, delta (in `Bands.lines`)."""
    from openk3.ops.mla import attention_gradient_gluon as kernels

    options = kernels.settings()["scores"]
    constants: dict[str, Any] = {"COLUMNS": _columns(views.q, views.k_a, views.k_b, views.v)}
    constants |= {"D_V": out.v.stride()[:2]}
    constants |= {name: options.pop(name) for name in ("STEP", "Q_STAGES", "O_STAGES")}
    step = constants["STEP"]
    d_o_THV, *sums = rows
    keys = [_rows(x, kernels.SIZE) for x in (views.k_a, views.k_b, views.v)]
    lines = [Matrix(x, (x.shape[0], x.shape[1]), (x.stride(0), 1), (1, step)) for x in sums]
    arguments = [*_queries(views, step), *keys, _rows(d_o_THV, step), *lines, _tiles(portion, (64, step)), out.v]
    arguments += [portion.tiles.keys, portion.order, scale * LOG2E, *portion.place]
    launch(kernels.score_gradient_gluon, _programs(portion, len(portion.slab.tiles)), arguments, constants, options)


def keys(views: Views, out: Views, scale: float, portion: Portion) -> None:
    """As `key_gradient_kernel`."""
    options, constants = _products()
    constants |= {"COLUMNS": _columns(views.q, views.q), "QUERIES": False}
    constants |= {"D_A": out.k_a.stride()[:2], "D_B": out.k_b.stride()[:2]}
    step = constants["STEP"]
    arguments = [_tiles(portion, (portion.tiles.size, step)), *_queries(views, step), out.k_a, out.k_b]
    arguments += [portion.tiles.keys, portion.order, scale, *portion.place]
    _launch_products(_programs(portion, len(portion.slab.tiles)), arguments, constants, options)


def queries(views: Views, out: Views, scale: float, portion: Portion) -> None:
    """As `query_gradient_kernel`, of whole heads."""
    options, constants = _products()
    first, _, _ = views.widths
    stride = out.q.stride()[:2]
    constants |= {"COLUMNS": _columns(views.k_a, views.k_b), "QUERIES": True, "D_A": stride, "D_B": stride}
    step, count = constants["STEP"], len(portion.tiles.queries)
    arguments = [_tiles(portion, (step, portion.tiles.size)), _rows(views.k_a, step), _rows(views.k_b, step)]
    arguments += [out.q[..., :first], out.q[..., first:], portion.tiles.queries, None, scale]
    _launch_products(_programs(portion, count), [*arguments, count, *portion.place[1:]], constants, options)


def _movable(x: Tensor) -> bool:
    """Whether the copy engine takes a tensor's rows."""
    strides = x.stride()
    return (
        x.dtype == torch.bfloat16
        and x.numel() > 0
        and x.data_ptr() % 16 == 0
        and strides[2] == 1
        and all(stride % 8 == 0 for stride in strides[:2])
    )


def _rows(x_THC: Tensor, tokens: int) -> Matrix:
    """All heads of a token as one row, moved in blocks of some tokens and the channels of one head."""
    T, H, C = x_THC.shape
    across, along = x_THC.stride()[:2]
    return Matrix(x_THC, (T, (H - 1) * along + C), (across, 1), (tokens, C))


def _queries(views: Views, tokens: int) -> tuple[Matrix, Matrix]:
    """Both parts of the queries."""
    first, _, _ = views.widths
    return _rows(views.q[..., :first], tokens), _rows(views.q[..., first:], tokens)


def _columns(*tensors: Tensor) -> tuple[int, ...]:
    """From head to head in such rows."""
    return tuple(x.stride(1) for x in tensors)


def _tiles(portion: Portion, block: tuple[int, int]) -> Matrix:
    """Score gradients, tile below tile."""
    size = portion.tiles.size
    return Matrix(portion.d_scores, (portion.d_scores.numel() // size, size), (size, 1), block)


def _programs(portion: Portion, count: int) -> int:
    return count * len(portion.slab.heads)


def _products() -> tuple[dict[str, int], dict[str, Any]]:
    """Launch options, and the first compile-time arguments."""
    from openk3.ops.mla import attention_gradient_gluon as kernels

    options = kernels.settings()["products"]
    return options, {name: options.pop(name) for name in ("STEP", "STAGES")}


def _launch_products(programs: int, arguments: list[Any], constants: dict[str, Any], options: dict[str, int]) -> None:
    from openk3.ops.mla import attention_gradient_gluon as kernels

    ordered = {name: constants[name] for name in ("COLUMNS", "D_A", "D_B", "QUERIES", "STEP", "STAGES")}
    launch(kernels.product_gradient_gluon, programs, arguments, ordered, options)
