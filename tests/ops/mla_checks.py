"""What must hold of attention by kernels on any device and at any size: inputs, and everything beside float64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from openk3.ops.mla.reference import joint_attention, mla_attention

Found = dict[str, Tensor]


def bounds(lengths: tuple[int, ...]) -> Tensor:
    """cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@dataclass(frozen=True)
class Case:
    """Sequences of `new` queries and `old` earlier keys, heads, and channels of a head."""

    new: tuple[int, ...]
    old: tuple[int, ...]
    H: int = 2
    own: int = 16
    shared: int = 8
    V: int = 16
    joint: bool = True
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        """Scores of about 2, so that probabilities are neither flat nor all in one place."""
        return 2 * (self.own + self.shared) ** -0.5

    def bounds(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Of queries and of keys."""
        keys = tuple(a + b for a, b in zip(self.new, self.old))
        return bounds(self.new).to(device), bounds(keys).to(device)

    def draw(self, device: torch.device | str = "cpu", seed: int = 0) -> Found:
        """Fresh inputs and a gradient of the output by name, as the kernels round them."""
        generator = torch.Generator(device).manual_seed(seed)
        Tq, Tk, H = sum(self.new), sum(self.new) + sum(self.old), self.H
        shapes = {"q": (Tq, H, self.own + self.shared), "d_o": (Tq, H, self.V)}
        if self.joint:
            shapes |= {"kv": (Tk, H, self.own + self.V), "shared": (Tk, self.shared)}
        else:
            shapes |= {"k": (Tk, H, self.own + self.shared), "v": (Tk, H, self.V)}
        return {
            name: torch.randn(shape, generator=generator, device=device).to(self.dtype)
            for name, shape in shapes.items()
        }

    def run(self, values: Found) -> Found:
        """Output, largest scores and gradients."""
        leaves = {name: x.detach().clone().requires_grad_() for name, x in values.items() if name != "d_o"}
        tensors, cu = list(leaves.values()), self.bounds(values["q"].device)
        if self.joint:
            o, peaks = joint_attention(*tensors, *cu, scale=self.scale, return_max=True)
        else:
            o, peaks = mla_attention(*tensors, *cu, scale=self.scale, return_max=True)
        assert peaks is not None
        grads = torch.autograd.grad(o, tensors, values["d_o"].to(o.dtype))
        return {"o": o.detach(), "peaks": peaks} | {f"d_{name}": x for name, x in zip(leaves, grads)}


def errors(got: Found, want: Found) -> dict[str, float]:
    """Norm of each difference by the norm of what is right, or that of values of 1e-3 where those are tiny."""
    found = {}
    for name, x in got.items():
        y = want[name].double()
        assert x.shape == y.shape, f"{name}: {list(x.shape)}, not {list(y.shape)}"
        here, there = x.double(), y
        both = ~(there.isinf() & (here == there))  # a head without queries has no largest score
        here, there = here[both], there[both]
        assert bool(here.isfinite().all()), f"{name}: not finite"
        found[name] = float((here - there).norm() / (there.norm() + 1e-3 * max(1, there.numel()) ** 0.5))
    return found
