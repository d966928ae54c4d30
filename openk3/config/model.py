"""ModelConfig: the shapes of a K3, with the released config's field names, and its JSON form."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openk3.config.json_file import JsonError, read_json


class ConfigError(ValueError):
    """A configuration cannot describe a model; the message names the field and what to do."""


@dataclass(frozen=True)
class LinearAttnConfig:
    """`linear_attn_config`: the KDA layers. Layer numbers are 1-based, as in the released file."""

    head_dim: int = 128
    num_heads: int = 96
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = -5.0  # None is Kimi Linear's unbounded softplus gate
    use_full_rank_gate: bool = True
    kda_layers: tuple[int, ...] = ()
    full_attn_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class TextConfig:
    """`text_config`: the backbone. Defaults are the released model's (report Table 1)."""

    vocab_size: int = 163840
    hidden_size: int = 7168
    intermediate_size: int = 33792
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64  # kept for its width only: no rotation anywhere (NoPE)
    v_head_dim: int = 128
    mla_use_output_gate: bool = True
    linear_attn_config: LinearAttnConfig = field(default_factory=LinearAttnConfig)
    attn_res_block_size: int = 12
    attn_res_mode: str = "block"  # "block" (report eq. 10) or "full" (eqs. 8-9)
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    num_experts: int = 896
    num_experts_per_token: int = 16
    num_shared_experts: int = 2
    moe_intermediate_size: int = 3072
    routed_expert_hidden_size: int = 3584
    moe_renormalize: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float | None = 25.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 1048576
    num_nextn_predict_layers: int = 0

    @property
    def qk_head_dim(self) -> int:
        """Width of one MLA query or key: content part and shared part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values that MLA caches per token and layer (576 in the released model)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the fused shared experts."""
        return self.moe_intermediate_size * self.num_shared_experts

    def layer_kinds(self) -> tuple[str, ...]:
        """'kda' or 'mla' for each layer, 0-based."""
        mla = set(self.linear_attn_config.full_attn_layers)
        return tuple("mla" if i + 1 in mla else "kda" for i in range(self.num_hidden_layers))

    def is_moe_layer(self, index: int) -> bool:
        """Whether layer `index` (0-based) holds a LatentMoE; the others hold a dense FFN."""
        return index >= self.first_k_dense_replace and index % self.moe_layer_freq == 0


@dataclass(frozen=True)
class VisionConfig:
    """`vision_config`: MoonViT-V2 and its projector."""

    patch_size: int = 14
    vt_num_hidden_layers: int = 27
    vt_hidden_size: int = 1024
    vt_intermediate_size: int = 4096
    vt_num_attention_heads: int = 12
    qkv_hidden_size: int = 1536
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    merge_kernel_size: tuple[int, int] = (2, 2)
    projector_ln_eps: float = 1e-5
    text_hidden_size: int = 7168
    video_attention: str = "joint"  # "joint" (released code) or "factorised" (report section 2.4)


