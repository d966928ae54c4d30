"""policy_of: the activation policy of a training run; "auto" is made from what the device has room for."""

from __future__ import annotations

import logging

from torch import Tensor

from openk3.config.activations import AUTO, ActivationPolicy
from openk3.config.train import PretrainConfig
from openk3.model.roofline import H200
from openk3.model.saved_bytes import Form, choose
from openk3.ops.backend import pick
from openk3.runtime.memory import total_memory

log = logging.getLogger(__name__)


def policy_of(config: PretrainConfig, weight: Tensor) -> ActivationPolicy:
    """What `config.activations` says, for a model of `weight`'s format and device.

    "auto" makes as little again as lets the longest stage's micro-batch fit; every choice it has gives the gradients
    of keeping everything, bit by bit.
    """
    if config.activations != AUTO:
        return ActivationPolicy.parse(config.activations)
    total = total_memory(weight.device)
    if total is None:
        return ActivationPolicy()
    found = auto(config, total, form_of(config, weight))
    log.info("activations: %s", found)
    return found


def form_of(config: PretrainConfig, weight: Tensor) -> Form:
    """How steps of `config` run with weights like this one."""
    longest = max(length for _, length in config.data.stages)
    return Form(pick("norm", weight) == "triton", weight.element_size(), longest)


def auto(config: PretrainConfig, memory: float, form: Form) -> ActivationPolicy:
    """The policy for a device of `memory` bytes."""
    tokens = max(config.data.micro_batch_tokens, form.length) * config.workers
    return choose(config.model, tokens, memory, H200, form)
