"""tiny: every feature of K3 in shapes so small that a run takes seconds on a CPU."""

from __future__ import annotations

from openk3.config.model import LinearAttnConfig, ModelConfig, TextConfig, VisionConfig, schedule
from openk3.config.train import (
    CheckpointConfig,
    DataConfig,
    OptimConfig,
    PretrainConfig,
    ValidationConfig,
)

VOCAB = 1024  # 768 ranks at most, and K3's 256 special tokens


def model() -> ModelConfig:
    """About 0.5 M parameters: 3 KDA and 2 MLA layers, 8 experts of which 2 work, 3 depth blocks, vision, MTP."""
    kda, full = schedule(5)
    text = TextConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=5,
        num_attention_heads=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        linear_attn_config=LinearAttnConfig(head_dim=16, num_heads=4, kda_layers=kda, full_attn_layers=full),
        attn_res_block_size=2,
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=2,
        moe_intermediate_size=32,
        routed_expert_hidden_size=32,
        max_position_embeddings=4096,
        num_nextn_predict_layers=1,
    )
    vision = VisionConfig(
        vt_num_hidden_layers=2,
        vt_hidden_size=32,
        vt_intermediate_size=64,
        vt_num_attention_heads=2,
        qkv_hidden_size=32,
        init_pos_emb_height=8,
        init_pos_emb_width=8,
        text_hidden_size=64,
    )
    ids = {"bos_token_id": VOCAB - 256, "eos_token_id": VOCAB - 254, "pad_token_id": VOCAB - 1}
    return ModelConfig(text=text, vision=vision, media_placeholder_token_id=VOCAB - 235, **ids)


def pretrain() -> PretrainConfig:
    """40 steps of 1,024 tokens; windows grow from 128 to 1,024 tokens for the last quarter."""
    return PretrainConfig(
        model=model(),
        data=DataConfig(stages=((0.75, 128), (0.25, 1024)), batch_tokens=1024, micro_batch_tokens=512),
        optim=OptimConfig(lr=5e-3, min_lr=5e-4),
        checkpoint=CheckpointConfig(every=20, experts="float32"),
        validation=ValidationConfig(every=20, max_tokens=4096),
        steps=40,
    )
