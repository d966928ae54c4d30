"""Name and shape of every tensor in the released checkpoint layout, and the parameter of ours that holds it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from openk3.config.model import ModelConfig, TextConfig, VisionConfig
from openk3.model.accounting import padded_heads

TEXT = "language_model.model"
# Kept in float32 whatever the model's dtype: convolution taps, KDA output norm, decay parameters and router bias.
_KEPT_FLOAT32 = re.compile(r"\.mixer\.([qkv]_conv1d\.weight|o_norm\.weight|A_log|dt_bias)$|\.router\.bias$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the released layout (before MXFP4 packing) and where it lives in our model."""

    released: str
    ours: str
    shape: tuple[int, ...]
    expert: int | None = None  # row of our stacked expert parameter
    real: int | None = None  # leading entries that mean something; the release ends A_log in zeros

    @property
    def kept_float32(self) -> bool:
        """Whether it is stored in float32 also when the rest is bfloat16."""
        return kept_float32(self.ours)

    @property
    def packed(self) -> str:
        """Name of its MXFP4 codes."""
        return f"{self.released}_packed"

    @property
    def scale(self) -> str:
        """Name of its MXFP4 scale bytes."""
        return f"{self.released}_scale"


@dataclass(frozen=True)
class Unit:
    """Tensors that are always stored in one file: one layer, or one of the parts around the layers."""

    name: str
    tensors: tuple[StoredTensor, ...]


def kept_float32(ours: str) -> bool:
    """Whether the parameter of this name (ours) stays float32 in a bfloat16 model and checkpoint."""
    return _KEPT_FLOAT32.search(ours) is not None


def units(config: ModelConfig) -> Iterator[Unit]:
    """The whole checkpoint of `config`, one unit at a time: layers first, as in the release."""
    text = config.text
    width, vocab = text.hidden_size, text.vocab_size
    for i, kind in enumerate(text.layer_kinds()):
        layer = _layer(text, f"{TEXT}.layers.{i}", f"layers.{i}", kind, text.is_moe_layer(i))
        yield Unit(f"layer {i}", tuple(layer))
    if text.num_nextn_predict_layers:
        yield Unit("MTP layer", tuple(_mtp(text)))
    yield Unit("embedding", (StoredTensor(f"{TEXT}.embed_tokens.weight", "embed.weight", (vocab, width)),))
    head = [
        StoredTensor(f"{TEXT}.norm.weight", "norm.weight", (width,)),
        StoredTensor(f"{TEXT}.output_attn_res_norm.weight", "output_query.norm", (width,)),
        StoredTensor(f"{TEXT}.output_attn_res_proj.weight", "output_query.proj", (1, width)),
        StoredTensor("language_model.lm_head.weight", "lm_head.weight", (vocab, width)),
    ]
    yield Unit("head", tuple(head))
    if config.vision is not None:
        yield Unit("vision", tuple(_vision(config.vision)))


def shared_copies(config: ModelConfig) -> dict[str, str]:
    """Tensors some writers add at the MTP index, by released name: each must equal the tensor it is a copy of."""
    prefix = f"{TEXT}.layers.{config.text.num_hidden_layers}"
    if not config.text.num_nextn_predict_layers:
        return {}
    return {
        f"{prefix}.shared_head.head.weight": "language_model.lm_head.weight",
        f"{prefix}.embed_tokens.weight": f"{TEXT}.embed_tokens.weight",
    }


def _layer(text: TextConfig, released: str, ours: str, kind: str, moe: bool) -> Iterator[StoredTensor]:
    width = text.hidden_size
    yield StoredTensor(f"{released}.input_layernorm.weight", f"{ours}.mix_norm.weight", (width,))
    yield StoredTensor(f"{released}.post_attention_layernorm.weight", f"{ours}.ffn_norm.weight", (width,))
    for theirs, query in (("self_attention_res", "mix_query"), ("mlp_res", "ffn_query")):
        yield StoredTensor(f"{released}.{theirs}_norm.weight", f"{ours}.{query}.norm", (width,))
        yield StoredTensor(f"{released}.{theirs}_proj.weight", f"{ours}.{query}.proj", (1, width))
    for leaf, shape in (_kda(text) if kind == "kda" else _mla(text)).items():
        real = text.linear_attn_config.num_heads if leaf == "A_log" else None
        yield StoredTensor(f"{released}.self_attn.{leaf}", f"{ours}.mixer.{leaf}", shape, real=real)
    if moe:
        yield from _moe(text, f"{released}.block_sparse_moe", f"{ours}.ffn")
    else:
        yield from _ffn(f"{released}.mlp", f"{ours}.ffn", width, text.intermediate_size)


def _kda(text: TextConfig) -> dict[str, tuple[int, ...]]:
    linear, width = text.linear_attn_config, text.hidden_size
    heads, dim = linear.num_heads, linear.head_dim
    channels = heads * dim
    leaves: dict[str, tuple[int, ...]] = {f"{x}_proj.weight": (channels, width) for x in "qkvg"}
    leaves["o_proj.weight"] = (width, channels)
    leaves.update({f"{x}_conv1d.weight": (channels, 1, linear.short_conv_kernel_size) for x in "qkv"})
    leaves["f_a_proj.weight"] = (dim, width)
    leaves["f_b_proj.weight"] = (channels, dim)
    leaves["b_proj.weight"] = (heads, width)
    leaves["A_log"] = (padded_heads(heads),)
    leaves["dt_bias"] = (channels,)
    leaves["o_norm.weight"] = (dim,)
    return leaves


