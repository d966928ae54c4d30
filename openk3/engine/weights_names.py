"""WeightsNames: names of weights that no other weights have, for prefixes that outlive a pass, a model or a process."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import nn

from openk3.config.model import ConfigError
from openk3.config.serve import EngineConfig
from openk3.engine.speculation import rows_version
from openk3.engine.store import Store
from openk3.model.k3 import K3

PIECE = 1 << 24  # bytes at a time, where weights are not in CPU memory


class WeightsNames:
    """Of one engine: what its caller says, a digest where prefixes outlive the engine, or a number.

    Raises ConfigError for a store without a tier before it.
    """

    def __init__(self, config: EngineConfig, store: Store | None) -> None:
        if store is not None and config.tier is None:
            raise ConfigError("tier: a store needs memory before it; give a TierConfig")
        self._config = config
        self._outlive = config.tier is not None and (store is not None or config.tier.folder is not None)
        self._num_models = 0

    def name(self, model: K3, version: str | None = None) -> str:
        """The version, or what stands for it."""
        self._num_models += 1
        if version is None and self._outlive:
            return weights_digest(model)
        return str(self._num_models - 1) if version is None else version

    def next(self, model: K3, version: str | None, current: str) -> str:
        """The name of new weights. Raises ValueError if it is said to be the `current` one, as books have it."""
        name = rows_version(self.name(model, version), self._config.speculation)
        if version is not None and self._config.tier is not None and name == current:
            raise ValueError(f"load_weights: {version!r} names the weights before; give new ones a new name")
        return name


def require_same_kind(old: K3, new: K3) -> None:
    """Raise ValueError if a model differs from the one before it in more than its weights."""
    if new.config != old.config:
        raise ValueError("load_weights: the new model's configuration differs")
    before, after = old.embed.weight, new.embed.weight
    if (before.dtype, before.device) != (after.dtype, after.device):
        raise ValueError(
            f"load_weights: {after.dtype} on {after.device} cannot follow {before.dtype} on {before.device}"
        )


@torch.no_grad()
def weights_digest(model: nn.Module) -> str:
    """Of name, dtype, shape and every byte of each parameter and buffer: about a gigabyte a second."""
    digest = blake2b(digest_size=32, person=b"openk3 weights")
    for name, value in sorted([*model.named_parameters(), *model.named_buffers()]):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        flat_B = value.detach().contiguous().view(-1).view(torch.uint8)
        for piece_B in flat_B.split(PIECE):
            digest.update(piece_B.cpu().numpy().data)
    return digest.hexdigest()
