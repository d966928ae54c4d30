"""KimiDeltaAttention: gated delta-rule linear attention with a channel-wise bounded decay (report section 2.1.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openk3.config.model import TextConfig
from openk3.model.cache import KdaCache, Sequences
from openk3.model.norm import RMSNorm
from openk3.model.trace import NO_TRACE, Trace
from openk3.ops.kda.chunk import chunk_kda
from openk3.ops.kda.decode import step_kda
from openk3.ops.kda.reference import KdaGate, kda_gate
from openk3.ops.norm import gated_rms_norm
from openk3.ops.short_conv import short_conv


class ShortConv(nn.Module):
    """Depthwise causal convolution over the last W tokens, then SiLU; weight [C, W], the last column is now."""

    def __init__(self, width: int, kernel_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, kernel_size))

    def forward(self, x_TC: Tensor, window_NCW: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """(y_TC, the last W raw inputs of each sequence)."""
        return short_conv(x_TC, self.weight, window_NCW=window_NCW, cu_seqlens=sequences.cu_seqlens)


class KimiDeltaAttention(nn.Module):
    """S <- Diag(alpha) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q  (report eqs. 1, 2, 5, 6)."""

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        linear = config.linear_attn_config
        width, heads, head_dim = config.hidden_size, linear.num_heads, linear.head_dim
        inner = heads * head_dim
        self.layer, self.heads, self.lower_bound = layer, heads, linear.gate_lower_bound
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, inner, bias=False)
        self.v_proj = nn.Linear(width, inner, bias=False)
        self.q_conv1d = ShortConv(inner, linear.short_conv_kernel_size)
        self.k_conv1d = ShortConv(inner, linear.short_conv_kernel_size)
        self.v_conv1d = ShortConv(inner, linear.short_conv_kernel_size)
        self.f_a_proj = nn.Linear(width, head_dim, bias=False)
        self.f_b_proj = nn.Linear(head_dim, inner, bias=False)
        self.b_proj = nn.Linear(width, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.g_proj = nn.Linear(width, inner, bias=False)
        self.o_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(inner, width, bias=False)

    def forward(
        self, x_TD: Tensor, sequences: Sequences, cache: KdaCache | None = None, trace: Trace = NO_TRACE
    ) -> Tensor:
        """y_TD = W_o [sigmoid(W_g x) * RMSNorm(KDA(x))]; with a cache, continues its states."""
        windows = (None, None, None) if cache is None else cache.windows
        q_TC, q_window = self.q_conv1d(self.q_proj(x_TD), windows[0], sequences)
        k_TC, k_window = self.k_conv1d(self.k_proj(x_TD), windows[1], sequences)
        v_TC, v_window = self.v_conv1d(self.v_proj(x_TD), windows[2], sequences)
        decay_logit_TC, beta_logit_TH = self.f_b_proj(self.f_a_proj(x_TD)), self.b_proj(x_TD)
        q, k, v, decay_logit = (y.unflatten(-1, (self.heads, -1)) for y in (q_TC, k_TC, v_TC, decay_logit_TC))
        gate = KdaGate(self.A_log, self.dt_bias.view(self.heads, -1), self.lower_bound)
        if trace.wants("decay"):
            trace.decay(self.layer, kda_gate(decay_logit, gate))
        if cache is not None and sequences.one_each:
            o_THV, state_NHKV = step_kda(q, k, v, decay_logit, beta_logit_TH, gate, cache.state_NHKV)
        else:
            state_NHKV = None if cache is None else cache.state_NHKV
            o_THV, state_NHKV = chunk_kda(
                *(q, k, v, decay_logit, beta_logit_TH, gate),
                state_NHKV=state_NHKV,
                cu_seqlens=sequences.cu_seqlens,
            )
        if cache is not None:
            cache.write(state_NHKV, (q_window, k_window, v_window))
        gate_THV = self.g_proj(x_TD).unflatten(-1, (self.heads, -1))
        return self.o_proj(gated_rms_norm(o_THV, gate_THV, self.o_norm.weight, self.o_norm.eps).flatten(-2))
