"""TrainState: everything that one training run changes as it goes, built fresh from a configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from openk3.config.activations import ActivationPolicy
from openk3.config.train import PretrainConfig
from openk3.data.ahead import Ahead
from openk3.data.loader import Loader
from openk3.model.k3 import K3
from openk3.optim.groups import build_optimizer
from openk3.optim.optimizer import Optimizer
from openk3.optim.quantile_balance import BalanceTrace
from openk3.runtime.device import Rank, pick_device, pick_dtype, seed_everything
from openk3.train.activations import policy_of


@dataclass
class TrainState:
    """What a checkpoint holds: model, optimizer, balancing, place in the data, and how far the run is.

    `step` counts finished optimizer steps, `tokens` the tokens they read, `seconds` the time they took; `total_steps`
    is the length of the schedule.
    """

    config: PretrainConfig
    model: K3
    optimizer: Optimizer
    balance: BalanceTrace
    total_steps: int
    loader: Loader | Ahead | None = None
    activations: ActivationPolicy = ActivationPolicy()
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    @classmethod
    def build(cls, config: PretrainConfig, loader: Loader | Ahead | None = None) -> TrainState:
        """A state at step 0; the seed fixes the weights and every generator. Raises DeviceError, ConfigError."""
        device = pick_device(config.device, Rank.from_env())
        seed_everything(config.seed)
        model = K3.build(config.model, seed=config.seed, dtype=pick_dtype(config.dtype, device), device=device)
        return cls.around(model, config, loader)

    @classmethod
    def around(cls, model: K3, config: PretrainConfig, loader: Loader | Ahead | None = None) -> TrainState:
        """A state at step 0 that trains an existing model."""
        balance = BalanceTrace(model, config.balance, max_logits=config.optim.qk_clip_tau > 0)
        policy = policy_of(config, model.embed.weight)
        return cls(config, model, build_optimizer(model, config.optim), balance, config.steps, loader, policy)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.model.embed.weight.device

    @property
    def seq_len(self) -> int:
        """Window length of the next step, from the length curriculum."""
        return self.config.data.length_at(self.step / self.total_steps)
