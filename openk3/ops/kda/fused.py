"""Forward pass of Kimi Delta Attention by kernels: prepare all tiles, then scan, in segments where heads are few."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.backend import multiprocessors
from openk3.ops.device_tables import device_table
from openk3.ops.kda.prepare_kernel import prepare
from openk3.ops.kda.reference import KdaGate
from openk3.ops.kda.scan_kernel import ScanOutputs, fold, scan, scan_maps
from openk3.ops.kda.tiles import CHUNK, Span, Tiles, tile_table
from openk3.ops.kda.workspace import Workspace, kept

_SLAB_TILES = 2**17  # tiles times heads whose workspace is held at a time: 29 kB each, 37 before a backward pass

# Microseconds on an H200 of a tile in the scan, of one in the scan for maps, and of joining parts: at all, and each.
_SCAN, _MAP, _JOINS, _JOIN = 1.2, 0.75, 70.0, 2.0


@dataclass(frozen=True)
class Plan:
    """The tiles of a call, in parts, and whether the parts of a sequence are scanned at once."""

    tiles: Tiles
    split: bool


@device_table(64)
def make_plan(
    bounds: tuple[int, ...],
    heads: int,
    device: torch.device,
    *,
    checkpoints: tuple[int, ...] = (),
    part_tiles: int | None = None,
) -> Plan:
    """Plan for packed sequences: split where the device has more multiprocessors than there are heads to scan.

    Parts have at most `part_tiles` tiles (None: as many as a workspace may hold), not counting those that checkpoints
    cut. Remembered.
    """
    counts = [-(-(b - a) // CHUNK) for a, b in zip(bounds, bounds[1:])]
    best = split_tiles(counts, heads, multiprocessors(device) if device.type == "cuda" else 0)
    limits = [x for x in (best, part_tiles, max(1, _SLAB_TILES // max(1, heads))) if x is not None]
    most = min(limits) if max(counts, default=0) > min(limits) else None
    tiles = tile_table(bounds, device, checkpoints=checkpoints, part_tiles=most)
    return Plan(tiles, best is not None)


def split_tiles(counts: Sequence[int], heads: int, multiprocessors: int) -> int | None:
    """Most tiles of a part if sequences of that many tiles are best scanned in parts at once, else None.

    A scan of one head occupies a multiprocessor; the scan for maps has twice as many rows of state. What is compared
    is the time of all rounds, or of the longest part if that is more.
    """
    total, longest = sum(counts), max(counts, default=0)
    if (
        total * heads >= longest * multiprocessors
    ):  # nothing to gain: all multiprocessors are busy as long as the longest
        return None
    counts_N = torch.tensor(counts)

    def rounds(tiles: int, width: int) -> float:
        parts = int((counts_N + tiles - 1).div_(tiles, rounding_mode="floor").sum())
        return max(tiles, -(-parts * heads * width // multiprocessors) * total / parts)

    best, least = None, 0.8 * _SCAN * rounds(longest, 1)
    for pieces in range(2, 65):
        tiles = -(-longest // pieces)
        time = _SCAN * rounds(tiles, 1) + _MAP * rounds(tiles, 2) + _JOINS + _JOIN * pieces
        if time < least:
            best, least = tiles, time
    return best


@dataclass(frozen=True)
class Forward:
    """Results of `fused_forward`."""

    o_THV: Tensor
    final_NHKV: Tensor  # float32
    checkpoints_MHKV: Tensor  # float32
    entering_PHKV: Tensor | None  # float32: the state entering each part; None: parts are sequences and start from zero
    maps_PHRK: Tensor | None = None  # the parts as maps, where they were scanned at once


def fused_forward(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    gate: KdaGate,
    state_NHKV: Tensor | None,
    tiles: Tiles,
    *,
    split: bool,
    careful: bool = False,
) -> Forward:
    """Outputs, final states, checkpoints and the states that the backward pass starts its parts from.

    tokens: contiguous q, k, v, decay logits, beta logits, as in `recurrent_kda`; state_NHKV contiguous, or None for
    zeros. `split` scans all parts at once, joined by their maps; otherwise each sequence is scanned in one go. With
    `careful` the maps are as exact as the scans of the backward pass, which starts from where they lead.
    """
    _, _, v_THV, _, _ = tokens
    K, (_, H, V) = tokens[0].shape[2], v_THV.shape
    o_THV = torch.empty_like(v_THV)
    slabs = _slabs(tiles, H, split)
    if split or len(slabs) > 1:
        return _forward_in_slabs(
            tokens, gate, state_NHKV, tiles, split=split, o_THV=o_THV, slabs=slabs, careful=careful
        )
    span = tiles.sequences()
    workspace = _prepare(tokens, gate, span)
    final_NHKV = v_THV.new_empty(tiles.num_sequences, H, K, V, dtype=torch.float32)
    saved, entering = None, state_NHKV
    if tiles.num_saved > tiles.num_sequences:
        saved = _saved_states(tiles, state_NHKV, final_NHKV)
        entering = saved[: tiles.num_parts]
    scan(workspace, v_THV, span, state_NHKV, ScanOutputs(o=o_THV, final=final_NHKV, saved=saved))
    return Forward(o_THV, final_NHKV, _checkpoints(tiles, saved, final_NHKV), entering)


def _forward_in_slabs(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    gate: KdaGate,
    state_NHKV: Tensor | None,
    tiles: Tiles,
    *,
    split: bool,
    o_THV: Tensor,
    slabs: list[tuple[int, int]],
    careful: bool,
) -> Forward:
    """Slab by slab: each scans its parts at once, from states that earlier slabs left or that maps give."""
    v_THV = tokens[2]
    K, (_, H, V) = tokens[0].shape[2], v_THV.shape
    leaving = v_THV.new_empty(tiles.num_parts, H, K, V, dtype=torch.float32)
    if split:  # parts run at once, in any order: what one saves is not what the next one starts from
        entering = torch.empty_like(leaving)
        saved = leaving.new_empty(tiles.num_saved, H, K, V) if tiles.checkpoint_rows else None
    else:
        saved = _saved_states(tiles, state_NHKV, leaving)
        entering = saved[: tiles.num_parts]
    maps: list[Tensor] = []
    rests = kept(H, tiles.num_tiles) if split and careful else ()
    for low, high in slabs:
        span = tiles.slab(low, high)
        workspace = _prepare(tokens, gate, span, rests)
        if split:
            maps.append(scan_maps(workspace, v_THV, span))
            if low:
                entering[low] = leaving[low - 1]  # where a sequence goes on; `fold` writes where one begins
            fold(maps[-1], entering, state_NHKV, tiles=tiles, parts=(low, high))
        first, final = (entering[low:high], leaving[low:high]) if len(slabs) > 1 else (entering, leaving)
        scan(workspace, v_THV, span, first, ScanOutputs(o=o_THV, final=final, saved=saved))
    final_NHKV = leaving[-1:] if tiles.num_sequences == 1 else leaving.index_select(0, tiles.last_part_N)
    joined = torch.cat(maps) if len(maps) > 1 else (maps[0] if maps else None)
    return Forward(o_THV, final_NHKV, _checkpoints(tiles, saved, leaving), entering, joined)


def _prepare(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], gate: KdaGate, span: Span, rests: tuple[str, ...] = ()
) -> Workspace:
    q_THK, k_THK, _, logit_THK, beta_TH = tokens
    return prepare(q_THK, k_THK, logit_THK, beta_TH, gate, span=span, rests=rests)


def _slabs(tiles: Tiles, heads: int, split: bool) -> list[tuple[int, int]]:
    """Parts [low, high) whose workspaces are held at a time: everything if it is not too large.

    Otherwise as many parts as fit; and, unless maps join them, none whose entering state another one leaves.
    """
    room = _SLAB_TILES // max(1, heads)
    if tiles.num_tiles <= room:
        return [(0, tiles.num_parts)]
    begins = set(tiles.sequence_parts)
    slabs, low = [], 0
    for part in range(1, tiles.num_parts):
        if tiles.part_first[part + 1] - tiles.part_first[low] > room or not (split or part in begins):
            slabs.append((low, part))
            low = part
    return [*slabs, (low, tiles.num_parts)]


def _saved_states(tiles: Tiles, state_NHKV: Tensor | None, like: Tensor) -> Tensor:
    """Room for the states that a scan saves, with those before sequences filled in."""
    saved = like.new_empty(tiles.num_saved, *like.shape[1:])
    if state_NHKV is None:
        return saved.index_fill_(0, tiles.first_part_N, 0.0)
    return saved.index_copy_(0, tiles.first_part_N, state_NHKV.float())


def _checkpoints(tiles: Tiles, saved: Tensor | None, like: Tensor) -> Tensor:
    """States at the checkpoints, in their order."""
    rows = tiles.checkpoint_rows
    if saved is None or not rows:
        return like.new_empty(0, *like.shape[1:])
    if rows == tuple(range(rows[0], rows[0] + len(rows))):
        return saved[rows[0] : rows[0] + len(rows)]
    return saved[list(rows)]
