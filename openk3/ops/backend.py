"""Choose which implementation of an operation runs: the only place that looks at the device."""

import os

from torch import Tensor

from openk3.config.model import ConfigError

# Every operation has its plain PyTorch definition; further implementations are listed here beside it.
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "kda": ("reference",),
    "short_conv": ("reference",),
    "norm": ("reference",),
    "mla": ("reference",),
    "attn_res": ("reference",),
    "situ": ("reference",),
    "routing": ("reference",),
    "grouped_linear": ("reference",),
    "mxfp": ("reference",),
    "cross_entropy": ("reference",),
    "newton_schulz": ("reference",),
    "sampling": ("reference",),
}


def pick(op: str, x: Tensor) -> str:
    """Name the implementation of `op` for tensors like x: the device's best, or what OPENK3_BACKEND forces.

    Raises ValueError for an unknown operation, and ConfigError for a forced implementation that `op` does not have
    on x's device.
    """
    if op not in IMPLEMENTATIONS:
        raise ValueError(f"no operation named {op!r}; known: {', '.join(IMPLEMENTATIONS)}")
    available = IMPLEMENTATIONS[op]
    forced = os.environ.get("OPENK3_BACKEND")
    if not forced:
        return available[-1]
    if forced not in available:
        raise ConfigError(f"OPENK3_BACKEND={forced}: {op} on {x.device.type} has {', '.join(available)}")
    return forced
