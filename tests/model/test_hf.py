"""Checkpoints in the released layout: load, save, load again, MXFP4, the MTP layer, conversion without a model."""

from __future__ import annotations

import dataclasses
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from openk3.config.model import ConfigError, LinearAttnConfig, ModelConfig, TextConfig, schedule
from openk3.inputs.packed import Packed
from openk3.model.hf import convert_checkpoint, load_weights
from openk3.model.hf_files import CheckpointError
from openk3.model.hf_names import kept_float32, units
from openk3.model.hf_storage import FileSource, ModelSource
from openk3.model.k3 import K3
from openk3.ops.mxfp import dequantize_mxfp4, fake_quantize_mxfp4, quantize_mxfp4

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
MODELS = ("text_a", "text_b", "mxfp4_a", "mm_a")
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight"


def small(mtp: int = 1) -> ModelConfig:
    """Three layers (KDA, KDA, MLA) whose expert widths can be packed."""
    kda, full = schedule(3)
    linear = LinearAttnConfig(head_dim=16, num_heads=2, kda_layers=kda, full_attn_layers=full)
    text = TextConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        linear_attn_config=linear,
        attn_res_block_size=2,
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=32,
        routed_expert_hidden_size=64,
        num_nextn_predict_layers=mtp,
    )
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "media_placeholder_token_id": 4}
    return ModelConfig(text=text, vision=None, **ids)


