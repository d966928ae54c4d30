"""Which optimizer each parameter gets: Muon in how many blocks, or AdamW, and whether its weight decays."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from openk3.config.model import ModelConfig
from openk3.config.train import OptimConfig
from openk3.model.k3 import K3
from openk3.optim.optimizer import Optimizer

# Matrices below these names are projections between hidden spaces; embedding, head and patch embedding are not.
_MUON_PLACES = ("layers.", "mtp.", "vision.encoder.blocks.", "projector.")
_ADAMW_LEAVES = ("b_proj", "q_conv1d", "k_conv1d", "v_conv1d", "router")


class Rule(NamedTuple):
    """How a parameter is updated: with Muon in `blocks` pieces, or with AdamW when `blocks` is 0."""

    blocks: int
    decays: bool


def rule_for(name: str, parameter: Tensor, config: ModelConfig) -> Rule:
    """The rule of one parameter (report section 2.5): per head for q, k, v, q_b, kv_b and the vision tower's wqkv.

    Other matrices inside layers are one block, a stack of experts one block per expert. Everything else is AdamW's;
    vectors (norms, A_log, dt_bias, depth queries) do not decay.
    """
    decays = parameter.ndim > 1
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if parameter.ndim not in (2, 3) or not name.startswith(_MUON_PLACES) or leaf in _ADAMW_LEAVES:
        return Rule(0, decays)
    if parameter.ndim == 3:
        return Rule(parameter.shape[0], decays)
    text, vision = config.text, config.vision
    if leaf in ("q_proj", "k_proj", "v_proj"):
        return Rule(text.linear_attn_config.num_heads, decays)
    if leaf in ("q_b_proj", "kv_b_proj"):
        return Rule(text.num_attention_heads, decays)
    if leaf == "wqkv" and vision is not None:
        return Rule(3 * vision.vt_num_attention_heads, decays)
    return Rule(1, decays)


def build_optimizer(model: K3, config: OptimConfig) -> Optimizer:
    """The optimizer of every parameter of `model` that requires a gradient."""
    optimizer = Optimizer(config)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rule = rule_for(name, parameter, model.config)
            optimizer.add(name, parameter, blocks=rule.blocks, decays=rule.decays)
    return optimizer
