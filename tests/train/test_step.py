"""train_step: accumulation, token weights, E01, the order of updates, a custom loss."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_models import random_batch, small_model, small_run
from torch import Tensor

from openk3.inputs.packed import Packed
from openk3.model.k3 import K3, Losses
from openk3.model.trace import Trace
from openk3.optim.optimizer import NonFiniteGradient
from openk3.train.state import TrainState
from openk3.train.step import count_targets, train_step


def weights(state: TrainState) -> dict[str, Tensor]:
    """A copy of every parameter and buffer."""
    named = [*state.model.named_parameters(), *state.model.named_buffers()]
    return {name: value.detach().clone() for name, value in named}


def build(**changes: object) -> TrainState:
    """A fresh state in float64, so that sums in another order agree closely."""
    return TrainState.build(dataclasses.replace(small_run(), dtype="float64", **changes))  # pyrefly: ignore


def test_micro_batches_equal_one_batch() -> None:
    """Four unequal micro-batches give the gradient, losses and router biases of one batch with the same sequences."""
    lengths = (40, 3, 24, 17)
    whole = random_batch(0, lengths)
    parts = [Packed.join([ids]) for ids in whole.token_ids_T.split(lengths)]
    one, four = build(), build()
    first, second = train_step(one, [whole]), train_step(four, parts)
    for name in ("loss", "lm", "mtp", "grad_norm", "max_load", "mean_load", "max_logit"):
        assert first[name] == pytest.approx(second[name], rel=1e-9), name
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(four)[name], value, rtol=1e-6, atol=1e-8, msg=name)


def test_losses_are_the_models() -> None:
    """Reported values are the model's own means over the step, at the weights before the update."""
    state = build()
    expected = state.model.loss(random_batch(0), mtp_loss_weight=0.1)
    values = train_step(state, [random_batch(0)])
    assert values["loss"] == pytest.approx(float(expected.total.detach()), rel=1e-12)
    assert values["lm"] == pytest.approx(float(expected.lm.detach()), rel=1e-12)
    assert expected.mtp is not None and values["mtp"] == pytest.approx(float(expected.mtp.detach()), rel=1e-12)
    assert values["tokens"] == 64 and (state.step, state.tokens) == (1, 64)


def test_count_targets() -> None:
    """Labels at t + 1 and t + 2 inside their own sequence, without the ignored ones."""
    packed = Packed.join([[1, 2, 3, 4], [5], [6, 7, 8]], labels=[[1, -100, 3, 4], [5], [6, 7, -100]])
    assert count_targets(packed) == (3, 2)
    for lengths in ((0, 3, 0), (1, 0, 1, 2), (0,), (5, 1)):
        sequences = [[7] * length for length in lengths]
        labels = [[-100 if i % 3 == 2 else i for i in range(length)] for length in lengths]
        packed = Packed.join(sequences, labels=labels)
        next_T = packed.shifted_labels()
        after_T = dataclasses.replace(packed, labels_T=next_T).shifted_labels()
        assert count_targets(packed) == (int((next_T != -100).sum()), int((after_T != -100).sum()))


def test_biases_change_after_the_step_only() -> None:
    """The step is routed by the old bias throughout; the new one is in place for the next step."""
    seen: list[Tensor] = []

    def loss(model: K3, packed: Packed, trace: Trace) -> Losses:
        seen.append(model.layers[1].ffn.router.bias.clone())
        return model.loss(packed, trace)

    state = build()
    train_step(state, [random_batch(0), random_batch(1)], loss)
    after = state.model.layers[1].ffn.router.bias.clone()
    train_step(state, [random_batch(2)], loss)
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], after) and torch.equal(seen[2], after)


