"""GatedMLA: multi-head latent attention without positional encoding, gated channel by channel (report section 2.1.2).

Two equal forms. Expanded: keys and values of every head are computed from the latents; for training and prefill.
Absorbed: the key and value halves of kv_b act on queries and outputs instead, and attention runs over cached latents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor, nn

from openk3.config.model import TextConfig
from openk3.model.cache import LatentCache, Sequences
from openk3.model.norm import RMSNorm
from openk3.model.step_cache import StepLatents
from openk3.model.trace import NO_TRACE, Trace
from openk3.ops.few.latent import LatentWeights, step_few, steps_few
from openk3.ops.few.linear import through
from openk3.ops.joint_linear import joint_linear
from openk3.ops.mla.reference import absorbed_attention, joint_attention
from openk3.ops.saved import remake, remake_linear
from openk3.ops.sigmoid_gate import sigmoid_gate

LATENT_NORM_EPS = 1e-6  # the released code builds both latent norms with its class default, not with rms_norm_eps


class GatedMLA(nn.Module):
    """y = W_o [sigmoid(W_g x) * softmax(q k^T / sqrt(dim)) v]  (report eq. 7)."""

    joint = ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")  # maps of the layer's input

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.layer, self.heads = layer, heads
        self.kv_rank, self.shared = config.kv_lora_rank, config.qk_rope_head_dim
        self.nope, self.value = config.qk_nope_head_dim, config.v_head_dim
        self.scale = config.qk_head_dim**-0.5
        self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, config.latent_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, heads * (self.nope + self.value), bias=False)
        self.g_proj = nn.Linear(width, heads * self.value, bias=False) if config.mla_use_output_gate else None
        self.o_proj = nn.Linear(heads * self.value, width, bias=False)

    def forward(
        self,
        x_TD: Tensor,
        sequences: Sequences,
        cache: LatentCache | StepLatents | None = None,
        trace: Trace = NO_TRACE,
    ) -> Tensor:
        """y_TD; with a cache, its rows are attended to as well and this pass's are appended."""
        maps = (self.q_a_proj, self.kv_a_proj_with_mqa, self.g_proj)
        narrow_TC, joint_TC, *gate_TC = joint_linear(x_TD, [each.weight for each in maps if each is not None])
        if isinstance(cache, StepLatents) and steps_few(joint_TC, self._few_weights, cache.places):
            gated = narrow_TC, joint_TC, gate_TC[0] if gate_TC else None, self._few_weights
            attend = partial(cache.read, scale=self.scale)
            return through(self.o_proj, step_few(*gated, places=cache.places, attend=attend))
        for made_TC, each in ((narrow_TC, self.q_a_proj), (joint_TC, self.kv_a_proj_with_mqa)):
            remake_linear("mla_latents", made_TC, x_TD, each.weight)
        q_latent_TC = self.q_a_layernorm(narrow_TC)
        remake("mla_normed", [q_latent_TC], self.q_a_layernorm, narrow_TC)
        q_TC = self.q_b_proj(q_latent_TC)
        remake_linear("mla_qkv", q_TC, q_latent_TC, self.q_b_proj.weight)
        q_THK = q_TC.unflatten(-1, (self.heads, -1))
        latent_TC = self._latent(joint_TC)
        remake("mla_normed", [latent_TC], self._latent, joint_TC)
        if cache is None:
            o_THV = self.expanded(q_THK, latent_TC, sequences.cu_seqlens, sequences.cu_seqlens, trace)
        elif isinstance(cache, StepLatents):
            o_THV = self._through_latents(q_THK, partial(cache.attend, latent_TC, scale=self.scale))
        else:
            o_THV = self._continue(q_THK, latent_TC, sequences, cache, trace)
        o_TC = o_THV.flatten(-2)
        if self.g_proj is None:
            return self.o_proj(o_TC.to(x_TD.dtype))
        remake_linear("mla_gates", gate_TC[0], x_TD, self.g_proj.weight)
        gate = partial(sigmoid_gate, dtype=x_TD.dtype)
        gated_TC = gate(o_TC, gate_TC[0])
        remake("gated_outputs", [gated_TC], gate, o_TC, gate_TC[0])
        return self.o_proj(gated_TC)

    @property
    def _few_weights(self) -> LatentWeights:
        q_norm, latent_norm = self.q_a_layernorm, self.kv_a_layernorm
        norms = (q_norm.weight, q_norm.eps), self.q_b_proj.weight, (latent_norm.weight, latent_norm.eps)
        return LatentWeights(*norms, self.kv_b_proj.weight, self.heads, self.nope, self.value)

    def _continue(
        self, q_THK: Tensor, latent_TC: Tensor, sequences: Sequences, cache: LatentCache, trace: Trace
    ) -> Tensor:
        """o_THV of sequences that go on from what is cached; those with few new tokens that come first apart."""
        past, latents = list(cache.lengths), cache.append(latent_TC, sequences)
        traced, outputs = trace.wants("max_logit"), list[Tensor]()
        few = 0 if traced else sum(1 for _ in takewhile(self._few, sequences.lengths))
        for which, rows, part in sequences.split(few):
            if not traced and self.prefers_absorbed(part, past[which]):
                outputs.append(self.absorbed(q_THK[rows], latents[which], part.cu_seqlens))
                continue
            if not any(past[which]):  # all there is are the pass's own
                outputs.append(self.expanded(q_THK[rows], latent_TC[rows], part.cu_seqlens, part.cu_seqlens, trace))
                continue
            whole = list(latents[which])
            ends = torch.tensor([0, *map(len, whole)]).cumsum(0)
            bounds = part.cu_seqlens, ends  # on the CPU: nothing waits for them to be read
            whole_KC = whole[0] if len(whole) == 1 else torch.cat(whole)
            outputs.append(self.expanded(q_THK[rows], whole_KC, *bounds, trace))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def latent(self, x_TD: Tensor) -> Tensor:
        """What is cached per token: the normed latent, then the key part that all heads share, not normed [T, C+R]."""
        return self._latent(self.kv_a_proj_with_mqa(x_TD))

    def _latent(self, joint_TC: Tensor) -> Tensor:
        latent_TC, shared_TR = joint_TC.split((self.kv_rank, self.shared), -1)
        return torch.cat((self.kv_a_layernorm(latent_TC), shared_TR), -1)

    def expanded(
        self, q_THK: Tensor, latent_TC: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, trace: Trace = NO_TRACE
    ) -> Tensor:
        """o_THV in at least float32, from per-head keys and values of every latent."""
        latent_TC, shared_TR = latent_TC.split((self.kv_rank, self.shared), -1)
        kv_TC = self.kv_b_proj(latent_TC)
        remake_linear("mla_qkv", kv_TC, latent_TC, self.kv_b_proj.weight)
        kv_THC = kv_TC.unflatten(-1, (self.heads, -1))
        wanted = trace.wants("max_logit")
        o_THV, max_H = joint_attention(
            q_THK, kv_THC, shared_TR, cu_seqlens_q, cu_seqlens_k, scale=self.scale, return_max=wanted
        )
        if max_H is not None:
            trace.max_logit(self.layer, max_H)
        return o_THV

    def absorbed(self, q_THK: Tensor, latents: Sequence[Tensor], cu_seqlens_q: Tensor) -> Tensor:
        """o_THV in at least float32, from the latents themselves: W_uk moves to the query, W_uv to the output."""

        def attend(q_latent_THC: Tensor, q_shared_THR: Tensor) -> Tensor:
            return absorbed_attention(q_latent_THC, q_shared_THR, latents, cu_seqlens_q, scale=self.scale)

        return self._through_latents(q_THK, attend)

    def _through_latents(self, q_THK: Tensor, attend: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`absorbed`, given what turns both parts of the queries into contexts."""
        up_HCK = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        key_HKC, value_HVC = up_HCK.split((self.nope, self.value), 1)
        q_THK, q_shared_THR = q_THK.split((self.nope, self.shared), -1)
        q_latent_THC = torch.einsum("thk,hkc->thc", q_THK, key_HKC)
        ctx_THC = attend(q_latent_THC, q_shared_THR)
        narrow = value_HVC.is_cuda and value_HVC.dtype == torch.bfloat16 and not torch.is_grad_enabled()
        if narrow:  # contexts are rounded as values of the expanded form are
            ctx_HTC = ctx_THC.transpose(0, 1).to(torch.bfloat16)
            return torch.bmm(ctx_HTC, value_HVC.mT, out_dtype=torch.float32).transpose(0, 1)
        return torch.einsum("thc,hvc->thv", ctx_THC, value_HVC.to(ctx_THC.dtype))

    def prefers_absorbed(self, sequences: Sequences, past: Sequence[int]) -> bool:
        """Whether sequences are continued by so few tokens that expanding the past would cost more than it saves."""
        return any(past) and self._few(max(sequences.lengths))

    def _few(self, num_tokens: int) -> bool:
        """Per key and head, expanding costs C*(K+V) and each absorbed query 2C-K-V more than an expanded one."""
        expansion = self.kv_rank * (self.nope + self.value)
        return num_tokens * (2 * self.kv_rank - self.nope - self.value) <= expansion
