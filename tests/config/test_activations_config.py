"""Activation policies as text: what is read, what is refused, and the shortest text of a policy."""

from __future__ import annotations

import dataclasses

import pytest
from activation_checks import policies
from hypothesis import given

from openk3 import recipes
from openk3.config.activations import PRESETS, ActivationPolicy
from openk3.config.model import ConfigError
from openk3.config.train import PretrainConfig


@given(policies())
def test_text_of_a_policy_is_read_as_the_same(policy: ActivationPolicy) -> None:
    """Whatever it is; presets are their names."""
    assert ActivationPolicy.parse(str(policy)) == policy


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset: str) -> None:
    """Their own names are their texts; only "memory" rounds."""
    policy = ActivationPolicy.parse(preset)
    assert str(policy) == preset
    assert policy.is_exact == (preset != "memory")


def test_changes_of_a_preset() -> None:
    """With and without the preset's name."""
    alone = ActivationPolicy.parse("moe_hidden=fp8, situ=recompute")
    assert alone == ActivationPolicy(moe_hidden="fp8", situ="recompute")
    assert ActivationPolicy.parse("selective,situ=keep") == dataclasses.replace(
        ActivationPolicy.parse("selective"), situ="keep"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("some", "'some' is none of none, selective, memory, full, auto"),
        ("full,experts=fp8", "'experts=fp8' is not GROUP=HOW; groups are depth_sources,"),
        ("full,situ", "'situ' is not GROUP=HOW"),
        ("depth_sources=recompute", "depth_sources can be keep, fp8, got 'recompute'"),
        ("vision=fp8", "vision can be keep, recompute, got 'fp8'"),
        ("full,layer_inputs=fp8", "with mixer=recompute, layer inputs must not come from FP8"),
        ("ffn=recompute,layer_inputs=recompute,depth_sources=fp8", "with ffn=recompute, layer inputs must not"),
        ("", "'' is none of"),
        ("auto,mixer=keep", "auto chooses every group itself; give it alone"),
    ],
)
def test_errors_name_what_is_wrong(text: str, message: str) -> None:
    """In one line, from the policy and from the run's configuration alike."""
    with pytest.raises(ConfigError) as caught:
        ActivationPolicy.parse(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="activations: "):
        dataclasses.replace(recipes.pretrain("tiny"), activations=text)


def test_blanks_mean_nothing() -> None:
    """Between words."""
    assert ActivationPolicy.parse(" none , mixer = recompute ") == ActivationPolicy(mixer="recompute")


def test_runs_keep_it() -> None:
    """As text in run.json; a run from before there was the field keeps everything."""
    config = dataclasses.replace(recipes.pretrain("tiny"), activations="auto")
    assert PretrainConfig.from_dict(config.to_dict()).activations == "auto"
    old = config.to_dict()
    del old["activations"]
    assert PretrainConfig.from_dict(old).activations == "none"
