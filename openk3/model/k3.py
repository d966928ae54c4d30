"""K3: tokens and images in, logits or loss out; embedding, layers, the last depth read, norm, head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from openk3.config.model import ModelConfig
from openk3.inputs.packed import MediaItem, Packed
from openk3.model.cache import Cache, DenseCache, Sequences
from openk3.model.depth import DepthQuery, open_stream
from openk3.model.few_step import few_hidden
from openk3.model.hf import from_pretrained, save_pretrained
from openk3.model.init import allocate, initialize, keeping_float32
from openk3.model.layer import Layer
from openk3.model.moe import keep_packed
from openk3.model.mtp import MTPLayer, next_token_pairs
from openk3.model.norm import RMSNorm
from openk3.model.trace import NO_TRACE, Trace
from openk3.model.vision import MoonViT, Projector
from openk3.ops.cross_entropy import linear_cross_entropy

Device = torch.device | str


@dataclass(frozen=True)
class Losses:
    """Mean losses of one batch: `total` = lm + weight * mtp; `mtp` is None in a model without the MTP layer.

    The token counts (0-d tensors) are the denominators, for means over several batches.
    """

    total: Tensor
    lm: Tensor
    mtp: Tensor | None
    num_tokens: Tensor
    num_mtp_tokens: Tensor | None = None


class K3(nn.Module):
    """A whole Kimi K3 on one device. Build it with `K3.build` or `K3.from_pretrained`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        text, vision = config.text, config.vision
        width, eps, depth = text.hidden_size, text.rms_norm_eps, text.num_hidden_layers
        self.config = config
        self.embed = nn.Embedding(text.vocab_size, width)
        kinds = enumerate(text.layer_kinds())
        self.layers = nn.ModuleList(Layer(text, i, kind, text.is_moe_layer(i)) for i, kind in kinds)
        self.output_query = DepthQuery(width, eps, depth, "output")
        self.norm = RMSNorm(width, eps)
        self.lm_head = nn.Linear(width, text.vocab_size, bias=False)
        self.vision = MoonViT(vision) if vision is not None else None
        self.projector = Projector(vision) if vision is not None else None
        self.mtp = MTPLayer(text) if text.num_nextn_predict_layers else None

    @classmethod
    def build(
        cls, config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> Self:
        """A model with fresh weights; the same seed gives the same values on every device."""
        model = cls.empty(config, dtype=dtype, device=device)
        initialize(model, seed, config.text.initializer_range)
        return model

    @classmethod
    def empty(
        cls, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: Device = "cpu", packed: bool = False
    ) -> Self:
        """A model whose memory is allocated, not set (on "meta" not even that); `packed` holds experts in MXFP4."""
        with torch.device("meta"):
            model = keep_packed(cls(config), config.text) if packed else cls(config)
        allocate(model, dtype=dtype, device=device)
        return model

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        dtype: torch.dtype = torch.float32,
        device: Device = "cpu",
        experts: str | None = None,
    ) -> Self:
        """A model from a folder in the released layout; bf16, float32 and MXFP4 experts are read alike.

        experts="mxfp4" holds them packed in memory, for inference. Raises ConfigError or CheckpointError naming the
        file that is missing, damaged or does not fit.
        """
        return from_pretrained(cls.empty, directory, dtype=dtype, device=device, experts=experts)

    def save_pretrained(self, directory: str | Path, experts: str = "bf16", **options: Any) -> None:
        """Write the released layout, whole or not at all; experts "bf16", "mxfp4" or "float32".

        Further options are those of `openk3.model.hf.save_pretrained`.
        """
        save_pretrained(self, directory, experts=experts, **options)

    def forward(self, packed: Packed, cache: Cache | None = None, trace: Trace | None = None) -> Tensor:
        """logits_TV of every token, image tokens included; with a cache, its sequences are continued.

        T counts the tokens after each image's placeholder was replaced by one per image token. With a cache nothing
        is recorded for gradients.
        """
        with _recording(cache):
            return self.logits(self.hidden(packed, cache, trace))

    def hidden(self, packed: Packed, cache: Cache | None = None, trace: Trace | None = None) -> Tensor:
        """h_TD: the last depth read, before the final norm (the MTP layer's h_t)."""
        with _recording(cache):
            packed = _expand(self, packed)
            return self.backbone(self.inputs(packed), packed.cu_seqlens, cache, trace)

    def logits(self, h_TD: Tensor) -> Tensor:
        """lm_head(norm(h)) [T, V]."""
        return self.lm_head(self.norm(h_TD))

    def inputs(self, packed: Packed) -> Tensor:
        """x_TD: token embeddings with the projected image features in their places. Raises ValueError on bad ids."""
        packed = _expand(self, packed)
        ids_T = packed.token_ids_T
        if ids_T.device.type == "cpu" and len(ids_T):
            for wrong in (int(end) for end in ids_T.aminmax() if not 0 <= end < self.config.text.vocab_size):
                raise ValueError(f"token id {wrong} lies outside the vocabulary of {self.embed.num_embeddings}")
        x_TD = self.embed(ids_T)
        if not packed.images:
            return x_TD
        where = (ids_T == self.config.media_placeholder_token_id).nonzero().squeeze(1)
        return x_TD.index_copy(0, where, self.image_features(packed.images))

    def image_features(self, images: Sequence[MediaItem]) -> Tensor:
        """What stands at the images' tokens, one after the other [sum of h*w/4, D]. Raises ValueError on bad images."""
        if self.vision is None or self.projector is None:
            raise ValueError("images: this model has no vision tower (vision_config is null)")
        return self.projector(self.vision(images)).to(self.embed.weight.dtype)

    def backbone(
        self, x_TD: Tensor, cu_seqlens: Tensor, cache: Cache | None = None, trace: Trace | None = None
    ) -> Tensor:
        """h_TD from embedded inputs: every layer, then the last depth read."""
        sequences, trace = Sequences(cu_seqlens), trace or NO_TRACE
        if cache is not None:
            cache.check(sequences)
        with _recording(cache):
            h_TD = _through_layers(self, x_TD, sequences, cache, trace)
        if cache is not None:
            cache.commit(sequences)
        return h_TD

    def depth_queries(self) -> list[DepthQuery]:
        """Every read of depth, in order."""
        layers = [cast(Layer, layer) for layer in self.layers]
        return [query for layer in layers for query in (layer.mix_query, layer.ffn_query)] + [self.output_query]

    def loss(self, packed: Packed, trace: Trace | None = None, mtp_loss_weight: float = 0.1) -> Losses:
        """Next-token cross-entropy of `packed.shifted_labels()`, plus the MTP layer's if the model has one.

        Image positions have no label. Means over the positions that have one; 0 where there is none.
        """
        return _losses(self, _expand(self, packed), trace or NO_TRACE, mtp_loss_weight)

    def draft(
        self, h_TD: Tensor, next_ids_T: Tensor, cu_seqlens: Tensor, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor]:
        """One step of the MTP layer as a draft: (h'_TD, logits_TV of token t + 2) from h_t and token t + 1.

        h'_t and a token chosen from the logits can be passed again. With a cache, `cache.mtp` is continued. Raises
        ValueError in a model without the layer.
        """
        if self.mtp is None:
            raise ValueError("draft: this model has no MTP layer (num_nextn_predict_layers is 0)")
        rows = None if cache is None else cache.mtp
        with _recording(rows):
            h_TD = self.mtp(h_TD, self.embed(next_ids_T), Sequences(cu_seqlens), rows)
            logits_TV = self.lm_head(self.mtp.norm(h_TD))
        if rows is not None:
            rows.commit()
        return h_TD, logits_TV

    def new_cache(self, num_sequences: int) -> DenseCache:
        """An empty cache of this model's dtype and device."""
        return DenseCache(self.config, num_sequences, self.embed.weight.dtype, self.embed.weight.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`.to(bfloat16)` and the like leave what has to stay at least float32 as it is."""
        return super()._apply(keeping_float32(self, fn), recurse)


def _recording(cache: object) -> torch.set_grad_enabled:
    """Gradients as the caller has them, none with a cache."""
    return torch.set_grad_enabled(torch.is_grad_enabled() and cache is None)


def _through_layers(model: K3, x_TD: Tensor, sequences: Sequences, cache: Cache | None, trace: Trace) -> Tensor:
    """`backbone` between cache checks."""
    if cache is not None and trace is NO_TRACE:
        h_TD = few_hidden(x_TD, model.layers, model.config.text, cache.layers, model.output_query)
        if h_TD is not None:
            return h_TD
    depth = open_stream(x_TD, model.config.text, model.depth_queries(), trace)
    for i, layer in enumerate(model.layers):
        layer(depth, sequences, None if cache is None else cache.layers[i], trace)
    return depth.read(model.output_query)


def _expand(model: K3, packed: Packed) -> Packed:
    """The batch with one placeholder per image token. Raises TypeError for what is no Packed."""
    if not isinstance(packed, Packed):
        raise TypeError(f"K3 reads a Packed, such as Packed.join([[1, 2, 3]]); got a {type(packed).__name__}")
    # Without a vision tower the placeholder's id is a token like any other.
    if model.vision is None and not packed.images:
        return packed
    return packed.expand(model.config.media_placeholder_token_id)


def _losses(model: K3, packed: Packed, trace: Trace, mtp_loss_weight: float) -> Losses:
    x_TD, labels_T = model.inputs(packed), packed.shifted_labels()
    h_TD = model.backbone(x_TD, packed.cu_seqlens, None, trace)
    total, num_tokens = linear_cross_entropy(model.norm(h_TD), model.lm_head.weight, labels_T)
    lm = total / num_tokens.clamp_min(1)
    if model.mtp is None:
        return Losses(lm, lm, None, num_tokens)
    pairs = next_token_pairs(Sequences(packed.cu_seqlens))
    next_T = pairs.here_T + 1
    h_TD = model.mtp(h_TD[pairs.here_T], x_TD[next_T], pairs.sequences, None, trace)
    total, count = linear_cross_entropy(model.mtp.norm(h_TD), model.lm_head.weight, labels_T[next_T])
    mtp = total / count.clamp_min(1)
    return Losses(lm + mtp_loss_weight * mtp, lm, mtp, num_tokens, count)
