"""Sums of gradients, and Muon or AdamW steps of many float32 weights, by kernels on tensors where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from openk3.ops.backend import on_device
from openk3.ops.launch import start
from openk3.ops.newton_schulz_fused import Update, chunks, orthogonalize
from openk3.ops.optimizer_kernel import (
    ADAMW_VALUES,
    RANGE,
    VALUES,
    adamw_kernel,
    momentum_kernel,
    rescale_kernel,
    widen_kernel,
)


class MuonWeight(NamedTuple):
    """A weight of `blocks` matrices one after another; contiguous float32 tensors, and a bfloat16 copy or None."""

    gradient: Tensor
    momentum: Tensor
    weight: Tensor
    narrow: Tensor | None
    blocks: int


class MuonRates(NamedTuple):
    """What all blocks of a Muon step share: w <- keep * w - rate * NewtonSchulz(clip * gradient + momentum * m)."""

    momentum: float
    clip: float
    keep: float
    rate: float
    steps: int
    coefficients: tuple[float, float, float]


class AdamWeight(NamedTuple):
    """A weight with its moments; contiguous float32 tensors, and a bfloat16 copy or None.

    `factors`: what decay leaves of the weight, the step over the mean's correction, 1 over the square's correction.
    """

    gradient: Tensor
    mean: Tensor
    square: Tensor
    weight: Tensor
    narrow: Tensor | None
    factors: tuple[float, float, float]


class AdamRates(NamedTuple):
    """What all tensors of an AdamW step share; gradients are multiplied by `clip` first."""

    beta1: float
    beta2: float
    eps: float
    clip: float


class MuonTables(NamedTuple):
    """Where blocks stored as [rows, columns] lie, [4, blocks] on the device for each launch; what keeps them alive."""

    weights: Sequence[MuonWeight]
    parts: list[Tensor]
    rows: int
    columns: int
    narrow: bool
    aligned: bool


class AdamTables(NamedTuple):
    """Where tensors lie, and what each of their pieces is, on the device; `weights` keeps them alive."""

    weights: Sequence[AdamWeight]
    tensors: tuple[Tensor, ...]
    aligned: bool


def muon_tables(weights: Sequence[MuonWeight], rows: int, columns: int) -> MuonTables:
    """For weights whose blocks all are stored as [rows, columns]; all have a narrow copy, or none has."""
    size, device = rows * columns, weights[0].weight.device
    addresses = np.concatenate([_block_addresses(weight, size) for weight in weights], 1)
    narrow, aligned = weights[0].narrow is not None, not (addresses % 16).any()
    parts = [_on(addresses[:, part], device) for part in chunks(addresses.shape[1], size)]
    return MuonTables(weights, parts, rows, columns, narrow, bool(aligned))


def muon_kernels(tables: MuonTables, rates: MuonRates) -> None:
    """One step in place of all weights.

    Blocks whose gradient is zero everywhere decay, and their momentum shrinks, as in `muon_step`.
    """
    _, parts, rows, columns, narrow, aligned = tables
    size = rows * columns
    pieces = triton.cdiv(size, VALUES)
    for table in parts:
        blocks, device = table.shape[1], table.device
        x_BRC = torch.empty(blocks, rows, columns, dtype=torch.bfloat16, device=device)
        peaks = torch.zeros(2, blocks, dtype=torch.int32, device=device)
        with on_device(x_BRC):
            momentum_kernel[(blocks * pieces,)](
                *(table, x_BRC, peaks, blocks, size, rates.momentum, rates.clip, VALUES),
                WHOLE=size % VALUES == 0,
                ALIGNED=aligned,
                num_warps=8,
            )
            rescale_kernel[(blocks * pieces,)](x_BRC, peaks, size, VALUES, RANGE, num_warps=8)
        update = Update(table, peaks, rates.keep, rates.rate, narrow, aligned)
        orthogonalize(x_BRC, rates.steps, rates.coefficients, update)


def adamw_tables(weights: Sequence[AdamWeight]) -> AdamTables:
    """Of weights that have values."""
    weights = [weight for weight in weights if weight.weight.numel()]
    if not weights:
        return AdamTables([], (), True)
    device = weights[0].weight.device
    addresses = np.array([[_address(x) for x in weight[:5]] for weight in weights], np.int64).T
    table, aligned = _on(addresses, device), not (addresses % 16).any()
    factors = _on(np.array([weight.factors for weight in weights], np.float32).T, device)
    sizes, tensor_of, piece_of = _pieces(tuple(weight.weight.numel() for weight in weights), device)
    return AdamTables(weights, (table, sizes, factors, tensor_of, piece_of), bool(aligned))


def adamw_kernels(tables: AdamTables, rates: AdamRates) -> None:
    """One step in place of every weight, in one launch."""
    weights, tensors, aligned = tables
    if weights:
        with on_device(tensors[0]):
            adamw_kernel[(len(tensors[-1]),)](*tensors, len(weights), *rates, ADAMW_VALUES, aligned, num_warps=8)


def widen_kernels(gradient: Tensor, total: Tensor | None) -> Tensor:
    """total + gradient in place, or the gradient alone as a new tensor; float32, both contiguous.

    torch's own sum of two formats reads values one by one, at a third of the memory's rate.
    """
    out = torch.empty_like(gradient, dtype=torch.float32) if total is None else total
    with on_device(gradient):
        start(widen_kernel, triton.cdiv(gradient.numel(), VALUES))(
            gradient, out, gradient.numel(), VALUES, total is not None, num_warps=8
        )
    return out


def _block_addresses(weight: MuonWeight, size: int) -> np.ndarray:
    """[4, blocks]: where each block of gradient, momentum, weight and narrow weight begins; 0 without a narrow one."""
    block = np.arange(weight.blocks, dtype=np.int64) * size
    return np.stack([0 * block if x is None else _address(x) + block * x.element_size() for x in weight[:4]])


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _on(values: np.ndarray, device: torch.device) -> Tensor:
    """A contiguous copy on a device; from pinned memory, so that no GPU is waited for."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@lru_cache(maxsize=8)
def _pieces(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(sizes, tensor of each program, which of its pieces): a program for every ADAMW_VALUES values."""
    counts = [triton.cdiv(size, ADAMW_VALUES) for size in sizes]
    tensor_of = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
    piece_of = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    return _on(np.array(sizes, np.int64), device), _on(tensor_of, device), _on(piece_of, device)
