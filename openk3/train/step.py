"""train_step: the one optimizer step; pretraining and every later kind of training differ in the loss alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from openk3.inputs.packed import IGNORE, Packed
from openk3.model.k3 import K3, Losses
from openk3.model.trace import Trace
from openk3.ops.saved import saving
from openk3.ops.sequences import remember_integers
from openk3.optim.qk_clip import apply_qk_clip
from openk3.optim.quantile_balance import largest_and_mean
from openk3.optim.schedule import learning_rate
from openk3.train.side_by_side import gradients_in_order
from openk3.train.state import TrainState

LossFunction = Callable[[K3, Packed, Trace], Losses]


def next_token_loss(mtp_loss_weight: float = 0.1) -> LossFunction:
    """Next-token cross-entropy plus the MTP layer's: the loss of pretraining."""

    def loss(model: K3, packed: Packed, trace: Trace) -> Losses:
        return model.loss(packed, trace, mtp_loss_weight)

    return loss


def count_targets(packed: Packed) -> tuple[int, int]:
    """(tokens that some position predicts, tokens that the MTP layer predicts from two before)."""
    labelled_T = (packed.token_ids_T if packed.labels_T is None else packed.labels_T) != IGNORE
    begin_N, end_N = packed.cu_seqlens[:-1].long(), packed.cu_seqlens[1:].long()
    first = int(labelled_T[begin_N[begin_N < end_N]].sum())
    second = int(labelled_T[begin_N[begin_N + 1 < end_N] + 1].sum())
    predicted = int(labelled_T.sum()) - first
    return predicted, predicted - second


def train_step(state: TrainState, batches: Sequence[Packed], loss: LossFunction | None = None) -> dict[str, float]:
    """Accumulate the micro-batches' gradients, update the weights once, then the router biases for the next step.

    Each token counts alike, however the tokens lie in micro-batches: `lm` means are weighted by `num_tokens`, whatever
    `total` has beyond them by `num_mtp_tokens`. Order after the backward passes: clip, Muon and AdamW, Quantile
    Balancing, QK-Clip (neither of the last two reads what the other one changes). Returns loss, lm, mtp, grad_norm, lr,
    max_load and mean_load (busiest expert over the mean expert: worst layer, and mean of the layers), max_logit,
    clipped_heads, tokens. Raises NonFiniteGradient with the state unchanged, and ValueError if no token has a label.
    """
    config = state.config
    loss = loss or next_token_loss(config.mtp_loss_weight)
    batches = [packed.expand(state.model.config.media_placeholder_token_id) for packed in batches]
    counts = [count_targets(packed) for packed in batches]
    all_next, all_mtp = (max(1, sum(pair[n] for pair in counts)) for n in (0, 1))
    if not any(next_tokens for next_tokens, _ in counts):
        raise ValueError("train_step: no token of the batch has a label")
    state.optimizer.zero_grad()
    state.balance.reset()
    shares = [(next_tokens / all_next, mtp_tokens / all_mtp) for next_tokens, mtp_tokens in counts]
    losses = _backward(state, batches, shares, loss)
    lr = learning_rate(state.step, state.total_steps, config.optim)
    grad_norm = state.optimizer.step(lr)
    # A GPU gets all work of the step before anything but the norm waits for it.
    logits, ratios_L = state.balance.max_logits, state.balance.ratios()
    state.balance.update()
    clipped = apply_qk_clip(state.model, state.optimizer, logits, config.optim.qk_clip_tau)
    max_load, mean_load = largest_and_mean(ratios_L)
    max_logit = float(torch.stack([value.max() for value in logits.values()]).max()) if logits else 0.0
    sums = {name: sum(torch.stack([values[name] for values in losses]).tolist()) for name in losses[0]}
    state.optimizer.zero_grad()
    tokens = sum(packed.num_tokens for packed in batches)
    state.step += 1
    state.tokens += tokens
    values = {"grad_norm": grad_norm, "lr": lr, "max_load": max_load, "mean_load": mean_load, "max_logit": max_logit}
    return {**sums, **values, "clipped_heads": clipped, "tokens": tokens}


def _backward(
    state: TrainState, batches: Sequence[Packed], shares: Sequence[tuple[float, float]], loss: LossFunction
) -> list[dict[str, Tensor]]:
    """Give the optimizer the step's gradient; returns the losses' shares. In order, whatever `workers`."""
    losses: list[dict[str, Tensor]] = [{} for _ in batches]

    def forward(n: int) -> Tensor:
        packed = batches[n].to(state.device)
        remember_integers(packed.cu_seqlens, batches[n].cu_seqlens.tolist())
        objective, losses[n] = _forward(state, packed, loss, shares[n])
        return objective

    jobs = [partial(forward, n) for n in range(len(batches))]
    if state.config.workers == 1 or len(jobs) == 1:
        for job in jobs:
            objective = job()
            with state.optimizer.adding():
                torch.autograd.backward(objective)
    else:
        for gradients in gradients_in_order(jobs, list(state.optimizer.parameters.values()), state.config.workers):
            state.optimizer.add_gradients(gradients)
    return losses


def _forward(
    state: TrainState, packed: Packed, loss: LossFunction, shares: tuple[float, float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """One micro-batch's share of the step's objective, and of the step's losses.

    The trace is closed before the backward pass, so that a layer that is computed again there is not counted twice.
    """
    next_share, mtp_share = shares
    state.balance.open()
    try:
        with saving(state.activations.groups()):
            losses = loss(state.model, packed, state.balance)
    finally:
        state.balance.close()
    objective = losses.lm * next_share
    if losses.total is not losses.lm:
        objective = objective + (losses.total - losses.lm) * (next_share if losses.mtp is None else mtp_share)
    mtp = torch.zeros_like(objective) if losses.mtp is None else losses.mtp.detach() * mtp_share
    return objective, {"loss": objective.detach(), "lm": losses.lm.detach() * next_share, "mtp": mtp}
