"""HostStep: passes of single tokens on a CPU give what the modules give, whatever shapes, pages and company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from openk3 import recipes
from openk3.config.model import ModelConfig
from openk3.config.serve import CacheConfig, EngineConfig
from openk3.engine import host_pages, host_step
from openk3.engine.engine import Engine
from openk3.engine.host_moe import HostFeedForward, situ
from openk3.engine.host_step import HostStep
from openk3.engine.request import Request, SamplingParams
from openk3.inputs.packed import Packed
from openk3.model.k3 import K3
from openk3.ops.situ import situ_glu


def model_of(dtype: torch.dtype = torch.float64, **changes: object) -> K3:
    """`tiny` with other numbers everywhere that a fresh model has zeros and ones, so that every part counts."""
    config: ModelConfig = recipes.model("tiny")
    config = replace(config, vision=None, text=replace(config.text, **changes))  # pyrefly: ignore
    model = K3.build(config, seed=3, dtype=dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.ndim == 1 and "dt_bias" not in name:
            value += 0.3 * torch.randn(value.shape, generator=generator, dtype=torch.float32).to(dtype)
    return model


def engine_of(model: K3, **options: int) -> Engine:
    """Small pages whose memory holds no numbers at first."""
    width = model.embed.weight.element_size()
    cache = CacheConfig.of(model.config, 1 << 23, value_bytes=width, max_tokens=256)
    one = Engine(model, EngineConfig(cache, **options))
    one._loop.runner.memory.poison(range(cache.num_pages))
    return one


def answers(one: Engine, lengths: list[int], count: int) -> list[list[tuple[int, float]]]:
    """Greedy ones, of prompts of these lengths."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 700, (length,), generator=generator).tolist() for length in lengths]
    found = one.generate([Request(ids, SamplingParams(max_tokens=count, temperature=0)) for ids in prompts])
    for ids, answer in zip(prompts, found):
        assert answer.finish.error is None
        check(one._loop.runner.model, ids, answer.tokens)
    return [[(token.id, token.logprob) for token in answer.tokens] for answer in found]


@torch.no_grad()
def check(model: K3, ids: list[int], tokens: object) -> None:
    """Each is the most likely one of the plain forward pass, with its log-probability."""
    found = list(tokens)  # pyrefly: ignore
    logits_TV = model(Packed.join([[*ids, *(token.id for token in found)]]))[len(ids) - 1 : -1]
    digits = 1e-10 if logits_TV.dtype == torch.float64 else 1e-4
    best_TV = logits_TV.log_softmax(-1)
    assert [token.id for token in found] == best_TV.argmax(-1).tolist()
    want = best_TV.max(-1).values.tolist()
    assert max(abs(a - token.logprob) for a, token in zip(want, found)) < digits


SHAPES = {
    "tiny": {},
    "one expert each": {"num_experts_per_token": 1, "num_shared_experts": 0},
    "all experts": {"num_experts_per_token": 8},
    "groups of experts": {"num_expert_group": 4, "topk_group": 2},
    "weights as they are": {"moe_renormalize": False},
    "no output gate": {"mla_use_output_gate": False},
    "one block": {"attn_res_block_size": 8},
    "blocks of one": {"attn_res_block_size": 1},
}


@pytest.mark.parametrize("name", SHAPES)
def test_as_the_modules(name: str) -> None:
    """Requests of many lengths at once, some of one token, in pages of which most hold garbage."""
    answers(engine_of(model_of(**SHAPES[name])), [1, 30, 2, 47, 48, 96], 6)


def test_float32_and_kernels_for_experts() -> None:
    """The format that is served: experts by torch's grouped product."""
    answers(engine_of(model_of(torch.float32)), [5, 60, 17], 6)


def test_without_room_for_mixtures_of_depth_the_modules_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts beside decoding requests: the same answers from the step and from the modules."""
    calls, run = list[int](), HostStep.__call__

    def counting(step: HostStep, x_TD: Tensor) -> Tensor:
        calls.append(len(x_TD))
        return run(step, x_TD)

    monkeypatch.setattr(HostStep, "__call__", counting)
    model, lengths = model_of(), [3, 4, 5, 6, 90, 91]
    stepped = answers(engine_of(model, step_tokens=16), lengths, 9)
    assert max(calls) == 16 and min(calls) < 16
    calls.clear()
    monkeypatch.setattr(host_step, "MOST_MIXED", 0)
    by_modules = answers(engine_of(model, step_tokens=16), lengths, 9)
    assert not calls
    assert [[id for id, _ in each] for each in stepped] == [[id for id, _ in each] for each in by_modules]


def test_pages_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """More latents than may be gathered at once: several gathers, the same answers."""
    model = model_of()
    whole = answers(engine_of(model), [40, 1, 100, 30], 4)
    monkeypatch.setattr(host_pages, "MOST_VALUES", 1)
    assert [[id for id, _ in each] for each in answers(engine_of(model), [40, 1, 100, 30], 4)] == [
        [id for id, _ in each] for each in whole
    ]


def test_equal_scores_take_the_lower_expert() -> None:
    """A router of zeros: all scores are equal, and the choice is `route`'s."""
    model = model_of()
    for layer in model.layers:
        if hasattr(layer.ffn, "router"):
            layer.ffn.router.weight.zero_()  # pyrefly: ignore
            layer.ffn.router.bias.zero_()  # pyrefly: ignore
    answers(engine_of(model), [9, 10], 4)


def test_new_weights_are_read_anew() -> None:
    """What was computed from the old ones is not kept."""
    model = model_of()
    one = engine_of(model)
    before = answers(one, [7], 5)
    for name, value in model.named_parameters():
        value.mul_(1.5 if "conv" in name or "norm" in name else 0.9)
    one.load_weights(model)
    assert answers(one, [7], 5) != before


def test_where_it_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to narrow formats, nor to the full form of depth, nor where kernels are asked for."""
    model = model_of(torch.float32)
    assert HostStep.applies(model) and not HostStep.applies(model_of(attn_res_mode="full"))
    assert not HostStep.applies(model_of(torch.bfloat16))


@pytest.mark.parametrize("linear_beta", [None, 2.5])
@pytest.mark.parametrize("size", [7, 7000])
def test_situ(size: int, linear_beta: float | None) -> None:
    """The same function as the one that training uses."""
    gate, up = torch.randn(2, 5, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).mul(3).unbind()
    torch.testing.assert_close(situ(gate, up, 1.5, linear_beta), situ_glu(gate, up, 1.5, linear_beta))


def test_parts_that_run_as_they_are() -> None:
    """A feed-forward part of another kind, such as one that keeps its experts elsewhere."""

    class Half(torch.nn.Module):
        def forward(self, x_ND: Tensor, trace: object) -> Tensor:
            return x_ND / 2

    x_ND = torch.randn(3, 4)
    assert torch.equal(HostFeedForward(Half(), x_ND.dtype)(x_ND, None), x_ND / 2)
