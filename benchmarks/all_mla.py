"""What a K3 is compared with: a model of the same parts whose layers are all MLA, with plain residuals.

Only the mixers and the residual stream differ: latents, gates, LatentMoE with its router, norms, head and first layer
are the model's own. Compute is matched by depth: an MLA layer costs more than a KDA layer, so the baseline has fewer of
them; the dense layer's width takes what is left, and the number of experts makes stored parameters equal.

`rotary` turns the key part that all heads share, and the queries that meet it, by their positions (as MLA was first
published): K3's MLA layers have no positions of their own and rely on KDA for them, which a model of MLA alone cannot.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

from openk3.config.model import LinearAttnConfig, ModelConfig, TextConfig, schedule
from openk3.model.accounting import account
from openk3.model.cache import Cache, Sequences
from openk3.model.depth import DepthQuery
from openk3.model.k3 import K3
from openk3.model.layer import Layer
from openk3.model.mla import GatedMLA
from openk3.model.norm import RMSNorm
from openk3.model.trace import NO_TRACE, Trace
from openk3.ops.attn_res import mix_depth_normed

TOLERANCE = 0.02  # of FLOPs a token, and of stored parameters
ROTARY_BASE = 10000.0
DENSE_STEP = 64  # widths of the dense layer are multiples of it
MODELS = ("k3", "mla", "mla-rotary")


def text_config(vocab: int, *, small: bool = False) -> ModelConfig:
    """The K3: 8 layers of width 512, 6 KDA and 2 MLA, depth blocks of 2 layers, 32 experts of which 4 work.

    `small` is for trials: width 32, 4 layers.
    """
    layers = 4 if small else 8
    kda, full = schedule(layers)
    if small:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "moe_intermediate_size": 16}
        sizes |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
        sizes |= {"v_head_dim": 16, "num_experts": 8, "num_experts_per_token": 2, "routed_expert_hidden_size": 16}
        linear = LinearAttnConfig(head_dim=16, num_heads=2, kda_layers=kda, full_attn_layers=full)
    else:
        sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 4, "moe_intermediate_size": 256}
        sizes |= {"q_lora_rank": 192, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        sizes |= {"v_head_dim": 128, "num_experts": 32, "num_experts_per_token": 4, "routed_expert_hidden_size": 256}
        linear = LinearAttnConfig(head_dim=128, num_heads=4, kda_layers=kda, full_attn_layers=full)
    text = TextConfig(
        vocab_size=vocab,
        num_hidden_layers=layers,
        num_shared_experts=1,
        attn_res_block_size=2,
        linear_attn_config=linear,
        max_position_embeddings=8192,
        **cast("dict[str, Any]", sizes),
    )
    ids = {"bos_token_id": vocab - 256, "eos_token_id": vocab - 254, "pad_token_id": vocab - 1}
    return ModelConfig(text=text, vision=None, media_placeholder_token_id=vocab - 235, **ids)


def all_mla(config: ModelConfig, layers: int | None = None) -> ModelConfig:
    """The same sizes with MLA in every layer, and as many `layers` as before or as given."""
    layers = layers or config.text.num_hidden_layers
    linear = dataclasses.replace(
        config.text.linear_attn_config, kda_layers=(), full_attn_layers=tuple(range(1, layers + 1))
    )
    return config.replace_text(num_hidden_layers=layers, linear_attn_config=linear)


def training_flops(config: ModelConfig, length: int, *, plain: bool) -> float:
    """Model FLOPs of one token forward and backward at this length; plain residuals have no attention over depth."""
    flops = account(config).training_flops(length)
    return flops.total - flops.depth * plain


def matched(config: ModelConfig, length: int) -> ModelConfig:
    """The all-MLA model with plain residuals that costs what `config` costs at `length`, and stores as much.

    Depth first, then the dense layer's width, then the number of experts (which costs a row of the router each). Raises
    ValueError where no sizes come within 2 %.
    """
    goal, stored = training_flops(config, length, plain=False), account(config).total

    def off(other: ModelConfig) -> float:
        return abs(training_flops(other, length, plain=True) / goal - 1)

    def size_off(other: ModelConfig) -> float:
        return abs(account(other).total / stored - 1)

    found = min((all_mla(config, n) for n in range(1, config.text.num_hidden_layers + 1)), key=off)
    for _ in range(2):  # experts move FLOPs a little, the dense layer moves parameters a little
        experts, width = config.text.num_experts, config.text.intermediate_size
        chosen = config.text.num_experts_per_token
        sizes = [found.replace_text(num_experts=n) for n in range(chosen, 2 * experts + 1)]
        found = min(sizes, key=size_off)
        steps = range(DENSE_STEP, 2 * width + 1, DENSE_STEP) if width > DENSE_STEP else range(8, 2 * width + 1, 8)
        found = min((found.replace_text(intermediate_size=n) for n in steps), key=off)
    if max(off(found), size_off(found)) > TOLERANCE:
        raise ValueError(f"no all-MLA model within {TOLERANCE:.0%} of the K3's FLOPs and parameters at {length} tokens")
    return found


class PlainStream:
    """Residuals in place of depth attention: sum and norm in the one pass that a mixture of one source takes."""

    def __init__(self, x_TD: Tensor) -> None:
        self.x_TD = x_TD
        self.unsummed: Tensor | None = None
        self.no_query: tuple[Tensor, Tensor] | None = None

    @property
    def prefix_TD(self) -> Tensor:
        """The running sum."""
        if self.unsummed is not None:
            self.x_TD, self.unsummed = self.x_TD + self.unsummed, None
        return self.x_TD

    def read(self, query: DepthQuery | None) -> Tensor:
        """The running sum, whatever the query."""
        return self.prefix_TD

    def read_normed(self, query: DepthQuery | None, norm: RMSNorm) -> Tensor:
        """Its norm; a softmax over one source is 1, so the query that the kernel asks for has no say."""
        if query is None and self.no_query is None:
            width = self.x_TD.shape[1]
            self.no_query = self.x_TD.new_zeros(width), self.x_TD.new_ones(width)
        vectors = self.no_query if query is None else (query.proj, query.norm)
        assert vectors is not None
        found = mix_depth_normed([self.x_TD], *vectors, norm.weight, norm.eps, addend_TD=self.unsummed)
        self.x_TD, self.unsummed = found.newest_TD, None
        return found.normed_TD

    def write(self, y_TD: Tensor) -> None:
        """Add to it, by the next read."""
        self.x_TD, self.unsummed = self.prefix_TD, y_TD


class RotaryMLA(GatedMLA):
    """MLA whose shared key part, and the query part that meets it, are rotated by position; training only."""

    def expanded(
        self, q_THK: Tensor, latent_TC: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, trace: Trace = NO_TRACE
    ) -> Tensor:
        """As without positions, on rotated values."""
        cos_TR, sin_TR = rotation(cu_seqlens_q.to(q_THK.device), len(q_THK), self.shared)
        own_THK, shared_THR = q_THK.split((self.nope, self.shared), -1)
        turned_THR = rotate(shared_THR, cos_TR.unsqueeze(1), sin_TR.unsqueeze(1))
        kept_TC, shared_TR = latent_TC.split((self.kv_rank, self.shared), -1)
        latent_TC = torch.cat((kept_TC, rotate(shared_TR, cos_TR, sin_TR)), -1)
        return super().expanded(torch.cat((own_THK, turned_THR), -1), latent_TC, cu_seqlens_q, cu_seqlens_k, trace)


def rotation(cu_seqlens: Tensor, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) [T, R/2] of every token's place in its own sequence, in float32."""
    at_T = torch.arange(tokens, device=cu_seqlens.device)
    sequence_T = torch.bucketize(at_T, cu_seqlens[1:].long(), right=True)
    place_T = at_T - cu_seqlens.long().index_select(0, sequence_T)
    rate_R = ROTARY_BASE ** (-torch.arange(0, width, 2, device=cu_seqlens.device, dtype=torch.float32) / width)
    angle_TR = place_T.float().unsqueeze(1) * rate_R
    return angle_TR.cos(), angle_TR.sin()


