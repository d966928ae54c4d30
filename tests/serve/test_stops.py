"""Stop texts: what is let through, for every cut of the answer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.serve.stops import StopMatcher

TEXT = "the brown own fox\njumps ABCDEFGHIJ over 👩‍👩‍👧 it"


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: before the match that ends first, and of those the one that starts first."""
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    _, start, stop = min(found)
    return text[:start], stop


def fed(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    """Through a matcher, piece by piece."""
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    return shown + matcher.finish(), matcher.found


@pytest.mark.parametrize(
    "stops",
    [
        ["own fox"],
        ["\n"],
        ["DEFGHIJ"],
        ["FGH", "DEFGHIJ"],
        ["DEFGHIJ", "GHIJ"],
        ["👩‍👧"],
        ["x" * 500],
        [TEXT],
        ["it!"],
        ["own own"],
    ],
)
def test_every_cut_lets_the_same_through(stops: list[str]) -> None:
    """A04: whole, character by character, and cut once at every place; an unmatched tail is kept."""
    want = cut(TEXT, stops)
    assert fed([TEXT], stops) == fed(list(TEXT), stops) == want
    for place in range(len(TEXT) + 1):
        assert fed([TEXT[:place], TEXT[place:]], stops) == want


@settings(max_examples=150)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_what_is_let_through_is_what_the_definition_says(text: str, stops: list[str], data: st.DataObject) -> None:
    """A04: on an alphabet of two letters, where matches overlap all the time; held text is never too much."""
    matcher, shown, at = StopMatcher(stops), "", 0
    while at < len(text):
        size = data.draw(st.integers(1, 4))
        shown += matcher.feed(text[at : at + size])
        at += size
        if matcher.found is None:
            held = text[: min(at, len(text))][len(shown) :]
            assert held == "" or any(stop.startswith(held) for stop in stops)
    assert (shown + matcher.finish(), matcher.found) == cut(text, stops)


def test_a_long_stop_costs_no_more_than_its_length() -> None:
    """A text that nearly matches all the time is read in linear time."""
    stop = "a" * 999 + "b"
    matcher = StopMatcher([stop])
    shown = "".join(matcher.feed("a" * 50) for _ in range(2000))
    assert len(shown) + len(matcher.finish()) == 100_000
