"""small: a K3 of a billion parameters that one large GPU trains in a day."""

from __future__ import annotations

from openk3.config.model import LinearAttnConfig, ModelConfig, TextConfig, VisionConfig, schedule
from openk3.config.train import CheckpointConfig, DataConfig, OptimConfig, PretrainConfig, ValidationConfig

VOCAB = 32768


def model() -> ModelConfig:
    """25 layers of width 768 (18 KDA, 7 MLA), 80 experts of which 4 work, 7 depth blocks, an 8-layer tower, MTP."""
    kda, full = schedule(25)
    text = TextConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=25,
        num_attention_heads=6,
        q_lora_rank=256,
        kv_lora_rank=256,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_attn_config=LinearAttnConfig(head_dim=128, num_heads=6, kda_layers=kda, full_attn_layers=full),
        attn_res_block_size=4,
        num_experts=80,
        num_experts_per_token=4,
        num_shared_experts=1,
        moe_intermediate_size=384,
        routed_expert_hidden_size=384,
        max_position_embeddings=65536,
        num_nextn_predict_layers=1,
    )
    vision = VisionConfig(
        vt_num_hidden_layers=8,
        vt_hidden_size=384,
        vt_intermediate_size=1536,
        vt_num_attention_heads=6,
        qkv_hidden_size=384,
        init_pos_emb_height=32,
        init_pos_emb_width=32,
        text_hidden_size=768,
    )
    ids = {"bos_token_id": VOCAB - 256, "eos_token_id": VOCAB - 254, "pad_token_id": VOCAB - 1}
    return ModelConfig(text=text, vision=vision, media_placeholder_token_id=VOCAB - 235, **ids)


def pretrain() -> PretrainConfig:
    """10,000 steps of 524,288 tokens (5.2 G tokens); windows grow from 8,192 to 65,536 for the last tenth."""
    return PretrainConfig(
        model=model(),
        data=DataConfig(stages=((0.9, 8192), (0.1, 65536)), batch_tokens=524288, micro_batch_tokens=65536),
        optim=OptimConfig(lr=8e-4, min_lr=8e-5),
        checkpoint=CheckpointConfig(every=500),
        validation=ValidationConfig(every=250, max_tokens=262144),
        steps=10000,
        device="auto",
    )
