"""MoonViT-V2: items do not see each other, frames, both forms of video attention, and limits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_model import MEDIA, close, random_image, tiny_config, tiny_model
from torch import Tensor

from openk3 import Packed
from openk3.inputs.packed import MediaItem
from openk3.model.vision import FrameAttention, MoonViT

MODEL = tiny_model()
GRIDS = ((1, 4, 6), (1, 2, 8), (3, 4, 4), (1, 4, 6), (1, 6, 6))


def tower() -> MoonViT:
    """The tiny model's."""
    assert MODEL.vision is not None
    return MODEL.vision


def features(items: list[MediaItem]) -> list[Tensor]:
    """Merged patches of each item."""
    with torch.no_grad():
        return list(tower()(items).split([item.num_tokens for item in items]))


def test_items_are_isolated() -> None:
    """V04: a pixel of image 1 changes it and leaves every other item bit for bit as it was."""
    items = [random_image(grid, seed) for seed, grid in enumerate(GRIDS)]
    before = features(items)
    pixels = items[0].pixels_N3PP.clone()
    pixels[3, 1, 5, 5] += 0.5
    after = features([MediaItem(pixels, items[0].grid_thw), *items[1:]])
    assert not torch.equal(after[0], before[0])
    for got, want in zip(after[1:], before[1:], strict=True):
        assert torch.equal(got, want)


def test_order_and_company_of_items_do_not_matter() -> None:
    """V04: permuted media, and each item alone, give the same features."""
    items = [random_image(grid, seed) for seed, grid in enumerate(GRIDS)]
    want = features(items)
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        for n, got in zip(order, features([items[n] for n in order])):
            close(got, want[n], 1e-12)
    for item, expected in zip(items, want):
        close(features([item])[0], expected, 1e-12)


def test_permuted_media_in_text() -> None:
    """V04: two images and a video swapped together with the sequences that hold them give swapped logits."""
    rows = [[7, MEDIA, 8], [9, 10, MEDIA], [MEDIA, 11]]
    items = [random_image((1, 4, 6), 0), random_image((1, 4, 6), 1), random_image((4, 2, 4), 2)]
    with torch.no_grad():
        want = MODEL(Packed.join(rows, images=items)).split([8, 8, 3])
        got = MODEL(Packed.join(rows[::-1], images=items[::-1])).split([3, 8, 8])
    for one, two in zip(got[::-1], want):
        close(one, two)


def test_gradients_stay_inside_an_item() -> None:
    """What is read from item 2 sends no gradient to the pixels of item 1."""
    items = [random_image((1, 4, 4), 0), random_image((1, 4, 4), 1)]
    pixels = [item.pixels_N3PP.requires_grad_() for item in items]
    merged = tower()(items)
    first, second = torch.autograd.grad(merged[4:].square().sum(), pixels)
    assert not first.any() and second.flatten(1).any(1).all()


@pytest.mark.parametrize("frames", [1, 2, 3, 4])
def test_every_frame_count(frames: int) -> None:
    """V04: one to four frames give the tokens of one; every frame counts."""
    item = random_image((frames, 4, 6))
    assert item.num_tokens == 6
    (before,) = features([item])
    assert before.shape == (6, 4, 16)
    for frame in range(frames):
        pixels = item.pixels_N3PP.clone()
        pixels[frame * 24 + 5] += 0.5
        assert not torch.equal(features([MediaItem(pixels, item.grid_thw)])[0], before)


def test_order_of_frames_matters() -> None:
    """The temporal vector tells frames apart; a repeated frame is not the same as a still image."""
    one, two = random_image((1, 2, 2), 0).pixels_N3PP, random_image((1, 2, 2), 1).pixels_N3PP
    forward, backward = (features([MediaItem(torch.cat(p), (2, 2, 2))])[0] for p in ((one, two), (two, one)))
    assert (forward - backward).abs().max() > 1e-3
    still = features([MediaItem(one, (1, 2, 2))])[0]
    assert (features([MediaItem(torch.cat((one, one)), (2, 2, 2))])[0] - still).abs().max() > 1e-3


def test_factorised_attention_by_definition() -> None:
    """o = A_time(q, k, A_space(q, k, v)): inside each frame, then across frames at the same position."""
    q, k, v = torch.randn(3, 3 * 8, 2, 4, dtype=torch.float64)

    def softmax_rows(values: Tensor, rows: list[int]) -> Tensor:
        logits = torch.einsum("qhd,khd->hqk", q[rows], k[rows]) / 2
        return torch.einsum("hqk,khd->qhd", logits.softmax(-1), values[rows])

    space = torch.cat([softmax_rows(v, list(range(8 * f, 8 * f + 8))) for f in range(3)])
    want = torch.empty_like(v)
    for place in range(8):
        rows = [8 * f + place for f in range(3)]
        want[rows] = softmax_rows(space, rows)
    close(FrameAttention([(3, 2, 4)], factorised=True)(q, k, v), want, 1e-12)
    joint = softmax_rows(v, list(range(24)))
    close(FrameAttention([(3, 2, 4)], factorised=False)(q, k, v), joint, 1e-12)


def test_factorised_equals_joint_on_still_images_only() -> None:
    """The two forms of the config differ on video, and share every parameter."""
    config = tiny_config()
    assert config.vision is not None
    other = dataclasses.replace(config, vision=dataclasses.replace(config.vision, video_attention="factorised"))
    model = tiny_model(other)
    assert model.vision is not None
    model.load_state_dict(MODEL.state_dict())
    stills, video = [random_image((1, 4, 6)), random_image((1, 2, 2))], [random_image((3, 4, 4))]
    with torch.no_grad():
        close(model.vision(stills), tower()(stills), 1e-13)
        assert (model.vision(video) - tower()(video)).abs().max() > 1e-3
        mixed = model.vision([*video, *stills, *video])
        close(mixed[-4:], model.vision(video), 1e-12)
        close(mixed[4:11], model.vision(stills), 1e-12)


def test_too_large_items_are_refused() -> None:
    """More frames than the temporal table, more patches on a side than the rotary table, patches of another size."""
    with pytest.raises(ValueError, match=r"image 1: grid \(5, 2, 2\) exceeds 4 frames"):
        tower()([random_image((1, 2, 2)), random_image((5, 2, 2))])
    with pytest.raises(ValueError, match=r"image 0: grid \(1, 2, 514\) exceeds"):
        tower()([random_image((1, 2, 514))])
    with pytest.raises(ValueError, match=r"image 0: patches of \[3, 16, 16\]; the vision tower reads \[3, 14, 14\]"):
        tower()([MediaItem(torch.zeros(4, 3, 16, 16), (1, 2, 2))])


def test_position_table_is_stretched_and_trained() -> None:
    """Images of any size send gradients to the whole table."""
    model = tiny_model()
    assert model.vision is not None
    model.vision([random_image((1, 4, 10))]).square().sum().backward()
    grad = model.vision.patch_embed.pos_emb.weight.grad
    assert grad is not None and grad.abs().amax(-1).min() > 0
