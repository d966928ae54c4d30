"""One decoding step of Kimi Delta Attention: one token for each sequence."""

import torch
from torch import Tensor

from openk3.ops.kda.reference import KdaGate, kda_gate
from openk3.ops.norm import at_least_float32, l2_norm


def step_kda(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    decay_logit_NHK: Tensor,
    beta_logit_NH: Tensor,
    gate: KdaGate,
    state_NHKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token per sequence: the recurrence's step batched over sequences (report eq. 1)."""
    q = l2_norm(q_NHK) * q_NHK.shape[-1] ** -0.5
    k = l2_norm(k_NHK)[..., None, :]
    alpha = kda_gate(decay_logit_NHK, gate).exp()
    beta = torch.sigmoid(at_least_float32(beta_logit_NH))
    state = at_least_float32(state_NHKV) * alpha[..., None]
    error = at_least_float32(v_NHV)[..., None, :] - k @ state
    state = state + k.transpose(-1, -2) * (beta[..., None, None] * error)
    o_NHV = (q[..., None, :] @ state).squeeze(-2)
    return o_NHV.to(v_NHV.dtype), state
