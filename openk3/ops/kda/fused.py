"""Forward pass of Kimi Delta Attention by kernels: prepare all tiles, then scan, in segments where heads are few."""

from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.kda.prepare_kernel import Workspace, prepare
from openk3.ops.kda.reference import KdaGate
from openk3.ops.kda.scan_kernel import ScanOutputs, fold, scan, scan_maps
from openk3.ops.kda.tiles import Tiles


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
        first = tiles.parts_N[:-1]
        entering[first.long()] = 0.0 if state_NHKV is None else state_NHKV.float()
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
    final = leaving[tiles.parts_N[1:].long() - 1]
    return Forward(o_THV, final, _checkpoints(tiles, saved, final), entering, maps)


def _checkpoints(tiles: Tiles, saved: Tensor | None, like: Tensor) -> Tensor:
    """States at the checkpoints, in their order."""
    rows = tiles.checkpoint_rows
    if saved is None or not rows:
        return like.new_empty(0, *like.shape[1:])
    if rows == tuple(range(rows[0], rows[0] + len(rows))):
        return saved[rows[0] : rows[0] + len(rows)]
    return saved[list(rows)]
