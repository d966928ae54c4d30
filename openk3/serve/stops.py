"""StopMatcher: find stop texts in an answer that arrives in pieces, and hold back what may be the start of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """The match that ends first counts; of those that end together, the one that starts first.

    What is let through is the same for every cut of the text, and never holds a part of the match.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.found: str | None = None
        self._stops = [(stop, _fallbacks(stop)) for stop in stops]
        self._states = [0] * len(self._stops)  # characters of each stop that the text ends with
        self._held = ""

    def feed(self, text: str) -> str:
        """Text that is certain to be part of the answer; nothing once a stop was found."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        for place, char in enumerate(text, start=len(self._held) + 1):
            longest = ""
            for n, (stop, fallbacks) in enumerate(self._stops):
                state = self._states[n]
                while state and (state == len(stop) or stop[state] != char):
                    state = fallbacks[state - 1]
                self._states[n] = state = state + 1 if stop[state] == char else 0
                if state == len(stop) > len(longest):
                    longest = stop
            if longest:
                self.found, self._held = longest, ""
                return held[: place - len(longest)]
        kept = max(self._states)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    def finish(self) -> str:
        """The text is over: what was held back is part of it."""
        held, self._held = self._held, ""
        return held


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of the stop, the length of its longest proper prefix that is also its end."""
    lengths = [0] * len(stop)
    for place in range(1, len(stop)):
        state = lengths[place - 1]
        while state and stop[state] != stop[place]:
            state = lengths[state - 1]
        lengths[place] = state + (stop[state] == stop[place])
    return lengths
