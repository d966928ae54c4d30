"""Named, complete configurations; importing them loads no torch."""

from __future__ import annotations

import importlib
from types import ModuleType

from openk3.config.model import ConfigError, ModelConfig
from openk3.config.train import PretrainConfig

NAMES = ("tiny", "pocket", "small", "medium", "k3")


def model(name: str) -> ModelConfig:
    """The model of a recipe. Raises ConfigError for a name that is none."""
    return _recipe(name).model()


def pretrain(name: str) -> PretrainConfig:
    """The pretraining run of a recipe, without data paths and run folder. Raises ConfigError for an unknown name."""
    return _recipe(name).pretrain()


def _recipe(name: str) -> ModuleType:
    if name not in NAMES:
        raise ConfigError(f"{name}: no such recipe; there are {', '.join(NAMES)}")
    return importlib.import_module(f"openk3.recipes.{name}")
