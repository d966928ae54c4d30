"""Training that ends with MXFP4 experts: both passes see rounded weights, updates go to float32 masters."""

from __future__ import annotations

import torch

from openk3.ops.mxfp import dequantize_mxfp4, quantize_mxfp4
from openk3.train.state import TrainState

EXPERTS = (".experts.w1_EIC", ".experts.w3_EIC", ".experts.w2_ECI")


@torch.no_grad()
def round_experts(state: TrainState) -> bool:
    """Once `config.mxfp4_from` of the steps are done, put the masters' MXFP4 values where the model computes with them.

    The gradient with respect to a rounded weight is then applied to its master, as if rounding were the identity
    (straight through). At the end the model's weights are exactly what MXFP4 files hold. Weights that are their own
    masters (a float32 model) are left alone: there is nothing beside them that could keep the small updates. Returns
    whether weights were rounded.
    """
    if state.step < state.config.mxfp4_from * state.total_steps:
        return False
    masters = state.optimizer.masters
    for name, parameter in state.optimizer.parameters.items():
        if name.endswith(EXPERTS) and name in masters:
            parameter.copy_(dequantize_mxfp4(*quantize_mxfp4(masters[name]), dtype=parameter.dtype))
    return any(name.endswith(EXPERTS) for name in masters)
