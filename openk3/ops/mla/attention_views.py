"""What a call of causal attention is made of: its sequences and scale, and its tensors as kernels see them."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from openk3.ops.mla.tiles import Bands

MOST_KEY_CHANNELS = 192
MOST_VALUE_CHANNELS = 128
MOST_LATENT_CHANNELS, MOST_SHARED_CHANNELS = 512, 64
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Job:
    """What a call asks for besides its tensors.

    With `joint` None the tensors are q, k and v. Otherwise they are q, per-head keys and values side by side
    [T, H, joint + V], and a key part that all heads share [T, R].
    """

    bands: Bands
    scale: float
    joint: int | None = None


class Widths(NamedTuple):
    """Channels of a head: the two parts of a key, and a value; any sizes, padded to powers of two inside kernels."""

    first: int
    second: int  # may be 0
    value: int

    def constants(self) -> dict[str, int]:
        """Compile-time arguments of kernels: true and padded sizes."""
        padded = [0 if width == 0 else max(16, 1 << (width - 1).bit_length()) for width in self]
        return dict(zip(("A", "B", "V", "PA", "PB", "PV"), (*self, *padded)))


@dataclass(frozen=True)
class Views:
    """Queries, both parts of the keys, and values; the second part may be empty, or the same for all heads."""

    q: Tensor
    k_a: Tensor
    k_b: Tensor
    v: Tensor

    @classmethod
    def of(cls, job: Job, tensors: tuple[Tensor, ...]) -> "Views":
        """Of a call's tensors, or of their gradients."""
        q, *others = tensors
        if job.joint is not None:
            keys_values, shared = others
            if shared.ndim == 2:
                shared = shared.unsqueeze(1).expand(-1, q.shape[1], -1)
            return cls(q, keys_values[..., : job.joint], shared, keys_values[..., job.joint :])
        k, v = others
        first = min(128, 1 << max(0, k.shape[2].bit_length() - 1))
        return cls(q, k[..., :first], k[..., first:], v)

    @property
    def widths(self) -> Widths:
        """Channels of a head."""
        return Widths(self.k_a.shape[2], self.k_b.shape[2], self.v.shape[2])

    def strides(self) -> tuple[int, ...]:
        """From token to token and from head to head of each."""
        return tuple(stride for x in (self.q, self.k_a, self.k_b, self.v) for stride in x.stride()[:2])


def obstacle(job: Job, tensors: tuple[Tensor, ...]) -> str | None:
    """Why the kernels cannot take a call, or None; `backend.pick` looks at device and format of the first tensor."""
    first, second, values = Views.of(job, tensors).widths
    if not 0 < first + second <= MOST_KEY_CHANNELS or not 0 < values <= MOST_VALUE_CHANNELS:
        most = f"{MOST_KEY_CHANNELS} and {MOST_VALUE_CHANNELS}"
        return f"a head has {first + second} channels of keys and {values} of values; they take up to {most}"
    if any(x.dtype != tensors[0].dtype or x.device != tensors[0].device for x in tensors):
        return "queries, keys and values differ in format or device"
    return None if job.scale > 0 else f"the scale is {job.scale}, not positive"
