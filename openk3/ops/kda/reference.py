"""Kimi Delta Attention by definition: the decay gate and the recurrence, token by token."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.norm import at_full_precision, at_least_float32, l2_norm
from openk3.ops.sequences import check_tensors, sequence_bounds
from openk3.ops.unrecorded import apply

_FORMATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
        bound = self.lower_bound
        if bound is not None and not (isinstance(bound, int | float) and -5.0 <= bound < 0.0):
            raise ValueError(f"KDA gate: lower_bound must be None or in [-5, 0), got {self.lower_bound!r}")


def kda_gate(decay_logit_THK: Tensor, gate: KdaGate) -> Tensor:
    """Log decay g (natural log, at least float32) of decay logits [..., H, K]; same shape (report §2.1.1).

    Bounded: g = lower_bound * sigmoid(exp(A_log) * (logit + dt_bias)), not a clamp of the other form.
    Unbounded (Kimi Linear): g = -exp(A_log) * softplus(logit + dt_bias).
    Raises ValueError if the gate's parameters are not [H] and [H, K].
    """
    logit = at_least_float32(decay_logit_THK)
    check_gate(logit, gate)
    A_log_H, dt_bias_HK = gate.A_log_H.to(logit.dtype), gate.dt_bias_HK.to(logit.dtype)
    if gate.lower_bound is None:
        return -A_log_H.exp()[:, None] * F.softplus(logit + dt_bias_HK, threshold=40.0)
    return apply(_BoundedGate, logit, A_log_H, dt_bias_HK, gate.lower_bound)


class _BoundedGate(torch.autograd.Function):
    """bound * sigmoid(exp(A_log) * (logit + dt_bias)) as one step: it touches every key channel of every token."""

    @staticmethod
    def forward(ctx: Any, logit: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float) -> Tensor:
        # Finite, so that where the gate is pinned its gradient is 0 and not 0 times infinity.
        slope = A_log.exp().clamp_(max=torch.finfo(A_log.dtype).max)[:, None]
        opened = (logit + dt_bias).mul_(slope).sigmoid_()
        ctx.save_for_backward(logit, dt_bias, slope, opened)
        ctx.bound = bound
        return opened * bound

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  (the decorator hides the name of ctx)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logit, dt_bias, slope, opened = ctx.saved_tensors
        d_logit = torch.ops.aten.sigmoid_backward(grads[0], opened).mul_(slope).mul_(ctx.bound)
        d_bias = d_logit.flatten(0, -3).sum(0)
        d_A_log = (d_logit * logit).flatten(0, -3).sum((0, 2)) + (d_bias * dt_bias).sum(1)
        return d_logit, d_A_log, d_bias, None


def check_tokens(q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, decay_logit_THK: Tensor, beta_logit_TH: Tensor) -> None:
    """Raise ValueError unless the five agree in tokens, heads, key channels and device, and in float64 or not."""
    names = ("q_THK", "k_THK", "v_THV", "decay_logit_THK", "beta_logit_TH")
    check_tensors(*zip(names, (q_THK, k_THK, v_THV, decay_logit_THK, beta_logit_TH)))
    if _alike(q_THK, k_THK, v_THV, decay_logit_THK, beta_logit_TH):
        return
    if q_THK.ndim != 3:
        raise ValueError(
            f"q_THK: expected [tokens, heads, key channels], got {list(q_THK.shape)};"
            " sequences lie end to end, with cu_seqlens between them"
        )
    heads = q_THK.shape[:2]
    parts = (
        ("q_THK", q_THK, q_THK.shape),
        ("k_THK", k_THK, q_THK.shape),
        ("v_THV", v_THV, (*heads, *v_THV.shape[2:3])),
        ("decay_logit_THK", decay_logit_THK, q_THK.shape),
        ("beta_logit_TH", beta_logit_TH, heads),
    )
    if 0 in (*q_THK.shape[1:], *v_THV.shape[2:3]):
        raise ValueError(f"q_THK {list(q_THK.shape)}, v_THV {list(v_THV.shape)}: needs a head and a channel at least")
    wide = q_THK.dtype == torch.float64
    for name, x, shape in parts:
        if x.shape != shape or (name == "v_THV" and x.ndim != 3):
            expected = [*heads, "value channels"] if name == "v_THV" else list(shape)
            expected = str(expected).replace("'", "")
            raise ValueError(f"{name}: {list(x.shape)} does not fit q_THK {list(q_THK.shape)}; expected {expected}")
        if x.dtype not in _FORMATS or (x.dtype == torch.float64) != wide:
            raise ValueError(
                f"{name}: {x.dtype} beside q_THK {q_THK.dtype}; must be floating point, all float64 or none,"
                " of 16 bits or more"
            )
        if x.device != q_THK.device:
            raise ValueError(f"{name}: on {x.device}, but q_THK is on {q_THK.device}")


def check_kind(gate: KdaGate) -> None:
    """Raise ValueError unless it is a gate whose parameters are tensors."""
    if not isinstance(gate, KdaGate):
        raise ValueError(f"gate: expected a KdaGate, got {type(gate).__name__}")
    check_tensors(("KDA gate: A_log_H", gate.A_log_H), ("KDA gate: dt_bias_HK", gate.dt_bias_HK))


def _alike(q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, decay_logit_THK: Tensor, beta_logit_TH: Tensor) -> bool:
    """Whether all are of one format and as many channels: what is usual, and seen sooner than what may be wrong."""
    shape, dtype = q_THK.shape, q_THK.dtype
    return (
        len(shape) == 3
        and 0 not in shape[1:]
        and k_THK.shape == v_THV.shape == decay_logit_THK.shape == shape
        and beta_logit_TH.shape == shape[:2]
        and dtype in _FORMATS
        and k_THK.dtype == v_THV.dtype == decay_logit_THK.dtype == beta_logit_TH.dtype == dtype
        and k_THK.device == v_THV.device == decay_logit_THK.device == beta_logit_TH.device == q_THK.device
    )


def check_gate(logit_THK: Tensor, gate: KdaGate) -> None:
    """Raise ValueError unless the gate's parameters are [H] and [H, K] for logits [..., H, K], on their device."""
    check_kind(gate)
    for name, x, shape in (
        ("A_log_H", gate.A_log_H, logit_THK.shape[-2:-1]),
        ("dt_bias_HK", gate.dt_bias_HK, logit_THK.shape[-2:]),
    ):
        if x.shape != shape:
            raise ValueError(
                f"KDA gate: {name} must be {list(shape)} for logits {list(logit_THK.shape)}, got {list(x.shape)}"
            )
        if x.device != logit_THK.device or not x.is_floating_point():
            raise ValueError(
                f"KDA gate: {name} must be floating point on {logit_THK.device}, got {x.dtype} on {x.device}"
            )


