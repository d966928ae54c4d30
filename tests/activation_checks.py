"""Any activation policy, for property tests; and the memory that a forward pass really leaves behind."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openk3.config.activations import FP8, HOLDS, ActivationPolicy
from openk3.config.model import ConfigError


@st.composite
def policies(draw: st.DrawFn, exact: bool = False) -> ActivationPolicy:
    """Any policy that is allowed; `exact`: without FP8."""
    chosen = {
        name: draw(st.sampled_from([how for how in choices if not (exact and how == FP8)]))
        for name, choices in HOLDS.items()
    }
    try:
        return ActivationPolicy(**chosen)
    except ConfigError:
        return ActivationPolicy(**chosen | {"mixer": "keep", "ffn": "keep"})


class LiveMemory(TorchDispatchMode):
    """Counts the memory of tensors made while entered, as long as anything holds them."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and x.layout == torch.strided:
                storage = x.untyped_storage()
                self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return found

    def bytes(self, beside: list[Tensor]) -> int:
        """Of what is alive now, without the tensors given."""
        others = {x.untyped_storage()._cdata for x in beside}
        return sum(count for key, (alive, count) in self._seen.items() if key not in others and not alive.expired())
