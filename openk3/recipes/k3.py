"""k3: the released shapes, and a pretraining schedule as far as the report gives one."""

from __future__ import annotations

from openk3.config.model import LinearAttnConfig, ModelConfig, TextConfig, schedule
from openk3.config.train import CheckpointConfig, DataConfig, OptimConfig, PretrainConfig, ValidationConfig


def model() -> ModelConfig:
    """The released model (report Table 1): 93 layers, three KDA to one MLA and an MLA at the end, no MTP layer."""
    kda, full = schedule(93)
    linear = LinearAttnConfig(kda_layers=kda, full_attn_layers=full)
    return ModelConfig(text=TextConfig(linear_attn_config=linear))


def pretrain() -> PretrainConfig:
    """Windows of 8K and 64K, then 256K and 1M in the cooldown (report section 3); 1 % warm-up, cosine, decay 0.1.

    Learning rates, batch size, number of steps and the stages' shares are not published: these are ours. The report
    also trains one MTP layer, which the released weights lack; `model.text.num_nextn_predict_layers` 1 adds it.
    """
    return PretrainConfig(
        model=model(),
        data=DataConfig(
            stages=((0.85, 8192), (0.10, 65536), (0.04, 262144), (0.01, 1048576)),
            batch_tokens=1 << 26,
            micro_batch_tokens=8192,
        ),
        optim=OptimConfig(lr=2e-4, min_lr=2e-5),
        checkpoint=CheckpointConfig(every=1000, experts="mxfp4"),
        validation=ValidationConfig(every=1000, max_tokens=1 << 22),
        steps=250_000,
    )
