"""TierConfig: wrong values are refused in one line that names the field, and the secret is in no text of it."""

from __future__ import annotations

from typing import Any

import pytest

from openk3.config.model import ConfigError
from openk3.config.outer_tier import TierConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": 0}, "memory_bytes: must be a whole number of at least 1, got 0"),
        ({"disk_bytes": 1.5}, "disk_bytes: must be a whole number of at least 1, got 1.5"),
        ({"io_threads": True}, "io_threads: must be"),
        ({"folder": ""}, "folder: must name a folder"),
        ({"swap": "maybe"}, "swap: must be one of auto, always, never, got 'maybe'"),
        ({"load": "never"}, "load: must be one of auto, always, got 'never'"),
        ({"wait_seconds": 0}, "wait_seconds: must be a positive number, got 0"),
        ({"wait_seconds": float("nan")}, "wait_seconds: must be"),
        ({"secret": "text"}, "secret: must be bytes"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, Any], message: str) -> None:
    """By field."""
    with pytest.raises(ConfigError, match=message):
        TierConfig(**{"memory_bytes": 1, **changes})


def test_the_secret_is_not_shown() -> None:
    """In logs, say."""
    assert "hush" not in repr(TierConfig(1, secret=b"hush"))
