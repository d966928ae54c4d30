"""Every image shows what its text says: measured in its pixels, kind by kind."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from openk3.data.render import CELL, COLORS, KINDS, draw, render

ITEMS = [render(3, i) for i in range(600)]
HELD_OUT = [render(3, i, held_out=True) for i in range(600)]


def of_kind(kind: str, count: int = 16) -> list:
    items = [item for item in ITEMS if item.kind == kind][:count]
    assert len(items) == count
    return items


def names(image: Image.Image) -> np.ndarray:
    """The name of the colour nearest to every pixel, 'white' being one of them; [H, W]."""
    table = {**COLORS, "white": (255, 255, 255)}
    distance = np.abs(np.asarray(image, float)[:, :, None] - np.array(list(table.values()), float)).sum(-1)
    return np.array(list(table))[distance.argmin(-1)]


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def test_same_seed_same_item_and_other_seeds_differ():
    again = render(3, 17)
    assert (again.text, again.kind) == (ITEMS[17].text, ITEMS[17].kind)
    assert np.array_equal(again.image, ITEMS[17].image)
    assert [render(4, i).text for i in range(40)] != [item.text for item in ITEMS[:40]]


def test_every_kind_comes_with_about_its_share_and_fits_few_tokens():
    counts = Counter(item.kind for item in ITEMS)
    whole = sum(kind.share for kind in KINDS.values())
    for name, kind in KINDS.items():
        assert counts[name] == pytest.approx(600 * kind.share / whole, rel=0.5)
    for item in ITEMS:
        width, height = item.image.size
        assert item.image.mode == "RGB"
        assert width % CELL == height % CELL == 0
        assert 1 <= width * height // CELL**2 <= 16


def test_held_out_combinations_never_occur_in_training():
    compositional = {name for name, kind in KINDS.items() if kind.compositional}
    training = {item.text for item in ITEMS if item.kind in compositional}
    held_out = {item.text for item in HELD_OUT if item.kind in compositional}
    assert len(training) > 300 and len(held_out) > 100
    assert not training & held_out


def test_hardly_two_images_are_equal():
    assert len({item.image.tobytes() for item in ITEMS + HELD_OUT}) > 1190


def test_the_tinted_image_is_the_text_drawn_again():
    """Kinds whose text leaves nothing open: redrawing it gives the same image up to its tint."""
    for kind in ("solid", "grid", "svg", "bar", "plot", "pie"):
        for item in of_kind(kind):
            plain, tinted = np.asarray(draw(item.text), float), np.asarray(item.image, float)
            assert (tinted <= plain).all() and (tinted >= 0.88 * plain - 1).all()


def test_solid_and_grid_show_one_colour_per_token():
    for item in of_kind("solid", 5) + of_kind("grid", 15):
        token = np.asarray(item.image.resize((4, 4), Image.Resampling.BOX))[1::2, 1::2]
        seen = names(Image.fromarray(token)).ravel().tolist()
        said = re.findall("|".join(COLORS), item.text)
        assert seen == (said * 4 if item.kind == "solid" else said)


def test_dots_are_as_many_as_the_text_says():
    for item in of_kind("dots"):
        ink = np.asarray(draw(item.text).convert("L")) < 250
        ink_of_one = np.asarray(draw("1 red dot").convert("L")) < 250
        assert ink.sum() == numbers(item.text)[0] * ink_of_one.sum()
        assert item.text.endswith("dot" if numbers(item.text)[0] == 1 else "dots")


def test_svg_covers_the_box_its_numbers_give():
    for item in of_kind("svg"):
        seen = names(draw(item.text))
        ink = np.argwhere(seen != "white")
        (top, left), (bottom, right) = ink.min(0), ink.max(0)
        n = numbers(item.text)
        if "circle" in item.text:
            box = (n[0] - n[2], n[1] - n[2], n[0] + n[2], n[1] + n[2])
        elif "rect" in item.text:
            box = (n[0], n[1], n[0] + n[2] - 1, n[1] + n[3] - 1)
        else:
            box = (min(n[::2]), min(n[1::2]), max(n[::2]), max(n[1::2]))
        assert (left, top, right, bottom) == box
        assert f'fill="{seen[tuple(ink[len(ink) // 2])]}"' in item.text


def test_bars_and_points_are_as_high_as_their_numbers():
    for item in of_kind("bar"):
        ink = np.asarray(draw(item.text).convert("L")) < 250
        assert [int(ink[:, 14 + CELL * i].sum()) for i in range(3)] == [6 * h for h in numbers(item.text)]
    for item in of_kind("plot"):
        ink = np.asarray(draw(item.text).convert("L")) < 250
        columns = [np.flatnonzero(ink[:, 14 + CELL * i]) for i in range(4)]
        assert [(56 - round(c.mean())) // 5 for c in columns] == numbers(item.text)


def test_pie_areas_are_as_the_eighths():
    for item in of_kind("pie", 10):
        seen = Counter(names(draw(item.text)).ravel())
        first, second = re.findall("|".join(COLORS), item.text)
        part, rest = numbers(item.text)
        assert part + rest == 8
        assert seen[first] / (seen[first] + seen[second]) == pytest.approx(part / 8, abs=0.02)


def test_letters_can_be_told_apart():
    drawn = [np.asarray(draw(f'text("{c}{c}", "black")').convert("L"), float) for c in "A8BDKMTWZ25"]
    for i, image in enumerate(drawn):
        for other in drawn[:i]:
            assert np.abs(image - other).mean() > 3


@pytest.mark.parametrize(
    "text", ["", "solid mauve", "7 red dots", 'bar([1, 2], "red")', '<svg><circle fill="red" cx="1"/></svg>', "x = 1"]
)
def test_other_text_does_not_draw(text):
    with pytest.raises(ValueError, match="picture|numbers"):
        draw(text)
