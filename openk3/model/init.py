"""Every initial value of a K3 in one place, seeded per tensor, so that it depends on neither device nor other tensors.

- Linear weights, experts, embedding and head: normal with std `initializer_range`. Norm weights 1.
- Depth queries 0: every read starts as the plain mean of its sources.
- A_log 0 (report section 2.1.1); dt_bias the inverse softplus of a step log-uniform in [0.001, 0.1], as in Mamba-2.
- Router uniform in +-1/sqrt(width), convolution taps uniform in +-1/sqrt(taps) (both as in the released code), router
  bias 0.
- Vision: position table standard normal; truncated normal with std sqrt(2 / inputs) before or after an activation
  (MLPs and projector), sqrt(1 / inputs) elsewhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from openk3.model.hf_names import kept_float32

DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 1e-1, 1e-4


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Dtype of the named tensor in a model of `dtype`: decay, convolution and router bias stay at least float32."""
    return torch.promote_types(dtype, torch.float32) if kept_float32(name) else dtype


def allocate(model: nn.Module, *, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give a model that was built on the meta device memory; its values are undefined.

    Raises ValueError for what is no floating-point dtype of torch.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating-point one such as torch.bfloat16, got {dtype!r}")
    joint = _joint_memory(model, dtype, device)
    for name, old in [*model.named_parameters(), *model.named_buffers()]:
        path, _, leaf = name.rpartition(".")
        kind = stored_dtype(name, dtype) if old.is_floating_point() else old.dtype
        new = joint[name] if name in joint else torch.empty(old.shape, dtype=kind, device=device)
        if isinstance(old, nn.Parameter):
            model.get_submodule(path).register_parameter(leaf, nn.Parameter(new))
        else:
            model.get_submodule(path).register_buffer(leaf, new)


def _joint_memory(model: nn.Module, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
    """Memory of weights that a module multiplies the same input by, its `joint` ones: one behind the other."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        joint = cast("tuple[str, ...]", getattr(module, "joint", ()))
        maps = {name: cast(nn.Linear, getattr(module, name)) for name in joint if getattr(module, name) is not None}
        rows = [each.out_features for each in maps.values()]
        if maps:
            width = next(iter(maps.values())).in_features
            parts = torch.empty(sum(rows), width, dtype=dtype, device=device).split(rows)
            found |= {f"{path}.{name}.weight": part for name, part in zip(maps, parts)}
    return found


def keeping_float32(model: nn.Module, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`fn`, a conversion that `nn.Module.to` would apply, but never below float32 for what `stored_dtype` keeps."""
    named = [*model.named_parameters(), *model.named_buffers()]
    values = [value for name, value in named if kept_float32(name)]
    kept = {id(value) for value in values} | {id(value.grad) for value in values if value.grad is not None}

    def convert(value: Tensor) -> Tensor:
        new = fn(value)
        wide = torch.promote_types(new.dtype, torch.float32)
        return value.to(new.device, wide) if id(value) in kept and new.dtype != wide else new

    return convert


@torch.no_grad()
def initialize(model: nn.Module, seed: int, initializer_range: float) -> None:
    """Set every parameter and buffer. Values are drawn on the CPU in float32 from a seed of (seed, name)."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        # One expert at a time: all experts of a layer at once would be far larger than the model's own copy.
        rows = tensor if ".experts." in name else [tensor]
        for row in rows:
            value = torch.empty(row.shape, dtype=torch.float32)
            row.copy_(_fill(value, name, generator, initializer_range))


def _fill(value: Tensor, name: str, generator: torch.Generator, initializer_range: float) -> Tensor:
    leaf = name.rpartition(".")[2]
    if leaf in ("A_log", "proj") or name.endswith("router.bias"):
        return value.zero_()
    if leaf == "dt_bias":
        return _inverse_softplus_step(value, generator)
    if "pos_emb" in name:
        return value.normal_(generator=generator)
    if value.ndim == 1:
        return value.fill_(1.0)
    if name.endswith("router.weight") or "conv1d" in name:
        bound = value.shape[1] ** -0.5
        return value.uniform_(-bound, bound, generator=generator)
    if name.startswith(("vision.", "projector.")):
        gain = 2.0 if ".mlp." in name or name.startswith("projector.") else 1.0
        std = math.sqrt(gain / value[0].numel())
        # torch's own trunc_normal_ draws other numbers in other versions.
        edge = math.erf(math.sqrt(2))
        value.uniform_(-edge, edge, generator=generator).erfinv_().mul_(std * math.sqrt(2))
        return value.clamp_(-2 * std, 2 * std)
    return value.normal_(std=initializer_range, generator=generator)


def _inverse_softplus_step(value: Tensor, generator: torch.Generator) -> Tensor:
    low, high = math.log(DT_MIN), math.log(DT_MAX)
    step = value.uniform_(low, high, generator=generator).exp().clamp_min(DT_FLOOR)
    return step + torch.log(-torch.expm1(-step))
