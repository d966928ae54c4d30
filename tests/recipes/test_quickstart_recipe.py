"""The quickstart's recipe: every part of K3 is on, and a longer run gets more of everything."""

import pytest

from openk3.recipes import quickstart as recipe


def test_the_recipe_has_every_part_of_k3_and_grows_its_windows_eightfold():
    config = recipe.pretrain()
    text = config.model.text
    assert set(text.layer_kinds()) == {"kda", "mla"} and text.num_nextn_predict_layers == 1
    assert text.attn_res_block_size < text.num_hidden_layers and config.model.vision is not None
    assert recipe.LONG_WINDOW == 8 * recipe.WINDOW == config.data.stages[1][1]
    assert config.data.stages[0][0] > 0.7
    assert sum(recipe.SHARES) == pytest.approx(1) and recipe.SHARES[2] >= 0.05
    short, long = recipe.plan(1), recipe.plan(8)
    assert short.evaluation_seconds < 15 and long.evaluation_seconds < 60
    assert recipe.pretrain(1).data.batch_tokens < recipe.pretrain(8).data.batch_tokens
    assert short.num_images < long.num_images and short.held_out_bytes < long.held_out_bytes


def test_a_slow_machine_examines_less_and_a_fast_one_as_planned():
    plan = recipe.plan(8)
    assert recipe.fitted(plan, 9000) == plan
    slow = recipe.fitted(plan, 1000)
    assert slow.held_out_bytes == round(plan.held_out_bytes / 4) and slow.num_images == plan.num_images
    slowest = recipe.fitted(plan, 1)
    assert (slowest.held_out_bytes, slowest.num_captions, slowest.sample_tokens) == (30_000, 120, 48)
