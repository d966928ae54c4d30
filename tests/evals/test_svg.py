"""Charts: numbers and ticks by value, marks where the values are, and SVG that an XML parser accepts."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from openk3.evals.svg import Axes, Level, Range, Series, heat_map, line_chart, number, range_chart, thin, ticks

NAMESPACE = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    assert root.tag == NAMESPACE + "svg"
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    return root


def marks(root: ElementTree.Element, tag: str, css: str) -> list[ElementTree.Element]:
    return [e for e in root.iter(NAMESPACE + tag) if css in e.get("class", "").split()]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7"), (1.2345, "1.23"), (-0.5, "-0.5"), (9999, "9999"), (12345, "12.3k"), (3.7e6, "3.7M")],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1.6, 8.2), (-3, 4000), (0.001, 0.0017)])
def test_ticks_are_round_and_inside(low, high):
    values = ticks(low, high)
    assert 2 <= len(values) <= 6
    assert all(low - 1e-9 <= v <= high + 1e-9 for v in values)
    step = values[1] - values[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - m) for m in (1, 2, 5)) < 1e-6
    assert ticks(3.0, 3.0) == [3.0]


def test_thinning_keeps_the_mean_and_drops_what_is_not_finite():
    points = [(float(i), float(i % 7)) for i in range(1000)] + [(1000.0, math.nan), (1001.0, math.inf)]
    thinned = thin(points, 100)
    assert len(thinned) == 100
    assert sum(y for _, y in thinned) / 100 == pytest.approx(sum(i % 7 for i in range(1000)) / 1000)
    assert thin(points[:5]) == points[:5]


def test_a_line_falls_where_its_values_do():
    chart = line_chart("loss", [Series("a", [(1, 4.0), (2, 2.0), (3, 1.0)])], Axes("step", "nats"))
    (line,) = marks(parsed(chart), "polyline", "line")
    places = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
    xs, ys = zip(*places)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.11)
    assert (ys[1] - ys[0]) / (ys[2] - ys[1]) == pytest.approx(2.0, rel=0.01)
    assert list(ys) == sorted(ys)  # further down the page is a smaller value


def test_levels_are_drawn_and_named_apart_from_each_other():
    levels = [Level("order 3", 2.05), Level("order 5", 2.04), Level("order 1", 3.5)]
    root = parsed(line_chart("bits", [Series("a", [(1, 3.0), (2, 2.0)])], Axes("step", "bits", levels=levels)))
    assert len(marks(root, "line", "level")) == 3
    places = [float(t.get("y")) for t in root.iter(NAMESPACE + "text") if (t.text or "").startswith("order")]
    assert len(places) == 3
    assert all(abs(a - b) > 11 for i, a in enumerate(places) for b in places[:i])


def test_values_above_the_cap_stay_inside_the_frame():
    root = parsed(line_chart("load", [Series("a", [(1, 90.0), (2, 1.1)])], Axes("step", "x", low=1.0, cap=4.0)))
    (line,) = marks(root, "polyline", "line")
    assert all(0 <= float(pair.split(",")[1]) <= 240 for pair in line.get("points").split())


def test_empty_charts_say_so():
    assert "nothing recorded" in line_chart("loss", [Series("a", [])], Axes("step", "nats"))
    assert "nothing recorded" in line_chart("loss", [Series("a", [(1, math.nan)])], Axes("step", "nats"))
    assert "nothing recorded" in range_chart("decay", [], "tokens")


def test_several_series_have_a_legend_and_one_has_none():
    one = line_chart("t", [Series("alpha", [(1, 1.0), (2, 2.0)])], Axes("step", "y"))
    two = line_chart("t", [Series("alpha", [(1, 1.0)]), Series("beta", [(1, 2.0), (2, 2.0)])], Axes("step", "y"))
    assert "alpha" not in one and ">alpha<" in two and ">beta<" in two


def test_heat_map_shades_by_value_and_leaves_holes():
    root = parsed(heat_map("h", ["a", "b"], ["1", "2"], [[0.0, 1.0], [float("nan"), 4.0]], 2.0))
    cells = marks(root, "rect", "cell")
    assert [float(c.get("fill-opacity")) for c in cells] == [0.0, 0.5, 1.0]
    assert cells[1].find(NAMESPACE + "title").text == "a, 2: 1"


def test_range_chart_is_logarithmic():
    root = parsed(range_chart("decay", [Range("l1", 1, 10, 100), Range("l2", 10, 100, 1000)], "tokens"))
    bars = [(float(b.get("x1")), float(b.get("x2"))) for b in marks(root, "line", "range")]
    dots = [float(d.get("cx")) for d in marks(root, "circle", "dot")]
    assert dots[0] - bars[0][0] == pytest.approx(bars[0][1] - dots[0], abs=0.2)
    assert dots[1] - dots[0] == pytest.approx(dots[0] - bars[0][0], abs=0.2)


def test_text_is_escaped():
    chart = heat_map("<h>", ["<a&b>"], ['"c"'], [[1.0]], 1.0)
    parsed(chart)
    assert "<a&b>" not in chart
