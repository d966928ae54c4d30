"""Quality: a linear model over hashed words and pairs of words says how likely a text is a good one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from openk3.data.documents import DataError
from openk3.data.prepare.measures import Measures
from openk3.data.prepare.words import features
from openk3.runtime.run_folder import write_atomic

NUM_FEATURES = 1 << 16
SCALE = 30.0  # of the mean that the model multiplies, so that its weights are of order one
READ = 5_000  # tokens that are judged
SHIPPED = Path(__file__).resolve().parent.parent.parent / "shipped" / "quality" / "quality.safetensors"
KINDS = ("prose", "code")
_FORMAT = "openk3 quality 1"
_COMMONEST = "the of and to is that for it with are this from which have has were they"  # hardly words elsewhere
_ENGLISH = frozenset(_COMMONEST.split())


@dataclass(frozen=True)
class Linear:
    """p(good) = sigmoid(bias + SCALE * mean of the weights of all features), weight float32 [NUM_FEATURES]."""

    weight: np.ndarray
    bias: float

    def score(self, token_hashes: np.ndarray) -> float:
        """0 (bad) to 1 (good)."""
        found = features(token_hashes, NUM_FEATURES)
        value = self.bias + SCALE * float(self.weight[found].mean()) if len(found) else self.bias
        return 1 / (1 + math.exp(-max(-60.0, min(60.0, value))))


class Quality:
    """One linear model for prose, one for code; either may be missing."""

    def __init__(self, models: Mapping[str, Linear], card: Mapping[str, Any]) -> None:
        """`card`: what it was trained on.

        With "language": "en" it judges no prose that is not English; with "suffixes" no code in files of others.
        """
        self.models, self.card = dict(models), dict(card)

    def score(self, measures: Measures, domain: str, suffix: str = "") -> float | None:
        """0..1, or None where there is no model for such a text; `suffix` is its file's."""
        kind = "code" if domain == "code" else "prose"
        if kind not in self.models:
            return None
        if kind == "prose" and self.card.get("language") == "en" and not is_english(measures.tokens):
            return None
        if kind == "code" and suffix not in self.card.get("suffixes", (suffix,)):
            return None
        return self.models[kind].score(measures.token_hashes[:READ])

    def save(self, path: str | Path) -> None:
        """Write weights as float16, and the card, into one safetensors file."""
        tensors: dict[str, np.ndarray] = {}
        for kind, model in self.models.items():
            tensors[f"{kind}.weight"] = model.weight.astype(np.float16)
            tensors[f"{kind}.bias"] = np.array([model.bias], np.float32)
        about = {"format": _FORMAT, "card": json.dumps(self.card, sort_keys=True)}
        write_atomic(Path(path), lambda temporary: save_file(tensors, temporary, metadata=about))

    @classmethod
    def load(cls, path: str | Path) -> Quality:
        """Read what `save` wrote. Raises DataError naming the file."""
        try:
            with safe_open(path, "numpy") as file:
                about = file.metadata() or {}
                if about.get("format") != _FORMAT:
                    raise DataError(f"{path}: not a quality model; make one with `openk3 data train-quality`")
                names = set(file.keys())
                models = {
                    kind: Linear(
                        file.get_tensor(f"{kind}.weight").astype(np.float32),
                        float(file.get_tensor(f"{kind}.bias")[0]),
                    )
                    for kind in KINDS
                    if f"{kind}.weight" in names
                }
                card = json.loads(about["card"])
        except FileNotFoundError:
            raise DataError(f"{path}: no such file; --quality takes 'default', 'off' or a model's file") from None
        except (SafetensorError, OSError, KeyError, ValueError, IndexError, TypeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path}: not a quality model, or damaged ({error})") from None
        if not models or any(model.weight.shape != (NUM_FEATURES,) for model in models.values()):
            raise DataError(f"{path}: not a quality model of this version; train it again")
        if not all(np.isfinite(model.weight).all() and math.isfinite(model.bias) for model in models.values()):
            raise DataError(f"{path}: a damaged quality model: its weights are not all finite; train it again")
        if not isinstance(card, dict) or not isinstance(card.get("suffixes", []), list):
            raise DataError(f"{path}: a damaged quality model: its card is not as it was written; train it again")
        return cls(models, card)


def open_quality(name: str) -> Quality | None:
    """The model that --quality names: the shipped one, none, or a file's. Raises DataError."""
    if name == "off":
        return None
    return Quality.load(quality_file(name))


def quality_file(name: str) -> Path:
    """The file of the model that --quality names."""
    return SHIPPED if name == "default" else Path(os.path.expanduser(name))


def is_english(tokens: Sequence[str]) -> bool:
    """Whether one of 30 tokens is among common words of English, and three of these words are there."""
    found = list(filter(_ENGLISH.__contains__, tokens[:READ]))
    return 30 * len(found) >= min(len(tokens), READ) and len(set(found)) >= 3
