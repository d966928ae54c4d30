"""Recipes: k3 is the released model, tiny has every part, and tiny's first losses are pinned."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openk3 import recipes
from openk3.config.model import ConfigError, LinearAttnConfig, ModelConfig, TextConfig, VisionConfig, schedule
from openk3.data.documents import Encoder
from openk3.data.loader import Loader
from openk3.data.sources import Records
from openk3.inputs.tokenizer import Tokenizer
from openk3.train.pretrain import fit_to_tokenizer
from openk3.train.state import TrainState
from openk3.train.step import train_step

GOLDEN = Path(__file__).parent / "tiny_loss.json"
TOKENIZER = Tokenizer({bytes([b]): b for b in range(256)})


def test_k3_is_the_released_model() -> None:
    """Defaults with the 93-layer schedule; three KDA to one MLA, the last layer an MLA; the report's four lengths."""
    kda, full = schedule(93)
    linear = LinearAttnConfig(kda_layers=kda, full_attn_layers=full)
    assert recipes.model("k3") == ModelConfig(text=TextConfig(linear_attn_config=linear), vision=VisionConfig())
    run = recipes.pretrain("k3")
    assert run.model == recipes.model("k3") and run.model.text.layer_kinds().count("mla") == 24
    assert [length for _, length in run.data.stages] == [8192, 65536, 262144, 1048576]
    assert (run.optim.schedule, run.optim.warmup_fraction, run.optim.weight_decay) == ("cosine", 0.01, 0.1)
    assert run.optim.qk_clip_tau == 100 and run.balance.method == "histogram" and run.balance.bins == 1000


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_every_part_is_on(name: str) -> None:
    """KDA and MLA, several depth blocks, latent experts, vision, MTP, an 8x length step late in training."""
    config = recipes.pretrain(name)
    text, kinds = config.model.text, config.model.text.layer_kinds()
    assert config.model == recipes.model(name) and {"kda", "mla"} == set(kinds) and kinds[-1] == "mla"
    assert len(kinds) > text.attn_res_block_size and text.attn_res_mode == "block"
    assert text.num_experts > text.num_experts_per_token and text.routed_expert_hidden_size < text.hidden_size
    assert config.model.vision is not None and text.num_nextn_predict_layers == 1 and config.mtp_loss_weight > 0
    (early, short), (late, long) = config.data.stages
    assert long == 8 * short and late < early and config.optim.qk_clip_tau == 100


def test_unknown_recipe() -> None:
    """One line with the names there are."""
    for function in (recipes.model, recipes.pretrain):
        with pytest.raises(ConfigError, match="huge: no such recipe; there are tiny, pocket, small, medium, k3"):
            function("huge")


def records() -> list[dict[str, Any]]:
    """Texts, captioned images and conversations that need no file and no random number."""
    words = [f"{'abcdefghij'[n % 10] * (1 + n % 5)} = {n * n % 97};\n" for n in range(400)]
    texts = [{"text": "".join(words[n : n + 40])} for n in range(0, 400, 20)]
    ramp = np.arange(28 * 28 * 3, dtype=np.int64).reshape(28, 28, 3)
    images = [{"image": (ramp * n % 256).astype(np.uint8), "text": f"ramp {n}"} for n in range(1, 6)]
    turns = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}] for n in range(5)]
    return texts + images + [{"messages": messages} for messages in turns]


def losses(steps: int) -> list[float]:
    """The losses of tiny's first steps, bytes as tokens."""
    config = dataclasses.replace(fit_to_tokenizer(recipes.pretrain("tiny"), TOKENIZER), device="cpu", dtype="float32")
    config = dataclasses.replace(config, steps=10)
    encoder = Encoder(TOKENIZER, vision=config.model.vision)
    data = config.data
    loader = Loader(
        [Records("records", records())],
        encoder,
        batch_tokens=data.batch_tokens,
        micro_batch_tokens=data.micro_batch_tokens,
    )
    state = TrainState.build(config, loader)
    return [train_step(state, loader.batch(state.seq_len))["loss"] for _ in range(steps)]


def test_first_losses_are_pinned() -> None:
    """Ten steps of tiny give the stored losses: a change of any part of training shows here.

    The tolerance leaves room for other CPUs, whose matrix libraries round differently. After an intended change, write
    the file anew with OPENK3_WRITE_GOLDEN=1.
    """
    found = losses(10)
    if os.environ.get("OPENK3_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps([round(loss, 6) for loss in found], indent=1) + "\n")
    assert found == pytest.approx(json.loads(GOLDEN.read_text()), rel=3e-4)
    assert found[-1] < found[0] - 1


def test_same_seed_same_losses() -> None:
    """Bit for bit on one machine."""
    assert losses(2) == losses(2)
