"""Questions about rendered pictures: colours, counts, shapes and places, charts, letters, and whole words."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from openk3.data.docstring_chat import Exchange
from openk3.data.render import CELL, COLORS, KINDS, Rendered, render

DESCRIBE = ("What is in this image?", "Describe the image.", "What do you see?", "What is this?", "What does it show?")
_PLACES = {14: ("left", "top"), 42: ("middle", "middle"), 70: ("right", "bottom")}
_WORD_SHARE = 0.2  # of the pictures: a word or a number to read


@dataclass(frozen=True)
class Picture:
    """A picture and what may be asked about it, one of the exchanges being its description."""

    image: Image.Image
    exchanges: tuple[Exchange, ...]


def picture(seed: int, index: int, words: Sequence[str]) -> Picture:
    """Picture `index` of the endless series of `seed`: drawn small, some of them then enlarged to twice the size."""
    rng = random.Random(f"picture:{seed}:{index}")
    if rng.random() < _WORD_SHARE:
        image, exchanges = _word(rng, words)
    else:
        item = render(seed, index)
        image, exchanges = item.image, _ABOUT[item.kind](item, rng)
    factor = rng.choice((1, 1, 1, 2))
    if image.width * factor > 9 * CELL:
        factor = 1
    return Picture(image.resize((image.width * factor, image.height * factor), Image.Resampling.BICUBIC), exchanges)


def _described(rng: random.Random, thought: str, answer: str) -> Exchange:
    return Exchange(rng.choice(DESCRIBE), thought, answer)


def _word(rng: random.Random, words: Sequence[str]) -> tuple[Image.Image, tuple[Exchange, ...]]:
    if rng.random() < 0.4:
        text = str(rng.randint(0, 9999))
    else:
        text = rng.choice(words)[:7]
        text = rng.choice((text, text.upper(), text.capitalize()))
    name = rng.choice(list(COLORS))
    font = ImageFont.load_default(rng.choice((20, 22, 24)))
    width = -(-(int(font.getlength(text)) + 8) // CELL) * CELL
    image = Image.new("RGB", (width, rng.choice((1, 2)) * CELL), (255, 255, 255))
    place = (width // 2 + rng.randint(-1, 1), image.height // 2 + rng.randint(-2, 2))
    ImageDraw.Draw(image).text(place, text, COLORS[name], font, anchor="mm")
    letters = f"Letters from left to right: {' '.join(text)}."
    read = rng.choice(("What does it say?", "Read the text.", "What is written here?", "Which word is this?"))
    return image, (
        Exchange(read, letters, text),
        _described(rng, letters, f'The text "{text}" in {name}.'),
        Exchange("What colour is the text?", "I look at the letters.", f"It is {name}."),
    )


def _solid(item: Rendered, rng: random.Random) -> tuple[Exchange, ...]:
    name = item.text.split()[1]
    ask = rng.choice(
        ("What colour is this?", "What color is it?", "Which colour do you see?", "What colour is the image?")
    )
    return Exchange(ask, "One colour everywhere.", f"It is {name}."), _described(
        rng, "One colour everywhere.", f"The whole image is {name}."
    )


def _grid(item: Rendered, rng: random.Random) -> tuple[Exchange, ...]:
    names = item.text.replace(" /", "").split()
    place = rng.randrange(4)
    where = ("top left", "top right", "bottom left", "bottom right")[place]
    seen = "Four squares: {} and {} on top, {} and {} below.".format(*names)
    return (
        _described(rng, "A grid of two by two.", seen),
        Exchange(f"What colour is the {where} square?", seen, f"It is {names[place]}."),
    )


def _dots(item: Rendered, rng: random.Random) -> tuple[Exchange, ...]:
    count, name, dots = item.text.split()
    ask = rng.choice(
        ("How many dots are there?", "How many dots do you see?", "Count the dots.", "How many are there?")
    )
    return (
        Exchange(ask, f"I count the {name} dots.", f"There {'is' if count == '1' else 'are'} {count} {dots}."),
        Exchange("What colour are the dots?", "I look at the dots.", f"They are {name}."),
        _described(rng, f"Dots in {name}.", f"{count} {name} {dots}."),
    )


def _svg(item: Rendered, rng: random.Random) -> tuple[Exchange, ...]:
    match = KINDS["svg"].pattern.fullmatch(item.text)
    assert match is not None
    shape = {"circle": "circle", "rect": "square", "polygon": "triangle"}[match[1]]
    numbers = [int(n) for n in match[3].replace(",", " ").replace('"', " ").split() if n.isdigit()]
    if shape == "circle":
        x, y, r = numbers
    elif shape == "square":
        r = numbers[2] // 2
        x, y = numbers[0] + r, numbers[1] + r
    else:
        x, r = numbers[0], numbers[3] - numbers[1]
        r //= 2
        y = numbers[1] + r
    column, row = _PLACES[x][0], _PLACES[y][1]
    where = "in the middle" if column == row == "middle" else f"at the {row} {column}".replace("middle ", "")
    where = where.replace(" middle", "")
    size, name = ("small" if r < 10 else "large"), match[2]
    ask = rng.choice(("What shape is it?", "Which shape is this?", "What shape do you see?"))
    return (
        _described(rng, f"One {shape}.", f"A {size} {name} {shape} {where}."),
        Exchange(ask, "One shape.", f"It is a {shape}."),
        Exchange(f"What colour is the {shape}?", f"One {shape}.", f"It is {name}."),
        Exchange(f"Where is the {shape}?", "I look where it lies.", f"It is {where}."),
    )


def _values(item: Rendered, rng: random.Random) -> tuple[Exchange, ...]:
    match = KINDS[item.kind].pattern.fullmatch(item.text)
    assert match is not None
    values, name = [int(n) for n in match[1].split(", ")], match[2]
    what = "bars" if item.kind == "bar" else "points"
    listed = ", ".join(map(str, values))
    order = ("first", "second", "third", "fourth")
    high = max(values)
    found = [
        _described(rng, f"A chart with {len(values)} {what}.", f"A {name} chart with {len(values)} {what}: {listed}."),
        Exchange(f"What are the values of the {what}?", f"From left to right, in {name}.", f"{listed}"),
        Exchange(f"What is the highest value of the {what}?", f"The values are {listed}.", str(high)),
    ]
    if values.count(high) == 1:
        which = order[values.index(high)]
        found.append(
            Exchange(f"Which of the {what} is highest?", f"The values are {listed}.", f"The {which}, with {high}.")
        )
    return tuple(found)


def _pie(item: Rendered, rng: random.Random) -> tuple[Exchange, ...]:
    match = KINDS["pie"].pattern.fullmatch(item.text)
    assert match is not None
    part, rest, name, other = match.groups()
    answer = f"A pie chart: {part} eighths {name} and {rest} eighths {other}."
    larger = "Both are equal." if part == rest else f"{name if part > rest else other} is larger.".capitalize()
    return (
        _described(rng, "A circle in two colours.", answer),
        Exchange("Which part is larger?", answer, larger),
    )


def _text(item: Rendered, rng: random.Random) -> tuple[Exchange, ...]:
    match = KINDS["text"].pattern.fullmatch(item.text)
    assert match is not None
    ask = rng.choice(("What does it say?", "Read the text.", "Which letters are these?"))
    return (
        Exchange(ask, f"Two characters: {' '.join(match[1])}.", match[1]),
        _described(rng, "Two characters.", f'The text "{match[1]}" in {match[2]}.'),
    )


_ABOUT = {
    "solid": _solid,
    "grid": _grid,
    "dots": _dots,
    "svg": _svg,
    "bar": _values,
    "plot": _values,
    "pie": _pie,
    "text": _text,
}
