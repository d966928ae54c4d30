"""Forward pass of Kimi Delta Attention by kernels: prepare all tiles, then scan, in segments where heads are few."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from openk3.ops.kda.prepare_kernel import Workspace, prepare
from openk3.ops.kda.reference import KdaGate
from openk3.ops.kda.scan_kernel import ScanOutputs, fold, scan, scan_maps
from openk3.ops.kda.tiles import CHUNK, Tiles, tile_table

# Microseconds on an H200 of a tile in the scan, of one in the scan for maps, and of joining parts: at all, and each.
_SCAN, _MAP, _JOINS, _JOIN = 1.6, 1.3, 60.0, 2.0


@dataclass(frozen=True)
class Plan:
    """The tiles of a call, in parts, and whether the parts of a sequence are scanned at once."""

    tiles: Tiles
    split: bool


@lru_cache(maxsize=64)
def make_plan(
    bounds: tuple[int, ...],
    heads: int,
    device: torch.device,
    *,
    checkpoints: tuple[int, ...] = (),
    part_tiles: int | None = None,
) -> Plan:
    """Plan for packed sequences: split where the device has more multiprocessors than there are heads to scan.

    Parts have at most `part_tiles` tiles (None: any number). Remembered.
    """
    counts = [-(-(b - a) // CHUNK) for a, b in zip(bounds, bounds[1:])]
    multiprocessors = 0
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    best = split_tiles(counts, heads, multiprocessors)
    limits = [x for x in (best, part_tiles) if x is not None]
    tiles = tile_table(bounds, device, checkpoints=checkpoints, part_tiles=min(limits, default=None))
    return Plan(tiles, best is not None)


def split_tiles(counts: Sequence[int], heads: int, multiprocessors: int) -> int | None:
    """Most tiles of a part if sequences of that many tiles are best scanned in parts at once, else None.

    A scan of one head occupies a multiprocessor; the scan for maps has twice as many rows of state. What is compared
    is the time of all rounds, or of the longest part if that is more.
    """
    total, longest = sum(counts), max(counts, default=0)
    if not multiprocessors or not total * heads:
        return None

    def rounds(tiles: int, width: int) -> float:
        parts = sum(-(-count // tiles) for count in counts)
        return max(tiles, -(-parts * heads * width // multiprocessors) * total / parts)

    best, least = None, 0.9 * _SCAN * rounds(longest, 1)
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
) -> Forward:
    """Outputs, final states, checkpoints and the states that the backward pass starts its parts from.

    tokens: contiguous q, k, v, decay logits, beta logits, as in `recurrent_kda`; state_NHKV contiguous, or None for
    zeros. `split` scans all parts at once, joined by their maps; otherwise each sequence is scanned in one go.
    """
    q_THK, k_THK, v_THV, logit_THK, beta_TH = tokens
    K, (_, H, V) = q_THK.shape[2], v_THV.shape
    workspace = prepare(q_THK, k_THK, logit_THK, beta_TH, gate, span=tiles.sequences())

    def states(rows: int) -> Tensor:
        return torch.empty(rows, H, K, V, dtype=torch.float32, device=v_THV.device)

    o_THV = torch.empty_like(v_THV)
    if split and tiles.num_parts > tiles.num_sequences:
        return _split_forward(workspace, v_THV, state_NHKV, tiles, o_THV)
    saving = tiles.num_saved > tiles.num_sequences
    saved = states(tiles.num_saved) if saving else None
    final_NHKV = states(tiles.num_sequences)
    scan(workspace, v_THV, tiles.sequences(), state_NHKV, ScanOutputs(o=o_THV, final=final_NHKV, saved=saved))
    entering = state_NHKV
    if saved is not None and tiles.num_parts > tiles.num_sequences:
        entering = saved[: tiles.num_parts]
        first = final_NHKV.new_zeros(final_NHKV.shape) if state_NHKV is None else state_NHKV.float()
        entering.index_copy_(0, tiles.first_part_N, first)
    return Forward(o_THV, final_NHKV, _checkpoints(tiles, saved, final_NHKV), entering)


def _split_forward(
    workspace: Workspace, v_THV: Tensor, state_NHKV: Tensor | None, tiles: Tiles, o_THV: Tensor
) -> Forward:
    span = tiles.parts()
    maps = scan_maps(workspace, v_THV, span)
    entering = fold(maps, tiles, state_NHKV)
    leaving = torch.empty_like(entering)
    saved = None
    if tiles.checkpoint_rows:
        saved = entering.new_empty(tiles.num_saved, *entering.shape[1:])
    scan(workspace, v_THV, span, entering, ScanOutputs(o=o_THV, final=leaving, saved=saved))
    final = leaving.index_select(0, tiles.last_part_N)
    return Forward(o_THV, final, _checkpoints(tiles, saved, final), entering, maps)


def _checkpoints(tiles: Tiles, saved: Tensor | None, like: Tensor) -> Tensor:
    """States at the checkpoints, in their order."""
    rows = tiles.checkpoint_rows
    if saved is None or not rows:
        return like.new_empty(0, *like.shape[1:])
    if rows == tuple(range(rows[0], rows[0] + len(rows))):
        return saved[rows[0] : rows[0] + len(rows)]
    return saved[list(rows)]
