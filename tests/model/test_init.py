"""Initial values: what each kind of tensor starts as, and what the values depend on."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_model import tiny_config

from openk3 import K3, ModelConfig, Packed
from openk3.config.model import LinearAttnConfig, TextConfig, schedule
from openk3.model.accounting import account
from openk3.model.init import stored_dtype
from openk3.model.trace import Recorder
from openk3.ops.kda.reference import KdaGate, kda_gate

CONFIG = tiny_config(hidden_size=64, vocab_size=400)
STATE = K3.build(CONFIG, seed=1).state_dict()


def test_special_values() -> None:
    """Depth queries, A_log and router bias 0; every norm 1; nothing left unset."""
    for name, value in STATE.items():
        if name.endswith(("_query.proj", "A_log", "router.bias")):
            assert not value.any(), name
        elif "norm" in name:
            assert torch.equal(value, torch.ones_like(value)), name
        else:
            assert value.isfinite().all() and value.std() > 0, name


def test_distributions() -> None:
    """Standard deviations and bounds by kind."""
    std = {name: float(value.std()) for name, value in STATE.items()}
    for name in ("embed.weight", "lm_head.weight", "layers.0.mixer.q_proj.weight", "layers.1.ffn.experts.w1_EIC"):
        assert std[name] == pytest.approx(0.02, rel=0.06), name
    bounds = {"layers.1.ffn.router.weight": 64**-0.5, "layers.0.mixer.q_conv1d.weight": 0.5}
    for name, bound in bounds.items():
        assert float(STATE[name].abs().max()) == pytest.approx(bound, rel=0.05)
        assert float(STATE[name].abs().max()) <= bound
    assert std["vision.patch_embed.pos_emb.weight"] == pytest.approx(1.0, rel=0.15)
    for name, gain in (("vision.encoder.blocks.0.mlp.fc0.weight", 2), ("projector.proj.0.weight", 2),
                       ("vision.encoder.blocks.0.wqkv.weight", 1), ("vision.patch_embed.proj.weight", 1)):  # fmt: skip
        want = math.sqrt(gain / STATE[name][0].numel())
        assert float(STATE[name].abs().max()) <= 2 * want
        assert std[name] == pytest.approx(0.88 * want, rel=0.1), name  # a normal cut at two sigma


def test_decay_starts_slow() -> None:
    """dt_bias makes the first log decay lie between -0.005 and -0.5 (A_log 0, no input)."""
    bias_HK = STATE["layers.0.mixer.dt_bias"].view(2, 16)
    step = torch.nn.functional.softplus(bias_HK)
    assert step.min() >= 0.999e-3 and step.max() <= 0.1001
    g = kda_gate(torch.zeros(1, 2, 16), KdaGate(torch.zeros(2), bias_HK))
    assert g.min() > -0.5 and g.max() < -0.004


def test_values_depend_on_seed_and_name_only() -> None:
    """Not on dtype, other tensors or the default device; another seed gives other values."""
    again = K3.build(CONFIG, seed=1).state_dict()
    wide = K3.build(CONFIG, seed=1, dtype=torch.float64).state_dict()
    blind = K3.build(tiny_config(vision=False, hidden_size=64, vocab_size=400, num_nextn_predict_layers=0), seed=1)
    other = K3.build(CONFIG, seed=2).state_dict()
    for name, value in STATE.items():
        assert torch.equal(value, again[name]) and torch.equal(value, wide[name].float()), name
        if value.std() > 0:
            assert not torch.equal(value, other[name]), name
    assert all(torch.equal(value, STATE[name]) for name, value in blind.state_dict().items())
    assert not torch.equal(STATE["layers.0.mixer.q_proj.weight"], STATE["layers.0.mixer.k_proj.weight"])
    experts = STATE["layers.1.ffn.experts.w1_EIC"]
    assert not torch.equal(experts[0], experts[1])


def test_global_random_state_is_left_alone() -> None:
    """Building a model draws from its own generators."""
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    K3.build(tiny_config(), seed=9)
    assert torch.equal(torch.rand(1), want)


def test_released_size_on_the_meta_device() -> None:
    """All 2.78T parameters without memory; the count is what the accounting says (which pads A_log to 128)."""
    kda, full = schedule(93)
    linear = LinearAttnConfig(kda_layers=kda, full_attn_layers=full)
    config = ModelConfig(text=TextConfig(linear_attn_config=linear))
    model = K3.empty(config, dtype=torch.bfloat16, device="meta")
    count = sum(value.numel() for value in model.state_dict().values())
    assert count + 69 * 32 == account(config).total == 2_779_931_837_184
    for name, value in model.state_dict().items():
        assert value.is_meta and value.dtype == stored_dtype(name, torch.bfloat16)


def test_fresh_model_is_close_to_uniform() -> None:
    """Step 0: loss near log(vocabulary), all experts in use, depth weights flat."""
    model, recorder = K3.build(CONFIG, seed=4), Recorder()
    ids = torch.randint(6, 400, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        loss = model.loss(Packed.join([ids]), trace=recorder)
    assert float(loss.lm) == pytest.approx(math.log(400), rel=0.03)
    assert len(recorder.routes[1].expert_ids_Tk.unique()) == 6


@pytest.mark.parametrize("dtype", ["float32", torch.int8, torch.complex64, None])
def test_only_floating_point_models(dtype: object) -> None:
    """Names and integer formats are refused in one line."""
    with pytest.raises(ValueError, match="dtype: expected a floating-point one such as torch.bfloat16, got"):
        K3.build(CONFIG, dtype=dtype)  # pyrefly: ignore


def test_maps_of_one_input_lie_together() -> None:
    """Weights that multiply the same input are one piece of memory, in the order in which they are used."""
    model = K3.build(CONFIG, seed=0)
    for module in model.modules():
        weights = [module.get_submodule(name).weight for name in getattr(module, "joint", ())]
        ends = [weight.data_ptr() + weight.numel() * weight.element_size() for weight in weights]
        assert [weight.data_ptr() for weight in weights[1:]] == ends[:-1]
        assert len({weight.untyped_storage().data_ptr() for weight in weights}) <= 1
