"""Small captioned images drawn with Pillow: colours, counts, SVG shapes, charts and letters, made from their texts."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from openk3.data.sources import is_held_out

CELL = 28  # one image token after 14-pixel patches and the 2x2 merge
COLORS = {
    "red": (220, 30, 30),
    "green": (30, 150, 50),
    "blue": (30, 60, 220),
    "yellow": (245, 220, 40),
    "orange": (250, 140, 20),
    "purple": (130, 40, 160),
    "cyan": (40, 200, 220),
    "pink": (250, 150, 190),
    "black": (28, 28, 28),
    "gray": (130, 130, 130),
}
LETTERS = "ABCDEFGHJKLMNPRSTUVWXYZ23456789"  # without pairs that look alike
_WHITE = (255, 255, 255)
_COLOR = "(" + "|".join(COLORS) + ")"


@dataclass(frozen=True)
class Rendered:
    """An image, the text that made it (code or caption) and the kind of text."""

    kind: str
    text: str
    image: Image.Image


@dataclass(frozen=True)
class Kind:
    """How one kind of text is chosen, and how an image is painted from it."""

    share: int  # parts in the whole of all kinds
    compositional: bool  # so many texts exist that 5 % of them can be kept for the held-out set alone
    write: Callable[[random.Random], str]
    pattern: re.Pattern[str]
    paint: Callable[[re.Match[str], random.Random], Image.Image]


def render(seed: int, index: int, *, held_out: bool = False) -> Rendered:
    """Item `index` of the endless training or held-out series of `seed`.

    A compositional text belongs to one of the two series for good (by its md5), so that a held-out image shows a
    combination that no training image has; the few texts of the other kinds differ by tint and placing alone.
    """
    rng = random.Random(f"{'held-out' if held_out else 'train'}:{seed}:{index}")
    name = rng.choices(list(KINDS), [kind.share for kind in KINDS.values()])[0]
    kind = KINDS[name]
    text = kind.write(rng)
    while kind.compositional and is_held_out(text) != held_out:
        text = kind.write(rng)
    return Rendered(name, text, _perturb(draw(text, rng), rng))


def draw(text: str, rng: random.Random | None = None) -> Image.Image:
    """The RGB image that `text` describes, untinted; `rng` places what the text leaves open.

    Raises ValueError if the text is in none of the forms that `render` writes.
    """
    for kind in KINDS.values():
        match = kind.pattern.fullmatch(text)
        if match:
            return kind.paint(match, rng or random.Random(0))
    raise ValueError(f"{text!r}: not a picture's text")


def _perturb(image: Image.Image, rng: random.Random) -> Image.Image:
    """A little less of each colour, from left to right: no two images alike, yet small as PNG files."""
    columns = image.width
    gains = [[rng.uniform(0.88, 1.0) for _ in range(3)] for _ in range(2)]
    ramp = np.linspace(gains[0], gains[1], columns // 14).repeat(14, 0)
    return Image.fromarray((np.asarray(image, np.float32) * ramp).astype(np.uint8))


def _canvas(columns: int, rows: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """A white image of columns x rows image tokens."""
    image = Image.new("RGB", (columns * CELL, rows * CELL), _WHITE)
    return image, ImageDraw.Draw(image)


def _color(rng: random.Random) -> str:
    return rng.choice(list(COLORS))


def _colors(rng: random.Random, count: int) -> list[str]:
    return rng.sample(list(COLORS), count)


# "solid red": one colour everywhere


def _paint_solid(match: re.Match[str], rng: random.Random) -> Image.Image:
    return Image.new("RGB", (2 * CELL, 2 * CELL), COLORS[match[1]])


# "red blue / green gray": one colour per image token


def _write_grid(rng: random.Random) -> str:
    return "{} {} / {} {}".format(*(_color(rng) for _ in range(4)))


def _paint_grid(match: re.Match[str], rng: random.Random) -> Image.Image:
    image, pen = _canvas(2, 2)
    for i, name in enumerate(match.groups()):
        x, y = i % 2 * CELL, i // 2 * CELL
        pen.rectangle((x, y, x + CELL - 1, y + CELL - 1), COLORS[name])
    return image


# "3 red dots"


def _write_dots(rng: random.Random) -> str:
    count = rng.randint(1, 6)
    return f"{count} {_color(rng)} dot{'s' if count > 1 else ''}"


def _paint_dots(match: re.Match[str], rng: random.Random) -> Image.Image:
    image, pen = _canvas(2, 2)
    for cell in rng.sample(range(9), int(match[1])):
        x, y = 10 + 18 * (cell % 3) + rng.randint(-2, 2), 10 + 18 * (cell // 3) + rng.randint(-2, 2)
        pen.ellipse((x - 5, y - 5, x + 5, y + 5), COLORS[match[2]])
    return image


# '<svg><circle fill="red" cx="14" cy="42" r="8"/></svg>' and rect, polygon: real SVG on 84 x 84 pixels


def _write_svg(rng: random.Random) -> str:
    x, y, r = rng.choice((14, 42, 70)), rng.choice((14, 42, 70)), rng.choice((7, 12))
    body = {
        "circle": f'cx="{x}" cy="{y}" r="{r}"',
        "rect": f'x="{x - r}" y="{y - r}" width="{2 * r}" height="{2 * r}"',
        "polygon": f'points="{x},{y - r} {x + r},{y + r} {x - r},{y + r}"',
    }
    shape = rng.choice(list(body))
    return f'<svg><{shape} fill="{_color(rng)}" {body[shape]}/></svg>'


def _paint_svg(match: re.Match[str], rng: random.Random) -> Image.Image:
    image, pen = _canvas(3, 3)
    shape, color = match[1], COLORS[match[2]]
    numbers = [int(n) for n in re.findall(r"\d+", match[3])]
    if shape == "circle" and len(numbers) == 3:
        x, y, r = numbers
        pen.ellipse((x - r, y - r, x + r, y + r), color)
    elif shape == "rect" and len(numbers) == 4:
        x, y, width, height = numbers
        pen.rectangle((x, y, x + max(width, 1) - 1, y + max(height, 1) - 1), color)
    elif shape == "polygon" and len(numbers) == 6:
        pen.polygon(list(zip(numbers[::2], numbers[1::2])), color)
    else:
        raise ValueError(f"{match[0]!r}: {len(numbers)} numbers do not make a {shape}")
    return image


# 'bar([3, 7, 2], "red")': heights 1..9, one bar per column of image tokens


def _write_bar(rng: random.Random) -> str:
    return f'bar([{", ".join(str(rng.randint(1, 9)) for _ in range(3))}], "{_color(rng)}")'


def _paint_bar(match: re.Match[str], rng: random.Random) -> Image.Image:
    image, pen = _canvas(3, 2)
    for i, height in enumerate(match[1].split(", ")):
        top = 56 - 6 * int(height)
        pen.rectangle((i * CELL + 5, top, i * CELL + 22, 55), COLORS[match[2]])
    return image


# 'plot([1, 4, 2, 8], "red")': four points, one per column of image tokens


def _write_plot(rng: random.Random) -> str:
    return f'plot([{", ".join(str(rng.randint(1, 9)) for _ in range(4))}], "{_color(rng)}")'


def _paint_plot(match: re.Match[str], rng: random.Random) -> Image.Image:
    image, pen = _canvas(4, 2)
    points = [(14 + CELL * i, 56 - 5 * int(value)) for i, value in enumerate(match[1].split(", "))]
    pen.line(points, COLORS[match[2]], 3)
    for x, y in points:
        pen.ellipse((x - 4, y - 4, x + 4, y + 4), COLORS[match[2]])
    return image


# 'pie([3, 5], "red", "blue")': eighths, clockwise from the top


def _write_pie(rng: random.Random) -> str:
    part = rng.randint(1, 7)
    return 'pie([{}, {}], "{}", "{}")'.format(part, 8 - part, *_colors(rng, 2))


def _paint_pie(match: re.Match[str], rng: random.Random) -> Image.Image:
    image, pen = _canvas(2, 2)
    first, second = int(match[1]), int(match[2])
    angle = 360 * first / max(first + second, 1)
    pen.ellipse((2, 2, 53, 53), COLORS[match[4]])
    pen.pieslice((2, 2, 53, 53), -90, -90 + angle, COLORS[match[3]])
    return image


# 'text("K3", "red")': two letters, one per image token


def _write_text(rng: random.Random) -> str:
    return f'text("{rng.choice(LETTERS)}{rng.choice(LETTERS)}", "{_color(rng)}")'


def _paint_text(match: re.Match[str], rng: random.Random) -> Image.Image:
    image, pen = _canvas(2, 1)
    font = ImageFont.load_default(22)
    for i, letter in enumerate(match[1]):
        x, y = i * CELL + 14 + rng.randint(-2, 2), 14 + rng.randint(-2, 2)
        pen.text((x, y), letter, COLORS[match[2]], font, anchor="mm")
    return image


def _kind(share: int, compositional: bool, pattern: str, write: Callable, paint: Callable) -> Kind:
    return Kind(share, compositional, write, re.compile(pattern), paint)


KINDS = {
    "solid": _kind(12, False, f"solid {_COLOR}", lambda rng: f"solid {_color(rng)}", _paint_solid),
    "grid": _kind(24, True, f"{_COLOR} {_COLOR} / {_COLOR} {_COLOR}", _write_grid, _paint_grid),
    "dots": _kind(12, False, f"([1-6]) {_COLOR} dots?", _write_dots, _paint_dots),
    "svg": _kind(20, True, f'<svg><(circle|rect|polygon) fill="{_COLOR}" ([^<>/]*)/></svg>', _write_svg, _paint_svg),
    "bar": _kind(12, True, rf'bar\(\[(\d, \d, \d)\], "{_COLOR}"\)', _write_bar, _paint_bar),
    "plot": _kind(6, True, rf'plot\(\[(\d, \d, \d, \d)\], "{_COLOR}"\)', _write_plot, _paint_plot),
    "pie": _kind(6, True, rf'pie\(\[(\d), (\d)\], "{_COLOR}", "{_COLOR}"\)', _write_pie, _paint_pie),
    "text": _kind(8, True, rf'text\("([A-Z0-9]{{2}})", "{_COLOR}"\)', _write_text, _paint_text),
}
