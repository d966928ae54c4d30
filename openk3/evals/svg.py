"""Line charts, heat maps and range charts as inline SVG that takes its colours from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 420, 240  # user units; small, so that 12-unit text stays readable on a phone
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 26, 34
_MAX_POINTS = 240

Place = Callable[[float, float], tuple[float, float]]  # from values to user units


@dataclass(frozen=True)
class Series:
    """One line: points in order of x, and whether single points are marked."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line to compare with."""

    name: str
    y: float


@dataclass(frozen=True)
class Axes:
    """Names of the axes, and the range that y shows at least."""

    x: str
    y: str
    low: float | None = None
    high: float | None = None
    cap: float | None = None  # y never shows more than this, whatever the points say
    levels: Sequence[Level] = field(default_factory=tuple)


def number(value: float) -> str:
    """A short decimal: 3 significant digits, with k, M, G or T from 10,000 on."""
    for least, size, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.3g}{unit}"
    if value == round(value) and abs(value) < 1e4:
        return f"{value:.0f}"
    return f"{value:.3g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers inside [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not span > 0:
        return [low]
    step = 10 ** math.floor(math.log10(span / count))
    step *= next(m for m in (1, 2, 5, 10) if span / (step * m) <= count)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def thin(points: Sequence[tuple[float, float]], limit: int = _MAX_POINTS) -> list[tuple[float, float]]:
    """At most `limit` points: means of equally many neighbours. Points that are not finite are left out."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(finite) <= limit:
        return finite
    edges = [round(i * len(finite) / limit) for i in range(limit + 1)]
    parts = [finite[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    return [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts]


def line_chart(title: str, series: Sequence[Series], axes: Axes) -> str:
    """Lines over one pair of axes, with labelled levels, and a legend if there are several; a note without points."""
    drawn = [Series(s.name, thin(s.points), s.dots) for s in series]
    points = [p for s in drawn for p in s.points]
    if not points:
        return _figure(title, _text(WIDTH / 2, HEIGHT / 2, "nothing recorded", "middle"), HEIGHT)
    x_low, x_high = min(p[0] for p in points), max(p[0] for p in points)
    x_high = x_high if x_high > x_low else x_low + 1
    ys = (
        [p[1] for p in points]
        + [level.y for level in axes.levels]
        + [y for y in (axes.low, axes.high) if y is not None]
    )
    y_low, y_high = min(ys), max(ys)
    if axes.cap is not None:
        y_high = min(y_high, axes.cap)
    pad = 0.05 * (y_high - y_low) or 1.0
    y_low, y_high = (y_low if axes.low is not None else y_low - pad), y_high + pad

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)
        up = (min(max(y, y_low), y_high) - y_low) / (y_high - y_low) * (HEIGHT - _TOP - _BOTTOM)
        return _LEFT + across, HEIGHT - _BOTTOM - up

    parts = _grid(at, (x_low, x_high), (y_low, y_high), axes)
    parts += _levels(at, x_high, axes.levels)
    for i, s in enumerate(drawn, start=1):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in s.points))
        parts.append(f'<polyline class="line c{i}" points="{path}"/>')
        if s.dots or len(s.points) == 1:
            parts += [_dot(*at(*p), f"{s.name}: {number(p[1])} at {axes.x} {number(p[0])}", i) for p in s.points]
    return _figure(title, "".join([*parts, _legend([s.name for s in drawn] if len(drawn) > 1 else [])]), HEIGHT)


def heat_map(
    title: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]], top: float
) -> str:
    """One cell per value, from empty at 0 to full colour at `top`; NaN cells stay blank. Hovering shows the value."""
    left = 8 + 6.4 * max((len(r) for r in rows), default=0)
    cell = (WIDTH - left - 4) / max(len(columns), 1)
    height = min(18.0, max(9.0, cell))
    parts = []
    for i, (row, name) in enumerate(zip(values, rows, strict=True)):
        y = 4 + i * height
        parts.append(_text(left - 5, y + height / 2 + 4, name, "end"))
        for j, value in enumerate(row):
            if math.isfinite(value):
                opacity = min(max(value / top, 0.0), 1.0)
                parts.append(
                    f'<rect class="cell" x="{left + j * cell:.1f}" y="{y:.1f}" width="{cell - 1:.1f}"'
                    f' height="{height - 1:.1f}" fill-opacity="{opacity:.3f}">'
                    f"<title>{escape(name)}, {escape(columns[j])}: {number(value)}</title></rect>"
                )
    bottom = 4 + len(rows) * height
    every = max(1, math.ceil(len(columns) * 7.0 * max((len(c) for c in columns), default=1) / (WIDTH - left)))
    labels = [(j, c) for j, c in enumerate(columns) if j % every == 0]
    parts += [_text(left + (j + 0.5) * cell, bottom + 13, c, "middle") for j, c in labels]
    return _figure(title, "".join(parts), bottom + 20)


@dataclass(frozen=True)
class Range:
    """One row of a range chart: a bar from low to high with a mark in between, all positive."""

    name: str
    low: float
    middle: float
    high: float


def range_chart(title: str, rows: Sequence[Range], x: str) -> str:
    """Horizontal bars on a logarithmic axis."""
    if not rows:
        return _figure(title, _text(WIDTH / 2, 40, "nothing recorded", "middle"), 80)
    left, step = 10 + 6.4 * max(len(r.name) for r in rows), 16
    low = math.floor(math.log10(min(r.low for r in rows)))
    high = max(math.ceil(math.log10(max(r.high for r in rows))), low + 1)
    bottom = 8 + step * len(rows)

    def at(value: float) -> float:
        return left + (math.log10(value) - low) / (high - low) * (WIDTH - left - _RIGHT - 6)

    parts = []
    for power in range(low, high + 1):
        place = at(10.0**power)
        parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="4" y2="{bottom}"/>')
        parts.append(_text(place, bottom + 14, number(10.0**power), "middle"))
    for i, row in enumerate(rows):
        y = 8 + step * i + step / 2
        parts.append(_text(left - 6, y + 4, row.name, "end"))
        start, stop = at(row.low), max(at(row.high), at(row.low) + 1)
        parts.append(
            f'<line class="range" x1="{start:.1f}" x2="{stop:.1f}" y1="{y}" y2="{y}">'
            f"<title>{escape(row.name)}: {number(row.low)} to {number(row.high)}</title></line>"
        )
        parts.append(_dot(at(row.middle), y, f"{row.name}: {number(row.middle)}", 1))
    parts.append(_text((left + WIDTH) / 2, bottom + 29, x, "middle"))
    return _figure(title, "".join(parts), bottom + 36)


def _figure(title: str, body: str, height: float) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title, quote=True)}"'
        f' xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def _grid(at: Place, x_range: tuple[float, float], y_range: tuple[float, float], axes: Axes) -> list[str]:
    parts = []
    for y in ticks(*y_range):
        _, place = at(x_range[0], y)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(_text(_LEFT - 6, place + 4, number(y), "end"))
    for x in ticks(*x_range):
        place, _ = at(x, y_range[0])
        parts.append(_text(place, HEIGHT - _BOTTOM + 15, number(x), "middle"))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 4, axes.x, "middle"))
    parts.append(_text(4, 12, axes.y, "start"))
    return parts


def _levels(at: Place, x_high: float, levels: Sequence[Level]) -> list[str]:
    """Dashed lines, each with its name above the right end; names keep a line's distance from each other."""
    parts: list[str] = []
    lowest = 0.0
    for level in sorted(levels, key=lambda level: -level.y):
        x, y = at(x_high, level.y)
        parts.append(f'<line class="level" x1="{_LEFT}" x2="{x:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lowest = max(y - 3, lowest + 12)
        parts.append(_text(x, lowest, f"{level.name} {number(level.y)}", "end"))
    return parts


def _legend(names: Sequence[str]) -> str:
    parts = []
    x = float(WIDTH - _RIGHT)
    for i, name in reversed(list(enumerate(names, start=1))):
        parts.append(_text(x, 12, name, "end"))
        x -= 5.9 * len(name) + 4
        parts.append(f'<line class="line c{i}" x1="{x - 14:.1f}" x2="{x:.1f}" y1="8" y2="8"/>')
        x -= 24
    return "".join(parts)


def _dot(x: float, y: float, label: str, color: int) -> str:
    return f'<circle class="dot c{color}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(label)}</title></circle>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
