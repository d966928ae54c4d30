"""Kimi K3, complete and readable: exports K3, Packed and ModelConfig, each imported when it is first named."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openk3.config.model import ConfigError, ModelConfig
    from openk3.inputs.packed import Packed
    from openk3.inputs.tokenizer import Tokenizer
    from openk3.model.k3 import K3

__version__ = "0.1.0"
__all__ = ["K3", "ConfigError", "ModelConfig", "Packed", "Tokenizer"]

_HOMES = {
    "K3": "openk3.model.k3",
    "ConfigError": "openk3.config.model",
    "ModelConfig": "openk3.config.model",
    "Packed": "openk3.inputs.packed",
    "Tokenizer": "openk3.inputs.tokenizer",
}


def __getattr__(name: str) -> Any:
    """Import an exported name's module on first use, so that `import openk3` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'openk3' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
