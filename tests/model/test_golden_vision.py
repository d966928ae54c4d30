"""Golden images and video: tower, projector, merged text, and the tower's single operations."""

from __future__ import annotations

import pytest
import torch
from golden_checks import DTYPES, GOLDEN, check_merged, check_vision, golden
from safetensors.torch import load_file

from openk3.model.vision import merge_patches, position_embedding, rotary_angles, rotate, time_embedding

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
OPS = {"atol": 2e-6, "rtol": 1e-5}


@each_dtype
@pytest.mark.parametrize("name", ["vision_image", "vision_video", "vision_mixed", "vision_native"])
def test_tower_and_projector(name: str, dtype: torch.dtype) -> None:
    """Two images, a video, all mixed, and an image that needs no resizing of the position table."""
    check_vision(golden("mm_a", dtype), name)


@each_dtype
@pytest.mark.parametrize("name", ["mm_image", "mm_video"])
def test_text_with_media(name: str, dtype: torch.dtype) -> None:
    """Placeholders become features; logits, block sums and loss follow."""
    check_merged(golden("mm_a", dtype), name)


def test_operations_of_the_tower() -> None:
    """Position and time embedding, rotary turns, temporal pooling."""
    inputs = load_file(GOLDEN / "ops" / "inputs.safetensors")
    expected = load_file(GOLDEN / "ops" / "expected.safetensors")
    table = inputs["pos_emb.weight"]
    for rows, columns in ((16, 2), (2, 30), (4, 4), (6, 10), (8, 8)):
        got = position_embedding(table, rows, columns)
        torch.testing.assert_close(got, expected[f"pos_emb.{rows}x{columns}"].to(got), **OPS)
    torch.testing.assert_close(time_embedding(4, 12, table), expected["time_emb.dim12_t4"].to(table), **OPS)
    angles_TR, where = rotary_angles((2, 3, 5), 16), "vit_rope.t2h3w5_dim16"
    torch.testing.assert_close(angles_TR.cos(), expected[f"{where}.cos"].double(), **OPS)
    torch.testing.assert_close(angles_TR.sin(), expected[f"{where}.sin"].double(), **OPS)
    x_THK = inputs["vit_rope.x"].double()
    turned = rotate(x_THK, torch.polar(torch.ones_like(angles_TR), angles_TR))
    torch.testing.assert_close(turned, expected["vit_rope.y"].double(), **OPS)
    pooled = merge_patches(inputs["tpool.x"].double(), (3, 4, 6))
    torch.testing.assert_close(pooled, expected["tpool.t3h4w6"].double(), **OPS)
