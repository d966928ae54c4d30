"""Training under activation policies: the same bits where nothing is rounded, counted once, and how far FP8 is off."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from activation_checks import LiveMemory, policies
from hypothesis import given, settings
from small_models import random_batch, small_model, small_run
from torch import Tensor

from openk3 import recipes
from openk3.config.activations import PRESETS, ActivationPolicy
from openk3.inputs.packed import Packed
from openk3.model import moe
from openk3.model.accounting import account
from openk3.model.k3 import K3
from openk3.model.saved_bytes import USABLE, Form, saved, state_bytes
from openk3.model.trace import Recorder
from openk3.ops.routing import Routes
from openk3.ops.saved import saving
from openk3.train import activations
from openk3.train.state import TrainState
from openk3.train.step import train_step

MODELS = {dtype: K3.build(small_model(), seed=1, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}


def gradients(model: K3, policy: ActivationPolicy, packed: Packed) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients; the forward pass alone is under the policy."""
    model.zero_grad()
    with saving(policy.groups()):
        loss = model.loss(packed).total
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", MODELS)
@given(policy=policies(exact=True))
@settings(max_examples=8)
def test_exact_policies_give_the_same_bits(dtype: torch.dtype, policy: ActivationPolicy) -> None:
    """Loss and every gradient, with two sequences, two images and the MTP layer; no random number is drawn."""
    packed = random_batch(3, (29, 17), images=2)
    loss, want = gradients(MODELS[dtype], ActivationPolicy(), packed)
    state = torch.get_rng_state()
    again, got = gradients(MODELS[dtype], policy, packed)
    assert torch.equal(loss, again) and want.keys() == got.keys() and len(want) > 60
    for name in want:
        assert torch.equal(want[name], got[name]), name
    assert torch.equal(state, torch.get_rng_state())


@given(policy=policies())
@settings(max_examples=8)
def test_any_policy_leaves_the_forward_pass_alone(policy: ActivationPolicy) -> None:
    """FP8 is for the backward pass; its gradients are finite and near: the same direction within a few percent."""
    packed = random_batch(4, (29, 17), images=1)
    loss, want = gradients(MODELS[torch.float32], ActivationPolicy(), packed)
    again, got = gradients(MODELS[torch.float32], policy, packed)
    assert torch.equal(loss, again)
    one, other = (torch.cat([x.flatten() for x in each.values()]) for each in (want, got))
    assert float((one - other).norm()) < 0.05 * float(one.norm())


def test_full_attention_residuals_and_odd_widths() -> None:
    """Every sub-layer's output a source of its own; widths that no block of 32 divides."""
    model = K3.build(small_model(attn_res_mode="full", moe_intermediate_size=20, q_lora_rank=12), seed=1)
    packed = random_batch(5, (9, 1, 22))
    loss, want = gradients(model, ActivationPolicy(), packed)
    for preset in PRESETS:
        policy = ActivationPolicy.parse(preset)
        again, got = gradients(model, policy, packed)
        assert torch.equal(loss, again)
        for name in want:
            error = float((want[name] - got[name]).norm())
            assert error == 0 if policy.is_exact else error < 0.3 * float(want[name].norm()) + 1e-6, name


@pytest.mark.parametrize("preset", ["selective", "memory", "full"])
def test_routes_are_made_once_or_alike(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is computed again sends every token where it went before, and no trace hears of it."""
    found: list[Routes] = []
    heard: list[int] = []
    route = moe.route

    def noted(*args: object, **options: object) -> Routes:
        found.append(route(*args, **options))  # pyrefly: ignore
        return found[-1]

    class Counting(Recorder):
        def routing(self, layer: int, scores_TE: Tensor, bias_E: Tensor, routes: Routes) -> None:
            heard.append(layer)

        def max_logit(self, layer: int, max_H: Tensor) -> None:
            heard.append(100 + layer)

    monkeypatch.setattr(moe, "route", noted)
    model, packed = MODELS[torch.float32], random_batch(3)
    with saving(ActivationPolicy.parse(preset).groups()):
        loss = model.loss(packed, Counting()).total
    first = list(found)
    assert sorted(heard) == [1, 2, 101, 102] and len(first) == 2
    loss.backward()
    assert sorted(heard) == [1, 2, 101, 102]
    again = found[len(first) :]
    assert len(again) == (2 if preset == "full" else 0)
    for one, other in zip(first, reversed(again)):
        assert all(torch.equal(a, b) for a, b in zip(one[:3], other[:3]))  # without loads, which nobody asked for


@pytest.mark.parametrize("changes", [{}, {"workers": 2}])
@pytest.mark.parametrize("policy", ["selective", "full", "selective,moe_hidden=recompute"])
def test_training_is_the_same(policy: str, changes: dict[str, int]) -> None:
    """Weights, router biases and every reported value of two steps: balancing and QK-Clip count each token once."""

    def trained(activations: str) -> tuple[list[dict[str, float]], list[Tensor]]:
        state = TrainState.build(small_run(activations=activations, **changes))
        rows = [train_step(state, [random_batch(10 * step + n, images=n % 2) for n in range(2)]) for step in range(2)]
        return rows, [*state.model.parameters(), *state.model.buffers()]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (rows, weights), (other_rows, other_weights) = trained("none"), trained(policy)
    finally:
        torch.set_num_threads(threads)
    assert rows == other_rows
    assert all(map(torch.equal, weights, other_weights))


@pytest.mark.parametrize("policy", ["none", "selective", "memory", "full"])
def test_memory_that_is_really_held(policy: str) -> None:
    """The books, counted by the hooks, are what is alive behind a forward pass; and nothing is left behind a step."""
    model = MODELS[torch.float32]
    own = [*model.parameters(), *model.buffers()]
    packed = random_batch(3, (48, 80), images=1)
    model.loss(packed)  # tables of this layout are made and remembered
    model.zero_grad()
    with LiveMemory() as memory:
        with saving(ActivationPolicy.parse(policy).groups(), beside=own) as books:
            loss = model.loss(packed).total
            held = sum(books.bytes().values())
        alive = memory.bytes(own)
        assert held <= alive <= 1.03 * held + 4096
        gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        left = memory.bytes([*own, *(x for x in gradients if x is not None)])
    assert left < 0.03 * held + 4096


def test_auto_makes_again_what_the_device_has_no_room_for() -> None:
    """Less memory, more made again; always exact; everything but the sources at last."""
    config = dataclasses.replace(recipes.pretrain("small"), activations="auto")
    state = state_bytes(account(config.model))
    tokens = config.data.micro_batch_tokens
    form = Form(length=max(length for _, length in config.data.stages))
    whole = saved(config.model, ActivationPolicy(), form).peak(tokens)
    found = []
    for share in (1.01, 0.9, 0.6, 0.05):
        room = share * whole
        policy = activations.auto(config, (room + state) / USABLE, form)
        assert policy.is_exact
        found.append(saved(config.model, policy, form))
        if share > 0.1:
            assert found[-1].peak(tokens) <= room
    assert activations.auto(config, 2 * (whole + state), form) == ActivationPolicy()
    assert activations.auto(config, state, form) == ActivationPolicy.parse("full")
    assert [books.total for books in found] == sorted((books.total for books in found), reverse=True)
    assert [books.flops for books in found] == sorted(books.flops for books in found)


def test_auto_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is built with what fits; a system that does not say how much memory it has keeps everything."""
    config = small_run(activations="auto")
    for memory, policy in ((None, "none"), (2**40, "none"), (1, "full")):
        monkeypatch.setattr(activations, "total_memory", lambda device, memory=memory: memory)
        assert str(TrainState.build(config).activations) == policy
