"""The formulas of tile-wise Kimi Delta Attention in plain PyTorch, step by step as the kernels take them.

Everything is computed in the inputs' own format, so that float64 gives the exact value of each intermediate tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Cut:
    """Packed sequences cut into tiles of at most C tokens: first token and length of each, tiles of each sequence."""

    C: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    bounds: tuple[int, ...]  # tiles [bounds[n], bounds[n + 1]) belong to sequence n

    @classmethod
    def of(cls, sequences: Sequence[int], C: int) -> Cut:
        starts, lengths, bounds, token = [], [], [0], 0
        for length in sequences:
            for offset in range(0, length, C):
                starts.append(token + offset)
                lengths.append(min(C, length - offset))
            token += length
            bounds.append(len(starts))
        return cls(C, tuple(starts), tuple(lengths), tuple(bounds))

    def spread(self, x_THD: Tensor) -> Tensor:
        """Tokens in tiles [X, H, C, D], zero behind a tile's last token."""
        rows = x_THD.new_zeros(len(self.starts), self.C, *x_THD.shape[1:])
        for row, start, length in zip(rows, self.starts, self.lengths):
            row[:length] = x_THD[start : start + length]
        return rows.movedim(2, 1)

    def collect(self, x_XHCD: Tensor) -> Tensor:
        """Tokens [T, H, D] out of tiles."""
        rows = [row[:, :length].movedim(1, 0) for row, length in zip(x_XHCD, self.lengths)]
        return torch.cat(rows) if rows else x_XHCD.new_zeros(0, x_XHCD.shape[1], *x_XHCD.shape[3:])


@dataclass(frozen=True)
class Workspace:
    """What the scans read of each tile and head."""

    nkd: Tensor  # -kd
    qd: Tensor
    kr: Tensor
    inv: Tensor  # (I + diag(beta) P)^-1
    mqk: Tensor
    decay: Tensor
    beta: Tensor


@dataclass(frozen=True)
class Rows:
    """Normalised rows and gate of every tile, and what their own backward passes need."""

    qn: Tensor
    kn: Tensor
    q_scale: Tensor  # 1 / norm
    k_scale: Tensor
    opened: Tensor  # sigmoid of the gate
    G: Tensor  # running log2 decay
    beta: Tensor


