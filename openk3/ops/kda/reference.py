"""Kimi Delta Attention by definition: the decay gate and the recurrence, token by token."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.norm import at_least_float32, l2_norm


@dataclass(frozen=True)
class KdaGate:
    """Parameters that turn decay logits into log decay.

    A_log_H (one per head) and dt_bias_HK (one per head and channel). `lower_bound` in [-5, 0) is the bounded gate
    of K3; None is the unbounded gate of Kimi Linear, and only an explicit None chooses it.
    """

    A_log_H: Tensor
    dt_bias_HK: Tensor
    lower_bound: float | None = -5.0

    def __post_init__(self) -> None:
        if self.lower_bound is not None and not -5.0 <= self.lower_bound < 0.0:
            raise ValueError(f"KDA gate: lower_bound must be None or in [-5, 0), got {self.lower_bound}")


def kda_gate(decay_logit_THK: Tensor, gate: KdaGate) -> Tensor:
    """Log decay g (natural log, at least float32) of decay logits [..., H, K]; same shape."""
    logit, A_log_H, dt_bias_HK = (at_least_float32(x) for x in (decay_logit_THK, gate.A_log_H, gate.dt_bias_HK))
    if gate.lower_bound is None:
        return -A_log_H.exp()[:, None] * F.softplus(logit + dt_bias_HK, threshold=40.0)
    return _BoundedGate.apply(logit, A_log_H, dt_bias_HK, gate.lower_bound)


class _BoundedGate(torch.autograd.Function):
    """bound * sigmoid(exp(A_log) * (logit + dt_bias)) as one step: it touches every key channel of every token."""

    @staticmethod
    def forward(ctx: Any, logit: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float) -> Tensor:
        slope = A_log.exp()[:, None]
        opened = (logit + dt_bias).mul_(slope).sigmoid_()
        ctx.save_for_backward(logit, dt_bias, slope, opened)
        ctx.bound = bound
        return opened * bound

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logit, dt_bias, slope, opened = ctx.saved_tensors
        d_logit = torch.ops.aten.sigmoid_backward(grads[0], opened).mul_(slope * ctx.bound)
        d_bias = d_logit.flatten(0, -3).sum(0)
        d_A_log = (d_logit * logit).flatten(0, -3).sum((0, 2)) + (d_bias * dt_bias).sum(1)
        return d_logit, d_A_log, d_bias, None


def recurrent_kda(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    decay_logit_THK: Tensor,
    beta_logit_TH: Tensor,
    gate: KdaGate,
    *,
    state_NHKV: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention token by token (report eq. 1-2, 5-6)."""
    q = l2_norm(q_THK) * q_THK.shape[-1] ** -0.5
    k = l2_norm(k_THK)
    v = at_least_float32(v_THV)
    alpha = kda_gate(decay_logit_THK, gate).exp()
    beta = torch.sigmoid(at_least_float32(beta_logit_TH))
    bounds = [0, q.shape[0]] if cu_seqlens is None else cu_seqlens.tolist()
    if state_NHKV is None:
        state_NHKV = v.new_zeros(len(bounds) - 1, q.shape[1], q.shape[2], v.shape[2])
    q_t, k_t, v_t = q.unsqueeze(2).unbind(), k.unsqueeze(2).unbind(), v.unsqueeze(2).unbind()
    alpha_t, beta_t = alpha.unsqueeze(3).unbind(), beta[:, :, None, None].unbind()
    outputs, states = [], []
    for n, (start, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        state = state_NHKV[n].to(v.dtype)
        for t in range(start, end):
            state = state * alpha_t[t]
            error = v_t[t] - k_t[t] @ state
            state = torch.baddbmm(state, k_t[t].transpose(1, 2), beta_t[t] * error)
            outputs.append(q_t[t] @ state)
        states.append(state)
    o_THV = torch.stack(outputs).squeeze(2) if outputs else v
    return o_THV.to(v_THV.dtype), torch.stack(states)