def build(config: ModelConfig, dtype: torch.dtype = torch.float32) -> K3:
    """A model in which no tensor is constant, so that a swapped or skipped one shows."""
    model = K3.build(config, seed=3, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    for tensor in model.state_dict().values():
        tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    return model


def logits(model: K3, folder: str) -> torch.Tensor:
    ids = load_file(GOLDEN / folder / "inputs.safetensors")
    key = "mm_image.input_ids" if folder == "mm_a" else "full.input_ids"
    images = []
    if folder == "mm_a":
        patches = ids["vision_image.pixel_values"].float()
        grids = ids["vision_image.grid_thws"].tolist()
        images = list(zip(patches.split([t * h * w for t, h, w in grids]), grids))
    with torch.no_grad():
        return model(Packed.join(ids[key], images=images))


@pytest.mark.parametrize("folder", MODELS)
def test_golden_models_load_save_and_load_again(folder, tmp_path):
    """Loaded logits are the reference's; saved in float32 and loaded again, every tensor and logit is the same."""
    model = K3.from_pretrained(GOLDEN / folder)
    first = logits(model, folder)
    key = "mm_image.logits" if folder == "mm_a" else "full.logits"
    expected = load_file(GOLDEN / folder / "expected.safetensors")[key]
    torch.testing.assert_close(first.double(), expected.flatten(0, 1), atol=1e-3, rtol=0)
    model.save_pretrained(tmp_path / "copy", experts="float32")
    copy = K3.from_pretrained(tmp_path / "copy")
    assert copy.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(copy.state_dict()[name], tensor), name
    assert torch.equal(logits(copy, folder), first)


@pytest.mark.parametrize("folder", MODELS)
def test_written_tensors_are_those_of_the_released_layout(folder, tmp_path):
    """Names, shapes, values and dtypes equal the reference files'; A_log comes out padded to 128 zeros."""
    experts = "mxfp4" if folder == "mxfp4_a" else "float32"
    K3.from_pretrained(GOLDEN / folder).save_pretrained(tmp_path / "m", experts=experts, dtype="float32")
    ours, theirs = load_file(tmp_path / "m/model.safetensors"), load_file(GOLDEN / folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if name.endswith("A_log") and len(tensor) < 128:
            tensor = torch.nn.functional.pad(tensor, (0, 128 - len(tensor)))
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def test_bf16_rounds_all_but_what_stays_float32(tmp_path):
    """A bf16 checkpoint holds float32 for taps, o_norm, decay and router bias, and so does a bf16 model of it."""
    model = build(small())
    model.save_pretrained(tmp_path / "m")
    stored = load_file(tmp_path / "m/model.safetensors")
    wide = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    leaves = ("_conv1d.weight", "self_attn.o_norm.weight", "A_log", "dt_bias", "e_score_correction_bias")
    assert wide == {name for name in stored if name.endswith(leaves)}
    assert {tensor.dtype for name, tensor in stored.items() if name not in wide} == {torch.bfloat16}
    loaded = K3.from_pretrained(tmp_path / "m", dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        new = loaded.state_dict()[name]
        assert new.dtype == (torch.float32 if kept_float32(name) else torch.bfloat16), name
        assert torch.equal(new, tensor.to(new.dtype)), name
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"


def test_float64_model_loads_in_float64_throughout():
    state = K3.from_pretrained(GOLDEN / "text_a", dtype=torch.float64).state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float64}


@pytest.mark.parametrize("rule", ["even", "floor", "ceil"])
def test_exporter_loader_and_fake_quantise_agree(rule, tmp_path):
    """M04: what is packed on saving, unpacked on loading and fake-quantised in training is the same number."""
    model = build(small())
    model.save_pretrained(tmp_path / "m", experts="mxfp4", dtype="float32", scale_rule=rule)
    loaded = K3.from_pretrained(tmp_path / "m")
    stored = load_file(tmp_path / "m/model.safetensors")
    for name, tensor in model.state_dict().items():
        expected = fake_quantize_mxfp4(tensor, rule) if ".experts." in name else tensor
        assert torch.equal(loaded.state_dict()[name], expected), name
    weight = model.layers[1].ffn.experts.w1_EIC[0]
    packed, scale = quantize_mxfp4(weight, rule)
    assert torch.equal(stored[f"{EXPERT}_packed"], packed) and torch.equal(stored[f"{EXPERT}_scale"], scale)


def test_scale_rules_and_second_round_trip(tmp_path):
    """M04: block maxima 1 to 8 through the exporter, the loader and once more; M01: zero, tiny and -0 blocks."""
    peaks = torch.tensor([1, 3, 3.1, 4, 6, 6.5, 7, 7.9, 8])
    model = build(small(mtp=0))
    weight = model.layers[1].ffn.experts.w1_EIC
    with torch.no_grad():
        weight[0].zero_()
        weight[0, :9, 0] = peaks
        weight[0, :9, 5] = -0.25 * peaks
        weight[0, 9, :32] = -0.0
        weight[0, 10, 3] = 1e-40
        weight[0, 11, :32] = 2.0**-130
    for rule, sevens in (("floor", [6, 6, 6]), ("ceil", [6, 8, 8]), ("even", [6, 8, 8])):
        model.save_pretrained(tmp_path / rule, experts="mxfp4", scale_rule=rule)
        first = K3.from_pretrained(tmp_path / rule)
        got = first.layers[1].ffn.experts.w1_EIC[0]
        assert torch.equal(got, fake_quantize_mxfp4(weight[0].detach(), rule))
        assert (got[:9, 0] / peaks - 1).abs().max() <= 0.25
        assert got[5:8, 0].tolist() == sevens
        assert not got[9].any() and not got[12:].any()
        assert got[10].abs().max() <= 2e-40 and got[11, :32].max() <= 2.0**-129
        first.save_pretrained(tmp_path / f"{rule}-again", experts="mxfp4", scale_rule=rule)
        second = K3.from_pretrained(tmp_path / f"{rule}-again")
        assert torch.equal(second.layers[1].ffn.experts.w1_EIC[0], got)


def test_nan_stays_visible_in_mxfp4(tmp_path):
    """M01: a NaN weight is NaN after packing and loading, in its own block only."""
    model = build(small(mtp=0))
    with torch.no_grad():
        model.layers[1].ffn.experts.w2_ECI[2, 3, 4] = float("nan")
    model.save_pretrained(tmp_path / "m", experts="mxfp4")
    loaded = K3.from_pretrained(tmp_path / "m").layers[1].ffn.experts.w2_ECI
    assert loaded[2, 3].isnan().all() and loaded.isnan().sum() == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_a_loaded_mxfp4_checkpoint_changes_no_byte(dtype, tmp_path):
    model = K3.from_pretrained(GOLDEN / "mxfp4_a", dtype=dtype)
    model.save_pretrained(tmp_path / "a", experts="mxfp4")
    again = K3.from_pretrained(tmp_path / "a", dtype=dtype)
    again.save_pretrained(tmp_path / "b", experts="mxfp4")
    for name in ("model.safetensors", "config.json", "generation_config.json", "README.md"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    original, copy = load_file(GOLDEN / "mxfp4_a/model.safetensors"), load_file(tmp_path / "a/model.safetensors")
    packed = [name for name, tensor in original.items() if tensor.dtype == torch.uint8]
    assert len(packed) == 2 * 3 * 8 * 4
    assert all(torch.equal(original[name], copy[name]) for name in packed)


def test_config_of_an_mxfp4_checkpoint(tmp_path):
    """quantization_config is the released one, key for key, and goes away with the packed experts."""
    model = K3.from_pretrained(GOLDEN / "mxfp4_a")
    released = json.loads((GOLDEN / "mxfp4_a/config.json").read_text())
    for experts in ("mxfp4", "bf16"):
        model.save_pretrained(tmp_path / experts, experts=experts)
        written = json.loads((tmp_path / experts / "config.json").read_text())
        assert written["format_version"] == 1 and written["model_type"] == "kimi_k3"
        expected = released["text_config"]["quantization_config"] if experts == "mxfp4" else None
        assert written["text_config"].get("quantization_config") == expected
        assert ModelConfig.from_json(tmp_path / experts) == model.config
    generation = json.loads((tmp_path / "bf16/generation_config.json").read_text())
    assert generation == {"max_length": 4096, "eos_token_id": 2}


def test_widths_that_cannot_be_packed_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="routed_expert_hidden_size: 24 is no multiple of 32"):
        K3.from_pretrained(GOLDEN / "text_a").save_pretrained(tmp_path / "m", experts="mxfp4")
    with pytest.raises(CheckpointError, match="experts: 'int4' is not one of mxfp4, bf16, float32"):
        K3.from_pretrained(GOLDEN / "text_a").save_pretrained(tmp_path / "m", experts="int4")
    with pytest.raises(CheckpointError, match="scale_rule: 'round' is not one of even, floor, ceil"):
        convert_checkpoint(GOLDEN / "mxfp4_a", tmp_path / "m", experts="mxfp4", scale_rule="round")
    assert not list(tmp_path.iterdir())


def test_mtp_layer_is_written_at_index_L(tmp_path):
    """The MTP layer has the released loaders' names at index L, and nothing is there without one."""
    build(small()).save_pretrained(tmp_path / "with")
    build(small(mtp=0)).save_pretrained(tmp_path / "without")
    stored, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("with", "without"))
    extra = {name.removeprefix("language_model.model.layers.3.") for name in stored.keys() - plain.keys()}
    assert plain.keys() <= stored.keys()
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= extra
    assert {"self_attn.kv_b_proj.weight", "self_attention_res_proj.weight", "mlp_res_norm.weight"} <= extra
    assert {"block_sparse_moe.gate.e_score_correction_bias", "block_sparse_moe.experts.3.w2.weight"} <= extra
    assert "shared_head.head.weight" not in extra and "embed_tokens.weight" not in extra


def test_copies_of_the_shared_head_must_be_equal(tmp_path):
    """A checkpoint that repeats the head or the embedding at the MTP index loads only if it is the same tensor."""
    build(small()).save_pretrained(tmp_path / "m")
    path = tmp_path / "m/model.safetensors"
    stored = load_file(path)
    head, embedding = stored["language_model.lm_head.weight"], stored["language_model.model.embed_tokens.weight"]
    stored["language_model.model.layers.3.shared_head.head.weight"] = head.clone()
    stored["language_model.model.layers.3.embed_tokens.weight"] = embedding.clone()
    save_file(stored, path)
    K3.from_pretrained(tmp_path / "m")
    stored["language_model.model.layers.3.shared_head.head.weight"][7, 7] += 1
    save_file(stored, path)
    with pytest.raises(CheckpointError, match=r"shared_head\.head\.weight differs from language_model\.lm_head"):
        K3.from_pretrained(tmp_path / "m")


@pytest.mark.parametrize("folder", MODELS)
@pytest.mark.parametrize("experts", ["mxfp4", "bf16", "float32"])
def test_conversion_equals_saving_a_model(folder, experts, tmp_path):
    """`convert_checkpoint` writes the very bytes that loading and saving would, without building the model."""
    if experts == "mxfp4" and folder != "mxfp4_a":
        with pytest.raises(ConfigError, match="cannot be packed"):
            convert_checkpoint(GOLDEN / folder, tmp_path / "c", experts=experts)
        return
    dtype = "float32" if experts == "float32" else "bf16"
    convert_checkpoint(GOLDEN / folder, tmp_path / "c", experts=experts, dtype=dtype)
    K3.from_pretrained(GOLDEN / folder).save_pretrained(tmp_path / "m", experts=experts)
    for name in ("model.safetensors", "generation_config.json", "README.md"):
        assert (tmp_path / "c" / name).read_bytes() == (tmp_path / "m" / name).read_bytes(), name
    assert ModelConfig.from_json(tmp_path / "c") == ModelConfig.from_json(tmp_path / "m")


def test_conversion_unpacks_and_packs_without_loss(tmp_path):
    """MXFP4 -> bf16 -> MXFP4 gives the same bytes; with nothing asked for, everything stays as it is."""
    seen: list[tuple[int, int]] = []
    convert_checkpoint(GOLDEN / "mxfp4_a", tmp_path / "a")
    convert_checkpoint(
        *(tmp_path / "a", tmp_path / "b"),
        experts="bf16",
        shard_bytes=100_000,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    convert_checkpoint(tmp_path / "b", tmp_path / "c", experts="mxfp4")
    original, kept, packed = (
        load_file(folder / "model.safetensors") for folder in (GOLDEN / "mxfp4_a", tmp_path / "a", tmp_path / "c")
    )
    assert original.keys() == kept.keys() == packed.keys()
    for name, tensor in original.items():
        assert torch.equal(kept[name], tensor) and kept[name].dtype == tensor.dtype
        assert torch.equal(packed[name], tensor) and packed[name].dtype == tensor.dtype
    done, totals = zip(*seen)
    assert len(seen) > 3 and list(done) == sorted(set(done)) and set(totals) == {done[-1]}
    index = json.loads((tmp_path / "b/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done[-1]
    assert (tmp_path / "a/config.json").read_bytes() == (tmp_path / "c/config.json").read_bytes()


def test_conversion_keeps_the_other_files(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "mxfp4_a", source, ignore=shutil.ignore_patterns("*puts.*", "expected.*"))
    (source / "tiktoken.model").write_text("aGk= 0\n")
    (source / "pytorch_model.bin").write_bytes(b"never read")
    (source / "generation_config.json").write_text('{"eos_token_id": 99}')
    (source / "checkpoints").mkdir()
    convert_checkpoint(source, tmp_path / "target", experts="bf16")
    assert not (tmp_path / "target/checkpoints").exists()
    assert (tmp_path / "target/tiktoken.model").read_text() == "aGk= 0\n"
    assert json.loads((tmp_path / "target/generation_config.json").read_text()) == {"eos_token_id": 99}
    assert not (tmp_path / "target/pytorch_model.bin").exists()
    with pytest.raises(CheckpointError, match="onto itself"):
        convert_checkpoint(source, tmp_path / "target" / ".." / "source")


def test_text_only_export_with_a_flat_config(tmp_path):
    """Other trainers save a text model with the fields of text_config at the top level of config.json."""
    shutil.copytree(GOLDEN / "text_b", tmp_path / "m", ignore=shutil.ignore_patterns("*puts.*", "expected.*"))
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(config["text_config"]))
    model = K3.from_pretrained(tmp_path / "m")
    assert model.config.text == ModelConfig.from_json(GOLDEN / "text_b").text and model.config.vision is None
    convert_checkpoint(tmp_path / "m", tmp_path / "c")
    written = json.loads((tmp_path / "c/config.json").read_text())
    assert written["model_type"] == "kimi_k3" and written["text_config"] == config["text_config"]
    other = config["text_config"] | {"hidden_act": "silu"}
    (tmp_path / "m/config.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match=r"text_config\.hidden_act: 'silu' is not K3"):
        K3.from_pretrained(tmp_path / "m")


def test_mixed_experts_load_but_must_be_named_to_convert(tmp_path):
    """Packed and plain experts side by side are told apart by their names, tensor by tensor."""
    shutil.copytree(GOLDEN / "mxfp4_a", tmp_path / "m", ignore=shutil.ignore_patterns("*puts.*", "expected.*"))
    stored = load_file(tmp_path / "m/model.safetensors")
    packed, scale = stored.pop(f"{EXPERT}_packed"), stored.pop(f"{EXPERT}_scale")
    stored[EXPERT] = dequantize_mxfp4(packed, scale, torch.bfloat16)
    save_file(stored, tmp_path / "m/model.safetensors")
    mixed, whole = K3.from_pretrained(tmp_path / "m"), K3.from_pretrained(GOLDEN / "mxfp4_a")
    assert torch.equal(mixed.layers[1].ffn.experts.w1_EIC, whole.layers[1].ffn.experts.w1_EIC)
    with pytest.raises(CheckpointError, match="some experts are packed and some are not"):
        convert_checkpoint(tmp_path / "m", tmp_path / "c")
    convert_checkpoint(tmp_path / "m", tmp_path / "c", experts="mxfp4")
    assert torch.equal(load_file(tmp_path / "c/model.safetensors")[f"{EXPERT}_packed"], packed)


def test_only_one_tensor_is_held_at_a_time(tmp_path, monkeypatch):
    """Loading, saving and converting let go of each weight before they ask for the next."""
    held: list[weakref.ref] = []

    def watch(weight):
        def watched(self, stored):
            assert not held or held[-1]() is None, f"two weights at once at {stored.released}"
            tensor = weight(self, stored).clone()
            held.append(weakref.ref(tensor))
            return tensor

        return watched

    for source in (FileSource, ModelSource):
        monkeypatch.setattr(source, "weight", watch(source.weight))
    model = K3.from_pretrained(GOLDEN / "mxfp4_a")
    model.save_pretrained(tmp_path / "m", experts="float32")
    convert_checkpoint(tmp_path / "m", tmp_path / "c", experts="bf16", dtype="bf16")
    assert len(held) == 3 * sum(len(unit.tensors) for unit in units(model.config))


def test_released_index_is_reproduced_in_number():
    """The released checkpoint's 497,220 tensors (packed experts count twice)."""
    kda, full = schedule(93)
    text = TextConfig(linear_attn_config=LinearAttnConfig(kda_layers=kda, full_attn_layers=full))
    stored = [tensor for unit in units(ModelConfig(text=text)) for tensor in unit.tensors]
    assert len(stored) + sum(tensor.expert is not None for tensor in stored) == 497_220
    assert len({tensor.released for tensor in stored}) == len(stored)


def test_a_model_unlike_the_layout_is_an_error():
    """A parameter that the layout does not know must not stay uninitialised silently."""
    model = K3.empty(small())
    model.register_parameter("stray", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(RuntimeError, match="stray"):
        load_weights(model, GOLDEN / "text_a")


def test_wrong_config_is_caught_by_names_and_shapes(tmp_path):
    """A folder whose config.json does not describe its tensors is refused, with the first names."""
    shutil.copytree(
        GOLDEN / "text_a", tmp_path / "m", ignore=shutil.ignore_patterns("*puts.*", "expected.*", "grads.*")
    )
    config = ModelConfig.from_json(GOLDEN / "text_a")
    fewer = dataclasses.replace(config, text=dataclasses.replace(config.text, num_experts=6))
    (tmp_path / "m/config.json").write_text(fewer.to_json())
    with pytest.raises(CheckpointError, match=r"48 tensors unexpected: .*experts\.6\.w1\.weight, .*\.\.\.$"):
        K3.from_pretrained(tmp_path / "m")
    more = dataclasses.replace(config, text=dataclasses.replace(config.text, num_experts=9))
    (tmp_path / "m/config.json").write_text(more.to_json())
    with pytest.raises(
        CheckpointError, match=r"24 tensors missing: .*layers\.1\.block_sparse_moe\.experts\.8\.w1\.weight,"
    ):
        K3.from_pretrained(tmp_path / "m")
    wider = config.replace_text(intermediate_size=100)
    (tmp_path / "m/config.json").write_text(wider.to_json())
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: tensor .*gate_proj.* shape \[96, 48\].*\[100, 48\]"
    ):
        K3.from_pretrained(tmp_path / "m")