def initial_states(state_NHKV: Tensor | None, num_sequences: int, k_THK: Tensor, v_THV: Tensor) -> Tensor:
    """States before N sequences [N, H, K, V] in v's format: the given ones, or zeros.

    Raises ValueError if the given ones are not floating point of that shape on v's device.
    """
    if state_NHKV is None:
        return v_THV.new_zeros(num_sequences, *k_THK.shape[1:], v_THV.shape[2])
    check_states(state_NHKV, num_sequences, k_THK, v_THV)
    return state_NHKV.to(v_THV.dtype)


def check_states(state_NHKV: Tensor, num_sequences: int, k_THK: Tensor, v_THV: Tensor) -> None:
    """Raise ValueError unless states before N sequences are floating point [N, H, K, V] on v's device."""
    check_tensors(("state_NHKV", state_NHKV))
    shape = (num_sequences, *k_THK.shape[1:], v_THV.shape[2])
    if state_NHKV.shape != shape:
        raise ValueError(f"state_NHKV: expected {list(shape)} for these tokens, got {list(state_NHKV.shape)}")
    if state_NHKV.device != v_THV.device or not state_NHKV.is_floating_point():
        raise ValueError(
            f"state_NHKV: must be floating point on {v_THV.device}, got {state_NHKV.dtype} on {state_NHKV.device}"
        )


@at_full_precision
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
    """Kimi Delta Attention token by token, the definition (report eq. 1-2, 5-6).

    Per head, with q = L2(q) / sqrt(K), k = L2(k), alpha = exp(kda_gate), beta = sigmoid(beta_logit):
    S <- diag(alpha) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q. The error is taken after the decay, the output
    after the write.

    q, k [T, H, K] raw; v [T, H, V]; decay_logit [T, H, K]; beta_logit [T, H]. cu_seqlens [N + 1] int cuts the tokens
    into sequences (None: one), state [N, H, K, V] is the one before each (None: zeros). Returns o [T, H, V] in
    v.dtype and the states after each sequence in at least float32, which is what everything is computed in.
    Raises ValueError if shapes, dtypes or devices do not fit, cu_seqlens does not cover the tokens or the states are
    not N.
    """
    check_tokens(q_THK, k_THK, v_THV, decay_logit_THK, beta_logit_TH)
    q = l2_norm(q_THK, scale=q_THK.shape[-1] ** -0.5)
    k = l2_norm(k_THK)
    v = at_least_float32(v_THV)
    alpha = kda_gate(decay_logit_THK, gate).exp()
    beta = torch.sigmoid(at_least_float32(beta_logit_TH))
    bounds = sequence_bounds(cu_seqlens, q.shape[0])
    state_NHKV = initial_states(state_NHKV, len(bounds) - 1, k, v)
    q_t, k_t, v_t = q.unsqueeze(2).unbind(), k.unsqueeze(2).unbind(), v.unsqueeze(2).unbind()
    alpha_t, beta_t = alpha.unsqueeze(3).unbind(), beta[:, :, None, None].unbind()
    outputs, states = [], []
    for initial, start, end in zip(state_NHKV, bounds[:-1], bounds[1:]):
        state = initial
        for t in range(start, end):
            state = state * alpha_t[t]
            error = beta_t[t] * (v_t[t] - k_t[t] @ state)
            state = torch.baddbmm(state, k_t[t].mT, error)
            outputs.append(q_t[t] @ state)
        states.append(state)
    o_THV = torch.stack(outputs).squeeze(2) if outputs else v
    return o_THV.to(v_THV.dtype), torch.stack(states) if states else state_NHKV
