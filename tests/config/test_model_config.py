"""ModelConfig: released files read and written without loss, layer schedules, and wrong values refused by field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openk3 import recipes
from openk3.config.model import ConfigError, LinearAttnConfig, ModelConfig, TextConfig, schedule

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = ("text_a", "text_b", "mxfp4_a", "mm_a")
MM: dict[str, Any] = json.loads((GOLDEN / "mm_a" / "config.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_released_files_round_trip(name: str, tmp_path: Path) -> None:
    """Read, write, read: the same model, and every field of the file that this project writes keeps its value."""
    data = json.loads((GOLDEN / name / "config.json").read_text())
    config = ModelConfig.from_json(GOLDEN / name)
    assert config == ModelConfig.from_dict(data) == ModelConfig.from_dict(config.to_dict())
    (tmp_path / "config.json").write_text(config.to_json())
    assert ModelConfig.from_json(tmp_path) == ModelConfig.from_json(tmp_path / "config.json") == config
    written = config.to_dict()
    for section in ("text_config", "vision_config"):
        for field, value in written.get(section, {}).items():
            stored = data[section].get(field, value) if field != "dtype" else value
            assert json.loads(json.dumps(value)) == stored, f"{section}.{field}"


def test_released_sizes() -> None:
    """The defaults and the k3 recipe are the released model (report Table 1)."""
    config = recipes.model("k3")
    text, linear = config.text, config.text.linear_attn_config
    assert (text.hidden_size, text.num_hidden_layers, text.num_experts, text.num_experts_per_token) == (
        7168,
        93,
        896,
        16,
    )
    assert (text.latent_dim, text.qk_head_dim, text.shared_intermediate_size) == (576, 192, 6144)
    assert linear.full_attn_layers == (*range(4, 93, 4), 93) and len(linear.kda_layers) == 69
    assert text.layer_kinds().count("mla") == 24 and text.layer_kinds()[:4] == ("kda", "kda", "kda", "mla")
    assert [text.is_moe_layer(i) for i in (0, 1, 92)] == [False, True, True]
    assert linear.gate_lower_bound == -5.0 and text.attn_res_block_size == 12
    kinds = {field: getattr(TextConfig(), field) for field in ("rms_norm_eps", "routed_scaling_factor", "vocab_size")}
    assert kinds == {"rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0, "vocab_size": 163840}


@pytest.mark.parametrize(("layers", "full"), [(1, (1,)), (4, (4,)), (5, (4, 5)), (9, (4, 8, 9))])
def test_schedule(layers: int, full: tuple[int, ...]) -> None:
    """Three KDA layers to one MLA layer, the last one MLA; 1-based."""
    kda, mla = schedule(layers)
    assert mla == full and sorted(kda + mla) == list(range(1, layers + 1))


def test_text_only_exports_of_other_trainers() -> None:
    """A file with the text fields at the top is the same model without a tower; its bound must be there too."""
    text = dict(MM["text_config"], model_type="kimi_linear", bos_token_id=1, eos_token_id=2, pad_token_id=3)
    config = ModelConfig.from_dict(text)
    assert config.text == ModelConfig.from_dict(MM).text and config.vision is None
    assert (config.bos_token_id, config.media_placeholder_token_id) == (1, 3)
    text["linear_attn_config"] = {k: v for k, v in text["linear_attn_config"].items() if k != "gate_lower_bound"}
    with pytest.raises(ConfigError, match="gate_lower_bound: missing"):
        ModelConfig.from_dict(text)


def changed(section: str, field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set one field of a section ("" is the top, "linear" is linear_attn_config)."""

    def change(data: dict[str, Any]) -> None:
        places = {
            "": data,
            "text": data["text_config"],
            "linear": data["text_config"]["linear_attn_config"],
            "vision": data["vision_config"],
        }
        places[section][field] = value

    return change