def rotate(x_R: Tensor, cos_R: Tensor, sin_R: Tensor) -> Tensor:
    """Pairs (i, i + R/2) of the last axis turned by their angles, in at least float32, in x's dtype again."""
    wide_R = x_R.to(torch.promote_types(x_R.dtype, torch.float32))
    first_R, second_R = wide_R.chunk(2, -1)
    turned_R = torch.cat((first_R * cos_R - second_R * sin_R, second_R * cos_R + first_R * sin_R), -1)
    return turned_R.to(x_R.dtype)


class PlainK3(K3):
    """A K3 without depth attention: no depth queries, a running sum in their place."""

    rotary = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(cast("list[Layer]", list(self.layers))):
            del layer.mix_query, layer.ffn_query
            layer.mix_query = layer.ffn_query = None  # type: ignore[assignment]
            if self.rotary:
                layer.mixer = RotaryMLA(config.text, index)
        del self.output_query

    def backbone(
        self, x_TD: Tensor, cu_seqlens: Tensor, cache: Cache | None = None, trace: Trace | None = None
    ) -> Tensor:
        """h_TD: the running sum after the last layer. Raises ValueError for a cache: it is for training."""
        if cache is not None:
            raise ValueError("PlainK3: made for training, it continues no cache")
        stream, sequences = PlainStream(x_TD), Sequences(cu_seqlens)
        for layer in self.layers:
            layer(stream, sequences, None, trace or NO_TRACE)
        return stream.prefix_TD


class RotaryK3(PlainK3):
    """`PlainK3` with positions in every MLA layer."""

    rotary = True


def model_class(name: str) -> type[K3]:
    """What builds a model of `MODELS`."""
    return {"k3": K3, "mla": PlainK3, "mla-rotary": RotaryK3}[name]


def model_config(name: str, vocab: int, length: int, *, small: bool = False) -> ModelConfig:
    """Sizes of a model of `MODELS`, for sequences of `length` tokens."""
    config = text_config(vocab, small=small)
    return config if name == "k3" else matched(config, length)
