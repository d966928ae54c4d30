"""The output gate of attention: values times the sigmoid of a gate, rounded once at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from openk3.ops.backend import pick


def sigmoid_gate(o: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    """o sigmoid(gate) in `dtype`; the sigmoid has the gate's format, the product that of both (report eq. 7).

    o and gate of one shape. Raises ValueError if shapes differ.
    """
    if o.shape != gate.shape:
        raise ValueError(f"sigmoid_gate: o {list(o.shape)} and gate {list(gate.shape)}: need one shape")
    narrow = {torch.float32, torch.bfloat16, torch.float16}
    wide = o.dtype == torch.float32 and {gate.dtype, dtype} <= narrow
    obstacle = None if wide else f"they multiply float32 by gates of 32 bits or less, not {o.dtype} by {gate.dtype}"
    if pick("sigmoid_gate", o, name="o", obstacle=obstacle) == "triton":
        from openk3.ops.sigmoid_gate_fused import fused_sigmoid_gate

        return fused_sigmoid_gate(o, gate, dtype)
    return (o * torch.sigmoid(gate)).to(dtype)
