"""Form: whether a model's layers are the parts that `HostStep` knows, and are still as it has read them.

The step reads weights past their modules, and computes some things from them once. So whoever puts a part of another
class into a layer, a hook or a `forward` on one, other numbers into a weight in place or another weight into its place,
must find it in the next pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from openk3.model.capture import KNOWN
from openk3.model.k3 import K3
from openk3.model.layer import Layer

_GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)


class Form:
    """Parts and weights of a model's layers at one moment."""

    def __init__(self, model: K3) -> None:
        self._modules = list(_backbone(model))
        self._tables = [table for each in self._modules for table in (each._modules, each._parameters, each._buffers)]
        # Numbers such as a scale; what nn.Linear has says nothing that its weight does not.
        owners = [vars(each) for each in self._modules if type(each) is not nn.Linear]
        self._numbers = [(own, name) for own in owners for name in own if name[0] != "_" and name != "training"]
        self._objects = list(self._look())
        self._tensors = [each for each in self._objects if isinstance(each, Tensor)]
        hooks = [hooks for each in self._modules for hooks in (each._forward_hooks, each._forward_pre_hooks)]
        attributes = [vars(each) for each in (model, *self._modules)]
        self._sized = [*_GLOBAL_HOOKS, *hooks, *attributes, *self._tables]
        self._marks = self._count()

    def holds(self) -> bool:
        """Whether all is as it was: parts, their classes, hooks and numbers, weights and what is written in them."""
        return self._count() == self._marks and all(map(is_, self._look(), self._objects))

    def _look(self) -> Iterator[object]:
        yield from chain.from_iterable(table.values() for table in self._tables)
        yield from [own.get(name) for own, name in self._numbers]

    def _count(self) -> list[Any]:
        return [
            *map(len, self._sized),
            *map(type, self._modules),
            *[tensor.data_ptr() for tensor in self._tensors],
            *[tensor._version for tensor in self._tensors if not tensor.is_inference()],
        ]


def is_plain(model: K3) -> bool:
    """Whether all but feed-forward parts is what `HostStep` computes; no hook sees all modules."""
    bare = type(model).backbone is K3.backbone and type(model).depth_queries is K3.depth_queries
    if not bare or {"backbone", "depth_queries"} & vars(model).keys() or any(_GLOBAL_HOOKS):
        return False
    layers = [layer for layer in model.layers if isinstance(layer, Layer)]
    foreign = {each for layer in layers for each in layer.ffn.modules()}
    whole = len(layers) == len(model.layers)
    return whole and all_known((each for each in _backbone(model) if each not in foreign), model.embed.weight.dtype)


def all_known(modules: Iterable[nn.Module], dtype: torch.dtype) -> bool:
    """Whether each is of a class of this package itself, without hooks, biases and weights of another format."""
    return all(_is_known(each, dtype) for each in modules)


def _is_known(part: nn.Module, dtype: torch.dtype) -> bool:
    weights = [weight for weight in part._parameters.values() if weight is not None]
    return (
        type(part) in KNOWN
        and not (part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
        and not (type(part) is nn.Linear and part.bias is not None)
        and all(type(weight) is nn.Parameter and weight.dtype == dtype for weight in weights)
    )


def _backbone(model: K3) -> Iterator[nn.Module]:
    return chain(model.layers.modules(), model.output_query.modules())
