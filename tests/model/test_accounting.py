"""Accounting reproduces the released model's published sizes, and equals built models entry for entry."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from openk3.config.model import ConfigError, LinearAttnConfig, ModelConfig, TextConfig, VisionConfig, schedule
from openk3.inputs.packed import Packed
from openk3.model.accounting import account, depth_sources, padded_heads
from openk3.model.k3 import K3
from openk3.model.trace import Trace

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def released(**changes) -> ModelConfig:
    kda, full = schedule(93)
    linear = LinearAttnConfig(kda_layers=kda, full_attn_layers=full)
    return ModelConfig(text=TextConfig(linear_attn_config=linear, **changes))


def test_released_totals():
    """The report's 2.78T total and 104.2B activated, and the released index's total_size to the byte."""
    books = account(released())
    assert books.total == 2_779_931_837_184
    assert books.activated == 104_189_532_416
    assert books.weight_bytes() == 1_560_860_324_864
    assert books.mtp == 0


def test_released_components():
    sizes = {part.name: part.total for part in account(released()).components}
    assert sizes == {
        "routed experts": 2_722_740_830_208,
        "KDA attention": 30_618_088_704,
        "MLA attention": 5_572_706_304,
        "shared experts": 12_155_092_992,
        "latent projections": 4_726_980_608,
        "routed expert norm": 329_728,
        "router": 590_872_576,
        "router bias": 82_432,
        "dense FFN": 726_663_168,
        "norms and depth queries": 4_021_248,
        "embedding": 1_174_405_120,
        "LM head": 1_174_405_120,
        "vision tower": 401_214_464,
        "projector": 46_144_512,
    }


def test_released_dtypes():
    by_dtype = account(released()).by_dtype()
    assert by_dtype == {"mxfp4": 2_722_740_830_208, "bf16": 57_179_884_544, "float32": 11_122_432}


def test_released_caches():
    books = account(released())
    assert books.latent_values_per_layer == 576
    assert books.latent_bytes_per_token() == 27_648
    assert books.latent_bytes_per_token("fp8") == 13_824
    assert books.kda_state_bytes_per_layer() == 6_291_456
    assert books.conv_bytes_per_layer() == 221_184
    assert books.state_bytes_per_request() == 449_372_160
    assert books.state_bytes_per_request("bf16", "bf16") == 232_316_928
    assert books.request_bytes(1_048_576) == 449_372_160 + 1_048_576 * 27_648


def test_mtp_stands_on_its_own_line():
    """With an MTP layer the total stays; memory and bytes grow by exactly that layer."""
    without, having = account(released()), account(released(num_nextn_predict_layers=1))
    assert having.total == without.total and having.activated == without.activated
    # eh_proj, 9 vectors, MLA, shared experts, latent projections and norm, router and bias, 896 experts
    layer = 2 * 7168**2 + 9 * 7168 + 232_196_096 + 132_120_576 + 51_380_224 + 3584 + 896 * 7169 + 896 * 33_030_144
    assert having.mtp == layer == without.mtp_layer.total
    assert having.in_memory - without.in_memory == layer
    experts = 896 * 33_030_144
    grown = having.weight_bytes() - without.weight_bytes()
    assert grown == experts // 2 + experts // 32 + 4 * 896 + 2 * (layer - experts - 896)


def test_flops_of_the_released_model():
    """Two per activated parameter (208.4 GFLOP), and the attention work that this leaves out."""
    books = account(released())
    flops = books.forward_flops(1000)
    assert flops.weights == 208_379_064_832
    assert flops.kda_state == 69 * 96 * 7 * 128 * 128
    assert flops.mla_scores == 24 * 96 * 2 * (192 + 128) * 1000
    assert flops.total == flops.weights + flops.kda_state + flops.mla_scores + flops.depth
    assert books.backward_flops(1000).total == 2 * flops.total
    assert books.training_flops(1999).total == 3 * flops.total
    assert account(released(num_nextn_predict_layers=1)).training_flops(1999).mtp > 6 * books.mtp_layer.activated


def test_depth_sources():
    """Source counts of block and full attention over depth (report eqs. 8-10)."""
    text = released().text
    counts = depth_sources(text)
    assert len(counts) == 2 * 93  # layer 0's mixer reads the embedding alone
    assert counts[0] == 2 and counts[-1] == 9
    small = dataclasses.replace(text, num_hidden_layers=5, attn_res_block_size=2)
    assert depth_sources(small) == [2, 2, 2, 2, 3, 3, 3, 3, 4, 4]
    assert depth_sources(dataclasses.replace(small, attn_res_mode="full")) == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("name", ["text_a", "text_b", "mxfp4_a", "mm_a"])
def test_golden_checkpoints(name):
    """The count equals what the stored tensors hold (text_a leaves A_log unpadded)."""
    folder = GOLDEN / name
    config = ModelConfig.from_json(folder)
    entries = 0
    for key, shape in stored_shapes(folder / "model.safetensors").items():
        if key.endswith("weight_scale"):
            continue
        size = 2 if key.endswith("weight_packed") else 1
        for length in shape:
            size *= length
        entries += size
    books = account(config)
    assert entries == books.total - (books.padding if name == "text_a" else 0)


def stored_shapes(path: Path) -> dict[str, list[int]]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {key: value["shape"] for key, value in header.items() if key != "__metadata__"}


def test_bytes_of_other_choices():
    config = ModelConfig.from_json(GOLDEN / "mxfp4_a")
    books = account(config)
    split = books.by_dtype()
    assert books.weight_bytes("bf16", "bf16") == 2 * (split["mxfp4"] + split["bf16"]) + 4 * split["float32"]
    assert books.weight_bytes("float32", "float32") == 4 * books.total
    assert books.weight_bytes("mxfp4", "float32") == split["mxfp4"] * 17 // 32 + 4 * (books.total - split["mxfp4"])
    with pytest.raises(ValueError, match="'int8' is unknown"):
        books.weight_bytes("int8")
    with pytest.raises(ConfigError, match="routed_expert_hidden_size: 24 is no multiple of 32"):
        account(ModelConfig.from_json(GOLDEN / "text_a")).weight_bytes()


def test_vision_is_optional():
    config = ModelConfig.from_json(GOLDEN / "mm_a")
    assert isinstance(config.vision, VisionConfig)
    blind = dataclasses.replace(config, vision=None)
    names = {part.name for part in account(blind).components}
    assert names.isdisjoint({"vision tower", "projector"})
    assert account(blind).activated == account(config).activated
    assert account(blind).image_flops(16) == 0
    # quadratic in the patches: joint attention inside one item
    first, second, third = (account(config).image_flops(n) for n in (0, 1000, 2000))
    assert first == 0 and third > 2 * second


def test_padded_heads():
    assert [padded_heads(h) for h in (1, 96, 128, 129)] == [128, 128, 128, 256]


def variants() -> dict[str, ModelConfig]:
    """Configurations that differ in which parts they have."""
    plain = ModelConfig.from_json(GOLDEN / "text_b")
    vision = ModelConfig.from_json(GOLDEN / "mm_a")
    assert vision.vision is not None
    return {
        "plain": plain,
        "vision": vision,
        "factorised video": dataclasses.replace(
            vision, vision=dataclasses.replace(vision.vision, video_attention="factorised")
        ),
        "mtp": plain.replace_text(num_nextn_predict_layers=1),
        "no shared experts": plain.replace_text(num_shared_experts=0),
        "no MLA gate": plain.replace_text(mla_use_output_gate=False),
        "full depth attention": plain.replace_text(attn_res_mode="full"),
        "two dense layers": plain.replace_text(first_k_dense_replace=2),
        "every other layer dense": plain.replace_text(moe_layer_freq=2, first_k_dense_replace=0),
        "no shared key": plain.replace_text(qk_rope_head_dim=0),
    }


@pytest.mark.parametrize("name", variants())
def test_built_models_hold_what_was_counted(name):
    """Entries of all parameters and router biases of a real model."""
    config = variants()[name]
    model = K3.empty(config, device="meta")
    assert sum(tensor.numel() for tensor in model.state_dict().values()) == account(config).in_memory


@pytest.mark.parametrize("mode", ["block", "full"])
def test_depth_sources_of_a_running_model(mode):
    """The sources counted are those that the forward pass mixes, read by read."""
    config = ModelConfig.from_json(GOLDEN / "text_b").replace_text(attn_res_mode=mode)
    seen: list[int] = []

    class Depths(Trace):
        def wants(self, name: str) -> bool:
            return name == "depth"

        def depth(self, layer, site, probs_TL) -> None:
            seen.append(probs_TL.shape[1])

    K3.build(config).forward(Packed.join([[5, 6, 7]]), trace=Depths())
    assert [count for count in seen if count > 1] == depth_sources(config.text)


def test_released_model_on_meta_in_little_memory():
    """Building the released sizes on the meta device takes under 2 GiB and holds exactly the counted entries."""
    program = """
import resource
from openk3.config.model import LinearAttnConfig, ModelConfig, TextConfig, schedule
from openk3.model.k3 import K3
kda, full = schedule(93)
linear = LinearAttnConfig(kda_layers=kda, full_attn_layers=full)
config = ModelConfig(text=TextConfig(linear_attn_config=linear, num_nextn_predict_layers=1))
model = K3.empty(config, device="meta")
for part in (model, model.mtp):
    print(sum(tensor.numel() for tensor in part.state_dict().values()))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    whole, mtp, peak = map(int, run.stdout.split())
    assert mtp == 30_119_957_888
    assert whole - mtp == 2_779_931_837_184 - 69 * 32
    assert peak < 2 * 1024**2  # kibibytes
