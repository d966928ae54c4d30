"""PageShape and CacheConfig: sizes that follow from the model, and wrong values refused by field."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from small_models import small_model

from openk3 import recipes
from openk3.config.model import ConfigError
from openk3.config.serve import CacheConfig, EngineConfig, PageShape, kda_row_bytes

RELEASED = recipes.model("k3")


def test_the_released_model_has_pages_of_6144_tokens() -> None:
    """State 6,291,456 + convolution 221,184 bytes are 5,653.3 latents of 1,152 bytes: 12 hash blocks of 512."""
    shape = PageShape.of(RELEASED)
    assert kda_row_bytes(RELEASED.text) == 6_512_640
    assert (shape.page_tokens, shape.hash_tokens, shape.blocks_per_page) == (6144, 512, 12)
    assert shape.row_bytes == 6144 * 1152 >= 6_512_640 > (6144 - 512) * 1152
    assert (shape.layers_per_page, shape.kda_groups) == (24, 3)  # 69 KDA layers in three groups of 23
    assert shape.page_bytes == 24 * 6144 * 1152
    assert [shape.latent_pages(n) for n in (0, 1, 6144, 6145)] == [0, 1, 1, 2]


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 6144), (2, 3072), (4, 1536), (8, 1024)])
def test_tensor_parallelism_shrinks_states_but_not_latents(ranks: int, tokens: int) -> None:
    """So pages hold fewer tokens."""
    assert PageShape.of(RELEASED, tensor_parallel=ranks).page_tokens == tokens


def test_small_models_choose_small_pages() -> None:
    """A given page size stands, and a state still fits into a row; the MTP layer's latents have their own row."""
    model = small_model()
    shape = PageShape.of(model, page_tokens=8, hash_tokens=4, value_bytes=4)
    state = 2 * 16 * 16 * 4 + 3 * 3 * 32 * 4 + 32 * 4  # and the hidden vector that the MTP layer goes on from
    assert shape == PageShape(8, 4, 1 + model.text.num_nextn_predict_layers, 1, state)
    wide = PageShape.of(model, page_tokens=4096, hash_tokens=4, value_bytes=4)
    assert wide.row_bytes == 4096 * 24 * 4
    assert PageShape.of(model, hash_tokens=1, value_bytes=4).page_tokens == -(-state // 96)


def test_rows_are_aligned_and_hold_what_they_must() -> None:
    """A float64 model's states are float64; rows are a multiple of 16 bytes whatever the widths."""
    model = small_model(kv_lora_rank=15, qk_rope_head_dim=6)
    assert kda_row_bytes(model.text, 8) == (2 * 16 * 16 + 3 * 3 * 32) * 8
    assert PageShape.of(model, page_tokens=255, hash_tokens=1, value_bytes=2).row_bytes == 255 * 21 * 2 + 10
    assert (
        PageShape.of(model, page_tokens=1, hash_tokens=1, value_bytes=8).row_bytes
        == kda_row_bytes(model.text, 8) + 32 * 8
    )


def test_limits_follow_from_the_shape() -> None:
    """A request holds the pages of its latents and one page per KDA group."""
    config = CacheConfig(PageShape(8, 4, 1, 3, 100), num_pages=9, checkpoint_pages=2)
    assert [config.pages_for(n) for n in (1, 8, 9)] == [4, 4, 5]
    assert config.checkpoint_tokens == 16
    assert dataclasses.replace(config, checkpoint_pages=0).checkpoint_tokens == 0


def test_memory_is_cut_into_pages_that_suit_the_model() -> None:
    """The released shape from 80 GiB: 6,144 tokens, hash blocks of 512; a tiny model's pages are smaller."""
    config = CacheConfig.of(RELEASED, 80 * 2**30, max_requests=8)
    assert (config.pages, config.max_requests) == (PageShape.of(RELEASED), 8)
    assert config.num_pages == 80 * 2**30 // (24 * 6144 * 1152) == 505
    tiny = CacheConfig.of(recipes.model("tiny"), 10**6, value_bytes=4)
    assert (tiny.pages.hash_tokens, tiny.pages.page_tokens) == (16, 48)
    assert tiny.num_pages * tiny.pages.page_bytes <= 10**6 < (tiny.num_pages + 1) * tiny.pages.page_bytes
    assert CacheConfig.of(recipes.model("tiny"), 10**6, hash_tokens=4).pages.hash_tokens == 4
    with pytest.raises(ConfigError, match="num_pages: one request of one token takes"):
        CacheConfig.of(RELEASED, 10**6)


def test_an_engine_says_how_it_shares_its_time() -> None:
    """Wrong numbers are refused by field."""
    cache = CacheConfig(PageShape(8, 4, 1, 3, 100), num_pages=9)
    assert EngineConfig(cache, patience=0).on(gpu=False, graphs=False).step_tokens == 2048
    for changes, name in (({"step_tokens": -1}, "step_tokens"), ({"patience": -1}, "patience")):
        with pytest.raises(ConfigError, match=f"{name}: must be a whole number"):
            EngineConfig(cache, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_tokens": 100, "hash_tokens": 64}, "page_tokens: 100 is no multiple of hash_tokens 64"),
        ({"page_tokens": 0}, "page_tokens: must be a whole number of at least 1, got 0"),
        ({"hash_tokens": 1024}, "hash_tokens: must be at most 512, got 1024"),
        ({"hash_tokens": 0}, "hash_tokens: must be a whole number"),
        ({"hash_tokens": True}, "hash_tokens: must be a whole number"),
        ({"value_bytes": -1}, "value_bytes: must be a whole number"),
        ({"tensor_parallel": 5}, "tensor_parallel: 5 does not divide 96 KDA heads"),
    ],
)
def test_a_wrong_shape_is_one_line(changes: dict[str, Any], message: str) -> None:
    """Naming the field."""
    with pytest.raises(ConfigError, match=message) as error:
        PageShape.of(RELEASED, **changes)
    assert "\n" not in str(error.value)


def test_a_model_without_mla_layers_is_refused() -> None:
    """Its cache has no pages of latents to agree with."""
    linear = dataclasses.replace(small_model().text.linear_attn_config, kda_layers=(1, 2), full_attn_layers=())
    with pytest.raises(ConfigError, match="at least one MLA layer"):
        PageShape.of(small_model(linear_attn_config=linear))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 3}, "num_pages: one request of one token takes 4 pages .400 bytes., got 3"),
        ({"num_pages": 2**60}, "num_pages: must be a whole number"),
        ({"max_requests": 0}, "max_requests: must be a whole number"),
        ({"max_tokens": 1.5}, "max_tokens: must be a whole number"),
        ({"checkpoint_pages": -1}, "checkpoint_pages: must be a whole number of at least 0, got -1"),
    ],
)
def test_a_wrong_limit_is_one_line(changes: dict[str, Any], message: str) -> None:
    """Naming the field."""
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**{"pages": PageShape(8, 4, 1, 3, 100), "num_pages": 9, **changes})
