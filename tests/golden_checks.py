"""Runs a golden model case and compares everything stored for it, at the tolerances of golden/README.md."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from openk3 import K3, Packed
from openk3.inputs.packed import MediaItem
from openk3.model.cache import DenseCache, KdaCache, MlaCache
from openk3.model.trace import Recorder

GOLDEN = Path(__file__).parent / "golden"
TEXT_MODELS = ("text_a", "text_b", "mxfp4_a")
DTYPES = (torch.float32, torch.float64)
# Largest difference allowed to a float32 model, by what is compared (golden/README.md, "Tolerances").
FLOAT32 = {"logits": 1e-3, "hidden": 1e-3, "state": 1e-4, "probs": 1e-4, "loss": 1e-5, "vision": 5e-5}


class Golden:
    """One golden folder and, if it is a model, the model at a dtype."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype
        self.inputs = load_file(GOLDEN / name / "inputs.safetensors")
        self.expected = load_file(GOLDEN / name / "expected.safetensors")
        self.model = K3.from_pretrained(GOLDEN / name, dtype=dtype)

    def check(self, key: str, got: Tensor, kind: str) -> None:
        """`got` against the stored `key`, whose shape is used."""
        want = self.expected[key]
        got = got.reshape(want.shape)
        if self.dtype == torch.float64:
            exact = want.dtype == torch.float64
            torch.testing.assert_close(got.double(), want.double(), **({"atol": 1e-8, "rtol": 0} if exact else CLOSE))
        else:
            torch.testing.assert_close(got.double(), want.double(), atol=FLOAT32[kind], rtol=0)

    def packed(self, case: str, images: list[MediaItem] | None = None) -> Packed:
        """The case's batch with labels, if it has any."""
        labels = self.inputs.get(f"{case}.labels")
        rows = None if labels is None else list(labels)
        return Packed.join(list(self.inputs[f"{case}.input_ids"]), images=images or (), labels=rows)

    def images(self, case: str) -> list[MediaItem]:
        """Items of a vision case; pixels are stored in bf16 and exact."""
        grids = [tuple(grid) for grid in self.inputs[f"{case}.grid_thws"].tolist()]
        pixels = self.inputs[f"{case}.pixel_values"].to(self.dtype).split([t * h * w for t, h, w in grids])
        return [MediaItem(*item) for item in zip(pixels, grids, strict=True)]


CLOSE = {"atol": 1e-6, "rtol": 1e-6}


@cache
def golden(name: str, dtype: torch.dtype) -> Golden:
    """Loaded once per process; do not change its model."""
    return Golden(name, dtype)


def check_logits(case: Golden, name: str = "full") -> None:
    """Logits of one text case, nothing else: what mutants are held against."""
    with torch.no_grad():
        case.check(f"{name}.logits", case.model(case.packed(name)), "logits")


def check_forward(case: Golden, name: str) -> None:
    """Everything stored for an uncached text forward: logits, loss, block sums, depth weights, routes, outputs."""
    packed, recorder = case.packed(name), Recorder()
    with torch.no_grad():
        h_TD = case.model.hidden(packed, trace=recorder)
        case.check(f"{name}.logits", case.model.logits(h_TD), "logits")
        case.check(f"{name}.loss", case.model.loss(packed).total, "loss")
        if f"{name}.final_norm_out" in case.expected:
            case.check(f"{name}.final_norm_out", case.model.norm(h_TD), "hidden")
    check_states(case, f"{name}.", cached(case, packed))
    if f"{name}.output_res_probs" in case.expected:
        _check_trace(case, name, recorder)


def _check_trace(case: Golden, name: str, recorder: Recorder) -> None:
    layers = case.model.config.text.num_hidden_layers
    case.check(f"{name}.output_res_probs", recorder.depths[layers, "output"], "probs")
    for i in range(layers):
        prefix = f"{name}.layer_{i:02d}"
        case.check(f"{prefix}.out", recorder.layer_outs[i], "hidden")
        case.check(f"{prefix}.mlp_res_probs", recorder.depths[i, "ffn"], "probs")
        assert ((i, "mixer") in recorder.depths) == (i > 0) == (f"{prefix}.attn_res_probs" in case.expected)
        if i > 0:
            case.check(f"{prefix}.attn_res_probs", recorder.depths[i, "mixer"], "probs")
        if f"{prefix}.attn_out" in case.expected:  # sequence 0 only
            length = case.expected[f"{prefix}.attn_out"].shape[-2]
            case.check(f"{prefix}.attn_out", recorder.mixer_outs[i][:length], "hidden")
            case.check(f"{prefix}.mlp_out", recorder.ffn_outs[i][:length], "hidden")
        if i in recorder.routes:
            routes = recorder.routes[i]
            ids_Tk, order_Tk = routes.expert_ids_Tk.sort(dim=-1)
            assert torch.equal(ids_Tk, case.expected[f"{prefix}.topk_idx"].long())
            case.check(f"{prefix}.topk_weight", routes.weights_Tk.gather(1, order_Tk), "probs")


