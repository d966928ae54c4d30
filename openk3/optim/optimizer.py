"""Optimizer: gradients in, Muon and AdamW steps out, with float32 masters and a state named after the parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from openk3.config.train import OptimConfig
from openk3.ops.backend import pick
from openk3.ops.gradient_sums import GradientSum, keep_sum
from openk3.ops.norm import at_least_float32
from openk3.optim.adamw import Moments, adamw_ready
from openk3.optim.muon import Member, muon_ready

WIDENED_BY_KERNEL = 1 << 21  # values of a gradient


class NonFiniteGradient(ArithmeticError):
    """A gradient is NaN or infinite. The step was refused: weights and optimizer state are as before."""


class Optimizer:
    """Updates parameters by name. A parameter without a gradient in a step is left alone, decay included.

    Weights below float32 have a float32 master that takes the updates, and their gradients of several micro-batches
    are summed in float32.
    """

    def __init__(self, config: OptimConfig) -> None:
        self.config = config
        self.parameters: dict[str, nn.Parameter] = {}
        self.masters: dict[str, Tensor] = {}
        self.muon: dict[str, Member] = {}
        self.adamw: dict[str, Moments] = {}
        self._wide_gradients: dict[str, Tensor] = {}
        self._sums: list[GradientSum] = []
        self._waiting: dict[str, Tensor] | None = None  # narrow gradients of the micro-batch that `adding` is at

    def add(self, name: str, parameter: nn.Parameter, *, blocks: int, decays: bool) -> None:
        """Take charge of a parameter: Muon in `blocks` pieces, or AdamW if `blocks` is 0."""
        self.parameters[name] = parameter
        weight, narrow = at_least_float32(parameter.detach()), None
        if weight.dtype != parameter.dtype:
            self.masters[name], narrow = weight, parameter.detach()
            parameter.register_post_accumulate_grad_hook(_widening(weakref.ref(self), name))
            self._sums.append(GradientSum(self._wide_gradients, name))
            keep_sum(parameter, self._sums[-1])
        decay = self.config.weight_decay if decays else 0.0
        if blocks:
            self.muon[name] = Member.of(name, weight, blocks, decay, narrow)
        else:
            self.adamw[name] = Moments.of(name, weight, decay, narrow)

    def _widen(self, name: str, parameter: Tensor) -> None:
        """Move a narrow gradient into its float32 sum as soon as backward has made it."""
        gradient = parameter.grad
        if gradient is None:  # a backward pass has added it by itself
            return
        parameter.grad = None
        if self._waiting is not None and gradient.numel() < WIDENED_BY_KERNEL and gradient.is_contiguous():
            self._waiting[name] = gradient
        else:
            self._wide_gradients[name] = _widened(gradient, self._wide_gradients.get(name))

    @contextmanager
    def adding(self) -> Generator[None]:
        """One backward pass inside may add gradients to the float32 sums by itself; small ones are added at the end.

        Hundreds of small sums as one operation: on a GPU each would take longer to begin than to add.
        """
        for total in self._sums:
            total.is_open = True
        self._waiting = {}
        try:
            yield
            self._add_waiting(self._waiting)
        finally:
            self._waiting = None
            for total in self._sums:
                total.is_open = False

    @torch.no_grad()
    def _add_waiting(self, waiting: dict[str, Tensor]) -> None:
        new = {name: torch.empty_like(gradient, dtype=torch.float32) for name, gradient in waiting.items()}
        if new:
            torch._foreach_copy_(list(new.values()), list(waiting.values()))
        old = {name: total for name, total in self._wide_gradients.items() if name in new}
        if old:
            torch._foreach_add_(list(old.values()), [new[name] for name in old])
        self._wide_gradients |= {name: total for name, total in new.items() if name not in old}

    def add_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients that were computed apart, one per parameter in order, as a backward pass would add them."""
        for (name, parameter), gradient in zip(self.parameters.items(), gradients, strict=True):
            if gradient is None:
                continue
            # A copy: two gradients that autograd returns may be one tensor.
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
            if name in self.masters:
                self._widen(name, parameter)

    def weight(self, name: str) -> Tensor:
        """What the updates go to: the float32 master, or the parameter itself."""
        return self.masters.get(name, self.parameters[name].detach())

    def gradients(self) -> dict[str, Tensor]:
        """The gradients summed since `zero_grad`, by parameter name; parameters without one are missing."""
        found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        return {**found, **self._wide_gradients}

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self._wide_gradients.clear()

    def step(self, lr: float) -> float:
        """Clip to the global norm, update every weight that has a gradient; returns the norm before clipping.

        Raises NonFiniteGradient, naming the parameters, before anything has changed.
        """
        gradients = self.gradients()
        norm_0 = get_total_norm(list(gradients.values())) if gradients else 0.0
        updates = self._updates(gradients, lr)  # while a GPU is at work on gradients and norm
        norm = float(norm_0)
        if not norm < float("inf"):
            raise NonFiniteGradient(_diagnosis(gradients, norm))
        clip = self.config.clip_norm / norm if norm > self.config.clip_norm else 1.0
        for update in updates:
            update(clip)
        return norm

    def _updates(self, gradients: dict[str, Tensor], lr: float) -> list[Callable[[float], None]]:
        """What a step does to weights and state, ready to be called with the factor that gradients are clipped by."""
        config = self.config
        by_shape: dict[tuple[int, int], list[tuple[Member, Tensor]]] = {}
        others: list[tuple[Moments, Tensor]] = []
        for name, gradient in gradients.items():
            if name in self.muon:
                by_shape.setdefault(self.muon[name].shape, []).append((self.muon[name], gradient))
            else:
                others.append((self.adamw[name], gradient))
        muon = {"momentum": config.momentum, "steps": config.newton_schulz_steps, "scale": config.update_scale}
        updates = [adamw_ready(others, lr * config.adamw_lr_scale, config)]
        return updates + [muon_ready(pairs, lr, **muon) for pairs in by_shape.values()]

    @torch.no_grad()
    def publish(self, names: Iterable[str]) -> None:
        """Copy the masters of these parameters into the model."""
        for name in names:
            if name in self.masters:
                self.parameters[name].copy_(self.masters[name])

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors themselves, so that a checkpoint reads them and a load writes into them."""
        state = {f"master.{name}": master for name, master in self.masters.items()}
        state |= {f"momentum.{name}": member.momentum_BMN for name, member in self.muon.items()}
        for name, moments in self.adamw.items():
            state[f"mean.{name}"], state[f"square.{name}"] = moments.mean, moments.square
            state[f"count.{name}"] = moments.count
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy in what `state_dict` gave. Raises KeyError if a tensor is missing."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
        self.publish(self.masters)


def _widening(optimizer: weakref.ref[Optimizer], name: str) -> Callable[[Tensor], None]:
    """`Optimizer._widen` for a parameter's hook, by which a parameter must not keep the optimizer alive, unseen."""

    def widen(parameter: Tensor) -> None:
        found = optimizer()
        if found is not None:
            found._widen(name, parameter)

    return widen


def _widened(gradient: Tensor, total: Tensor | None) -> Tensor:
    """The float32 sum with a narrow gradient added; large ones by a kernel, which for small ones saves nothing."""
    contiguous = gradient.is_contiguous() and (total is None or total.is_contiguous())
    if gradient.numel() >= WIDENED_BY_KERNEL and contiguous and pick("widen", gradient) == "triton":
        from openk3.ops.optimizer_fused import widen_kernels

        return widen_kernels(gradient, total)
    return at_least_float32(gradient) if total is None else total.add_(gradient)


def _diagnosis(gradients: dict[str, Tensor], norm: float) -> str:
    counts = {name: int((~torch.isfinite(gradient)).sum()) for name, gradient in gradients.items()}
    bad = [f"{name} ({count} of {gradients[name].numel()} values)" for name, count in counts.items() if count]
    if not bad:
        return f"gradient norm {norm}: every gradient is finite, but their squares overflow; the step was refused"
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return f"gradient not finite: {', '.join(bad[:3])}{more}; the step was refused"
