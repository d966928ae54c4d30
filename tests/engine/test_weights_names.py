"""Names of weights: the same only for the same weights, wherever prefixes outlive their engine."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_model import cache_config, engine_model
from odd_stores import DictStore

from openk3.config.outer_tier import TierConfig
from openk3.config.serve import EngineConfig
from openk3.engine.weights_names import WeightsNames, weights_digest


def test_a_digest_covers_every_byte() -> None:
    """Of parameters and buffers, of CPU copies as of the original; one bit, a dtype or a name make another one."""
    model = engine_model()
    want = weights_digest(model)
    other = copy.deepcopy(model)
    assert weights_digest(other) == want and len(want) == 64
    for value in [*list(other.parameters())[::9], *other.buffers()]:
        flat = value.view(-1).view(torch.uint8)
        flat[len(flat) // 2] ^= 1
        assert weights_digest(other) != want
        flat[len(flat) // 2] ^= 1
    assert weights_digest(other) == want
    assert weights_digest(engine_model(torch.float32)) != want and weights_digest(engine_model(seed=1)) != want
    other.register_buffer("more", torch.zeros(0))
    assert weights_digest(other) != want


@pytest.mark.parametrize(
    ("tier", "stored", "digested"),
    [(None, False, False), ("memory", False, False), ("memory", True, True), ("folder", False, True)],
)
def test_a_digest_is_taken_where_it_is_needed(tier: str | None, stored: bool, digested: bool, tmp_path) -> None:  # noqa: ANN001
    """Where prefixes outlive the engine; elsewhere a number does, and what the caller says goes everywhere."""
    given = None if tier is None else TierConfig(1 << 20, str(tmp_path) if tier == "folder" else None)
    names = WeightsNames(EngineConfig(cache_config(), tier=given), DictStore() if stored else None)
    first, second = names.name(engine_model()), names.next(engine_model(seed=1), None, "0")
    if digested:
        assert first == weights_digest(engine_model()) and second == weights_digest(engine_model(seed=1))
    else:
        assert (first, second) == ("0", "1")
    assert names.name(engine_model(), "mine") == "mine"