@dataclass(frozen=True)
class ModelConfig:
    """A whole K3: `text` backbone, optional `vision` tower, and the special token ids."""

    text: TextConfig = field(default_factory=TextConfig)
    vision: VisionConfig | None = field(default_factory=VisionConfig)
    bos_token_id: int = 163584
    eos_token_id: int = 163586
    pad_token_id: int = 163839
    media_placeholder_token_id: int = 163605

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Read a released-style config dictionary. Raises ConfigError naming the bad field."""
        if not isinstance(data, dict):
            raise ConfigError("config: expected a JSON object")
        data = released_form(data)
        _refuse_unsupported(data)
        text_data = dict(data.get("text_config") or {})
        linear = _build(LinearAttnConfig, text_data.pop("linear_attn_config", None) or {}, "linear_attn_config")
        text = _build(TextConfig, text_data, "text_config", linear_attn_config=linear)
        vision_data = data.get("vision_config")
        vision = _build(VisionConfig, vision_data, "vision_config") if vision_data else None
        ids = {name: _coerce(data[name], "int", name) for name in ID_FIELDS if data.get(name) is not None}
        return cls(text=text, vision=vision, **ids)

    @classmethod
    def from_json(cls, path: str | Path) -> ModelConfig:
        """Read `config.json`, or the one inside a checkpoint directory."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            data = read_json(path)
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; expected a K3 config.json") from None
        except JsonError as error:
            raise ConfigError(str(error)) from None
        try:
            return cls.from_dict(data)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The released config.json's shape; `from_dict(to_dict())` is the identity."""
        text = dataclasses.asdict(self.text)
        text.update(_TEXT_CONSTANTS)
        text["num_key_value_heads"] = self.text.num_attention_heads
        text.update(bos_token_id=self.bos_token_id, eos_token_id=self.eos_token_id, pad_token_id=self.pad_token_id)
        data: dict[str, Any] = dict(_TOP_CONSTANTS)
        data.update({name: getattr(self, name) for name in ID_FIELDS})
        data["text_config"] = text
        if self.vision is not None:
            vision = dataclasses.asdict(self.vision)
            vision.update(_VISION_CONSTANTS, mm_hidden_size=self.vision.vt_hidden_size)
            data["vision_config"] = vision
        return data

    def to_json(self) -> str:
        """`to_dict` as indented JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def replace_text(self, **changes: Any) -> ModelConfig:
        """A copy with some text fields changed."""
        return dataclasses.replace(self, text=dataclasses.replace(self.text, **changes))


def released_form(data: dict[str, Any]) -> dict[str, Any]:
    """The config with a `text_config`: text-only exports of other trainers hold its fields at the top instead."""
    if data.get("model_type") != "kimi_linear" or "text_config" in data:
        return data
    ids = {name: data[name] for name in ID_FIELDS if name in data}
    if ids.get("pad_token_id") is not None:
        # There are no images, so the released placeholder's number may lie outside a small vocabulary.
        ids.setdefault("media_placeholder_token_id", ids["pad_token_id"])
    return {**_TOP_CONSTANTS, "dtype": data.get("dtype", "bfloat16"), **ids, "text_config": data}


ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id")

_TOP_CONSTANTS = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "ignore_index": -100,
    "image_placeholder": "<|kimi_image_placeholder|>",
}
_TEXT_CONSTANTS = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "hidden_act": "situ",
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "tie_word_embeddings": False,
    "use_cache": True,
    "dtype": "bfloat16",
}
_VISION_CONSTANTS = {
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "patch_embed_proj_bias": False,
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "attn_bias": False,
    "linear_bias": False,
    "activation_func": "gelu_pytorch_tanh",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}


def _refuse_unsupported(data: dict[str, Any]) -> None:
    """A config that asks for what K3 does not have must not load silently."""
    text = data.get("text_config")
    linear = text.get("linear_attn_config") if isinstance(text, dict) else None
    parts = {"text_config": text, "linear_attn_config": linear, "vision_config": data.get("vision_config")}
    for name, part in parts.items():
        _require(part is None or isinstance(part, dict), f"{name}: expected a JSON object, got {part!r}")
    sections = (
        ("", data, {"model_type": "kimi_k3", "tie_word_embeddings": False}),
        ("text_config.", data.get("text_config") or {}, {k: v for k, v in _TEXT_CONSTANTS.items() if k in _FIXED_TEXT}),
        ("vision_config.", data.get("vision_config") or {}, _VISION_CONSTANTS),
    )
    for prefix, section, fixed in sections:
        for name, value in fixed.items():
            if name in section and section[name] != value:
                raise ConfigError(f"{prefix}{name}: {section[name]!r} is not K3 (expected {value!r})")
    if text is None:
        raise ConfigError("text_config: missing; this is not a K3 config")
    if text.get("num_key_value_heads", text.get("num_attention_heads")) != text.get("num_attention_heads"):
        raise ConfigError("text_config.num_key_value_heads: must equal num_attention_heads")
    if "gate_lower_bound" not in (linear or {}):
        raise ConfigError(
            "text_config.linear_attn_config.gate_lower_bound: missing; "
            "write -5.0 for K3 or null for Kimi Linear's unbounded gate"
        )


_FIXED_TEXT = {
    "hidden_act",
    "moe_router_activation_func",
    "topk_method",
    "latent_moe_use_norm",
    "mla_use_nope",
    "tie_word_embeddings",
}


def _build(cls: type, data: dict[str, Any], where: str, **given: Any) -> Any:
    """Build a dataclass from the known keys of `data`; unknown keys are Transformers boilerplate."""
    kwargs = dict(given)
    for spec in dataclasses.fields(cls):
        if spec.name in given or spec.name not in data:
            continue
        kwargs[spec.name] = _coerce(data[spec.name], str(spec.type), f"{where}.{spec.name}")
    return cls(**kwargs)


def _coerce(value: Any, kind: str, where: str) -> Any:
    if value is None and "None" in kind:
        return None
    if kind.startswith("tuple"):
        if not isinstance(value, (list, tuple)) or any(type(v) is not int for v in value):
            raise ConfigError(f"{where}: expected a list of integers, got {value!r}")
        return tuple(value)
    if kind.startswith("float") and type(value) in (int, float):
        return math.inf if abs(value) > _MOST_OF_ANY else float(value)  # refused by its field's check
    wanted = {"int": int, "bool": bool, "str": str}.get(kind)
    if wanted is None or type(value) is not wanted:
        raise ConfigError(f"{where}: expected {kind}, got {value!r}")
    return value


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _check(config: ModelConfig) -> None:
    text, linear, vision = config.text, config.text.linear_attn_config, config.vision
    for section, prefix in ((text, "text_config"), (linear, "linear_attn_config"), (vision, "vision_config")):
        for spec in dataclasses.fields(section) if section is not None else ():
            value, where = getattr(section, spec.name), f"{prefix}.{spec.name}"
            least = 0 if spec.name in _MAY_BE_ZERO else 1
            if spec.type == "int":
                _require(value >= least, f"{where}: must be at least {least}, got {value}")
                most = _MOST.get(spec.name, _MOST_OF_ANY)
                _require(value <= most, f"{where}: must be at most {most}, got {str(value)[:40]}")
            elif spec.type.startswith("float") and value is not None and spec.name != "gate_lower_bound":
                fits = math.isfinite(value) and value >= 0 and (value > 0 or not least)
                _require(fits, f"{where}: must be a positive number, got {value}")
    layers = sorted(linear.kda_layers + linear.full_attn_layers)
    _require(
        layers == list(range(1, text.num_hidden_layers + 1)),
        f"linear_attn_config: kda_layers and full_attn_layers must name each of the layers 1..{text.num_hidden_layers}"
        f" once (1-based), got {len(layers)} entries",
    )
    bound = linear.gate_lower_bound
    _require(
        bound is None or -5.0 <= bound < 0,
        f"linear_attn_config.gate_lower_bound: must lie in [-5, 0) or be null, got {bound}",
    )
    _require(linear.use_full_rank_gate, "linear_attn_config.use_full_rank_gate: K3 has a full-rank gate; must be true")
    _require(text.attn_res_mode in ("block", "full"), "text_config.attn_res_mode: must be 'block' or 'full'")
    _require(
        text.num_experts_per_token <= text.num_experts,
        f"text_config.num_experts_per_token: {text.num_experts_per_token} exceeds num_experts {text.num_experts}",
    )
    _require(
        text.num_experts % text.num_expert_group == 0 and text.topk_group <= text.num_expert_group,
        "text_config.num_expert_group: must divide num_experts and be at least topk_group",
    )
    _require(
        text.num_experts_per_token <= text.num_experts // text.num_expert_group * text.topk_group,
        "text_config.topk_group: the chosen groups hold fewer experts than num_experts_per_token",
    )
    _require(text.num_nextn_predict_layers in (0, 1), "text_config.num_nextn_predict_layers: must be 0 or 1")
    for name in ID_FIELDS:
        _require(
            0 <= getattr(config, name) < text.vocab_size,
            f"{name}: {getattr(config, name)} lies outside the vocabulary of {text.vocab_size}",
        )
    if vision is not None:
        _check_vision(vision, text)


_MAY_BE_ZERO = {
    "num_nextn_predict_layers",
    "first_k_dense_replace",
    "num_shared_experts",
    "qk_rope_head_dim",
    "initializer_range",
}
# Far beyond any model; counting up to them takes neither long nor much memory.
_MOST = {"num_hidden_layers": 4096, "vt_num_hidden_layers": 4096, "num_experts": 65536}
_MOST_OF_ANY = 2**48


def _check_vision(vision: VisionConfig, text: TextConfig) -> None:
    _require(
        vision.text_hidden_size == text.hidden_size,
        f"vision_config.text_hidden_size: {vision.text_hidden_size} must equal hidden_size {text.hidden_size}",
    )
    _require(
        vision.qkv_hidden_size % (4 * vision.vt_num_attention_heads) == 0,
        "vision_config.qkv_hidden_size: must be 4 * vt_num_attention_heads * n (2-D rotary pairs)",
    )
    _require(vision.vt_hidden_size % 2 == 0, "vision_config.vt_hidden_size: must be even (sines and cosines of time)")
    _require(vision.merge_kernel_size == (2, 2), "vision_config.merge_kernel_size: must be [2, 2]")
    _require(
        vision.video_attention in ("joint", "factorised"), "vision_config.video_attention: 'joint' or 'factorised'"
    )


def schedule(num_layers: int, ratio: int = 3) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(kda_layers, full_attn_layers), 1-based: `ratio` KDA layers, then one MLA; the last layer is MLA."""
    full = tuple(i for i in range(1, num_layers + 1) if i % (ratio + 1) == 0 or i == num_layers)
    return tuple(i for i in range(1, num_layers + 1) if i not in full), full
