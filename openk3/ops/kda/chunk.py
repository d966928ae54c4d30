"""Kimi Delta Attention chunk by chunk: the form for training and prefill."""

from torch import Tensor

from openk3.ops.kda.reference import KdaGate, recurrent_kda


def chunk_kda(
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
    """Same result as `recurrent_kda`."""
    return recurrent_kda(
        q_THK, k_THK, v_THV, decay_logit_THK, beta_logit_TH, gate, state_NHKV=state_NHKV, cu_seqlens=cu_seqlens
    )
