"""Decoding steps of few tokens on a GPU: the same bits as graphs, without them, and with kernels that start early."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from kda_kernel_checks import poisoned_memory
from torch import Tensor

from openk3.config.model import ModelConfig, schedule
from openk3.inputs.packed import Packed
from openk3.model.decoder import Decoder
from openk3.model.k3 import K3
from openk3.model.moe import Router
from openk3.ops.few import linear
from openk3.recipes import small

pytestmark = pytest.mark.gpu
IDS = [[5, 7, 900, 11, 44, 3], [9, 2, 3, 4, 5, 6], [1000, 33, 2, 8, 7, 1]]


def config() -> ModelConfig:
    """Five layers of `small`, one of them MLA."""
    whole = small.model()
    kda, full = schedule(5)
    heads = replace(whole.text.linear_attn_config, kda_layers=kda, full_attn_layers=full)
    text = replace(
        whole.text, num_hidden_layers=5, linear_attn_config=heads, vocab_size=2048, num_nextn_predict_layers=0
    )
    ids = {"media_placeholder_token_id": 2000, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    return replace(whole, text=text, vision=None, **ids)


@pytest.fixture(scope="module")
def model() -> K3:
    """In bfloat16 on the GPU."""
    model = K3.empty(config(), dtype=torch.bfloat16, device="cuda").eval()
    torch.manual_seed(0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        with torch.no_grad():
            tensor.normal_(std=0.02) if tensor.ndim > 1 else tensor.fill_(float("norm" in name))
    return model


def steps(model: K3, count: int, *, graphs: bool) -> Tensor:
    """Logits behind six tokens of `count` of three sequences, from empty slots; one place stands empty with three."""
    decoder = Decoder(model, slots=5, max_tokens=8, graphs=graphs)
    for t in range(6):
        logits = decoder.step([3, 0, 4][:count], [row[t] for row in IDS[:count]])
    return logits.clone()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_same_bits(model: K3, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With early starts and without, in graphs and eager, twice, and whatever memory held before."""
    want = steps(model, count, graphs=True)
    assert torch.isfinite(want).all()
    assert torch.equal(want, steps(model, count, graphs=True))
    assert torch.equal(want, steps(model, count, graphs=False))
    with poisoned_memory():
        assert torch.equal(want, steps(model, count, graphs=False))
    monkeypatch.setenv("OPENK3_EARLY", "0")
    assert torch.equal(want, steps(model, count, graphs=True))


@pytest.fixture
def fixed_routes(model: K3) -> Iterator[None]:
    """Every token of a layer goes to the same experts, with the weights of its own scores, which lie between 0 and 1.

    With choices that differ by a last digit, logits of random weights are far apart (docs/gpu_stack/decode.md).
    """
    biases = [module.bias for module in model.modules() if isinstance(module, Router)]
    for number, bias in enumerate(biases):
        bias[number :: len(bias) // model.config.text.num_experts_per_token] = 2
    yield
    for bias in biases:
        bias.zero_()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.usefixtures("fixed_routes")
def test_against_float64(model: K3, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to float64 as the kernels for many tokens are, and near; kernels that read depth themselves included."""
    wide = K3.empty(config(), dtype=torch.float64).eval()
    wide.load_state_dict({name: value.double().cpu() for name, value in model.state_dict().items()})
    with torch.no_grad():
        want = torch.stack([wide(Packed.join([row]))[-1] for row in IDS[:count]])

    def off() -> float:
        got = steps(model, count, graphs=False).double().cpu()
        return float((got - want).norm() / want.norm())

    few = off()
    monkeypatch.setattr(linear, "MOST_TOKENS", 0)
    many = off()
    assert few < 1.5 * many + 1e-3 and max(few, many) < 0.05, (few, many)