def cached(case: Golden, packed: Packed) -> DenseCache:
    """The cache after one pass over the batch."""
    cache = case.model.new_cache(packed.num_sequences)
    case.model.hidden(packed, cache)
    return cache


def check_states(case: Golden, prefix: str, cache: DenseCache) -> None:
    """Every state stored under `prefix`: KDA states (value dimension first), conv windows, MLA latents."""
    found = set()
    for i, layer in enumerate(cache.layers):
        got: dict[str, Tensor] = {}
        if isinstance(layer, KdaCache):
            got["kda_state"] = layer.state_NHKV.transpose(-1, -2)
            got.update({f"conv_state_{name}": window for name, window in zip("qkv", layer.windows)})
        elif isinstance(layer, MlaCache):
            got["mla_latent"] = layer.latents()[0]
        for key, value in ((f"{prefix}layer_{i:02d}.{name}", value) for name, value in got.items()):
            if key in case.expected:
                case.check(key, value, "state")
                found.add(key)
    stored = {key for key in case.expected if key.startswith(prefix) and ("_state" in key or "_latent" in key)}
    assert found == stored and stored


def check_decode(case: Golden) -> None:
    """Prefill, then one token at a time: logits equal the uncached ones, states at both points."""
    ids, first = case.inputs["decode.input_ids"][0], int(case.inputs["decode.n_prefill"])
    cache = case.model.new_cache(1)
    parts = [case.model(Packed.join([ids[:first]]), cache)]
    check_states(case, "decode.after_prefill.", cache)
    parts += [case.model(Packed.join([ids[t : t + 1]]), cache) for t in range(first, len(ids))]
    check_states(case, "decode.final.", cache)
    case.check("decode.logits", torch.cat(parts), "logits")


def check_leftpad(case: Golden) -> None:
    """Three left-padded sequences through `Packed.from_padded`; logits are stored as zero at padding."""
    mask_BT = case.inputs["leftpad.attention_mask"]
    packed = Packed.from_padded(case.inputs["leftpad.input_ids"], mask_BT)
    with torch.no_grad():
        case.check("leftpad.logits", packed.to_padded(case.model(packed)), "logits")


def check_vision(case: Golden, name: str) -> None:
    """Tower and projector outputs of a vision case, and the patch embedding with its positions."""
    items, tower = case.images(name), case.model.vision
    assert tower is not None and case.model.projector is not None
    with torch.no_grad():
        pixels = torch.cat([item.pixels_N3PP for item in items])
        embedded_TD = tower.patch_embed(pixels, [item.grid_thw for item in items])
        case.check(f"{name}.patch_embed", embedded_TD, "vision")
        merged_T4D = tower(items)
        case.check(f"{name}.tower", merged_T4D, "vision")
        case.check(f"{name}.projected", case.model.projector(merged_T4D), "vision")


def check_merged(case: Golden, name: str) -> None:
    """Merged inputs, block sums, logits and loss of a text with images, from one placeholder per image."""
    packed, recorder = case.packed(name, case.images(name.replace("mm_", "vision_"))), Recorder()
    expanded = packed.expand(case.model.config.media_placeholder_token_id)
    assert torch.equal(expanded.token_ids_T, case.inputs[f"{name}.expanded_input_ids"][0])
    assert expanded.labels_T is not None
    assert torch.equal(expanded.labels_T, case.inputs[f"{name}.expanded_labels"][0])
    with torch.no_grad():
        case.check(f"{name}.inputs_embeds", case.model.inputs(packed), "vision")
        case.check(f"{name}.logits", case.model(packed, trace=recorder), "logits")
        case.check(f"{name}.loss", case.model.loss(packed).total, "loss")
    for i in range(case.model.config.text.num_hidden_layers):
        case.check(f"{name}.layer_{i:02d}.out", recorder.layer_outs[i], "hidden")
