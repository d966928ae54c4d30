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
    """One step of `recurrent_kda` for N sequences at once (report eq. 1).

    Arguments as there, with one token per sequence. Returns o [N, H, V] in v.dtype and a new state [N, H, K, V] in at
    least float32; the given state is left as it was.
    """
    q = l2_norm(q_NHK, scale=q_NHK.shape[-1] ** -0.5).unsqueeze(-2)
    k = l2_norm(k_NHK).unsqueeze(-2)
    alpha = kda_gate(decay_logit_NHK, gate).exp().unsqueeze(-1)
    beta = torch.sigmoid(at_least_float32(beta_logit_NH))[..., None, None]
    state = at_least_float32(state_NHKV) * alpha
    error = beta * (at_least_float32(v_NHV).unsqueeze(-2) - k @ state)
    state = state + k.mT * error
    return (q @ state).squeeze(-2).to(v_NHV.dtype), state
