"""Choose which implementation of an operation runs: the only place that looks at the device."""

import importlib.util
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

from openk3.config.model import ConfigError

# Every operation has its plain PyTorch definition; further implementations are listed here beside it.
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "kda": ("reference", "triton"),
    "short_conv": ("reference", "triton"),
    "norm": ("reference", "triton"),
    "mla": ("reference", "triton"),
    "attn_res": ("reference", "triton"),
    "sigmoid_gate": ("reference", "triton"),
    "situ": ("reference", "triton"),
    "routing": ("reference",),
    "grouped_linear": ("reference",),
    "latent_moe": ("reference", "triton"),
    "few_tokens": ("reference", "triton"),
    "margins": ("reference", "triton"),
    "mxfp": ("reference", "triton"),
    "cross_entropy": ("reference", "triton"),
    "newton_schulz": ("reference", "triton"),
    "widen": ("reference", "triton"),
    "muon": ("reference", "triton"),
    "adamw": ("reference", "triton"),
    "sampling": ("reference",),
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CHANNELS = (16, 32, 64, 128)  # of a head, for the KDA kernels
_NOTHING = nullcontext()


def pick(
    op: str,
    x: Tensor,
    *,
    name: str = "x",
    channels: Sequence[int] = (),
    bounded: bool = True,
    obstacle: str | None = None,
) -> str:
    """Name the implementation of `op` for tensors like x: "triton" where the kernels apply, else "reference".

    Errors call x by the `name` that the caller's own caller knows.

    The kernels apply if all of this holds:
    - `op` has kernels, and triton can be imported;
    - x is on a CUDA device of compute capability 8.0 or later;
    - x is float32, bfloat16 or float16: float64 is for the definition;
    - KDA: `channels` (of a head: K, V) are 16, 32, 64 or 128 each, and the gate is `bounded`;
    - the caller knows no further `obstacle`: what else about its arguments the kernels of `op` cannot take;
    - no forward-mode derivatives are being computed, which kernels would lose without a word.

    OPENK3_BACKEND=reference forces the definition everywhere. OPENK3_BACKEND=triton forces the kernels of every
    operation that has some: what does not hold is then an error, except that with TRITON_INTERPRET=1 x may be on the
    CPU, where Triton's interpreter runs the kernels (slowly: for tests).
    Raises ValueError for an unknown operation, and ConfigError for a forced implementation that no operation has or
    that cannot run here.
    """
    if op not in IMPLEMENTATIONS:
        raise ValueError(f"no operation named {op!r}; known: {', '.join(IMPLEMENTATIONS)}")
    available = IMPLEMENTATIONS[op]
    forced = os.environ.get("OPENK3_BACKEND")
    if forced and not any(forced in names for names in IMPLEMENTATIONS.values()):
        raise ConfigError(f"OPENK3_BACKEND={forced}: {op} on {x.device.type} has {', '.join(available)}")
    if forced == "reference" or "triton" not in available:
        return "reference"
    obstacle = _obstacle(x, name, channels, bounded, interpret=forced == "triton") or obstacle
    if obstacle is None:
        return "triton"
    if forced:
        raise ConfigError(f"OPENK3_BACKEND=triton: {op} cannot use its kernels here: {obstacle}")
    return "reference"


def check_kernels(function: str, x: Tensor, *, name: str = "x", channels: Sequence[int] = ()) -> None:
    """Raise ValueError if kernels cannot take tensors like x: for functions that have no other implementation.

    TRITON_INTERPRET=1 admits the CPU.
    """
    obstacle = _obstacle(x, name, channels, True, interpret=True)
    if obstacle is not None:
        raise ValueError(f"{function}: there are no kernels for this: {obstacle}")


def prefers_gluon(device: torch.device) -> bool:
    """Whether kernels written in Gluon for Hopper (compute capability 9.0) run on a device, in place of Triton twins.

    OPENK3_GLUON=0 leaves everything to the twins: to compare the two, or to rule one out. Raises ConfigError for a
    value other than 0 and 1.
    """
    if device.type != "cuda" or _capability(device) != (9, 0):
        return False
    choice = os.environ.get("OPENK3_GLUON", "1")
    if choice not in ("0", "1", ""):
        raise ConfigError(f"OPENK3_GLUON={choice}: must be 0 or 1")
    return choice != "0"


def starts_early(device: torch.device) -> bool:
    """Whether kernels may start before the one in front of them has ended (compute capability 9.0 and later).

    OPENK3_EARLY=0 lets each wait for the one before: to compare, or to rule it out. Raises ConfigError for a value
    other than 0 and 1.
    """
    if device.type != "cuda" or _capability(device) < (9, 0):
        return False
    choice = os.environ.get("OPENK3_EARLY", "1")
    if choice not in ("0", "1", ""):
        raise ConfigError(f"OPENK3_EARLY={choice}: must be 0 or 1")
    return choice != "0"


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Kernels launched inside run on x's device, whichever is current outside."""
    device = x.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    """How many a CUDA device has; remembered, because torch takes its time to say."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _obstacle(x: Tensor, name: str, channels: Sequence[int], bounded: bool, *, interpret: bool) -> str | None:
    """Why the kernels cannot take tensors like x, or None; `interpret` also admits the CPU."""
    if not _importable("triton"):
        return "triton is not installed"
    if x.device.type == "cuda":
        major, minor = _capability(x.device)
        if major < 8:
            return f"they need compute capability 8.0, {x.device} has {major}.{minor}"
    elif not (interpret and x.device.type == "cpu"):
        return f"{name} is on {x.device}, not on a CUDA device"
    elif os.environ.get("TRITON_INTERPRET") != "1":
        return f"{name} is on the CPU, where only Triton's interpreter runs them (TRITON_INTERPRET=1)"
    if x.dtype not in _DTYPES:
        return f"{name} is {x.dtype}, not one of {', '.join(map(str, _DTYPES))}"
    if any(size not in _CHANNELS for size in channels):
        return f"a head has {' and '.join(map(str, channels))} channels, not {', '.join(map(str, _CHANNELS))}"
    if forward_ad._current_level >= 0:
        return "they have no forward-mode derivatives"
    return None if bounded else "they need the bounded gate (gate_lower_bound)"


@lru_cache(maxsize=8)
def _importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@lru_cache(maxsize=8)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
