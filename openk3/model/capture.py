"""Capture: whether a CUDA graph may stand for a model's passes of one token each, and whether it still may.

A graph reads weights where they lay when it was captured, and calls nobody. So whoever moves a weight, puts in a part
of another class, or hooks himself into one, must be seen before the next replay.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from openk3.model.depth import DepthQuery
from openk3.model.k3 import K3
from openk3.model.kda import KimiDeltaAttention, ShortConv
from openk3.model.layer import Layer
from openk3.model.mla import GatedMLA
from openk3.model.moe import DenseFFN, Experts, LatentMoE, LocalExchange, Router
from openk3.model.norm import RMSNorm
from openk3.model.packed_experts import PackedExperts
from openk3.ops.backend import pick
from openk3.ops.latent_moe.layer import by_kernels

KNOWN = {DepthQuery, KimiDeltaAttention, ShortConv, Layer, GatedMLA, DenseFFN, Experts, LatentMoE, Router, RMSNorm}
KNOWN |= {nn.Linear, nn.ModuleList}
_OUTSIDE = ("embed", "output_query", "norm", "lm_head")


class Form:
    """Where all parts and weights of a model were at one moment, and that nobody had hooked himself in."""

    def __init__(self, model: K3) -> None:
        modules = [*model.layers.modules(), *(getattr(model, name) for name in _OUTSIDE)]
        self._modules = modules
        self._tables: list[dict[str, Any]] = [
            table for each in modules for table in (each._modules, each._parameters, each._buffers) if table
        ]
        self._hooks = _hooks(modules)
        self._sized = [*map(vars, (model, *modules))]
        self._objects = list(self._look())
        self._tensors = [each for each in self._objects if isinstance(each, Tensor)]
        self._marks = self._count()

    def holds(self) -> bool:
        """Whether all is where it was; what is written into weights in place does not matter."""
        found = self._look()
        return self._count() == self._marks and all(map(is_, found, self._objects))

    def _look(self) -> Iterable[object]:
        return chain.from_iterable(map(dict.values, self._tables))

    def _count(self) -> list[Any]:
        hooks = [*map(len, self._hooks)] if any(self._hooks) else []
        return [*hooks, *map(len, self._sized), *map(type, self._modules), *map(Tensor.data_ptr, self._tensors)]


def _hooks(modules: Iterable[nn.Module]) -> list[Any]:
    """Every place where a module's call could be changed."""
    own = [hooks for each in modules for hooks in (each._forward_hooks, each._forward_pre_hooks)]
    return [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks, *own]


def is_plain(model: K3) -> bool:
    """Whether the model is of this package's parts alone, as they are: no hook, no other class, no `forward` put in."""
    modules = [*model.layers.modules(), *(getattr(model, name) for name in _OUTSIDE)]
    known = KNOWN | {PackedExperts, nn.Embedding}
    bare = type(model).backbone is K3.backbone and "backbone" not in vars(model)
    return bare and not any(_hooks(modules)) and all(type(x) in known and "forward" not in vars(x) for x in modules)


def has_kernels(model: K3) -> bool:
    """Whether all that a pass of one token each runs is kernels, which ask nothing of the host, so that it can be
    captured (`ops.backend.pick` has their conditions)."""
    weight, text = model.embed.weight, model.config.text
    width = text.linear_attn_config.head_dim
    x_1D = weight[:1]
    for layer in [cast(Layer, layer) for layer in model.layers]:
        moe, mixer = layer.ffn, layer.mixer
        if isinstance(moe, LatentMoE) and not (
            isinstance(moe.exchange, LocalExchange) and by_kernels(x_1D, moe._weights(), moe.form)
        ):
            return False
        bounded = not isinstance(mixer, KimiDeltaAttention) or pick("kda", x_1D, channels=(width, width)) == "triton"
        if not bounded:
            return False
    return weight.is_cuda and pick("mla", x_1D) == "triton" and model.lm_head.weight.dtype == weight.dtype
