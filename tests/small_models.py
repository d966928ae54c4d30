"""Models and batches for the training tests: every part of K3 present, a step in tens of milliseconds."""

from __future__ import annotations

import dataclasses

import torch

from openk3.config.model import LinearAttnConfig, ModelConfig, TextConfig, VisionConfig
from openk3.config.train import DataConfig, OptimConfig, PretrainConfig
from openk3.inputs.packed import Packed

MEDIA = 301


def small_model(**text: object) -> ModelConfig:
    """One KDA layer with a dense FFN, one MLA layer with 4 experts, vision, MTP; `text` replaces text fields."""
    config = TextConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        linear_attn_config=LinearAttnConfig(head_dim=16, num_heads=2, kda_layers=(1,), full_attn_layers=(2,)),
        attn_res_block_size=1,
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=32,
        routed_expert_hidden_size=32,
        num_nextn_predict_layers=1,
    )
    vision = VisionConfig(
        vt_num_hidden_layers=1,
        vt_hidden_size=16,
        vt_intermediate_size=32,
        vt_num_attention_heads=2,
        qkv_hidden_size=16,
        init_pos_emb_height=4,
        init_pos_emb_width=4,
        text_hidden_size=32,
    )
    config = dataclasses.replace(config, **text)  # pyrefly: ignore
    ids = {"bos_token_id": 280, "eos_token_id": 282, "pad_token_id": 319, "media_placeholder_token_id": MEDIA}
    return ModelConfig(text=config, vision=vision, **ids)


def small_run(**changes: object) -> PretrainConfig:
    """A run of `small_model` on the CPU, without data."""
    data = DataConfig(stages=((1.0, 64),), batch_tokens=128, micro_batch_tokens=64)
    config = PretrainConfig(model=small_model(), data=data, optim=OptimConfig(lr=1e-2, min_lr=1e-3), steps=10)
    return dataclasses.replace(config, **{"device": "cpu", "dtype": "float32", **changes})  # pyrefly: ignore


def random_batch(seed: int, lengths: tuple[int, ...] = (40, 24), images: int = 0) -> Packed:
    """Random text, with `images` 2x2-patch images at the start of the first sequence."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(0, 280, (length,), generator=generator) for length in lengths]
    pictures = []
    for n in range(images):
        sequences[0][n] = MEDIA
        pictures.append((torch.randn(4, 3, 14, 14, generator=generator), (1, 2, 2)))
    return Packed.join(sequences, pictures).expand(MEDIA)
