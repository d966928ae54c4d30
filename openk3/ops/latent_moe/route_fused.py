"""Launches of the routing kernels: choice, sort by expert with the table of row tiles, and the logits' gradient."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from openk3.ops.backend import on_device
from openk3.ops.latent_moe.route_kernel import (
    BACKWARD_WARPS,
    ROUTE_WARPS,
    SORT_WARPS,
    backward_settings,
    chunks,
    route_backward_kernel,
    route_kernel,
    sort_kernel,
    sort_settings,
    token_rows,
)
from openk3.ops.launch import start

MOST_GROUPS = 256  # programs of the first launch
MOST_SORTS = 256  # of the second, each of which reads what all of the first count, and walks over its words in order
MOST_COUNTS = 1 << 23  # that all of the second read in all


class Choice(NamedTuple):
    """How a router chooses."""

    k: int
    renormalize: bool
    scale: float


class Routed(NamedTuple):
    """What the first launch leaves: the routes, the chosen experts' scores, and which tokens each expert takes."""

    ids_Tk: Tensor  # int64, by descending biased score, equal ones by ascending index
    weights_Tk: Tensor
    chosen_Tk: Tensor  # scores of the chosen experts
    threshold_T: Tensor
    scores_TE: Tensor | None
    masks_WE: Tensor  # int32, a bit for each of 32 tokens
    counts_GE: Tensor  # int32, of the tokens of each program


class Plan(NamedTuple):
    """Token copies sorted by expert, stably: copy i of token t, slot t*k + i, lies in row `row_Tk[t, i]`."""

    row_Tk: Tensor  # int32
    slot_M: Tensor  # int32, the slot in each row
    start_X: Tensor  # int32 [E + 1]: first row of each expert, and M
    tile_expert: Tensor  # int32: the expert of each tile of rows; E where there are no more tiles
    tile_row: Tensor  # int32: its first row
    tile_end: Tensor  # int32: the row behind its expert's last
    tile: int  # rows of a tile


def route(logits_TE: Tensor, bias_E: Tensor, choice: Choice, *, with_scores: bool = False) -> Routed:
    """Choose experts by sigmoid(logits) + bias as `ops.routing.route` does, from float32 logits, without groups."""
    (T, E), k = logits_TE.shape, choice.k
    words = triton.cdiv(T, 32)
    blocks = max(1, triton.cdiv(words, MOST_GROUPS))
    groups = max(1, triton.cdiv(words, blocks))
    rows, (chunk, count) = token_rows(E), chunks(E)
    ids = torch.empty(T, k, dtype=torch.int64, device=logits_TE.device)
    weights, chosen = logits_TE.new_empty(2, T, k).unbind()
    masks = torch.empty(words, E, dtype=torch.int32, device=logits_TE.device)
    out = Routed(
        *(ids, weights, chosen),
        logits_TE.new_empty(T) if k < E else logits_TE.new_full((T,), float("-inf")),
        torch.empty_like(logits_TE) if with_scores else None,
        *(masks, masks.new_empty(groups, E)),
    )
    parts = masks.view({8: torch.int8, 16: torch.int16}[rows])
    with on_device(logits_TE):
        start(route_kernel, groups)(
            *(logits_TE, bias_E, ids, weights, chosen, out.threshold_T, out.scores_TE, parts, out.counts_GE),
            *(T, blocks, choice.scale, E, k, rows, chunk, count, choice.renormalize),
            num_warps=ROUTE_WARPS,
        )
    return out


def sort(routed: Routed, tile: int) -> Plan:
    """Sort the token copies by expert, and cut each expert's rows into tiles."""
    (T, k), (groups, E) = routed.ids_Tk.shape, routed.counts_GE.shape
    M = T * k
    settings = sort_settings(E, k, tile)
    sorts = max(1, min(MOST_SORTS, MOST_COUNTS // (groups * E)))
    span = triton.cdiv(groups, sorts)
    programs = max(triton.cdiv(groups, span), triton.cdiv(M // tile + min(E, M), settings["ENTRIES"]))
    row, slot, begin = (routed.masks_WE.new_empty(size) for size in (M, M, E + 1))
    tiles = expert, first, end = routed.masks_WE.new_empty(3, programs * settings["ENTRIES"]).unbind()
    blocks = max(1, triton.cdiv(triton.cdiv(T, 32), MOST_GROUPS))
    with on_device(row):
        start(sort_kernel, programs)(
            *(routed.ids_Tk, routed.masks_WE, routed.counts_GE, row, slot, begin, *tiles),
            *(T, blocks, groups, span),
            *settings.values(),
            num_warps=SORT_WARPS,
        )
    return Plan(row.view(T, k), slot, begin, expert, first, end, tile)


def logits_gradient(d_weights_Tk: Tensor, routed: Routed, choice: Choice, dtype: torch.dtype) -> Tensor:
    """Gradient of the logits [T, E] from that of the weights (float32, contiguous)."""
    (T, k), E = d_weights_Tk.shape, routed.counts_GE.shape[1]
    settings = backward_settings(E, k)
    d_logits = torch.empty(T, E, dtype=dtype, device=d_weights_Tk.device)
    if T:
        with on_device(d_logits):
            start(route_backward_kernel, triton.cdiv(T, settings["ROWS"]))(
                *(d_weights_Tk, routed.ids_Tk, routed.chosen_Tk, d_logits, T, choice.scale),
                *settings.values(),
                choice.renormalize,
                num_warps=BACKWARD_WARPS,
            )
    return d_logits