def _mla(text: TextConfig) -> dict[str, tuple[int, ...]]:
    width, heads = text.hidden_size, text.num_attention_heads
    value_width = heads * text.v_head_dim
    leaves: dict[str, tuple[int, ...]] = {
        "q_a_proj.weight": (text.q_lora_rank, width),
        "q_a_layernorm.weight": (text.q_lora_rank,),
        "q_b_proj.weight": (heads * text.qk_head_dim, text.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (text.latent_dim, width),
        "kv_a_layernorm.weight": (text.kv_lora_rank,),
        "kv_b_proj.weight": (heads * (text.qk_nope_head_dim + text.v_head_dim), text.kv_lora_rank),
    }
    if text.mla_use_output_gate:
        leaves["g_proj.weight"] = (value_width, width)
    leaves["o_proj.weight"] = (width, value_width)
    return leaves


def _ffn(released: str, ours: str, width: int, inner: int) -> Iterator[StoredTensor]:
    for name, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
        yield StoredTensor(f"{released}.{name}_proj.weight", f"{ours}.{name}_proj.weight", shape)


def _moe(text: TextConfig, released: str, ours: str) -> Iterator[StoredTensor]:
    width, latent, inner = text.hidden_size, text.routed_expert_hidden_size, text.moe_intermediate_size
    yield StoredTensor(f"{released}.gate.weight", f"{ours}.router.weight", (text.num_experts, width))
    yield StoredTensor(f"{released}.gate.e_score_correction_bias", f"{ours}.router.bias", (text.num_experts,))
    yield StoredTensor(f"{released}.routed_expert_down_proj.weight", f"{ours}.down_proj.weight", (latent, width))
    yield StoredTensor(f"{released}.routed_expert_norm.weight", f"{ours}.latent_norm.weight", (latent,))
    yield StoredTensor(f"{released}.routed_expert_up_proj.weight", f"{ours}.up_proj.weight", (width, latent))
    if text.num_shared_experts:
        yield from _ffn(f"{released}.shared_experts", f"{ours}.shared", width, text.shared_intermediate_size)
    stacked = (("w1", "w1_EIC", (inner, latent)), ("w2", "w2_ECI", (latent, inner)), ("w3", "w3_EIC", (inner, latent)))
    for e in range(text.num_experts):
        for theirs, name, shape in stacked:
            yield StoredTensor(f"{released}.experts.{e}.{theirs}.weight", f"{ours}.experts.{name}", shape, expert=e)


def _mtp(text: TextConfig) -> Iterator[StoredTensor]:
    released, width = f"{TEXT}.layers.{text.num_hidden_layers}", text.hidden_size
    yield StoredTensor(f"{released}.enorm.weight", "mtp.enorm.weight", (width,))
    yield StoredTensor(f"{released}.hnorm.weight", "mtp.hnorm.weight", (width,))
    yield StoredTensor(f"{released}.eh_proj.weight", "mtp.eh_proj.weight", (width, 2 * width))
    yield StoredTensor(f"{released}.shared_head.norm.weight", "mtp.norm.weight", (width,))
    yield from _layer(text, released, "mtp.layer", "mla", moe=True)


def _vision(vision: VisionConfig) -> Iterator[StoredTensor]:
    width, inner, qkv = vision.vt_hidden_size, vision.vt_intermediate_size, vision.qkv_hidden_size
    merged = width * vision.merge_kernel_size[0] * vision.merge_kernel_size[1]
    table = (vision.init_pos_emb_height, vision.init_pos_emb_width, width)
    leaves: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (width, 3, vision.patch_size, vision.patch_size),
        "patch_embed.pos_emb.weight": table,
    }
    for n in range(vision.vt_num_hidden_layers):
        block = f"encoder.blocks.{n}"
        leaves[f"{block}.norm0.weight"] = leaves[f"{block}.norm1.weight"] = (width,)
        leaves[f"{block}.wqkv.weight"] = (3 * qkv, width)
        leaves[f"{block}.wo.weight"] = (width, qkv)
        leaves[f"{block}.mlp.fc0.weight"] = (inner, width)
        leaves[f"{block}.mlp.fc1.weight"] = (width, inner)
    leaves["encoder.final_layernorm.weight"] = (width,)
    for leaf, shape in leaves.items():
        yield StoredTensor(f"vision_tower.{leaf}", f"vision.{leaf}", shape)
    projector: dict[str, tuple[int, ...]] = {
        "proj.0.weight": (merged, merged),
        "proj.2.weight": (vision.text_hidden_size, merged),
        "post_norm.weight": (vision.text_hidden_size,),
    }
    for leaf, shape in projector.items():
        yield StoredTensor(f"mm_projector.{leaf}", f"projector.{leaf}", shape)