def test_recomputed_forward_is_not_counted_twice() -> None:
    """With activation checkpointing the second forward pass runs inside backward and adds no statistics."""

    def recomputed(model: K3, packed: Packed, trace: Trace) -> Losses:
        def total(x: Tensor) -> Tensor:
            return model.loss(packed, trace).total + 0 * x

        value = torch.utils.checkpoint.checkpoint(total, torch.zeros((), requires_grad=True), use_reentrant=False)
        return Losses(value, value, None, torch.tensor(1))

    plain, again = build(), build()
    train_step(plain, [random_batch(0)])
    train_step(again, [random_batch(0)], recomputed)
    for name, value in weights(plain).items():
        assert torch.equal(weights(again)[name], value), name


def test_idle_experts_only_decay() -> None:
    """E01: after a step that used every expert, all tokens go to experts 0 and 1: the others decay and nothing else."""
    state = build()
    train_step(state, [random_batch(0, (300,))])
    before = weights(state)
    lr = 0.0
    for seed in (1, 2):
        for router in state.balance.routers.values():
            router.bias.copy_(torch.tensor([10.0, 10.0, 0.0, 0.0]))
        lr = train_step(state, [random_batch(seed)])["lr"]
        for name, value in weights(state).items():
            if ".experts." in name:
                torch.testing.assert_close(value[2:], before[name][2:] * (1 - lr * 0.1), rtol=1e-12, atol=0, msg=name)
                assert (value[:2] - before[name][:2]).abs().max() > 1e-4
        before = weights(state)


def test_images_train_the_vision_tower() -> None:
    """An image in the batch moves tower and projector; a step without images leaves them as they are."""
    state = build()
    start = weights(state)
    train_step(state, [random_batch(0)])
    for name, value in weights(state).items():
        assert torch.equal(value, start[name]) or not name.startswith(("vision.", "projector."))
    train_step(state, [random_batch(0, images=2), random_batch(1)])
    moved = {name for name, value in weights(state).items() if not torch.equal(value, start[name])}
    assert {"vision.encoder.blocks.0.wqkv.weight", "projector.proj.0.weight", "embed.weight"} <= moved


def test_custom_loss_without_mtp() -> None:
    """Another kind of training passes its own loss; tokens stay the weights of the micro-batches."""

    def loss(model: K3, packed: Packed, trace: Trace) -> Losses:
        value = model.hidden(packed, trace=trace).pow(2).mean()
        return Losses(value, value, None, torch.tensor(packed.num_tokens))

    state = build()
    values = train_step(state, [random_batch(0), random_batch(1)], loss)
    assert values["loss"] == values["lm"] > 0 and values["mtp"] == 0


def test_diverged_step_changes_nothing() -> None:
    """A NaN weight gives NaN gradients: the step is refused, and step count, biases and other weights stay."""
    state = build()
    train_step(state, [random_batch(0)])
    with torch.no_grad():
        state.model.lm_head.weight[0, 0] = torch.nan
    before = weights(state)
    with pytest.raises(
        NonFiniteGradient, match=r"gradient not finite: .*values\).* and \d+ more; the step was refused"
    ):
        train_step(state, [random_batch(1)])
    assert state.step == 1
    for name, value in weights(state).items():
        assert torch.equal(value.nan_to_num(7), before[name].nan_to_num(7)), name


def test_batch_without_labels_is_refused() -> None:
    """Nothing to learn from is an error, not a NaN."""
    packed = Packed.join([[1, 2, 3]], labels=[[-100, -100, -100]])
    for batches in ([packed], [], [Packed.join([])]):
        with pytest.raises(ValueError, match="no token of the batch has a label"):
            train_step(build(), batches)


def test_bfloat16_model_learns() -> None:
    """Ten steps on one batch in bfloat16 with float32 masters lower the loss."""
    config = dataclasses.replace(small_run(), dtype="bfloat16", model=small_model(num_nextn_predict_layers=0))
    state = TrainState.build(config)
    losses = [train_step(state, [random_batch(0)])["loss"] for _ in range(10)]
    assert losses[-1] < losses[0] - 0.5
