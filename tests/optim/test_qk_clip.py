"""QK-Clip: factors, which rows shrink, and the effect on the logits."""

from __future__ import annotations

import dataclasses

import torch
from small_models import random_batch, small_model, small_run

from openk3.model.k3 import K3
from openk3.model.trace import Recorder
from openk3.optim.groups import build_optimizer
from openk3.optim.qk_clip import apply_qk_clip, clip_factors, clip_heads
from openk3.train.state import TrainState
from openk3.train.step import train_step


def test_factors() -> None:
    """tau / max above the bound; 1 at, below, for negative and for masked-out heads."""
    gamma = clip_factors(torch.tensor([400.0, 100.0, 5.0, -3.0, -torch.inf]), 100.0)
    assert gamma.tolist() == [0.25, 1.0, 1.0, 1.0, 1.0]


def test_rows_that_shrink() -> None:
    """Content rows of q and k by sqrt(gamma), q's shared rows by gamma, value rows and unclipped heads not at all."""
    q_b, kv_b = torch.ones(2 * (3 + 2), 4), torch.ones(2 * (3 + 5), 6)
    clip_heads(q_b, kv_b, torch.tensor([0.25, 1.0]), nope=3)
    assert q_b.mean(1).tolist() == [0.5, 0.5, 0.5, 0.25, 0.25, 1, 1, 1, 1, 1]
    assert kv_b.mean(1).tolist() == [0.5, 0.5, 0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]


def test_logits_come_down_to_tau() -> None:
    """After a clip the same batch's largest logit is tau in each clipped head, and unchanged in the others."""
    model = K3.build(small_model(num_nextn_predict_layers=0), seed=0)
    optimizer = build_optimizer(model, small_run().optim)
    batch, before, after = random_batch(0), Recorder(), Recorder()
    model.loss(batch, before)
    logits = before.max_logits[1]
    tau = float(logits.min() + logits.max()) / 2
    shared = model.layers[1].mixer.kv_a_proj_with_mqa.weight.clone()
    assert apply_qk_clip(model, optimizer, before.max_logits, tau) == 1
    model.loss(batch, after)
    torch.testing.assert_close(after.max_logits[1], logits.clamp_max(tau), rtol=1e-5, atol=1e-6)
    assert torch.equal(shared, model.layers[1].mixer.kv_a_proj_with_mqa.weight)


def test_train_step_clips_after_the_update() -> None:
    """Logits forced above a low tau: the step reports its heads, and the weights shrink beside the update."""
    config = small_run()
    free = TrainState.build(dataclasses.replace(config, optim=dataclasses.replace(config.optim, qk_clip_tau=0.0)))
    tight = TrainState.build(dataclasses.replace(config, optim=dataclasses.replace(config.optim, qk_clip_tau=1e-6)))
    loose = train_step(free, [random_batch(0)])
    clipped = train_step(tight, [random_batch(0)])
    assert loose["clipped_heads"] == 0 and loose["max_logit"] == 0
    assert clipped["clipped_heads"] == 4 and clipped["max_logit"] > 1e-6
    for name, parameter in tight.model.named_parameters():
        other = free.model.get_parameter(name)
        if name.endswith(("q_b_proj.weight", "kv_b_proj.weight")):
            assert parameter.norm() < other.norm()
        else:
            assert torch.equal(parameter, other), name