def tile_rows(inputs: dict[str, Tensor], cut: Cut, bound: float = -5.0) -> Rows:
    """Rows of all tiles from raw inputs; zero, without decay and without beta behind a tile's last token."""
    q, k, logit = (cut.spread(inputs[name]) for name in ("q", "k", "decay_logit"))
    valid = cut.spread(torch.ones_like(inputs["beta_logit"])[..., None])
    q_scale, k_scale = ((x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    slope = inputs["A_log"].exp()[:, None, None]
    opened = torch.sigmoid(slope * (logit + inputs["dt_bias"][:, None])) * valid
    beta = torch.sigmoid(cut.spread(inputs["beta_logit"][..., None])) * valid
    G = (bound * LOG2_E * opened).cumsum(2)
    return Rows(q * q_scale, k * k_scale, q_scale, k_scale, opened, G, beta[..., 0])


def prepare(rows: Rows, bound: float = -5.0) -> Workspace:
    """The workspace of all tiles; R is the constant middle of the decay that a whole tile can have."""
    C, K = rows.G.shape[2:]
    R = bound * LOG2_E * C / 2
    ki = rows.kn * (R - rows.G).exp2()
    kd, qd = rows.kn * (rows.G - R).exp2(), rows.qn * K**-0.5 * (rows.G - R).exp2()
    P, mqk = (kd @ ki.mT).tril(-1), (qd @ ki.mT).tril()
    inv = torch.linalg.inv(torch.eye(C).to(P) + rows.beta[..., None] * P)
    last = rows.G[:, :, -1:]
    return Workspace(-kd * 2**R, qd * 2**R, ki * (last - R).exp2(), inv, mqk, last[:, :, 0].exp2(), rows.beta)


def forward_scan(
    space: Workspace, v_THV: Tensor, state_NHKV: Tensor, cut: Cut
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs and writes [T, H, V], transposed states entering each tile [X, H, V, K], final states."""
    v = cut.spread(v_THV)
    o, u, states = torch.empty_like(v), torch.empty_like(v), v.new_empty(*v.shape[:2], v.shape[3], space.nkd.shape[3])
    final = state_NHKV.clone()
    for n, (first, end) in enumerate(zip(cut.bounds, cut.bounds[1:])):
        for x in range(first, end):
            S = final[n]
            states[x] = S.mT
            r = v[x] + space.nkd[x] @ S
            u[x] = space.inv[x] @ (space.beta[x][..., None] * r)
            o[x] = space.qd[x] @ S + space.mqk[x] @ u[x]
            final[n] = space.decay[x][..., None] * S + space.kr[x].mT @ u[x]
    return cut.collect(o), cut.collect(u), states, final


def reverse_scan(space: Workspace, d_o_THV: Tensor, d_final_NHKV: Tensor, cut: Cut) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of v [T, H, V], transposed ones of the states leaving each tile [X, H, V, K], those of first states."""
    d_o = cut.spread(d_o_THV)
    dr, d_states = torch.empty_like(d_o), d_o.new_empty(*d_o.shape[:2], d_o.shape[3], space.nkd.shape[3])
    d_state = d_final_NHKV.clone()
    for n, (first, end) in enumerate(zip(cut.bounds, cut.bounds[1:])):
        for x in reversed(range(first, end)):
            dS = d_state[n].mT
            d_states[x] = dS
            dU = dS @ space.kr[x].mT + d_o[x].mT @ space.mqk[x]
            dr[x] = (dU @ space.inv[x]).mT * space.beta[x][..., None]
            d_state[n] = (dS * space.decay[x][:, None] + d_o[x].mT @ space.qd[x] + dr[x].mT @ space.nkd[x]).mT
    return cut.collect(dr), d_states, d_state


@dataclass(frozen=True)
class Scanned:
    """What the two scans leave for the gradients of the tiles."""

    states: Tensor
    d_states: Tensor
    writes: Tensor
    d_v: Tensor
    d_o: Tensor


def tile_gradients(inputs: dict[str, Tensor], scanned: Scanned, cut: Cut, bound: float = -5.0) -> dict[str, Tensor]:
    """Gradients of q, k, decay logits and beta logits, every tile and head by itself."""
    rows = tile_rows(inputs, cut, bound)
    U, dr, d_o = (cut.spread(x) for x in (scanned.writes, scanned.d_v, scanned.d_o))
    C, K = rows.G.shape[2:]
    scale, R, last = K**-0.5, rows.G[:, :, -1:] / 2, rows.G[:, :, -1:]
    up, down = (rows.G - R).exp2(), (R - rows.G).exp2()
    kd, ki, qd = rows.kn * up, rows.kn * down, rows.qn * scale * up
    dM, dP = (d_o @ U.mT).tril(), -(dr @ U.mT).tril(-1)
    d_beta_logit = torch.exp(-cut.spread(inputs["beta_logit"][..., None]))[..., 0] * (dr * U).sum(-1)
    d_qd = (d_o @ scanned.states) * R.exp2() + dM @ ki
    d_kd = -(dr @ scanned.states) * R.exp2() + dP @ ki
    d_kr = U @ scanned.d_states * (last - R).exp2()
    d_ki = dM.mT @ qd + dP.mT @ kd + d_kr
    dG = d_qd * qd + d_kd * kd - d_ki * ki
    at_end = last.exp2() * (scanned.states * scanned.d_states).sum(2, keepdim=True) + (d_kr * ki).sum(2, keepdim=True)
    dg = (dG.flip(2).cumsum(2).flip(2)) + at_end
    d_qn, d_kn = scale * up * d_qd, up * d_kd + down * d_ki
    slope = inputs["A_log"].exp()[:, None, None]
    result = {
        "d_q": rows.q_scale * (d_qn - rows.qn * (rows.qn * d_qn).sum(-1, keepdim=True)),
        "d_k": rows.k_scale * (d_kn - rows.kn * (rows.kn * d_kn).sum(-1, keepdim=True)),
        "d_decay_logit": dg * bound * rows.opened * (1 - rows.opened) * slope,
    }
    tokens = {name: cut.collect(x) for name, x in result.items()}
    return tokens | {"d_beta_logit": cut.collect(d_beta_logit[..., None])[..., 0]}
