"""pocket: the model that comes with openk3, trained in eight minutes on one large GPU; docs/pocket.md has its data."""

from __future__ import annotations

from openk3.config.model import LinearAttnConfig, ModelConfig, TextConfig, VisionConfig, schedule
from openk3.config.train import CheckpointConfig, DataConfig, OptimConfig, PretrainConfig, ValidationConfig

VOCAB = 4096  # 3,840 ranks and K3's 256 special tokens
SOURCES = ("books", "talk", "pictures")
SHARES = (0.14, 0.74, 0.12)  # of the tokens


def model() -> ModelConfig:
    """9 layers of width 256 (6 KDA, 3 MLA), 42 experts of which 4 work, 3 depth blocks, a 3-layer tower; no MTP."""
    kda, full = schedule(9)
    text = TextConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=9,
        num_attention_heads=2,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_attn_config=LinearAttnConfig(head_dim=128, num_heads=2, kda_layers=kda, full_attn_layers=full),
        attn_res_block_size=3,
        num_experts=42,
        num_experts_per_token=4,
        num_shared_experts=1,
        moe_intermediate_size=128,
        routed_expert_hidden_size=128,
        max_position_embeddings=8192,
    )
    vision = VisionConfig(
        vt_num_hidden_layers=3,
        vt_hidden_size=96,
        vt_intermediate_size=192,
        vt_num_attention_heads=3,
        qkv_hidden_size=96,
        init_pos_emb_height=8,
        init_pos_emb_width=8,
        text_hidden_size=256,
    )
    ids = {"bos_token_id": VOCAB - 256, "eos_token_id": VOCAB - 254, "pad_token_id": VOCAB - 1}
    return ModelConfig(text=text, vision=vision, media_placeholder_token_id=VOCAB - 235, **ids)


def pretrain() -> PretrainConfig:
    """Seven and a half minutes of steps of 131,072 tokens; for the last third with experts rounded to MXFP4."""
    return PretrainConfig(
        model=model(),
        data=DataConfig(
            weights=SHARES, stages=((1.0, 1024),), batch_tokens=131072, micro_batch_tokens=131072, held_out_percent=0
        ),
        optim=OptimConfig(lr=6e-3, min_lr=1e-4, weight_decay=0.05),
        checkpoint=CheckpointConfig(every=450, experts="mxfp4"),
        validation=ValidationConfig(every=0, max_tokens=131072),
        minutes=7.5,
        steps=3000,
        mxfp4_from=0.66,
        device="auto",
    )