NAN, INF = float("nan"), float("inf")
WRONG: list[tuple[str, str, Any, str]] = [
    ("", "text_config", None, "text_config: missing"),
    ("", "text_config", 5, "text_config: expected a JSON object, got 5"),
    ("", "text_config", [1], "text_config: expected a JSON object"),
    ("", "vision_config", [1], "vision_config: expected a JSON object"),
    ("", "vision_config", True, "vision_config: expected a JSON object"),
    ("text", "linear_attn_config", [1], "linear_attn_config: expected a JSON object"),
    ("text", "linear_attn_config", None, "gate_lower_bound: missing"),
    ("", "model_type", "kimi_k25", "model_type: 'kimi_k25' is not K3"),
    ("", "tie_word_embeddings", True, "tie_word_embeddings: True is not K3"),
    ("", "bos_token_id", "1", "bos_token_id: expected int, got '1'"),
    ("", "eos_token_id", [1, 2], "eos_token_id: expected int"),
    ("", "pad_token_id", 1.0, "pad_token_id: expected int"),
    ("", "bos_token_id", True, "bos_token_id: expected int"),
    ("", "bos_token_id", 160, "bos_token_id: 160 lies outside the vocabulary of 160"),
    ("", "bos_token_id", -1, "bos_token_id: -1 lies outside"),
    ("text", "hidden_size", 0, "text_config.hidden_size: must be at least 1, got 0"),
    ("text", "hidden_size", 64.0, "text_config.hidden_size: expected int, got 64.0"),
    ("text", "hidden_size", True, "text_config.hidden_size: expected int"),
    ("text", "qk_rope_head_dim", -1, "text_config.qk_rope_head_dim: must be at least 0, got -1"),
    ("text", "num_shared_experts", -1, "num_shared_experts: must be at least 0"),
    ("text", "rms_norm_eps", 0, "text_config.rms_norm_eps: must be a positive number, got 0.0"),
    ("text", "rms_norm_eps", NAN, "text_config.rms_norm_eps: must be a positive number, got nan"),
    ("text", "rms_norm_eps", "1e-5", "text_config.rms_norm_eps: expected float, got '1e-5'"),
    ("text", "activation_situ_beta", 0, "activation_situ_beta: must be a positive number"),
    ("text", "activation_situ_linear_beta", -25, "activation_situ_linear_beta: must be a positive number"),
    ("text", "routed_scaling_factor", INF, "routed_scaling_factor: must be a positive number"),
    ("text", "initializer_range", -1, "initializer_range: must be a positive number"),
    ("text", "moe_renormalize", 1, "moe_renormalize: expected bool, got 1"),
    ("text", "hidden_act", "silu", "text_config.hidden_act: 'silu' is not K3"),
    ("text", "mla_use_nope", False, "mla_use_nope: False is not K3"),
    ("text", "num_key_value_heads", 1, "num_key_value_heads: must equal num_attention_heads"),
    ("text", "attn_res_mode", "none", "attn_res_mode: must be 'block' or 'full'"),
    ("text", "attn_res_block_size", 0, "attn_res_block_size: must be at least 1"),
    ("text", "num_experts_per_token", 99, "num_experts_per_token: 99 exceeds num_experts"),
    ("text", "num_expert_group", 5, "num_expert_group: must divide num_experts"),
    ("text", "topk_group", 2, "num_expert_group: must divide num_experts and be at least topk_group"),
    ("text", "num_nextn_predict_layers", 2, "num_nextn_predict_layers: must be 0 or 1"),
    ("text", "num_hidden_layers", 6, "name each of the layers 1..6 once"),
    ("linear", "kda_layers", [[1]], "kda_layers: expected a list of integers"),
    ("linear", "kda_layers", [0, 1, 2], "name each of the layers"),
    ("linear", "use_full_rank_gate", False, "use_full_rank_gate: K3 has a full-rank gate"),
    ("linear", "gate_lower_bound", 0.0, r"gate_lower_bound: must lie in \[-5, 0\) or be null"),
    ("linear", "gate_lower_bound", -5.5, "gate_lower_bound: must lie in"),
    ("linear", "gate_lower_bound", NAN, "gate_lower_bound: must lie in"),
    ("linear", "gate_lower_bound", "-5", "gate_lower_bound: expected float"),
    ("vision", "text_hidden_size", 63, "text_hidden_size: 63 must equal hidden_size 64"),
    ("vision", "vt_hidden_size", 15, "vt_hidden_size: must be even"),
    ("vision", "qkv_hidden_size", 30, "qkv_hidden_size: must be 4"),
    ("vision", "merge_kernel_size", [1, 2], r"merge_kernel_size: must be \[2, 2\]"),
    ("vision", "video_attention", "none", "video_attention: 'joint' or 'factorised'"),
    ("vision", "pos_emb_type", "rope", "vision_config.pos_emb_type: 'rope' is not K3"),
    ("vision", "projector_ln_eps", 0.0, "projector_ln_eps: must be a positive number"),
    ("text", "rms_norm_eps", 10**400, "rms_norm_eps: must be a positive number"),
    ("text", "num_hidden_layers", 10**9, "num_hidden_layers: must be at most 4096"),
    ("text", "num_experts", 10**9, "num_experts: must be at most 65536"),
    ("vision", "vt_num_hidden_layers", 10**9, "vt_num_hidden_layers: must be at most 4096"),
    ("text", "vocab_size", 10**400, "vocab_size: must be at most"),
]


@pytest.mark.parametrize(("section", "field", "value", "words"), WRONG)
def test_wrong_values_are_refused_by_field(section: str, field: str, value: Any, words: str, tmp_path: Path) -> None:
    """One line that names the file and the field, whatever was written there."""
    data = copy.deepcopy(MM)
    changed(section, field, value)(data)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=words) as error:
        ModelConfig.from_json(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_case_K06_a_missing_bound_is_an_error_and_null_a_choice() -> None:
    """K06: a file that does not say which gate it has is refused; null is the unbounded gate."""
    data = copy.deepcopy(MM)
    del data["text_config"]["linear_attn_config"]["gate_lower_bound"]
    with pytest.raises(ConfigError, match=r"gate_lower_bound: missing; write -5\.0 for K3 or null"):
        ModelConfig.from_dict(data)
    data["text_config"]["linear_attn_config"]["gate_lower_bound"] = None
    assert ModelConfig.from_dict(data).text.linear_attn_config.gate_lower_bound is None


def test_wrong_files(tmp_path: Path) -> None:
    """Missing, no JSON, no object: the file is named."""
    path = tmp_path / "config.json"
    for content, words in (
        (None, "no such file"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "object"),
        (b"[" * 100_000, "nested too deeply"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=words) as error:
            ModelConfig.from_json(tmp_path if content else path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_dataclasses_are_checked_too() -> None:
    """A model described in Python goes through the same checks, also after `replace_text`."""
    kda, full = schedule(4)
    text = TextConfig(num_hidden_layers=4, linear_attn_config=LinearAttnConfig(kda_layers=kda, full_attn_layers=full))
    config = ModelConfig(text=text)
    assert config.replace_text(num_experts=32).text.num_experts == 32
    with pytest.raises(ConfigError, match="num_experts_per_token: 16 exceeds num_experts 8"):
        config.replace_text(num_experts=8)
