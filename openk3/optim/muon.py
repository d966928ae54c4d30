"""Per-Head Muon: momentum, orthogonalised block by block, as the update of every matrix inside the layers.

M <- mu M + G;  O = NewtonSchulz(G + mu M);  W <- (1 - lr * decay) W - lr * scale * sqrt(max(rows, columns)) * O, where
each attention head's rows are a block of their own (report section 2.5). Blocks of one shape, over the whole model, are
orthogonalised in one batched call. On a GPU momentum, orthogonalisation and update are kernels that work on gradients,
momenta and weights where they lie (`ops/optimizer_fused.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.backend import pick
from openk3.ops.newton_schulz import COEFFICIENTS, newton_schulz

CHUNK_VALUES = 1 << 26  # values orthogonalised at once, to bound the memory of the temporaries


@dataclass
class Member:
    """One weight, cut along its rows (or first axis) in `blocks` pieces, its momentum, and its narrow copy if any.

    The narrow copy is the parameter that the model computes with, where the weight is its float32 master.
    """

    name: str
    weight: Tensor
    blocks: int
    decay: float
    momentum: Tensor
    narrow: Tensor | None = None

    @classmethod
    def of(cls, name: str, weight: Tensor, blocks: int, decay: float, narrow: Tensor | None = None) -> Member:
        """Zero momentum. The number of rows must be a multiple of `blocks`."""
        return cls(name, weight, blocks, decay, torch.zeros_like(weight), narrow)

    @property
    def momentum_BMN(self) -> Tensor:
        """A view of the momentum: blocks with their long side last."""
        return _wide(self.momentum, self.blocks)

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


def muon_step(
    members: Iterable[tuple[Member, Tensor]],
    lr: float,
    *,
    momentum: float = 0.95,
    steps: int = 5,
    scale: float = 0.2,
    clip: float = 1.0,
) -> None:
    """One step in place over (member, gradient) pairs whose blocks all have one shape; narrow copies follow.

    Gradients count `clip` times. A block whose gradient is exactly zero (an expert without tokens) decays and keeps its
    direction for later: its momentum shrinks, but orthogonalisation would blow what is left of it up to a full update.
    """
    muon_ready(members, lr, momentum=momentum, steps=steps, scale=scale)(clip)


def muon_ready(
    members: Iterable[tuple[Member, Tensor]], lr: float, *, momentum: float, steps: int, scale: float
) -> Callable[[float], None]:
    """`muon_step` prepared: nothing has changed before it is called with `clip`."""
    pairs = list(members)
    if steps and pick("muon", pairs[0][0].weight) == "triton":
        return _kernels_ready(pairs, lr, momentum=momentum, steps=steps, scale=scale)
    return lambda clip: _by_torch(pairs, lr, momentum=momentum, steps=steps, scale=scale, clip=clip)


@torch.no_grad()
def _by_torch(
    pairs: list[tuple[Member, Tensor]], lr: float, *, momentum: float, steps: int, scale: float, clip: float
) -> None:
    directions, alive = [], []
    for member, gradient in pairs:
        momentum_BMN = member.momentum_BMN
        gradient_BMN = _wide(gradient, member.blocks).to(momentum_BMN.dtype)
        if clip != 1:
            gradient_BMN = gradient_BMN * clip
        momentum_BMN.mul_(momentum).add_(gradient_BMN)
        directions.append(gradient_BMN.add(momentum_BMN, alpha=momentum))
        alive.append((gradient_BMN != 0).flatten(1).any(1))
    update_BMN = orthogonalize(torch.cat(directions), steps, scale)
    update_BMN *= torch.cat(alive).view(-1, 1, 1)
    for (member, _), part_BMN in zip(pairs, update_BMN.split([member.blocks for member, _ in pairs])):
        weight_BMN = _wide(member.weight, member.blocks)
        weight_BMN.mul_(1 - lr * member.decay).sub_(part_BMN, alpha=lr)
        if member.narrow is not None:
            member.narrow.copy_(member.weight)


def _kernels_ready(
    pairs: list[tuple[Member, Tensor]], lr: float, *, momentum: float, steps: int, scale: float
) -> Callable[[float], None]:
    """The same on a GPU, by how blocks are stored, how they decay, and whether kernels can write the narrow copy."""
    from openk3.ops import optimizer_fused as fused

    groups: dict[tuple[int, int, float, bool], list[fused.MuonWeight]] = {}
    for member, gradient in pairs:
        columns = member.weight.shape[-1]
        rows = member.weight.numel() // (member.blocks * columns)
        writes = member.narrow is not None and member.narrow.dtype == torch.bfloat16
        tensors = gradient.to(torch.float32).contiguous(), member.momentum, member.weight
        weight = fused.MuonWeight(*tensors, member.narrow if writes else None, member.blocks)
        groups.setdefault((rows, columns, member.decay, writes), []).append(weight)
    tables = [fused.muon_tables(weights, rows, columns) for (rows, columns, *_), weights in groups.items()]

    @torch.no_grad()
    def run(clip: float) -> None:
        for (rows, columns, decay, _), table in zip(groups, tables):
            rate = lr * scale * math.sqrt(max(rows, columns))
            fused.muon_kernels(table, fused.MuonRates(momentum, clip, 1 - lr * decay, rate, steps, COEFFICIENTS))
        for member, _ in pairs:
            if member.narrow is not None and member.narrow.dtype != torch.bfloat16:
                member.narrow.copy_(member.weight)

    return run
