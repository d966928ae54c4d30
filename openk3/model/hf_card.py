"""The text files of a checkpoint folder: config.json, generation_config.json and the model card."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from openk3.config.json_file import read_json
from openk3.config.model import ConfigError, ModelConfig, released_form
from openk3.model.accounting import account

FORMAT_VERSION = 1
CONFIG, GENERATION, CARD = "config.json", "generation_config.json", "README.md"
_DTYPE_NAMES = {"bf16": "bfloat16", "float32": "float32"}
# What the released checkpoint declares about its packed experts, key for key.
_QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def config_data(data: dict[str, Any], packed: bool, dtype: str | None) -> dict[str, Any]:
    """A released-style config dictionary for files whose experts are `packed` and whose other weights are `dtype`.

    `dtype` is "bf16" or "float32"; None leaves what `data` says. `data` itself is not changed.
    """
    data = copy.deepcopy(data)
    data["format_version"] = FORMAT_VERSION
    text = data["text_config"]
    text.pop("quantization_config", None)
    if packed:
        text["quantization_config"] = copy.deepcopy(_QUANTIZATION)
    if dtype is not None:
        data["dtype"] = text["dtype"] = _DTYPE_NAMES[dtype]
    return data


def read_config_data(directory: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder as a dictionary; ConfigError when it is missing, broken or too new."""
    path = directory / CONFIG
    ModelConfig.from_json(path)  # every error of its content, with the file's name
    data = released_form(read_json(path))
    version = data.get("format_version", FORMAT_VERSION)
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise ConfigError(
            f"{path}: format_version {version!r} is unknown to this openk3 (it reads up to {FORMAT_VERSION}); update it"
        )
    return data


def is_ours(directory: Path) -> bool:
    """Whether a checkpoint written by this project lies there, which a new one may replace."""
    try:
        data = read_json(directory / CONFIG)
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and "format_version" in data


def to_json(data: dict[str, Any]) -> str:
    """Indented JSON text."""
    return json.dumps(data, indent=2) + "\n"


def generation_data(config: ModelConfig) -> dict[str, Any]:
    """generation_config.json: where generation stops."""
    return {"max_length": config.text.max_position_embeddings, "eos_token_id": config.eos_token_id}


def model_card(config: ModelConfig, experts: str, dtype: str, text: str = "") -> str:
    """README.md of a checkpoint: sizes, schedule and how to load it; `text` is the writer's own paragraph."""
    books, body = account(config), config.text
    task = "image-text-to-text" if config.vision is not None else "text-generation"
    kinds = body.layer_kinds()
    rows = [
        ("Parameters, as stored", f"{books.total:,}"),
        ("Activated per token", f"{books.activated:,}"),
        ("MTP layer", f"{books.mtp:,}" if books.mtp else "none"),
        ("Layers", f"{len(kinds)} ({kinds.count('kda')} KDA, {kinds.count('mla')} Gated MLA)"),
        ("Width", f"{body.hidden_size:,}"),
        ("Attention residuals", f"{body.attn_res_mode}, blocks of {body.attn_res_block_size}"),
        ("Routed experts", f"{body.num_experts}, {body.num_experts_per_token} per token, stored as {experts}"),
        ("Shared experts", f"{body.num_shared_experts}"),
        ("Other weights", f"{dtype}; decay, convolution and routing biases float32"),
        ("Vocabulary", f"{body.vocab_size:,}"),
        ("Vision tower", "MoonViT-V2" if config.vision is not None else "none"),
        ("Latent cache per token", f"{books.latent_bytes_per_token():,} bytes in bf16"),
    ]
    head = ["---", "library_name: openk3", f"pipeline_tag: {task}", "tags:", "- kimi_k3", "---", ""]
    lines = [*head, "# A Kimi K3 model", ""]
    lines += [text.strip(), ""] if text.strip() else []
    lines += ["| what | value |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows), ""]
    lines += ["Tensor names and dtypes are those of the released Kimi K3 checkpoint. To load it:", ""]
    lines += ["```python", "from openk3 import K3", "", 'model = K3.from_pretrained("PATH/OF/THIS/FOLDER")', "```", ""]
    return "\n".join(lines)
