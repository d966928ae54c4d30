"""quickstart: the laptop story, a small K3 with every part on, learning visibly in minutes on two CPU cores."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from openk3.config.model import LinearAttnConfig, ModelConfig, TextConfig, VisionConfig, schedule
from openk3.config.train import (
    BalanceConfig,
    CheckpointConfig,
    DataConfig,
    OptimConfig,
    PretrainConfig,
    ValidationConfig,
)

VOCAB = 2816  # 2,560 ranks and K3's 256 special tokens
WINDOW, LONG_WINDOW = 256, 2048  # the second stage is 8 times longer, late in training
SHARES = (0.79, 0.13, 0.08)  # text, captioned images, conversations; of the tokens


@dataclass(frozen=True)
class Plan:
    """How much of everything fits the time: what is gathered and drawn, and what the evaluation looks at."""

    minutes: float
    max_text_bytes: int = 16_000_000
    tokenizer_bytes: int = 3_000_000
    num_images: int = 0
    num_conversations: int = 0
    held_out_bytes: int = 0
    num_captions: int = 0
    num_samples: int = 8
    sample_tokens: int = 0
    evaluation_seconds: float = 0.0  # kept for everything after training
    curve_seconds: float = 0.0  # time between two held-out measurements while training


def plan(minutes: float) -> Plan:
    """Sizes for a run of `minutes`, on a machine that reads about 5,000 tokens a second at most."""
    return Plan(
        minutes,
        num_images=round(200 + 900 * minutes),
        num_conversations=round(60 + 120 * minutes),
        held_out_bytes=round(min(75_000 * max(minutes, 1), 800_000)),
        num_captions=round(min(120 + 40 * minutes, 600)),
        sample_tokens=96 if minutes < 3 else 160,
        evaluation_seconds=min(9 + 3.5 * minutes, 45.0),
        curve_seconds=max(10.0, 4.0 * minutes),
    )


def fitted(plan: Plan, tokens_per_second: float) -> Plan:
    """The same plan with a shorter evaluation on a machine that trains at fewer than 4,000 tokens a second."""
    speed = min(1.0, tokens_per_second / 4000)
    return dataclasses.replace(
        plan,
        held_out_bytes=max(30_000, round(plan.held_out_bytes * speed)),
        num_captions=max(120, round(plan.num_captions * speed)),
        sample_tokens=max(48, round(plan.sample_tokens * speed)),
    )


def model() -> ModelConfig:
    """6 layers of width 128 (4 KDA, 2 MLA), 16 experts of which 4 work, 3 depth blocks, a 2-layer tower, MTP."""
    kda, full = schedule(6)
    text = TextConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        linear_attn_config=LinearAttnConfig(head_dim=32, num_heads=4, kda_layers=kda, full_attn_layers=full),
        attn_res_block_size=2,
        num_experts=16,
        num_experts_per_token=4,
        num_shared_experts=1,
        moe_intermediate_size=64,
        routed_expert_hidden_size=64,
        max_position_embeddings=8192,
        num_nextn_predict_layers=1,
    )
    vision = VisionConfig(
        vt_num_hidden_layers=2,
        vt_hidden_size=64,
        vt_intermediate_size=256,
        vt_num_attention_heads=4,
        qkv_hidden_size=64,
        init_pos_emb_height=8,
        init_pos_emb_width=8,
        text_hidden_size=128,
    )
    ids = {"bos_token_id": VOCAB - 256, "eos_token_id": VOCAB - 254, "pad_token_id": VOCAB - 1}
    return ModelConfig(text=text, vision=vision, media_placeholder_token_id=VOCAB - 235, **ids)


def pretrain(minutes: float = 8.0) -> PretrainConfig:
    """Windows of 256 tokens, and of 2,048 for the last eighth; `SHARES` become the weights of its files.

    Short runs take smaller steps at a higher rate. A step is two micro-batches, one for each core.
    """
    batch, lr = (2048, 2e-2) if minutes < 3 else (4096, 1.2e-2)
    return PretrainConfig(
        model=model(),
        data=DataConfig(
            stages=((0.875, WINDOW), (0.125, LONG_WINDOW)), batch_tokens=batch, micro_batch_tokens=batch // 2
        ),
        optim=OptimConfig(lr=lr, min_lr=4e-4),
        balance=BalanceConfig(ema=0.95),
        checkpoint=CheckpointConfig(every=0, keep=1, experts="float32"),
        validation=ValidationConfig(every=0, max_tokens=8192),
        steps=800,
        workers=2,
        device="cpu",
    )
