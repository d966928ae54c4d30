"""SamplingDefaults: how a model wants to be sampled where nobody says otherwise, from its generation_config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from openk3.config.json_file import read_json
from openk3.config.model import ConfigError

FILE = "generation_config.json"


@dataclass(frozen=True)
class SamplingDefaults:
    """None is left to whoever samples."""

    temperature: float | None = None
    top_p: float | None = None


def read_sampling(directory: Path) -> SamplingDefaults:
    """From the directory's generation_config.json, if there is one. Raises ConfigError naming file and field."""
    path = directory / FILE
    data = read_json(path) if path.is_file() else {}
    found: dict[str, float | None] = {"temperature": None, "top_p": None}
    for name, (least, most) in {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0)}.items():
        value = data.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ConfigError(f"{path}: {name}: must lie in {least:g}..{most:g}, got {value!r}")
        found[name] = float(value)
    if found["top_p"] == 0:
        raise ConfigError(f"{path}: top_p: must be positive")
    return SamplingDefaults(**found)


def first(*values: float | None) -> float:
    """The first that is given. Raises ValueError if none is."""
    for value in values:
        if value is not None:
            return value
    raise ValueError("no value")
