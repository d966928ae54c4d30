"""PageMemory: rows that overlap as they should, copies that move what belongs together, and NaN everywhere else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from engine_model import cache_config, engine_config

from openk3 import recipes
from openk3.config.model import ConfigError
from openk3.config.serve import CacheConfig, PageShape
from openk3.engine.page_memory import PageMemory
from openk3.engine.page_plans import CopyPlan, LatentCopy, StateCopy


def memory(num_pages: int = 6, dtype: torch.dtype = torch.float64) -> PageMemory:
    """All NaN."""
    shape = PageShape.of(engine_config(), page_tokens=8, hash_tokens=2, value_bytes=dtype.itemsize)
    pages = PageMemory(CacheConfig(shape, num_pages), engine_config(), dtype)
    pages.poison(range(num_pages))
    return pages


def everything(pages: PageMemory, page: int) -> list[torch.Tensor]:
    """All numbers of a page, as latents and as states."""
    rows = range(pages.shape.layers_per_page)
    views = [pages.latents(row)[page] for row in rows]
    return views + [x[page] for row in rows for x in (pages.states(row)[0], *pages.states(row)[1])]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_views_share_one_memory(dtype: torch.dtype) -> None:
    """States are at least float32; nothing is copied, layers do not overlap, and poison is NaN in every format."""
    pages = memory(dtype=dtype)
    assert pages.nbytes == 6 * pages.shape.page_bytes
    seen = set()
    for row in range(2):
        latents, (state, inputs) = pages.latents(row), pages.states(row)
        assert latents.shape == (6, 8, 24) and latents.dtype == dtype
        assert state.shape == (6, 2, 16, 16) and state.dtype == torch.promote_types(dtype, torch.float32)
        assert [tuple(x.shape) for x in inputs] == [(6, 32, 3)] * 3
        assert all(x.isnan().all() for x in (latents, state, *inputs))
        assert latents[2].data_ptr() == state[2].data_ptr()
        for x in (state, *inputs):
            bounds = x[3].data_ptr(), x[3].data_ptr() + x[3].nbytes
            assert not any(a < bounds[1] and bounds[0] < b for a, b in seen)
            seen.add(bounds)
    pages.latents(1)[4] = 1.5
    assert all(x.isnan().all() for page in (3, 5) for x in everything(pages, page))
    assert (pages.latents(1)[4] == 1.5).all() and pages.latents(0)[4].isnan().all()


def test_the_released_model_in_pages() -> None:
    """24 latents rows of 6,144 x 576 values, or states of 24 KDA layers, in 7,077,888 bytes a row."""
    model = recipes.model("k3")
    pages = PageMemory(CacheConfig(PageShape.of(model), 8), model, torch.bfloat16, "meta")
    assert pages.nbytes == 8 * 24 * 7_077_888
    assert pages.latents(23).shape == (8, 6144, 576)
    state, inputs = pages.states(23)
    assert state.shape == (8, 96, 128, 128) and state.dtype == torch.float32
    assert [tuple(x.shape) for x in inputs] == [(8, 12288, 3)] * 3


def test_plans_are_carried_out() -> None:
    """A start zeroes states; rows of a partial page and whole states are copied, and sources stay as they were."""
    pages = memory()
    pages.carry_out(CopyPlan(held=(), zero_states=(0, 1)))
    for row in range(2):
        state, inputs = pages.states(row)
        assert all(not x[:2].any() and x[2:].isnan().all() for x in (state, *inputs))
        state[1], inputs[2][1] = row + 1.0, row + 10.0
        pages.latents(row)[2, :5] = row + 0.5
    plan = CopyPlan((2, 1), latent_copies=(LatentCopy(2, 3, 5),), state_copies=(StateCopy(1, 4),))
    pages.carry_out(plan)
    for row in range(2):
        assert (pages.latents(row)[3, :5] == row + 0.5).all() and pages.latents(row)[3, 6:].isnan().all()
        state, inputs = pages.states(row)
        assert (state[[1, 4]] == row + 1).all() and (inputs[2][[1, 4]] == row + 10).all()
        assert not inputs[0][4].any() and (pages.latents(row)[2, :5] == row + 0.5).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers_per_page": 3}, "layers_per_page: 3, but the model's pages need 2"),
        ({"kda_groups": 3}, "kda_groups: 3, but the model's pages need 2"),
        ({"row_bytes": 2048}, "row_bytes: 2048, but the model's pages need 6656"),
        ({"row_bytes": 6664}, "row_bytes: must be a multiple of 16, got 6664"),
    ],
)
def test_a_shape_that_does_not_fit_is_one_line(changes: dict[str, Any], message: str) -> None:
    """Naming the field."""
    config = cache_config()
    config = dataclasses.replace(config, pages=dataclasses.replace(config.pages, **changes))
    with pytest.raises(ConfigError, match=message):
        PageMemory(config, engine_config(), torch.float64)


def test_a_larger_row_is_allowed() -> None:
    """Pages of another model of the engine's, say; a float32 shape does not hold float64 states."""
    config = cache_config()
    config = dataclasses.replace(config, pages=dataclasses.replace(config.pages, row_bytes=6656 + 64))
    assert PageMemory(config, engine_config(), torch.float64).states(1)[0].shape == (64, 2, 16, 16)
    shape = PageShape.of(engine_config(), page_tokens=8, hash_tokens=2, value_bytes=4)
    with pytest.raises(ConfigError, match="row_bytes: 3328, but"):
        PageMemory(CacheConfig(shape, 8), engine_config(), torch.float64)
