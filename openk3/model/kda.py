"""KimiDeltaAttention: gated delta-rule linear attention with a channel-wise bounded decay (report section 2.1.1)."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from openk3.config.model import TextConfig
from openk3.model.cache import Sequences, StateCache, States
from openk3.model.norm import RMSNorm
from openk3.model.step_cache import OneTokenStates
from openk3.model.trace import NO_TRACE, Trace
from openk3.ops.backend import pick
from openk3.ops.device_tables import device_table
from openk3.ops.few.linear import through
from openk3.ops.joint_linear import joint_linear
from openk3.ops.kda.chunk import chunk_kda
from openk3.ops.kda.decode import (
    DecodePool,
    DecodeWeights,
    Projected,
    decode_kda,
    replay_kda,
    step_kda,
    verify_kda,
)
from openk3.ops.kda.reference import KdaGate, kda_gate
from openk3.ops.norm import gated_rms_norm
from openk3.ops.saved import name, remake, remake_linear
from openk3.ops.short_conv import short_convs


class ShortConv(nn.Module):
    """Weight [C, W] of a depthwise causal convolution over the last W tokens; the last column is now."""

    def __init__(self, width: int, kernel_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, kernel_size))


class KimiDeltaAttention(nn.Module):
    """S <- Diag(alpha) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q  (report eqs. 1, 2, 5, 6)."""

    joint = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")  # maps of the layer's input, odd widths last

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
        self,
        x_TD: Tensor,
        sequences: Sequences,
        cache: StateCache | OneTokenStates | None = None,
        trace: Trace = NO_TRACE,
    ) -> Tensor:
        """y_TD = W_o [sigmoid(W_g x) * RMSNorm(KDA(x))]; with a cache, continues its states.

        Sequences of one token that come first take a decoding step, whatever the others of the pass have. Where tokens
        may be refused, states stay as they are, and inputs are kept for `replay`.
        """
        weights = [cast(nn.Linear, getattr(self, name)).weight for name in self.joint]
        q_TC, k_TC, v_TC, gate_TC, narrow_TK, beta_TH = joint_linear(x_TD, weights)
        projected = Projected(q_TC, k_TC, v_TC, through(self.f_b_proj, narrow_TK), beta_TH)
        for made_TC, weight in zip((q_TC, k_TC, v_TC), weights):
            remake_linear("kda_projections", made_TC, x_TD, weight)
        remake_linear("kda_gates", gate_TC, x_TD, self.g_proj.weight)
        remake_linear("kda_gates", projected.decay_logit_TC, narrow_TK, self.f_b_proj.weight)
        if trace.wants("decay"):
            trace.decay(self.layer, kda_gate(projected.decay_logit_TC.unflatten(-1, (self.heads, -1)), self.decay_gate))
        if cache is None:
            return self.o_proj(self._mix(projected, gate_TC, sequences, None)[0])
        if isinstance(cache, OneTokenStates):
            return through(self.o_proj, cache.decode(projected, gate_TC, self._decode_weights))
        outputs, drafts = [], cache.drafts
        edges = () if drafts is None else (drafts.which.start, drafts.which.stop)
        for which, rows, part in sequences.split(sequences.num_single, *edges):
            whole = part is sequences
            inputs, gates_TC = (projected, gate_TC) if whole else (projected.rows(rows), gate_TC[rows])
            if drafts is not None and which == drafts.which:
                drafts.inputs = Projected(*(x.clone() for x in inputs.tensors()))  # not the whole pass's
                outputs.append(self._verify(inputs, gates_TC, part, cache.read(which)))
                continue
            if part.one_each and not torch.is_grad_enabled() and self._has_kernels(x_TD):
                y_TC, states = self._decode(inputs, gates_TC, part, cache.read(which))
            else:
                before = None if cache.is_new(which) else cache.read(which)
                y_TC, states = self._mix(inputs, gates_TC, part, before)
            cache.write(which, states)
            outputs.append(y_TC)
        return through(self.o_proj, outputs[0] if len(outputs) == 1 else torch.cat(outputs))

    @torch.no_grad()
    def replay(self, inputs: Projected, sequences: Sequences, states: States) -> States:
        """States and windows behind tokens whose outputs are known, from inputs that `forward` kept of them.

        The given states may be overwritten.
        """
        if not self._has_kernels(inputs.q_TC):
            return self._recur(inputs, sequences, states)[1]
        pool = DecodePool(*(x.contiguous() for x in (states[0], *states[1])))
        counts_N = sequences.cu_seqlens.diff()
        slots = _all_slots(len(counts_N), counts_N.device)
        replay_kda(inputs, self._decode_weights, pool, slots, counts_N, cu_seqlens=sequences.cu_seqlens)
        return pool.state_SHKV, pool.tensors()[1:]

    @property
    def decay_gate(self) -> KdaGate:
        """The parameters of the decay, by head."""
        return KdaGate(self.A_log, self.dt_bias.view(self.heads, -1), self.lower_bound)

    @property
    def _convolutions(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight

    @property
    def _decode_weights(self) -> DecodeWeights:
        return DecodeWeights(*self._convolutions, self.decay_gate, self.o_norm.weight, self.o_norm.eps)

    def _has_kernels(self, x_TD: Tensor) -> bool:
        head_dim = self.o_norm.weight.shape[0]
        return pick("kda", x_TD, channels=(head_dim, head_dim)) == "triton"

    def _mix(
        self, projected: Projected, gate_TC: Tensor, sequences: Sequences, states: States | None
    ) -> tuple[Tensor, States]:
        """Any number of tokens per sequence: gated outputs, and the states and windows behind them."""
        o_THV, states = self._recur(projected, sequences, states)
        gate_THV = gate_TC.unflatten(-1, (self.heads, -1))
        norm = partial(gated_rms_norm, weight=self.o_norm.weight, eps=self.o_norm.eps)
        y_THV = norm(o_THV, gate_THV)
        remake("gated_outputs", [y_THV], norm, o_THV, gate_THV)
        return y_THV.flatten(-2), states

    def _recur(self, projected: Projected, sequences: Sequences, states: States | None) -> tuple[Tensor, States]:
        """Convolutions and recurrence: o_THV before norm and gate, and the states and windows behind them."""
        state_NHKV, windows_NCW = states or (None, None)
        inputs = projected.tensors()[:3]
        layout = {"windows_NCW": windows_NCW, "cu_seqlens": sequences.cu_seqlens}
        convolved, windows = short_convs(inputs, self._convolutions, **layout)
        if states is None:
            convolve = partial(short_convs, weights_CW=self._convolutions, cu_seqlens=sequences.cu_seqlens)
            remake("kda_qkv", convolved, lambda *inputs: convolve(inputs)[0], *inputs)
        q, k, v, decay_logit = (y.unflatten(-1, (self.heads, -1)) for y in (*convolved, projected.decay_logit_TC))
        tokens = (q, k, v, decay_logit, projected.beta_logit_TH)
        if state_NHKV is not None and sequences.one_each:
            o_THV, state_NHKV = step_kda(*tokens, self.decay_gate, state_NHKV)
        else:
            bounds = sequences.cu_seqlens
            o_THV, state_NHKV = chunk_kda(*tokens, self.decay_gate, state_NHKV=state_NHKV, cu_seqlens=bounds)
            name("kda_outputs", o_THV)
        return o_THV, (state_NHKV, windows)

    def _verify(self, inputs: Projected, gate_TC: Tensor, sequences: Sequences, states: States) -> Tensor:
        """Gated outputs of tokens that may be refused; the given states stay as they were."""
        if torch.is_grad_enabled() or not self._has_kernels(gate_TC):
            return self._mix(inputs, gate_TC, sequences, states)[0]
        pool = DecodePool(*(x.contiguous() for x in (states[0], *states[1])))
        bounds = sequences.cu_seqlens
        slots = _all_slots(len(bounds) - 1, bounds.device)
        return verify_kda(inputs, gate_TC, self._decode_weights, pool, slots, cu_seqlens=bounds)

    def _decode(
        self, projected: Projected, gate_NC: Tensor, sequences: Sequences, states: States
    ) -> tuple[Tensor, States]:
        """One token for each sequence in one kernel, which leaves the given states as they were."""
        pool = DecodePool(*(x.contiguous() for x in (states[0], *states[1])))
        into = DecodePool(*(torch.empty_like(x) for x in pool.tensors()))
        y_NC = decode_kda(
            projected, gate_NC, self._decode_weights, pool, _all_slots(len(gate_NC), gate_NC.device), into=into
        )
        return y_NC, (into.state_SHKV, into.tensors()[1:])


@device_table(8)
def _all_slots(count: int, device: torch.device) -> Tensor:
    """Slots 0 .. count - 1: sequence n of a part is row n of its states."""
    return torch.arange(count, dtype=torch.int32, device=device)
