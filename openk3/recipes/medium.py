"""medium: a K3 of four billion parameters that one GPU of 141 GB trains in some days."""

from __future__ import annotations

from openk3.config.model import LinearAttnConfig, ModelConfig, TextConfig, VisionConfig, schedule
from openk3.config.train import CheckpointConfig, DataConfig, OptimConfig, PretrainConfig, ValidationConfig

VOCAB = 65536


def model() -> ModelConfig:
    """25 layers of width 1,536 (18 KDA, 7 MLA), 80 experts of which 4 work, 7 depth blocks, a 12-layer tower, MTP."""
    kda, full = schedule(25)
    text = TextConfig(
        vocab_size=VOCAB,
        hidden_size=1536,
        intermediate_size=6144,
        num_hidden_layers=25,
        num_attention_heads=12,
        q_lora_rank=768,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_attn_config=LinearAttnConfig(head_dim=128, num_heads=12, kda_layers=kda, full_attn_layers=full),
        attn_res_block_size=4,
        num_experts=80,
        num_experts_per_token=4,
        num_shared_experts=2,
        moe_intermediate_size=768,
        routed_expert_hidden_size=768,
        max_position_embeddings=65536,
        num_nextn_predict_layers=1,
    )
    vision = VisionConfig(
        vt_num_hidden_layers=12,
        vt_hidden_size=768,
        vt_intermediate_size=3072,
        vt_num_attention_heads=12,
        qkv_hidden_size=768,
        init_pos_emb_height=64,
        init_pos_emb_width=64,
        text_hidden_size=1536,
    )
    ids = {"bos_token_id": VOCAB - 256, "eos_token_id": VOCAB - 254, "pad_token_id": VOCAB - 1}
    return ModelConfig(text=text, vision=vision, media_placeholder_token_id=VOCAB - 235, **ids)


def pretrain() -> PretrainConfig:
    """16,000 steps of 1,048,576 tokens (16.8 G tokens); windows grow from 8,192 to 32,768 for the last tenth."""
    return PretrainConfig(
        model=model(),
        data=DataConfig(stages=((0.9, 8192), (0.1, 32768)), batch_tokens=1 << 20, micro_batch_tokens=32768),
        optim=OptimConfig(lr=5e-4, min_lr=5e-5),
        checkpoint=CheckpointConfig(every=500),
        validation=ValidationConfig(every=250, max_tokens=262144),
        steps=16000,
        device="auto",
    )
