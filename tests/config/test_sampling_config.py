"""How a model says it is sampled: its generation_config.json, and what is refused in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from openk3.config.model import ConfigError
from openk3.config.sampling import SamplingDefaults, first, read_sampling


def test_what_is_there_is_read(tmp_path: Path) -> None:
    """Each field by itself; a folder without the file, or a file without the field, says nothing."""
    assert read_sampling(tmp_path) == SamplingDefaults(None, None)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0, "eos_token_id": 3}')
    assert read_sampling(tmp_path) == SamplingDefaults(0.0, None)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3, "top_p": 0.9}')
    assert read_sampling(tmp_path) == SamplingDefaults(0.3, 0.9)


@pytest.mark.parametrize(
    "field", ['"temperature": -1', '"temperature": "hot"', '"top_p": 0', '"top_p": 1.5', '"top_p": true']
)
def test_values_out_of_range_are_named(tmp_path: Path, field: str) -> None:
    """With the file and the field."""
    (tmp_path / "generation_config.json").write_text(f"{{{field}}}")
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {field.split(chr(34))[1]}: must"):
        read_sampling(tmp_path)


def test_the_first_that_is_given_counts() -> None:
    """0 is given."""
    assert first(None, 0.0, 1.0) == 0.0
    with pytest.raises(ValueError, match="no value"):
        first(None)
