"""Per-Head Muon: momentum, orthogonalised block by block, as the update of every matrix inside the layers.

M <- mu M + G;  O = NewtonSchulz(G + mu M);  W <- (1 - lr * decay) W - lr * scale * sqrt(max(rows, columns)) * O, where
each attention head's rows are a block of their own (report section 2.5). Blocks of one shape, over the whole model, are
orthogonalised in one batched call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.newton_schulz import newton_schulz

CHUNK_VALUES = 1 << 26  # values orthogonalised at once, to bound the memory of the temporaries


@dataclass
class Member:
    """One weight, cut along its rows (or first axis) in `blocks` pieces, and their momenta, long side last."""

    name: str
    weight: Tensor
    blocks: int
    decay: float
    momentum_BMN: Tensor

    @classmethod
    def of(cls, name: str, weight: Tensor, blocks: int, decay: float) -> Member:
        """Zero momentum. The number of rows must be a multiple of `blocks`."""
        return cls(name, weight, blocks, decay, torch.zeros_like(_wide(weight, blocks)).contiguous())

    @property
    def shape(self) -> tuple[int, int]:
        """(short side, long side) of a block."""
        return (self.momentum_BMN.shape[1], self.momentum_BMN.shape[2])


def _wide(weight: Tensor, blocks: int) -> Tensor:
    """A view [blocks, short side, long side] of a weight [rows, columns] or [blocks, rows, columns]."""
    x_BMN = weight if weight.ndim == 3 else weight.unflatten(0, (blocks, -1))
    return x_BMN.mT if x_BMN.shape[1] > x_BMN.shape[2] else x_BMN


def orthogonalize(x_BMN: Tensor, steps: int, scale: float) -> Tensor:
    """scale * sqrt(max(M, N)) * NewtonSchulz of each block: an update of RMS about `scale`, as AdamW's."""
    per_chunk = max(1, CHUNK_VALUES // max(1, x_BMN[0].numel()))
    parts = [newton_schulz(part, steps) for part in x_BMN.split(per_chunk)]
    return torch.cat(parts).mul_(scale * math.sqrt(max(x_BMN.shape[-2:])))


def muon_update(momentum: Tensor, heads: int = 1, *, steps: int = 5, scale: float = 0.2) -> Tensor:
    """The update of one matrix [rows, columns] from its (Nesterov) momentum, `heads` blocks of rows apart.

    A stack [E, rows, columns] is E blocks. Shape and dtype are kept; a zero block gives a zero update.
    """
    blocks = momentum.shape[0] if momentum.ndim == 3 else heads
    update_BMN = orthogonalize(_wide(momentum, blocks), steps, scale)
    out = torch.empty_like(momentum)
    _wide(out, blocks).copy_(update_BMN)
    return out


@torch.no_grad()
def muon_step(
    members: Iterable[tuple[Member, Tensor]], lr: float, *, momentum: float = 0.95, steps: int = 5, scale: float = 0.2
) -> None:
    """One step in place over (member, gradient) pairs whose blocks all have one shape.

    A block whose gradient is exactly zero (an expert without tokens) decays and keeps its direction for later: its
    momentum shrinks, but orthogonalisation would blow what is left of it up to a full update.
    """
    pairs = list(members)
    directions, alive = [], []
    for member, gradient in pairs:
        gradient_BMN = _wide(gradient, member.blocks).to(member.momentum_BMN.dtype)
        member.momentum_BMN.mul_(momentum).add_(gradient_BMN)
        directions.append(gradient_BMN.add(member.momentum_BMN, alpha=momentum))
        alive.append((gradient_BMN != 0).flatten(1).any(1))
    update_BMN = orthogonalize(torch.cat(directions), steps, scale)
    update_BMN *= torch.cat(alive).view(-1, 1, 1)
    for (member, _), part_BMN in zip(pairs, update_BMN.split([member.blocks for member, _ in pairs])):
        weight_BMN = _wide(member.weight, member.blocks)
        weight_BMN.mul_(1 - lr * member.decay).sub_(part_BMN, alpha=lr)
